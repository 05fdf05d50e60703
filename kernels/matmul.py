"""Matrix product x W with a gradient of W that XLA computes fast on CPU.

    dx = g W^T        dW = sum over rows of x^T g, or (g^T x)^T

XLA's matrix product on CPU copies one of x and g to column order. Its compiler fuses that copy, element by element,
with the computation of the operand. Autodiff writes the second form, which copies g. Behind an activation or a softmax
g is the wider operand, and its derivative is then computed twice, the second time in column order. Here the narrower
operand is copied. The sums are the same. On an accelerator the compiler chooses layouts, whichever form is written.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from jaxmarl_llm.kernels.quantized import ScaledMatrix, scaled_matmul


def matmul(
    x: Float[Array, "*T K"], w: Float[Array, "*B K N"] | ScaledMatrix, dtype: Any = None
) -> Float[Array, "*T N"]:
    """Multiply x by W. Only reverse-mode differentiation is supported.

    An operand that is not differentiated gets no gradient and costs no product. Raises TypeError if x and w have
    different dtypes. A quantized matrix goes with every dtype (`quantized.scaled_matmul`).

    Args:
        x: left operand; the first axes of T are the axes B of ``w``.
        w: right operand; axes B are batch axes.
        dtype: of the sums and the result; None is as in `jax.lax.dot_general`.
    """
    if isinstance(w, ScaledMatrix):
        return scaled_matmul(x, w, dtype)
    if x.dtype != w.dtype:
        raise TypeError(f"x and w are of one dtype, not {x.dtype} and {w.dtype}")
    return _matmul(_Form(w.ndim - 2, dtype), x, w)


class _Form(NamedTuple):
    """Static arguments."""

    batch: int  # leading axes
    dtype: Any

    def dot(self, a: jax.Array, b: jax.Array, over: tuple[Sequence[int], Sequence[int]]) -> jax.Array:
        batch = range(self.batch)
        return jax.lax.dot_general(a, b, (over, (batch, batch)), preferred_element_type=self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(form: _Form, x: jax.Array, w: jax.Array) -> jax.Array:
    return form.dot(x, w, ([x.ndim - 1], [w.ndim - 2]))


def _forward(form: _Form, x: Any, w: Any) -> tuple[jax.Array, tuple[jax.Array | None, jax.Array | None]]:
    # Each operand is kept where the other one is differentiated.
    kept = x.value if w.perturbed else None, w.value if x.perturbed else None
    return _matmul(form, x.value, w.value), kept


def _backward(form: _Form, kept: tuple[jax.Array | None, jax.Array | None], g: jax.Array) -> tuple[Any, Any]:
    # g is never a symbolic zero: of an operation with one result, nothing is then transposed.
    (x, w), dx, dw = kept, None, None
    if w is not None:
        dx = form.dot(g, w, ([g.ndim - 1], [w.ndim - 1])).astype(w.dtype)
    if x is not None:
        rows = range(form.batch, x.ndim - 1)
        narrow = x.shape[-1] <= g.shape[-1]
        dw = form.dot(x, g, (rows, rows)) if narrow else form.dot(g, x, (rows, rows)).swapaxes(-1, -2)
        dw = dw.astype(x.dtype)
    return dx, dw


_matmul.defvjp(_forward, _backward, symbolic_zeros=True)
