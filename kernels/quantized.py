"""Arrays of values of one byte with float32 scales: weight matrices, and cached keys and values.

A matrix has a scale for each column:

    w[i, j] is about values[i, j] * scales[j]        x W = (x values) * scales

The largest magnitude of a column becomes the largest value. Values are whole numbers up to 127 (int8), or numbers of
float8_e4m3fn up to 448 (fp8). These have 3 bits of mantissa, and below 2^-6 they are multiples of 2^-9. An entry in
int8 is off by at most 1/254 of the column's largest one. In fp8 it is off by at most 1/16 of itself, or 2^-10 of a
scale. So fp8 is nearer where few entries of a column are far larger than the others, else int8.

The product converts the values beside the multiplication, so a program reads one byte of memory for each entry. The
sums are those of a product with a matrix of the activations' dtype. Values of both forms are exact in bfloat16 and
float32. No product has two operands of fp8, whichever chips could multiply them.

A cached key or value is a vector of one token and head, with a scale of its own (`ScaledVectors`). The scale of a key
is a factor of its score, and that of a value a factor of its weight. So products with a cache convert in the same way
(`scores`, `weighted`). Scales in bfloat16 would save 1.5 % of a cache with heads of 128, and need other kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float8e4m3fn, Int8

VALUES: dict[str, jax.typing.DTypeLike] = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}  # name of a form -> dtype


def _nearest_e4m3(x: jax.Array) -> jax.Array:
    """Round numbers up to 448 to those of float8_e4m3fn, ties to even. A conversion may round twice or be left out."""
    return jnp.where(jnp.abs(x) < 2**-6, jnp.round(x * 2**9) / 2**9, jax.lax.reduce_precision(x, 8, 3))


# Largest magnitude, and the function that rounds to a value. -128 is not used, so that values are symmetric.
_ROUNDING: dict[jnp.dtype, tuple[int, Callable[[jax.Array], jax.Array]]] = {
    jnp.dtype(jnp.int8): (127, jnp.round),
    jnp.dtype(jnp.float8_e4m3fn): (448, _nearest_e4m3),
}


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=[])
@dataclass(frozen=True)
class ScaledMatrix:
    """Matrices of values of one byte, in place of an array [*B K N].

    ``values``: of a dtype of `VALUES`. ``scales``: factor of each column.
    """

    values: Int8[Array, "*B K N"] | Float8e4m3fn[Array, "*B K N"]
    scales: Float[Array, "*B N"]


def quantize(w: Float[Array, "*B K N"], dtype: jax.typing.DTypeLike) -> ScaledMatrix:
    """Round each column to the nearest values times a scale. A number halfway between two values goes to the even one.

    A column of zeros stays zero. A column with an entry that is not finite has a product that is not finite.

    Args:
        w: matrices; B are batch axes.
        dtype: of the values, one of `VALUES`.
    """
    values, scales = _rounded(w, -2, dtype)
    return ScaledMatrix(values, scales[..., 0, :])


def _rounded(x: jax.Array, axis: int, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Values, and scales with axis ``axis`` of size 1."""
    (largest, nearest), wide = _ROUNDING[jnp.dtype(dtype)], x.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=axis, keepdims=True) / largest, jnp.finfo(jnp.float32).tiny)
    return nearest(jnp.clip(wide / scales, -largest, largest)).astype(dtype), scales


def scaled_matmul(x: Float[Array, "*T K"], w: ScaledMatrix, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
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


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=[])
@dataclass(frozen=True)
class ScaledVectors:
    """Vectors of values of one byte, in place of an array [*B H] of keys or values.

    ``values``: of a dtype of `VALUES`. ``scales``: factor of each vector. Both have the axes of the array, so what
    slices, gathers or lays out a cache does so with `jax.tree.map`.
    """

    values: Int8[Array, "*B H"] | Float8e4m3fn[Array, "*B H"]
    scales: Float[Array, "*B 1"]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        return self.values.shape


