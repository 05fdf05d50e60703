"""The order in which tasks and demonstrations are used: an endless stream of shuffled epochs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@functools.partial(jax.jit, static_argnames=("size", "count"))
def shuffled(key: jax.Array, size: int, start: Int[Array, ""] | int, count: int) -> Int[Array, " count"]:
    """Indices at ``count`` positions of the stream from ``start`` on. Pure, so resuming needs the position alone.

    Args:
        key: PRNG key of the stream; epoch e is the permutation drawn with ``fold_in(key, e)``.
        size: Items of an epoch.
        start: First position; may be traced.
        count: Positions.
    """
    start = jnp.asarray(start, jnp.int32)
    first = start // size
    epochs = (count + size - 2) // size + 1  # that ``count`` positions can touch
    draw = lambda e: jax.random.permutation(jax.random.fold_in(key, e), size)
    skip = lambda e: jnp.arange(size)
    # A permutation is a sort. Most steps touch one epoch, so a later one is drawn only where it is touched.
    orders = jax.lax.map(lambda e: jax.lax.cond(e * size < start + count, draw, skip, e), first + jnp.arange(epochs))
    at = start - first * size + jnp.arange(count)
    return orders[at // size, at % size].astype(jnp.int32)
