"""Weight matrices of int8 values with a float32 scale for each column, and the product of activations with them.

    w[i, j] is about values[i, j] * scales[j]        x W = (x values) * scales

The largest magnitude of a column is 127. An entry differs from the matrix by half a scale at most. The product converts
the values beside the multiplication, so a program reads one byte of memory for each entry. The sums are those of a
product with a matrix of the activations' dtype. Whole numbers up to 127 are exact in bfloat16 and in float32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

LARGEST = 127  # magnitude of a value; -128 is not used, so that the values are symmetric


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=[])
@dataclass(frozen=True)
class Int8Matrix:
    """Matrices of int8 values, in place of an array [*B K N].

    ``values``: whole numbers from -127 to 127. ``scales``: factor of each column.
    """

    values: Int8[Array, "*B K N"]
    scales: Float[Array, "*B N"]


def quantize(w: Float[Array, "*B K N"]) -> Int8Matrix:
    """Round each column to whole multiples of its largest magnitude / 127. Half a multiple goes to the even one.

    A column of zeros stays zero. A column with an entry that is not finite has a product that is not finite.

    Args:
        w: matrices; B are batch axes.
    """
    wide = w.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=-2) / LARGEST, jnp.finfo(jnp.float32).tiny)
    values = jnp.clip(jnp.round(wide / scales[..., None, :]), -LARGEST, LARGEST)
    return Int8Matrix(values.astype(jnp.int8), scales)


def int8_matmul(x: Float[Array, "*T K"], w: Int8Matrix, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Multiply x [*T K] by W: an array [*T N] of x's dtype, or of ``dtype``.

    Args:
        x: left operand, of any float dtype; the first axes of T are the axes B of ``w``.
        w: right operand.
        dtype: of the sums and the result; None is that of x.
    """
    batch = w.values.ndim - 2
    # Values that a loop does not change would be converted once, before the loop, and kept. x changes in the loop.
    x, values = jax.lax.optimization_barrier((x, w.values))
    axes = (((x.ndim - 1,), (batch,)), (tuple(range(batch)), tuple(range(batch))))
    sums = jax.lax.dot_general(x, values.astype(x.dtype), axes, preferred_element_type=dtype)
    scales = w.scales.reshape(*w.scales.shape[:-1], *[1] * (sums.ndim - batch - 1), w.scales.shape[-1])
    return (sums.astype(jnp.float32) * scales).astype(sums.dtype)