Cached = jax.Array | ScaledVectors  # keys or values of a cache


def quantize_vectors(x: Float[Array, "*B H"], dtype: jax.typing.DTypeLike) -> ScaledVectors:
    """Round each vector to the nearest values times a scale, as `quantize` does a column.

    Args:
        x: keys or values; B are rows, tokens and heads.
        dtype: of the values, one of `VALUES`.
    """
    return ScaledVectors(*_rounded(x, -1, dtype))


def dequantize(x: ScaledVectors, dtype: jax.typing.DTypeLike) -> Float[Array, "*B H"]:
    """Return the vectors that values and scales stand for.

    Args:
        x: values and scales.
        dtype: of the result.
    """
    return (x.values.astype(jnp.float32) * x.scales).astype(dtype)


def stored(x: Float[Array, "*B H"], like: Cached) -> Cached:
    """Return new keys or values in the form of the cache that they are written to.

    Args:
        x: keys or values.
        like: the cache.
    """
    return quantize_vectors(x, like.values.dtype) if isinstance(like, ScaledVectors) else x


def scores(letters: str, rows: jax.Array, keys: Cached) -> jax.Array:
    """Multiply rows with keys: float32.

    Args:
        letters: operands and result, as for `jax.numpy.einsum`. The last letter of both operands is summed over.
        rows: scaled queries.
        keys: keys of a cache.
    """
    f32 = {"preferred_element_type": jnp.float32}
    if not isinstance(keys, ScaledVectors):
        return jnp.einsum(letters, rows, keys, **f32)
    operands, result = letters.split("->")
    found = jnp.einsum(letters, rows, keys.values.astype(rows.dtype), **f32)
    return found * _along(keys.scales, operands.partition(",")[2], result)


def weighted(letters: str, weights: jax.Array, values: Cached, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Sum values with float32 weights: float32.

    Args:
        letters: operands and result, as for `jax.numpy.einsum`. The last letter of the second one is the head's size.
        weights: weight of each value.
        values: values of a cache.
        dtype: of both operands of the product.
    """
    if isinstance(values, ScaledVectors):
        first, second = letters.partition("->")[0].split(",")
        weights, values = weights * _along(values.scales, second, first), values.values.astype(dtype)
    return jnp.einsum(letters, weights.astype(dtype), values, preferred_element_type=jnp.float32)


def attend_to(
    q: Float[Array, "N T Q H"], k: ScaledVectors, v: ScaledVectors, visible: Bool[Array, "N T P"]
) -> Float[Array, "N T Q H"]:
    """Attend to quantized keys and values [N P K H], in the portable form.

    Args:
        q: queries.
        k: keys of a cache.
        v: values of a cache.
        visible: which keys a query sees, at least one.
    """
    (n, t, heads, h), kv = q.shape, k.shape[2]
    q, k, v = jax.lax.optimization_barrier((q, k, v))  # as in `scaled_matmul`: there may be a loop over queries
    rows = (q * h**-0.5).reshape(n, t, kv, heads // kv, h)
    score = jnp.where(visible[:, None, None], scores("ntkrh,npkh->nkrtp", rows, k), -jnp.inf)
    weights = jax.nn.softmax(score, axis=-1)
    return weighted("nkrtp,npkh->ntkrh", weights, v, q.dtype).reshape(q.shape).astype(q.dtype)


def _along(scales: jax.Array, axes: str, result: str) -> jax.Array:
    """Scales [*B 1] as a factor of an array. Letters: ``axes`` of [*B H], ``result`` of the array."""
    of_vectors = axes[:-1]
    order = [of_vectors.index(letter) for letter in result if letter in of_vectors]
    missing = [n for n, letter in enumerate(result) if letter not in of_vectors]
    return jnp.expand_dims(jnp.transpose(scales[..., 0], order), missing)
