"""Mathematics of `tree_pallas` for one block of keys and one block of queries, inside a kernel, on GPU and TPU.

Tiles are [H tokens], so that tokens are along the lanes of a TPU (no lane is empty at H = 64). ``q`` are queries, ``k``
keys and ``v`` values. ``end`` is [keys 1]; numbers per query are rows [1 queries]. ``first`` are the indices of the
first key and the first query. ``carry`` are the running maximum, sum and output.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxmarl_llm.kernels.attention.constants import NEG
from jaxmarl_llm.kernels.attention.group_decode_pallas import product

Lists = tuple[jax.Array, jax.Array]  # blocks to visit [B n m], and how many of them count [B n]: `tree_pallas.visits`


def scores(q: jax.Array, k: jax.Array, end: jax.Array, first: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """Compute the scores [keys queries], and which of them are visible."""
    shape = k.shape[1], q.shape[1]
    key = first[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    query = first[1] + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return product(k, q, (0, 0)), (key <= query) & (query < end)


def fold(carry: Any, q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array, first: tuple[Any, Any]) -> Any:
    """Add a block of keys to the running maximum [1 queries], sum [1 queries] and output [H queries]."""
    top, total, out = carry
    score, see = scores(q, k, end, first)
    most = jnp.maximum(top, jnp.where(see, score, NEG).max(0, keepdims=True))
    weight, keep = jnp.where(see, jnp.exp(score - most), 0.0), jnp.exp(top - most)
    total = total * keep + weight.sum(0, keepdims=True)
    return most, total, out * keep + product(v, weight.astype(v.dtype), (1, 0))


def finish(carry: Any) -> tuple[jax.Array, jax.Array]:
    """Return output and L of the running sums; 0 for queries that see no key."""
    top, total, out = carry
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    return out / total, jnp.where(seen, top + jnp.log(total), 0.0)


def pulled(
    q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, norm: jax.Array, dot: jax.Array, end: jax.Array, first: Any
) -> tuple[jax.Array, jax.Array]:
    """Compute p and ds [keys queries], in the dtype of the keys.

    do: cotangent of the output [H queries]. norm: L, the log-sum-exp of scores. dot: inner product of the output and
    ``do``.
    """
    score, see = scores(q, k, end, first)
    p = jnp.where(see, jnp.exp(score - norm), 0.0)
    ds = p * (product(v, do, (0, 0)) - dot)
    return p.astype(k.dtype), ds.astype(k.dtype)
