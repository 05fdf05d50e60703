"""Attention on a mesh: which device has which rows and heads of queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxmarl_llm.distributed.sharding import (
    ATTENTION,
    UNCONSTRAINED,
    attention_rows,
    cut_rows,
    is_rollout,
    meshed,
    parts_along,
    row_axes,
    row_parts,
)
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import PyTree


def check_heads(parts: int, model: str, heads: int, kv_heads: int, key: str = "config.mesh.tensor") -> None:
    """Raise ConfigError unless ``parts`` devices along tensor can cut the heads of a model.

    They divide the query heads. They divide the key/value heads, or are a multiple of them (`lay_heads`).

    model: name in the message. heads, kv_heads: numbers of query heads and of key/value heads. key: name of the
    setting in the message.
    """
    if heads % parts:
        raise ConfigError(f"{key}: {heads} query heads of {model} do not divide into {parts} parts")
    if kv_heads % parts and parts % kv_heads:
        raise ConfigError(
            f"{key}: {kv_heads} key/value heads of {model} neither divide into {parts} parts nor can each be copied "
            "equally often"
        )


def lay_heads(x: jax.Array) -> jax.Array:
    """Lay keys or values out for attention, inside a compiled function.

    Heads are copied where tensor has more parts than there are. Each part then has one head, and the query heads that
    attend to it. Rows are split over attn_dp, too. On other meshes, and without one, the result is ``x`` itself.

    x: keys or values [N ... K H].
    """
    parts, count = parts_along(("tensor",)), x.shape[-2]
    if parts <= count and parts_along((ATTENTION,)) == 1:
        return x
    wide = jnp.repeat(x, parts // count, axis=-2) if parts > count else x
    return cut_attention(wide)


def cut_attention(tree: PyTree) -> PyTree:
    """Constrain the rows and heads of keys and values to those of attention, inside a compiled function.

    tree: arrays [N ... K H]; the compiler decides for an axis that does not divide. Of arrays with fewer axes rows are
    constrained (`cut_rows`).
    """
    parts, rows = parts_along(("tensor",)), attention_rows()

    def cut(x: jax.Array) -> jax.Array:
        if x.ndim < 4:
            return cut_rows(x)
        first = UNCONSTRAINED if x.shape[0] % row_parts() else rows
        heads = UNCONSTRAINED if x.shape[-2] % parts else "tensor"
        place = PartitionSpec(first, *[UNCONSTRAINED] * (x.ndim - 3), heads, None)
        return jax.lax.with_sharding_constraint(x, place)

    return jax.tree.map(cut, tree) if meshed() else tree


def cut_heads(x: jax.Array) -> jax.Array:
    """Constrain queries, or the result of attention, as the projections beside attention have them.

    On a mesh with attn_dp, inside a compiled function: attn_dp splits heads there. On other meshes, ``x`` itself.

    x: [rows ... Q H].
    """
    if not meshed() or not is_rollout() or ATTENTION in row_axes():
        return x
    rows = UNCONSTRAINED if x.shape[0] % row_parts() else row_axes()
    place = PartitionSpec(rows, *[None] * (x.ndim - 3), (ATTENTION, "tensor"), None)
    return jax.lax.with_sharding_constraint(x, place)


def by_heads(function: Callable[..., Any], *arrays: PyTree) -> Any:
    """Run ``function(*arrays)`` on each device with its own rows and heads, inside a compiled function.

    Its code sees no mesh, so its kernels need not be partitioned. Without a mesh, it is called as it is.

    Args:
        function: attention, or another function whose rows and heads do not meet. Its result, or each of its results,
            has the axes of the first array.
        arrays: [N ... heads H], or with fewer axes: [N ...] without heads, or a number. Each may be a tree of such
            arrays. N is a multiple of `row_parts`. The numbers of heads are multiples of the tensor axis.
    """
    if not meshed():
        return function(*arrays)
    own = attention_rows()

    def cut(x: jax.Array) -> PartitionSpec:
        heads = (*[None] * (x.ndim - 3), "tensor", None) if x.ndim > 3 else ()
        return PartitionSpec(own, *heads) if x.ndim else PartitionSpec()

    specs = jax.tree.map(cut, arrays)
    return jax.shard_map(function, in_specs=specs, out_specs=specs[0], check_vma=False)(*arrays)
