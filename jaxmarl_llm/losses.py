"""Losses on token log-probabilities, minimised: policy gradients, ``sum(weights * token_loss)``, and preferences.

All averaging lives in ``weights`` (``aggregation_weights`` of the whole batch), so losses, gradients and metrics of
micro-batches are sums, whatever the split. A token of weight 0 is masked: whatever stands there, NaN included,
changes neither loss nor gradient. No function here touches a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.text import ConfigError

# Log-ratios are held within +-20 so that no ratio overflows; beyond, their gradient is 0 (verl holds them alike).
MAX_LOG_RATIO = 20.0  # unless a loss says otherwise (ReMA: 3)


def init_head(key: jax.Array, dim: int, hidden: int = 0) -> dict[str, Array]:
    """A value head on hidden states [... dim]: linear, or one layer of tanh units before it. N(0, 0.02), bias 0."""
    first, last = jax.random.split(key)
    head = {"kernel": 0.02 * jax.random.normal(last, (hidden or dim,)), "bias": jnp.zeros(())}
    if hidden:
        head |= {"inner": 0.02 * jax.random.normal(first, (dim, hidden)), "inner_bias": jnp.zeros(hidden)}
    return head


def head_value(head: dict[str, Array], x: Float[Array, "*batch D"]) -> Float[Array, "*batch"]:
    x = x.astype(jnp.float32)
    if "inner" in head:
        x = jnp.tanh(x @ head["inner"] + head["inner_bias"])
    return x @ head["kernel"] + head["bias"]


def value_loss(
    value: Float[Array, "*batch"],
    target: Float[Array, "*batch"],
    weights: Float[Array, "*batch"],
    old: Float[Array, "*batch"] | None = None,
    clip: float | None = None,
) -> Float[Array, ""]:
    """``sum w max((v - target)^2, (clip(v, old - c, old + c) - target)^2)``; without ``clip`` the first alone (PPO)."""
    weights = jax.lax.stop_gradient(weights)
    seen = weights > 0
    v, target = jnp.where(seen, value, 0.0), jax.lax.stop_gradient(jnp.where(seen, target, 0.0))
    error = (v - target) ** 2
    if clip is not None:
        if old is None:
            raise ValueError("clip needs the old values")
        near = jnp.clip(v, old - clip, old + clip)
        error = jnp.where(seen, jnp.maximum(error, (near - target) ** 2), 0.0)
    return jnp.sum(weights * error)


def aggregation_weights(
    mask: Bool[Array, "*batch R"],
    sequence_weight: Float[Array, "*batch"],
    kind: str,
    constant: float | None = None,
    trajectory: Int[Array, "*batch"] | None = None,
) -> Float[Array, "*batch R"]:
    """Weight of each token in the batch's loss. With N sequences, s counting and m the mask (here for weights 1):

    token: ``m / sum(m)``, every token alike (DAPO)
    sequence: ``m / (N |s|)``, mean over sequences of the token mean (GRPO, GSPO)
    sum: ``m / N``, mean over sequences of the summed loss (MAGRPO eq. 3: log pi of a response is a sum)
    constant: ``m / (N constant)``, as sum, over a fixed length (Dr. GRPO)
    trajectory: ``m / (K sum(m of the trajectory))``, mean over K trajectories of the mean over all tokens of their
        sequences (ReMA: its turns). ``trajectory``: ids in [0, number of sequences), in any order.

    ``sequence_weight`` scales a sequence in numerator and denominator alike; 0 leaves it out (invalid, not selected,
    another model's). So does an empty mask: a sequence without tokens is not counted in N. None left: all zeros. A
    trajectory weighs as much as the heaviest of its sequences.
    """
    tokens = mask * sequence_weight[..., None].astype(jnp.float32)
    length = jnp.sum(mask, axis=-1, dtype=jnp.float32)
    sequences = jnp.sum(jnp.where(length > 0, sequence_weight, 0.0), dtype=jnp.float32)
    if kind == "token":
        total = jnp.sum(tokens)
    elif kind == "sequence":
        tokens, total = tokens / jnp.maximum(length, 1.0)[..., None], sequences
    elif kind == "sum":
        total = sequences
    elif kind == "constant":
        if constant is None or constant <= 0:
            raise ValueError(f"kind 'constant' needs a positive constant, not {constant}")
        total = sequences * constant
    elif kind == "trajectory":
        if trajectory is None:
            raise ValueError("kind 'trajectory' needs the trajectory of each sequence")
        ids, count = trajectory.reshape(-1), trajectory.size
        mass = jax.ops.segment_sum(jnp.sum(tokens, axis=-1).reshape(-1), ids, count)
        weight = jax.ops.segment_max(jnp.where(length > 0, sequence_weight, 0.0).reshape(-1), ids, count)
        weight = jnp.where(mass > 0, weight, 0.0)  # also where there is no such trajectory
        share = weight / jnp.where(mass > 0, mass, 1.0)
        tokens, total = tokens * share[ids].reshape(trajectory.shape)[..., None], jnp.sum(weight, dtype=jnp.float32)
    else:
        raise ValueError(f"kind is 'token', 'sequence', 'sum', 'constant' or 'trajectory', not {kind!r}")
    return jnp.where(total > 0, tokens / jnp.where(total > 0, total, 1.0), 0.0)


def kl(logp: Float[Array, "*shape"], ref_logp: Float[Array, "*shape"], kind: str) -> Float[Array, "*shape"]:
    """Estimate of KL(pi || ref) from one token sampled from pi; d = log ref - log pi (Schulman 2020).

    k1: ``-d``. Unbiased, may be negative. As a loss term useless: its gradient is 0 in expectation.
    k2: ``d^2 / 2``. Biased, never negative. Its gradient is that of KL(pi || ref) in expectation.
    k3: ``exp(d) - d - 1``. Unbiased, never negative (DeepSeekMath eq. 4). As a loss term its gradient is that of the
        other divergence, KL(ref || pi), in expectation; the two agree to first order around pi = ref.

    The gradients (Tang and Munos 2025) hold for samples of the current policy. k3 overflows for d above 88.
    """
    d = ref_logp - logp
    if kind == "k1":
        return -d
    if kind == "k2":
        return 0.5 * d**2
    if kind == "k3":
        return jnp.expm1(d) - d
    raise ValueError(f"kind is 'k1', 'k2' or 'k3', not {kind!r}")


def _log_ratio(
    logprobs: Float[Array, "*batch R"],
    old_logprobs: Float[Array, "*batch R"],
    mask: Bool[Array, "*batch R"],
    level: str,
    cap: float = MAX_LOG_RATIO,
) -> Float[Array, "*batch R"]:
    """Log importance ratio at each token: its own, or for level ``sequence`` the mean over the sequence's tokens."""
    log_ratio = logprobs - old_logprobs
    if level == "sequence":
        total = jnp.sum(jnp.where(mask, log_ratio, 0.0), axis=-1, keepdims=True)
        count = jnp.sum(mask, axis=-1, keepdims=True, dtype=log_ratio.dtype)
        log_ratio = jnp.where(mask, total / jnp.maximum(count, 1.0), 0.0)
    elif level != "token":
        raise ValueError(f"level is 'token' or 'sequence', not {level!r}")
    return jnp.clip(log_ratio, -cap, cap)


def policy_loss(
    logprobs: Float[Array, "*batch R"],
    *,
    old_logprobs: Float[Array, "*batch R"] | None,
    advantages: Float[Array, "*batch"] | Float[Array, "*batch R"],
    weights: Float[Array, "*batch R"],
    clip: tuple[float, float] | None,
    dual_clip: float | None = None,
    level: str = "token",
    max_log_ratio: float = MAX_LOG_RATIO,
    behaviour_logprobs: Float[Array, "*batch R"] | None = None,
    importance_cap: float | None = None,
    ref_logprobs: Float[Array, "*batch R"] | None = None,
    kl_coef: float | Float[Array, ""] = 0.0,
    kl_kind: str = "k3",
    entropy: Float[Array, "*batch R"] | None = None,
    entropy_coef: float | Float[Array, ""] = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """``sum_t w_t (-iw_t min(rho_t A_t, clip(rho_t, 1 - clip[0], 1 + clip[1]) A_t) + kl_coef kl_t - entropy_coef H_t)``

    rho: ``pi / pi_old`` per token (PPO, GRPO); level ``sequence`` is GSPO eq. 6, the geometric mean of the token
        ratios of a sequence (not their product), which goes with weights of kind ``sequence``. Where a turn is a
        sequence this is ReMA's turn-level ratio. ``log rho`` is held within ``+-max_log_ratio``.
    old_logprobs: None stands for ``logprobs`` themselves, that is ratio 1 with the REINFORCE gradient A grad log pi,
        on whatever data: MAGRPO eq. 3 (with clip None, weights of kind ``sum``).
    clip: distances below and above 1 (DAPO's clip-higher has them differ); None leaves the ratio as it is.
    dual_clip: where A < 0 the objective is at least ``dual_clip * A`` (above 1; ReMA and MARSHAL: 3).
    behaviour_logprobs: what the sampler really used, where it differs from pi_old; then the constant per-token weight
        ``iw = min(pi_old / behaviour, importance_cap)`` (truncated importance sampling), and 1 otherwise.
    ref_logprobs, entropy: the KL term's reference and the policy's entropy, per token.

    Only ``logprobs`` and ``entropy`` carry gradient. Metrics are sums over tokens weighted by ``weights``, and add
    over micro-batches as the loss does; divide by ``weight``, the sum of the weights, for means (it is 1 over a batch
    with weights of kind token or sequence). ``clip_fraction`` counts tokens whose objective a clip changed;
    ``approx_kl`` is k3 of KL(pi_old || pi). entropy, ref_kl, importance_weight and tis_clipped appear with their
    inputs.
    """
    if ref_logprobs is None and (isinstance(kl_coef, jax.Array) or kl_coef != 0):
        raise ValueError("kl_coef needs ref_logprobs")
    if entropy is None and (isinstance(entropy_coef, jax.Array) or entropy_coef != 0):
        raise ValueError("entropy_coef needs entropy")
    if behaviour_logprobs is None and importance_cap is not None:
        raise ValueError("importance_cap needs behaviour_logprobs")
    if max_log_ratio <= 0:
        raise ValueError(f"max_log_ratio is positive, not {max_log_ratio}")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip is above 1, not {dual_clip}")
    weights = jax.lax.stop_gradient(weights)
    mask = weights > 0

    def clean(x):  # garbage under the mask goes before any arithmetic: 0 * NaN is NaN, in gradients too
        return jnp.where(mask, x.astype(jnp.float32), 0.0)

    def constant(x):
        return jax.lax.stop_gradient(clean(x))

    def weighted(x):
        return jnp.sum(weights * x)

    logp = clean(logprobs)
    old = jax.lax.stop_gradient(logp) if old_logprobs is None else constant(old_logprobs)
    advantage = advantages if advantages.ndim == logprobs.ndim else advantages[..., None]
    advantage = constant(jnp.broadcast_to(advantage, logprobs.shape))

    ratio = jnp.exp(_log_ratio(logp, old, mask, level, max_log_ratio))
    objective = unclipped = ratio * advantage
    if clip is not None:
        objective = jnp.minimum(objective, jnp.clip(ratio, 1.0 - clip[0], 1.0 + clip[1]) * advantage)
    if dual_clip is not None:
        objective = jnp.where(advantage < 0, jnp.maximum(objective, dual_clip * advantage), objective)
    metrics = {
        "weight": jnp.sum(weights),
        "ratio": weighted(ratio),
        "clip_fraction": weighted(objective != unclipped),
        "approx_kl": weighted(kl(old, logp, "k3")),
    }
    if behaviour_logprobs is not None:
        full = jnp.exp(_log_ratio(old, constant(behaviour_logprobs), mask, "token"))
        importance = full if importance_cap is None else jnp.minimum(full, importance_cap)
        objective = importance * objective
        metrics |= {"importance_weight": weighted(importance), "tis_clipped": weighted(importance < full)}
    loss = -weighted(objective)
    if ref_logprobs is not None:
        ref_kl = weighted(kl(logp, constant(ref_logprobs), kl_kind))
        loss = loss + kl_coef * ref_kl
        metrics["ref_kl"] = ref_kl
    if entropy is not None:
        mean_entropy = weighted(clean(entropy))
        loss = loss - entropy_coef * mean_entropy
        metrics["entropy"] = mean_entropy
    return loss, jax.lax.stop_gradient(metrics)


def dpo(
    logprobs: Float[Array, "*batch G R"],
    *,
    ref_logprobs: Float[Array, "*batch G R"],
    advantages: Float[Array, "*batch G R"],
    weights: Float[Array, "*batch G R"],
    beta: float,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Direct preference optimisation (Rafailov et al., arXiv 2305.18290, eq. 7) between the members of each group:

        ``sum_(i, j) w_ij (-log sigmoid(beta (d_i - d_j)))``, ``d_i = sum_t log pi(i_t) - log pi_ref(i_t)``

    over the pairs of a preferred i (a positive advantage) and a rejected j (a negative one) of one group, that is of
    one prompt. A sequence weighs as much as its heaviest token and a pair as its two sequences together: with weights
    of kind ``sum`` and groups of one pair each, the loss is the mean over pairs. Tokens of weight 0 are masked; a
    sequence without others is in no pair.

    Only ``logprobs`` carry gradient. Metrics are sums over pairs weighted by w_ij, with ``weight`` their sum:
    ``accuracy`` (d_i > d_j) and ``margin`` (beta (d_i - d_j)).
    """
    if beta <= 0:
        raise ValueError(f"beta is positive, not {beta}")
    weights = jax.lax.stop_gradient(weights)
    mask = weights > 0
    clean = lambda x: jnp.where(mask, x.astype(jnp.float32), 0.0)
    gain = jnp.sum(clean(logprobs) - jax.lax.stop_gradient(clean(ref_logprobs)), axis=-1)
    side = jnp.sum(jax.lax.stop_gradient(clean(advantages)), axis=-1)
    share = jnp.max(weights, axis=-1)
    pair = (side > 0)[..., :, None] & (side < 0)[..., None, :]
    weight = jnp.where(pair, share[..., :, None] + share[..., None, :], 0.0)
    margin = beta * (gain[..., :, None] - gain[..., None, :])
    weighted = lambda x: jnp.sum(weight * x)
    metrics = {"weight": jnp.sum(weight), "accuracy": weighted(margin > 0), "margin": weighted(margin)}
    return weighted(jax.nn.softplus(-margin)), jax.lax.stop_gradient(metrics)


# ---- as a configuration ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """What is minimised and how it is averaged; see losses.policy_loss, losses.dpo and losses.aggregation_weights."""

    objective: str = "policy"  # policy: the policy gradient; dpo: preferences between siblings, by sign of advantage
    beta: float = 0.1  # of dpo
    clip_low: float | None = 0.2  # None: no clip (then clip_high is unused)
    clip_high: float = 0.2
    dual_clip: float | None = None
    level: str = "token"  # token or sequence (GSPO; ReMA's turn) ratios
    max_log_ratio: float = MAX_LOG_RATIO  # beyond, a ratio is constant
    aggregate: str = "token"  # token, sequence, sum, constant or trajectory
    constant: float | None = None  # tokens, for aggregate=constant
    kl_coef: float = 0.0  # to the reference policy, in the loss
    kl_kind: str = "k3"
    importance_cap: float | None = None  # truncated importance weights between sampler and learner
    entropy_coef: float = 0.0
    value_coef: float = 0.0  # of the squared error of a value head
    value_clip: float | None = None  # how far a value may move from the one before the update (PPO)
    epochs: int = 1  # optimizer steps on one batch; from the second on, ratios are to the policy of the first

    def check(self, path: str) -> None:
        if self.objective not in ("policy", "dpo"):
            raise ConfigError(f"{path}.objective: expected policy or dpo, got {self.objective!r}")
        if self.objective == "dpo" and (self.aggregate != "sum" or self.beta <= 0):
            raise ConfigError(f"{path}: expected aggregate='sum' and beta > 0 with objective='dpo'")
        if self.objective == "dpo" and (self.kl_coef or self.entropy_coef or self.importance_cap is not None):
            raise ConfigError(f"{path}: expected no kl_coef, entropy_coef or importance_cap with objective='dpo'")
        if self.level not in ("token", "sequence"):
            raise ConfigError(f"{path}.level: expected token or sequence, got {self.level!r}")
        if self.aggregate not in ("token", "sequence", "sum", "constant", "trajectory"):
            raise ConfigError(
                f"{path}.aggregate: expected token, sequence, sum, constant or trajectory, got {self.aggregate!r}"
            )
        if self.max_log_ratio <= 0:
            raise ConfigError(f"{path}.max_log_ratio: expected > 0, got {self.max_log_ratio}")
        if self.aggregate == "constant" and not self.constant:
            raise ConfigError(f"{path}.constant: expected a positive number of tokens for aggregate=constant")
        if self.kl_kind not in ("k1", "k2", "k3"):
            raise ConfigError(f"{path}.kl_kind: expected k1, k2 or k3, got {self.kl_kind!r}")
        if self.value_coef < 0 or (self.value_clip is not None and self.value_clip <= 0):
            raise ConfigError(f"{path}: expected value_coef >= 0 and value_clip > 0 or None")
        if self.epochs < 1:
            raise ConfigError(f"{path}.epochs: expected >= 1, got {self.epochs}")

    @property
    def refers(self) -> bool:
        """Whether a reference policy is needed."""
        return bool(self.kl_coef) or self.objective == "dpo"

    @property
    def clip(self) -> tuple[float, float] | None:
        return None if self.clip_low is None else (self.clip_low, self.clip_high)


class RowData(NamedTuple):
    """What the loss of some rows needs beside their log-probs and entropies; names and shapes as in `Batch`."""

    weights: jax.Array
    advantages: jax.Array
    behaviour: jax.Array
    old: jax.Array | None
    reference: jax.Array | None


def row_loss(
    loss: Loss, logprobs: jax.Array, entropy: jax.Array, data: RowData
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and its metrics over rows [... (N) (G) R]; both add over whatever the loss does not couple."""
    if loss.objective == "dpo":
        value, metrics = dpo(
            logprobs,
            ref_logprobs=data.reference,
            advantages=data.advantages,
            weights=data.weights,
            beta=loss.beta,
        )
    else:
        value, metrics = policy_loss(
            logprobs,
            old_logprobs=data.old,
            advantages=data.advantages,
            weights=data.weights,
            clip=loss.clip,
            dual_clip=loss.dual_clip,
            level=loss.level,
            max_log_ratio=loss.max_log_ratio,
            kl_coef=loss.kl_coef,
            kl_kind=loss.kl_kind,
            behaviour_logprobs=None if loss.importance_cap is None else data.behaviour,
            importance_cap=loss.importance_cap,
            ref_logprobs=data.reference,
            entropy=entropy,
            entropy_coef=loss.entropy_coef,
        )
    nll = -jnp.sum(data.weights * jnp.where(data.weights > 0, logprobs, 0.0))
    return value, {**metrics, "nll": jax.lax.stop_gradient(nll)}
