"""Loss functions of other papers, each a `losses.RowLoss` that ``loss.objective`` names.

`cispo` clips the weight of a token instead of its update. `ClipCov` and `KlCov` slow the fall of the entropy: they act
on tokens whose log-prob and advantage vary together. A loss with settings is a frozen dataclass. Name an object of it:
``mine = ClipCov(fraction=1e-3)`` in a module of your own, and ``loss.objective="my_losses:mine"``. `clip_cov` and
`kl_cov` are objects with the papers' settings.

All three add to `losses.policy_loss`, so ``kl_coef``, ``entropy_coef``, ``tis_clip`` and ``epochs`` mean the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.config import at_least, in_range
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.training.losses import (
    Loss,
    RowData,
    Unit,
    log_ratios,
    loss_properties,
    masked,
    policy_loss,
    ratio_unit,
)

Result = tuple[Float[jax.Array, ""], dict[str, Float[jax.Array, ""]]]


@loss_properties(unit=ratio_unit)
def cispo(loss: Loss, logprobs: Float[jax.Array, "*rows"], entropy: Float[jax.Array, "*rows"], data: RowData) -> Result:
    """Compute CISPO's loss (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5):

        ``sum_t w_t (-iw_t sg(clip(rho_t, 1 - clip_low, 1 + clip_high)) A_t log pi_t + kl_coef kl_t
        - entropy_coef H_t)``

    sg stops the gradient. So each token has a gradient, also where its ratio rho is clipped. PPO's clip drops those.
    The paper has no lower bound: ``loss.clip_low=1``. With ``loss.clip_low=None`` nothing is clipped, and the gradient
    is REINFORCE's with importance weights. With one epoch rho is 1. ``loss.dual_clip`` is not read.

    Args:
        loss: constants of the formula, as in `losses.policy_loss`.
        logprobs: log-prob of each sampled token under pi. Carries gradient.
        entropy: entropy H in nats of each token's distribution. Carries gradient.
        data: weights w, advantages A, and log-probs of sampler, old policy and reference policy.

    Returns:
        The loss, and the metrics of `losses.policy_loss`. ``clip_fraction`` counts tokens whose ratio is clipped.
    """
    mask, ratio, advantage = _constants(loss, logprobs, data)
    clipped = ratio
    if loss.clip is not None:
        clipped = jnp.clip(ratio, 1.0 - loss.clip[0], 1.0 + loss.clip[1])
    weights = jax.lax.stop_gradient(data.weights)
    factor = weights * clipped * advantage
    if loss.tis_clip is not None:
        old = logprobs if data.old is None else data.old
        full = log_ratios(masked(mask, old), masked(mask, data.sampler_logprobs), mask, "token")
        factor = factor * jax.lax.stop_gradient(jnp.minimum(jnp.exp(full), loss.tis_clip))
    rest, metrics = policy_loss(loss, logprobs, entropy, data._replace(advantages=jnp.zeros_like(data.weights)))
    metrics["clip_fraction"] = jnp.sum(weights * (clipped != ratio))
    return rest - jnp.sum(factor * masked(mask, logprobs)), metrics


@dataclass(frozen=True)
class ClipCov:
    """Clip-Cov: no update from a few tokens of high covariance (Cui et al., arXiv 2505.22617).

    ``Cov_t = (log pi_t - mean log pi) (A_t - mean A)``. Candidates are the tokens with Cov_t in (``low``, ``high``)
    that `losses.policy_loss` does not clip (authors' code). max(1, floor(fraction N)) of them, drawn at random, have no
    policy gradient. N counts all tokens. Where there are fewer candidates, all are dropped.

    Changed: N and the means are those of one group, the completions of one prompt. The paper's are those of a batch.
    A loss here adds up over groups, whatever the micro-batches. The random order is a hash of the sampler's log-probs
    and the token's place in the group. So a run that was resumed drops the same tokens.

    Attributes:
        fraction: Share of the tokens of a group to drop, in [0, 1]. 0 is `losses.policy_loss`.
        low: Covariances at or below it are no candidates.
        high: Covariances at or above it are no candidates.
    """

    fraction: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    unit: ClassVar[Unit] = "group"

    def __post_init__(self) -> None:
        in_range("ClipCov.fraction", self.fraction, 0, 1)
        if not self.low < self.high:
            raise ConfigError(f"ClipCov.low: expected a number below high={self.high}, got {self.low}")

    def __call__(
        self,
        loss: Loss,
        logprobs: Float[jax.Array, "*rows G R"],
        entropy: Float[jax.Array, "*rows G R"],
        data: RowData,
    ) -> Result:
        """Compute `losses.policy_loss` without the dropped tokens' advantages; ``cov_fraction`` is their share.

        Args:
            loss: constants of `losses.policy_loss`.
            logprobs: log-prob of each sampled token under pi. Carries gradient.
            entropy: entropy in nats of each token's distribution. Carries gradient.
            data: the other arrays of the same rows.
        """
        mask, ratio, advantage = _constants(loss, logprobs, data)
        cov = token_covariance(jax.lax.stop_gradient(masked(mask, logprobs)), advantage, mask)
        kept = mask
        if loss.clip is not None:
            kept &= jnp.clip(ratio, 1.0 - loss.clip[0], 1.0 + loss.clip[1]) * advantage >= ratio * advantage
        candidate = kept & (cov > self.low) & (cov < self.high)
        dropped = _first(_hash(masked(mask, data.sampler_logprobs)), candidate, _count(mask, self.fraction))
        data = data._replace(advantages=jnp.where(dropped, 0.0, data.advantages))
        value, metrics = policy_loss(loss, logprobs, entropy, data)
        return value, {**metrics, "cov_fraction": jnp.sum(jax.lax.stop_gradient(data.weights) * dropped)}


@dataclass(frozen=True)
class KlCov:
    """KL-Cov: a KL term to the old policy for tokens of the highest covariance (arXiv 2505.22617).

    The ``fraction`` of tokens with the largest Cov_t (`ClipCov`) pays ``coef |log pi_t - log pi_old_t|``, the
    authors' estimator. The number of tokens is max(1, floor(fraction N)). The paper has no clip:
    ``loss.clip_low=None``. With one epoch pi is pi_old and the term has no gradient, so set ``loss.epochs`` above 1.

    Changed: N and the means are those of one group, as in `ClipCov`.

    Attributes:
        fraction: Share of the tokens of a group with the term, in [0, 1]. 0 is `losses.policy_loss`.
        coef: Coefficient of the term, at least 0.
    """

    fraction: float = 2e-3
    coef: float = 1.0
    unit: ClassVar[Unit] = "group"

    def __post_init__(self) -> None:
        in_range("KlCov.fraction", self.fraction, 0, 1)
        at_least("KlCov.coef", self.coef, 0)

    def __call__(
        self,
        loss: Loss,
        logprobs: Float[jax.Array, "*rows G R"],
        entropy: Float[jax.Array, "*rows G R"],
        data: RowData,
    ) -> Result:
        """Compute `losses.policy_loss` and the KL term of the chosen tokens; ``cov_fraction`` is their share.

        Args:
            loss: constants of `losses.policy_loss`.
            logprobs: log-prob of each sampled token under pi. Carries gradient.
            entropy: entropy in nats of each token's distribution. Carries gradient.
            data: the other arrays of the same rows.
        """
        mask, _, advantage = _constants(loss, logprobs, data)
        logp, weights = masked(mask, logprobs), jax.lax.stop_gradient(data.weights)
        cov = token_covariance(jax.lax.stop_gradient(logp), advantage, mask)
        chosen = _first(-cov, mask, _count(mask, self.fraction))
        value, metrics = policy_loss(loss, logprobs, entropy, data)
        metrics["cov_fraction"] = jnp.sum(weights * chosen)
        if data.old is None:
            return value, metrics
        old = jax.lax.stop_gradient(masked(mask, data.old))
        return value + self.coef * jnp.sum(jnp.where(chosen, weights * jnp.abs(logp - old), 0.0)), metrics


clip_cov = ClipCov()
kl_cov = KlCov()


def token_covariance(
    logprobs: Float[jax.Array, "*rows G R"],
    advantages: Float[jax.Array, "*rows G R"],
    mask: Bool[jax.Array, "*rows G R"],
) -> Float[jax.Array, "*rows G R"]:
    """Compute each token's part of the covariance of log-prob and advantage in its group (arXiv 2505.22617).

    ``(log pi_t - mean log pi) (A_t - mean A)``, with means over the tokens of a group. Masked tokens get 0.

    Args:
        logprobs: log-prob of each token. Finite.
        advantages: advantage of each token. Finite.
        mask: True at the tokens that count.
    """
    count = jnp.maximum(jnp.sum(mask, axis=(-2, -1), keepdims=True), 1)
    centred = lambda x: x - jnp.sum(jnp.where(mask, x, 0.0), axis=(-2, -1), keepdims=True) / count
    return jnp.where(mask, centred(logprobs) * centred(advantages), 0.0)


def _constants(loss: Loss, logprobs: jax.Array, data: RowData) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Which tokens count, the importance ratio of each, and its advantage; without gradients."""
    mask = data.weights > 0
    logp = jax.lax.stop_gradient(masked(mask, logprobs))
    old = logp if data.old is None else masked(mask, data.old)
    ratio = jnp.exp(log_ratios(logp, old, mask, loss.ratio_level))
    return jax.lax.stop_gradient((mask, ratio, masked(mask, data.advantages)))


def _count(mask: Bool[jax.Array, "*rows G R"], fraction: float) -> Int[jax.Array, "*rows"]:
    """Number of tokens to choose in each group: max(1, floor(fraction N)), and 0 for fraction 0."""
    share = jnp.floor(fraction * jnp.sum(mask, axis=(-2, -1), dtype=jnp.float32) + 1e-4).astype(jnp.int32)
    return jnp.maximum(share, 1) if fraction else jnp.zeros_like(share)


def _first(order: jax.Array, candidate: jax.Array, count: jax.Array) -> jax.Array:
    """Mark the ``count`` candidates of lowest ``order`` in each group [... G R]; equal ones by their place."""
    shape = order.shape
    flat = (*shape[:-2], shape[-2] * shape[-1])
    candidate = candidate.reshape(flat)
    by_rank = jnp.lexsort((order.reshape(flat), ~candidate), axis=-1)
    rank = jnp.argsort(by_rank, axis=-1)
    return (candidate & (rank < count[..., None])).reshape(shape)


def _hash(x: Float[jax.Array, "*rows G R"]) -> jax.Array:
    """Mix the bits of each number with its place in its group, to an order that has no relation to its size."""
    place = jnp.arange(x.shape[-2] * x.shape[-1], dtype=jnp.uint32).reshape(x.shape[-2:])
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) ^ (place * jnp.uint32(0x9E3779B9))
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # finaliser of MurmurHash3
        bits = (bits ^ (bits >> 16)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)
