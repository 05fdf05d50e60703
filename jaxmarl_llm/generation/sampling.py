"""From logits to a token and the log-prob of the distribution it was really drawn from.

The sampler and the learner call the same functions, so a log-prob means one thing: temperature, top-k, top-p and min-p
included, renormalised over what was kept. A token is drawn by inverting the cumulative distribution at one uniform
number per row (`kernels.head_sample`), so that a row's token depends on its own key alone and not on batch, bucket or
mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm import sharding
from jaxmarl_llm.kernels.head import Head
from jaxmarl_llm.kernels.head_sample import head_sample, sample_logits
from jaxmarl_llm.text import ConfigError


@dataclass(frozen=True)
class Sampling:
    """The distribution completions are drawn from. Filters apply in the order top-k, top-p, min-p."""

    temperature: float = 1.0  # 0 is greedy: a point mass, whose log-prob is 0 (evaluation only)
    top_k: int = 0  # keep the k most probable tokens (ties included); 0 keeps all
    top_p: float = 1.0  # keep the smallest set of most probable tokens whose mass reaches top_p
    min_p: float = 0.0  # keep tokens at least min_p times as probable as the most probable one

    def check(self, path: str) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"{path}.temperature: expected >= 0, got {self.temperature}")
        if self.top_k < 0:
            raise ConfigError(f"{path}.top_k: expected >= 0 (0 keeps all), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"{path}.top_p: expected in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p < 1:
            raise ConfigError(f"{path}.min_p: expected in [0, 1), got {self.min_p}")

    @property
    def filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def kept(scaled: Float[Array, "*B V"], sampling: Sampling) -> Bool[Array, "*B V"]:
    """Which tokens the filters keep, from logits already divided by the temperature."""
    keep = jnp.ones(scaled.shape, bool)
    if 0 < sampling.top_k < scaled.shape[-1]:
        kth = jax.lax.top_k(scaled, sampling.top_k)[0][..., -1:]
        keep &= scaled >= kth
    if sampling.top_p < 1:
        prob = jax.nn.softmax(jnp.where(keep, scaled, -jnp.inf), axis=-1)
        ordered = -jnp.sort(-prob, axis=-1)
        before = jnp.cumsum(ordered, axis=-1) - ordered
        # The least probable token still needed; its ties are kept too, so that the set is a function of values only.
        least = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        keep &= prob >= least
    if sampling.min_p > 0:
        keep &= scaled >= scaled.max(-1, keepdims=True) + jnp.log(sampling.min_p)
    return keep


def _scaled(logits: jax.Array, sampling: Sampling, always: jax.Array | None = None) -> jax.Array:
    """Logits of the distribution sampled from, -inf where filtered. ``always`` [...] is a token that stays in."""
    scaled = logits.astype(jnp.float32) / (sampling.temperature or 1.0)
    if not sampling.filters:
        return scaled
    keep = kept(jax.lax.stop_gradient(scaled), sampling)
    if always is not None:
        keep |= jnp.arange(logits.shape[-1]) == always[..., None]
    return jnp.where(keep, scaled, -jnp.inf)


def score(
    logits: Float[Array, "*B V"], tokens: Int[Array, "*B"], sampling: Sampling
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """Log-prob of ``tokens`` and entropy (nats) of the distribution that `sample` draws from.

    A filter's set moves with the policy. The scored token is always kept: an old sample that the new policy would
    filter out keeps a finite log-prob, and the ratio is exact while the policy is the one that sampled.
    """
    if sampling.temperature == 0:
        raise ConfigError("rollout.sampling.temperature: expected > 0 for training, got 0 (greedy has no gradient)")
    scaled = _scaled(logits, sampling, always=tokens)
    norm = jax.nn.logsumexp(scaled, axis=-1)
    logprob = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0] - norm
    prob = jnp.exp(scaled - norm[..., None])
    entropy = norm - jnp.sum(prob * jnp.where(prob > 0, scaled, 0.0), axis=-1)
    return logprob, entropy


def sample(
    logits: Float[Array, "*B V"], u: Float[Array, "*B"], sampling: Sampling
) -> tuple[Int[Array, "*B"], Float[Array, "*B"]]:
    """Token and its log-prob, from one uniform number ``u`` in [0, 1) per row."""
    parts = sharding.tensor_parts()
    return sample_logits(logits, u, temperature=sampling.temperature, keep=_keep(sampling), parts=parts)


def sample_hidden(
    hidden: Float[Array, "*B D"], head: Head, u: Float[Array, "*B"], sampling: Sampling
) -> tuple[Int[Array, "*B"], Float[Array, "*B"]]:
    """`sample` from the logits of ``hidden``, which need not be formed."""
    return head_sample(hidden, head, u, temperature=sampling.temperature, keep=_keep(sampling))


def _keep(sampling: Sampling) -> Callable[[jax.Array], jax.Array] | None:
    return functools.partial(kept, sampling=sampling) if sampling.filters else None
