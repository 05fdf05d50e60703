"""Losses of other papers, to be named in ``loss.objective``: CISPO and KL-Cov.

Each is `losses.policy_loss` with another objective of the token. A function of one's own binds other constants::

    @loss_properties(unit=ratio_unit)
    def strict(loss, logprobs, entropy, data):
        return kl_cov(loss, logprobs, entropy, data, fraction=0.02)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxmarl_llm.training.losses import (
    Loss,
    RowData,
    SurrogateInput,
    loss_properties,
    policy_loss,
    ratio_unit,
)


@loss_properties(unit=ratio_unit)
def cispo(
    loss: Loss, logprobs: Float[jax.Array, "*rows"], entropy: Float[jax.Array, "*rows"], data: RowData
) -> tuple[Float[jax.Array, ""], dict[str, Float[jax.Array, ""]]]:
    """Compute the loss of CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): a `losses.RowLoss`.

        ``sum_t w_t (-stop_gradient(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_t log pi_t)``

    The importance weight is clipped and no token: each keeps its gradient. The paper sets no lower bound, which is
    ``clip_low=1``. With ``clip_low=None`` nothing is clipped. The other terms are those of `losses.policy_loss`.

    Args:
        loss: constants of `losses.policy_loss`; ``dual_clip`` is not read.
        logprobs: log-prob of each sampled token under pi [... R]. Carries gradient.
        entropy: entropy in nats of each token's distribution [... R].
        data: the other arrays of the same rows.
    """
    return policy_loss(loss, logprobs, entropy, data, surrogate=cispo_surrogate)


def cispo_surrogate(loss: Loss, tokens: SurrogateInput) -> tuple[jax.Array, jax.Array]:
    """Objective of `cispo`: a `losses.Surrogate`.

    Args:
        loss: its clip is read.
        tokens: ratios, advantages and log-probs are read.
    """
    weight = jax.lax.stop_gradient(tokens.ratio)
    if loss.clip is not None:
        low, high = loss.clip
        weight = jnp.clip(weight, 1.0 - low, 1.0 + high)
    return weight * tokens.advantage * tokens.logp, weight != tokens.ratio


@loss_properties(unit=ratio_unit)
def kl_cov(
    loss: Loss,
    logprobs: Float[jax.Array, "*rows"],
    entropy: Float[jax.Array, "*rows"],
    data: RowData,
    *,
    fraction: float = 0.002,
    coef: float = 1.0,
) -> tuple[Float[jax.Array, ""], dict[str, Float[jax.Array, ""]]]:
    """Compute the loss of KL-Cov (arXiv 2505.22617, section 4.2): a `losses.RowLoss`.

        ``sum_t w_t (-rho_t A_t + coef |log pi_t - log pi_old_t| [t is selected])``

    Selected are the tokens with the largest ``(log pi - its mean) (A - its mean)``: ``fraction`` of them, at least one.
    Means and ranks are those of a micro-batch, as in the authors' code. The loss therefore depends on
    ``micro_tokens``. No ratio is clipped. The other terms are those of `losses.policy_loss`.

    Args:
        loss: constants of `losses.policy_loss`; its clips are not read.
        logprobs: log-prob of each sampled token under pi [... R]. Carries gradient.
        entropy: entropy in nats of each token's distribution [... R].
        data: the other arrays of the same rows.
        fraction: share of the trained tokens that is selected.
        coef: weight of the distance to the old policy on selected tokens.
    """
    surrogate = functools.partial(kl_cov_surrogate, fraction=fraction, coef=coef)
    return policy_loss(loss, logprobs, entropy, data, surrogate=surrogate)


def kl_cov_surrogate(
    loss: Loss, tokens: SurrogateInput, *, fraction: float, coef: float
) -> tuple[jax.Array, jax.Array]:
    """Objective of `kl_cov`: a `losses.Surrogate`.

    Args:
        loss: not read.
        tokens: all arrays are read.
        fraction: see `kl_cov`.
        coef: see `kl_cov`.
    """
    mask, logp, advantage = tokens.mask, jax.lax.stop_gradient(tokens.logp), tokens.advantage
    count = jnp.sum(mask)
    centred = lambda x: x - jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(count, 1)
    covariance = jnp.where(mask, centred(logp) * centred(advantage), -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-covariance.ravel())).reshape(mask.shape)
    few = jnp.maximum(1, jnp.floor(fraction * count + 1e-6).astype(rank.dtype))
    selected = mask & (rank < few)
    distance = jnp.abs(tokens.logp - tokens.old)
    return tokens.ratio * advantage - coef * jnp.where(selected, distance, 0.0), selected
