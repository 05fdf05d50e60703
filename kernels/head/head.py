"""Output head: the linear map from hidden states to logits."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

NEG = -1e30  # logit of padding ids: finite, so that 0 * NEG is 0 and not NaN


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["rows", "used"])
@dataclass(frozen=True)
class Head:
    """Linear map from hidden states to logits."""

    weight: Float[Array, "V D"] | Float[Array, "D V"]
    rows: bool = True  # a row for each id [V D], as tied embeddings are stored; else a column [D V]
    used: int | None = None  # ids at or beyond it are padding, with logit -1e30

    @property
    def vocab(self) -> int:
        """Number of ids, padding included."""
        return self.weight.shape[0 if self.rows else 1]

    @property
    def dim(self) -> int:
        """Size of the hidden states."""
        return self.weight.shape[1 if self.rows else 0]


def logits(hidden: Float[Array, "*B D"], head: Head, start: jax.Array | int = 0) -> Float[Array, "*B V"]:
    """Compute float32 logits, whatever the dtype of hidden states and weights.

    Args:
        hidden: hidden states.
        head: the linear map.
        start: id of the head's first row, where the head is a shard of a larger one.
    """
    if hidden.shape[-1] != head.dim:
        raise ValueError(f"hidden states of size {hidden.shape[-1]} do not fit a head of {head.dim}")
    over = (((hidden.ndim - 1,), (1 if head.rows else 0,)), ((), ()))
    z = jax.lax.dot_general(hidden, head.weight, over, preferred_element_type=jnp.float32)
    return z if head.used is None else jnp.where(start + jnp.arange(head.vocab) < head.used, z, NEG)
