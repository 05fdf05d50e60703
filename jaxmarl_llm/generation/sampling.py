"""Sampling: from logits to a token and its log-prob under the distribution it was drawn from.

The sampler and the learner call the same functions. Every log-prob therefore is that of one distribution: with
temperature, top-k, top-p and min-p, renormalised over the kept tokens. A token is drawn by inverting the cumulative
distribution at one uniform number per row (`kernels.head.sample`). It depends on the row's own key alone, and not on
batch, bucket or mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.config import at_least, in_range
from jaxmarl_llm.distributed import sharding
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.kernels.head.head import Head
from jaxmarl_llm.kernels.head.sample import head_sample, sample_logits


@dataclass(frozen=True)
class Sampling:
    """The distribution that completions are drawn from. Filters are applied in the order top-k, top-p, min-p."""

    temperature: float = 1.0  # 0 is greedy: a point mass, whose log-prob is 0 (evaluation only)
    top_k: int = 0  # keep the k most probable tokens (ties included); 0 keeps all
    top_p: float = 1.0  # keep the smallest set of most probable tokens whose mass reaches top_p
    min_p: float = 0.0  # keep tokens at least min_p times as probable as the most probable one

    def check(self, path: str) -> None:
        at_least(f"{path}.temperature", self.temperature, 0)
        at_least(f"{path}.top_k", self.top_k, 0)
        in_range(f"{path}.top_p", self.top_p, 0, 1, "(]")
        in_range(f"{path}.min_p", self.min_p, 0, 1, "[)")

    @property
    def filters(self) -> bool:
        """Whether any filter is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def kept(scaled: Float[Array, "*B V"], sampling: Sampling) -> Bool[Array, "*B V"]:
    """Mark the tokens that the filters keep.

    Args:
        scaled: logits, divided by the temperature.
        sampling: the filters.
    """
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
    """Compute the logits of the distribution, -inf where filtered. The tokens ``always`` [...] are never filtered."""
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
    """Compute the log-prob of tokens, and the entropy (nats) of the distribution that `sample` draws from.

    The set of kept tokens changes with the policy. The scored token is always kept. So an old sample that the new
    policy would filter out has a finite log-prob. The ratio is exact while the policy is the one that sampled.

    Args:
        logits: logits of the model.
        tokens: ids to score.
        sampling: the distribution, with a temperature above 0.
    """
    if sampling.temperature == 0:
        raise ConfigError("config.sampling.temperature: expected > 0 for training, got 0 (greedy has no gradient)")
    scaled = _scaled(logits, sampling, always=tokens)
    norm = jax.nn.logsumexp(scaled, axis=-1)
    logprob = jnp.take_along_axis(scaled, tokens[..., None], axis=-1)[..., 0] - norm
    prob = jnp.exp(scaled - norm[..., None])
    entropy = norm - jnp.sum(prob * jnp.where(prob > 0, scaled, 0.0), axis=-1)
    return logprob, entropy


def sample(
    logits: Float[Array, "*B V"], u: Float[Array, "*B"], sampling: Sampling
) -> tuple[Int[Array, "*B"], Float[Array, "*B"]]:
    """Draw a token per row, with its log-prob.

    Args:
        logits: logits of the model.
        u: one uniform number in [0, 1) per row.
        sampling: the distribution.
    """
    parts = sharding.tensor_parts()
    return sample_logits(logits, u, temperature=sampling.temperature, keep=_keep(sampling), parts=parts)


def sample_hidden(
    hidden: Float[Array, "*B D"], head: Head, u: Float[Array, "*B"], sampling: Sampling
) -> tuple[Int[Array, "*B"], Float[Array, "*B"]]:
    """Draw a token per row from hidden states, as `sample` does from logits; the logits need not be formed.

    Args:
        hidden: hidden states of the model.
        head: the linear map to logits.
        u: one uniform number in [0, 1) per row.
        sampling: the distribution.
    """
    return head_sample(hidden, head, u, temperature=sampling.temperature, keep=_keep(sampling))


def _keep(sampling: Sampling) -> Callable[[jax.Array], jax.Array] | None:
    return functools.partial(kept, sampling=sampling) if sampling.filters else None
