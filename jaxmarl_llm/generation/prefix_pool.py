"""Cached keys and values on the devices: slots from which rows are gathered, and to which rows are written.

On a mesh each part of the rows (`sharding.row_parts`) has slots of its own, on its own devices. So a row of a launch is
gathered and written where the launch computes it. An array of the pool is [D * S K H]: the S slots of the first part,
then those of the second, and so on. Slots are counted within a part. `move` alone sends slots to other parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxmarl_llm.distributed.sharding import current, meshed, row_parts
from jaxmarl_llm.distributed.sharding import put as put_on
from jaxmarl_llm.types import PyTree

NO_SLOT = np.iinfo(np.int32).max  # beyond any pool: writes to it are dropped


class Cut(NamedTuple):
    """Layout of the arrays of a launch on a mesh, and with them of the pool.

    rows: mesh axes that split each leading axis of the launch's arrays. heads: mesh axis that splits heads, or None.
    """

    rows: tuple[tuple[str, ...], ...]
    heads: str | None

    @property
    def table(self) -> PartitionSpec:
        """Of a table of rows."""
        return PartitionSpec(*self.rows)

    @property
    def parts(self) -> PartitionSpec:
        """Of an array whose axis 0 has one entry, or one piece, for each part of the rows."""
        return PartitionSpec(sum(self.rows, ()))

    def put(self, tables: PyTree) -> PyTree:
        """Copy host tables with an entry for each part of the rows, on axis 0, to the devices of the parts."""
        mesh = current()
        return tables if mesh is None else put_on(tables, NamedSharding(mesh, self.parts))

    @property
    def pool(self) -> PartitionSpec:
        """Of an array of the pool."""
        return PartitionSpec(sum(self.rows, ()), self.heads, None)

    def cache(self, between: int) -> PartitionSpec:
        """Of a cache with ``between`` axes between its rows and its heads."""
        return PartitionSpec(*self.rows, *[None] * between, self.heads, None)


def _on_parts(function: Callable, places: tuple, out: PartitionSpec, *arguments: PyTree) -> PyTree:
    """Call ``function`` for each part of the rows on its own devices; without a mesh, call it as it is.

    ``places``: PartitionSpec of each argument. ``out``: of the results.
    """
    if not meshed():
        return function(*arguments)
    return jax.shard_map(function, in_specs=places, out_specs=out, check_vma=False)(*arguments)


@functools.partial(jax.jit, static_argnames=("size", "cut"))
def make(cache: PyTree, *, size: int, cut: Cut) -> PyTree:
    """Make a pool of zeros.

    Args:
        cache: cache of prompts whose heads and dtype it has, (k, v) [N P K H] of each layer.
        size: slots of each part.
        cut: how a mesh splits the arrays.
    """

    def zeros(x: jax.Array) -> jax.Array:
        empty = jnp.zeros((row_parts() * size, *x.shape[-2:]), x.dtype)
        return jax.lax.with_sharding_constraint(empty, cut.pool) if meshed() else empty

    return jax.tree.map(zeros, cache)


@functools.partial(jax.jit, static_argnames=("more", "cut"))
def grow(pool: PyTree, *, more: int, cut: Cut) -> PyTree:
    """Add ``more`` slots to each part of ``pool``.

    Args:
        pool: the pool.
        more: number of new slots.
        cut: how a mesh splits the arrays.
    """

    def own(pool: PyTree) -> PyTree:
        return jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros((more, *x.shape[1:]), x.dtype)]), pool)

    return _on_parts(own, (cut.pool,), cut.pool, pool)


@functools.partial(jax.jit, static_argnames=("cut",))
def take(pool: PyTree, slot: Int[Array, "N P"], *, cut: Cut) -> PyTree:
    """Gather the cache [N P K H] of each layer from the slots of each row.

    Args:
        pool: the pool.
        slot: slots of each row's part.
        cut: how a mesh splits the arrays.
    """

    def own(pool: PyTree, slot: jax.Array) -> PyTree:
        return jax.tree.map(lambda x: x[slot], pool)

    return _on_parts(own, (cut.pool, cut.table), cut.cache(1), pool, slot)


@functools.partial(jax.jit, static_argnames=("cut",), donate_argnames=("pool",))
def put(pool: PyTree, prefix: PyTree, suffix: PyTree, to_prompt: Any, to_sample: Any, *, cut: Cut) -> PyTree:
    """Write each row of the caches to its slots. What goes to `NO_SLOT` is dropped.

    Args:
        pool: the pool, donated.
        prefix: cache of prompts, (k, v) [N P K H] of each layer.
        suffix: cache of samples, (k, v) [N G R K H] of each layer, or None.
        to_prompt: slot of each token of a prompt [N P].
        to_sample: slot of each token of a sample [N G R], or None.
        cut: how a mesh splits the arrays.
    """

    def own(pool: PyTree, prefix: PyTree, suffix: PyTree, to_prompt: Any, to_sample: Any) -> PyTree:
        pool = jax.tree.map(lambda x, new: x.at[to_prompt].set(new, mode="drop"), pool, prefix)
        if suffix is None:
            return pool
        return jax.tree.map(lambda x, new: x.at[to_sample].set(new, mode="drop"), pool, suffix)

    places = cut.pool, cut.cache(1), cut.cache(2), cut.table, cut.table
    return _on_parts(own, places, cut.pool, pool, prefix, suffix, to_prompt, to_sample)


@functools.partial(jax.jit, static_argnames=("cut",), donate_argnames=("pool",))
def move(pool: PyTree, sent: Int[Array, "D D M"], to: Int[Array, "D D M"], *, cut: Cut) -> PyTree:
    """Copy slots of each part to slots of other parts. Only on a mesh.

    Args:
        pool: the pool, donated.
        sent: entry [a, b] are slots of part a that part b gets.
        to: entry [b, a] are slots of part b for what part a sends, `NO_SLOT` for what fills up.
        cut: how a mesh splits the arrays.
    """

    def own(pool: PyTree, sent: jax.Array, to: jax.Array) -> PyTree:
        def exchange(x: jax.Array) -> jax.Array:
            came = jax.lax.all_to_all(x[sent[0]], sum(cut.rows, ()), split_axis=0, concat_axis=0)
            return x.at[to[0]].set(came, mode="drop")

        return jax.tree.map(exchange, pool)

    return _on_parts(own, (cut.pool, cut.parts, cut.parts), cut.pool, pool, sent, to)
