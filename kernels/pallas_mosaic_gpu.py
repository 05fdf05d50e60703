"""Pallas' Mosaic GPU backend: what the forms ``mosaic`` have in common.

These forms are for Hopper (sm_90a) and for bfloat16. They stand beside the forms ``gpu``, whose backend JAX deprecates.
Tests interpret and lower them. No GPU has run them, so `auto` takes none. After one measured run on a GPU, an entry
``"mosaic"`` in PAYS of `head.sample`, `attention.group_decode` or `attention.tree` is all that `auto` needs.

A tile is in shared memory, in the swizzled layout that a product of a warpgroup reads. A copy cuts an array into tiles
of 8 x 64. So the second last axis of an array is a multiple of 8, the last one a multiple of 64. A block of ragged
length is moved back until it lies within the array, and what it shares with the block before is masked. No copy
therefore reaches beyond an array.

JAX's interpreter for this backend is private. Tests ask for it, and ``interpret`` is refused.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

try:
    from jax.experimental.pallas import mosaic_gpu
except ImportError:
    mosaic_gpu: Any = None  # type: ignore[no-redef]  # a module above

DEEP = 64  # entries of a tile's last axis: 128 bytes


def lacking(interpret: bool, *arrays: Any) -> str | None:
    """Say why no form of this backend can be used, or return None.

    Args:
        interpret: whether Pallas' interpreter is asked for.
        arrays: operands of the products.
    """
    if mosaic_gpu is None:
        return "needs a JAX with Pallas' Mosaic GPU backend"
    if interpret:
        return "has no interpreter that JAX makes public"
    other = next((x.dtype for x in arrays if x.dtype != jnp.bfloat16), None)
    return None if other is None else f"takes bfloat16 and not {other}"


def tiles(*shape: int) -> Any:
    """Shared memory for bfloat16 tiles, in the layout of products.

    Args:
        shape: sizes, of which the last two are those of a tile.
    """
    layout = mosaic_gpu.TilingTransform((8, DEEP)), mosaic_gpu.SwizzleTransform(2 * DEEP)
    return mosaic_gpu.SMEM(shape, jnp.bfloat16, transforms=layout)


def count(shape: tuple[int, int], axis: int) -> jax.Array:
    """Count along an axis of a product's result [64 n, 8 m].

    Args:
        shape: of the result.
        axis: 0 or 1.
    """
    return mosaic_gpu.broadcasted_iota(jnp.int32, shape, axis, layout=mosaic_gpu.Layout.WGMMA)


def along(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat a number of each row along a product's result.

    Args:
        row: one number for each row.
        shape: of the result.
    """
    return jax.lax.broadcast_in_dim(row, shape, [0])
