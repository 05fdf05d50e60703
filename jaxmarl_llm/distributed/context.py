"""Rows whose tokens are cut over the mesh axis context: who has which tokens, and attention across them.

Device i of c along context has the i-th of c equal runs of a row's tokens. What is computed for each token stays on its
device. Attention gathers keys and values along context, layer by layer, and each device attends from its own queries.
Their gradients are summed over context and cut again. On a mesh without this axis every function is that of whole rows.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxmarl_llm.distributed.sharding import (
    CONTEXT,
    ROWS,
    UNCONSTRAINED,
    attention_rows,
    context_parts,
    cut_rows,
    row_axes,
    row_parts,
)
from jaxmarl_llm.types import PyTree


def missing(tokens: int) -> int:
    """Number of columns to add to rows of ``tokens``, so that context divides them."""
    return -tokens % context_parts()


def cuts(x: jax.Array) -> bool:
    """Whether the mesh has an axis context, and cuts the rows and tokens of ``x`` [N T ...] evenly."""
    return context_parts() > 1 and not x.shape[0] % row_parts() and not x.shape[1] % context_parts()


def cut_tokens(x: jax.Array) -> jax.Array:
    """Constrain rows and tokens to be split, inside a compiled function; tokens over context alone.

    x: [N T ...]. Where the mesh does not cut it evenly, rows alone are constrained (`sharding.cut_rows`).
    """
    if not cuts(x):
        return cut_rows(x, rest=None)
    place = PartitionSpec(row_axes(), CONTEXT, *[None] * (x.ndim - 2))
    return jax.lax.with_sharding_constraint(x, place)


def lay_embedded(x: Float[Array, "N T D"]) -> Float[Array, "N T D"]:
    """Constrain embedded tokens to be split as `cut_tokens` does; without context ``x`` itself.

    The gradient of the embedding is cut along D. XLA cannot exchange tokens for a part of D on two axes at once, so the
    exchange along context is stated.
    """
    if not cuts(x):
        return x
    return cut_tokens(jax.lax.with_sharding_constraint(x, PartitionSpec(row_axes(), None, CONTEXT)))


def whole_tokens(tree: PyTree) -> PyTree:
    """Gather the tokens of caches along context, inside a compiled function; without context the ``tree`` itself.

    tree: keys and values [N P K H].
    """
    if context_parts() == 1:
        return tree

    def gather(x: jax.Array) -> jax.Array:
        rows = UNCONSTRAINED if x.shape[0] % row_parts() else row_axes()
        return jax.lax.with_sharding_constraint(x, PartitionSpec(rows, None, UNCONSTRAINED, UNCONSTRAINED))

    return jax.tree.map(gather, tree)


def gather_tokens(x: jax.Array) -> jax.Array:
    """All tokens of ``x`` [N T/c ...] of one device, in order. Inside `jax.shard_map`; its gradient is cut again."""
    return jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True)


def attend_in_parts(
    attention: Callable[..., jax.Array],
    q: Float[Array, "N T Q H"],
    k: Float[Array, "N T K H"],
    v: Float[Array, "N T K H"],
    end: Int[Array, "N T"],
) -> Float[Array, "N T Q H"]:
    """Attend on each device from its own tokens, rows and heads, inside a compiled function. Needs `cuts` of ``q``.

    A device rolls keys to the right until its own tokens are the last ones. So one mask serves all parts: query i sees
    key j where ``j <= i < end[j]``. Keys behind a device's own tokens come to the front, with an ``end`` of 0.

    Args:
        attention: `kernels.attention.tree.tree_attention`, with queries of the last tokens.
        q: queries.
        k: keys.
        v: values.
        end: index behind each token's subtree; 0 is padding.
    """
    cut = PartitionSpec(attention_rows(), CONTEXT, "tensor", None)

    def own(q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array) -> jax.Array:
        t, size = end.shape[1], q.shape[1]
        last = (jax.lax.axis_index(CONTEXT) + 1) * size  # behind this device's tokens
        shift = t - last
        end = jnp.where((jnp.arange(t) < last) & (end > 0), jnp.minimum(end + shift, t), 0)
        k, v, end = (jnp.roll(x, shift, axis=1) for x in (gather_tokens(k), gather_tokens(v), end))
        return attention(q, k, v, end)

    specs = cut, cut, cut, PartitionSpec(attention_rows())
    return jax.shard_map(own, in_specs=specs, out_specs=cut, check_vma=False)(q, k, v, end)


def extend_in_parts(
    attention: Callable[..., tuple[jax.Array, ...]],
    q: Float[Array, "N E Q H"],
    k: Float[Array, "N E K H"],
    v: Float[Array, "N E K H"],
    pk: Float[Array, "N P K H"],
    pv: Float[Array, "N P K H"],
    slots: Int[Array, "N E"],
) -> tuple[jax.Array, ...]:
    """Attend from new tokens to a cache that every device along context has. Needs `cuts` of ``q``.

    Args:
        attention: function of all other arguments, and of the slots of the queries that a device has.
        q: queries of the new tokens.
        k: keys of the new tokens.
        v: values of the new tokens.
        pk: cached keys.
        pv: cached values.
        slots: place of each new token in the cache.

    Returns:
        Result [N E Q H], and the caches [N P K H] with the new tokens.
    """
    rows = attention_rows()
    cut, kept = PartitionSpec(rows, CONTEXT, "tensor", None), PartitionSpec(rows, None, "tensor", None)

    def own(q: jax.Array, at: jax.Array, k: jax.Array, v: jax.Array, *cache: jax.Array) -> tuple[jax.Array, ...]:
        return attention(q, gather_tokens(k), gather_tokens(v), *cache, at)

    specs = cut, PartitionSpec(rows, CONTEXT), cut, cut, kept, kept, PartitionSpec(rows)
    found = jax.shard_map(own, in_specs=specs, out_specs=(cut, kept, kept), check_vma=False)
    return found(q, slots, k, v, pk, pv, slots)


def take_tokens(x: Float[Array, "F T D"], at: Int[Array, "F *M R"]) -> Float[Array, "F *M R D"]:
    """Take the vectors at the given places of each row, inside a compiled function.

    With context, the places of the last axis are cut over it, and each device gathers the row.

    Args:
        x: vectors of all tokens.
        at: places in [0, T).
    """
    take = jax.vmap(lambda tokens, places: tokens[places])
    if context_parts() == 1 or x.shape[0] % row_parts():
        return take(x, at)
    columns, (more_x, more_at) = at.shape[-1], (missing(x.shape[1]), missing(at.shape[-1]))
    x = jnp.pad(x, [(0, 0), (0, more_x), (0, 0)]) if more_x else x
    at = jnp.pad(at, [(0, 0)] * (at.ndim - 1) + [(0, more_at)]) if more_at else at
    places = PartitionSpec(ROWS, *[None] * (at.ndim - 2), CONTEXT)
    own = lambda x, at: take(gather_tokens(x), at)
    specs = PartitionSpec(ROWS, CONTEXT), places
    found = jax.shard_map(own, in_specs=specs, out_specs=PartitionSpec(*places, None), check_vma=False)(x, at)
    return found[..., :columns, :] if more_at else found


def split_tokens(x: jax.Array, parts: int) -> jax.Array:
    """Cut completions into one piece for each part of rows and tokens, inside a compiled function.

    x: [rows R ...]. parts: of the rows, which divides them. Returns [parts * c, rows / parts, R' / c, ...], split along
    axis 0, with R' a multiple of the c parts of context. Padding is zeros.
    """
    c = context_parts()
    x = jnp.pad(x, [(0, 0), (0, missing(x.shape[1])), *[(0, 0)] * (x.ndim - 2)])
    x = jnp.moveaxis(x.reshape(parts, len(x) // parts, c, -1, *x.shape[2:]), 2, 1)
    return cut_parts(x.reshape(parts * c, *x.shape[2:]))


def join_tokens(x: jax.Array, parts: int, columns: int) -> jax.Array:
    """Undo `split_tokens`: [rows R]. ``x``: [parts * c, rows / parts, R' / c]. ``columns``: R."""
    c = context_parts()
    x = jnp.moveaxis(x.reshape(parts, c, *x.shape[1:]), 1, 2)
    return x.reshape(-1, c * x.shape[-1])[:, :columns]


def cut_parts(x: jax.Array) -> jax.Array:
    """Constrain axis 0 of ``x`` to be split over rows and context."""
    axes = (*ROWS, CONTEXT) if context_parts() > 1 else ROWS
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes, *[None] * (x.ndim - 1)))
