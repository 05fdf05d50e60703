"""x W, with a gradient of W that XLA computes well on CPU.

    dx = g W^T        dW = sum over rows of x^T g, or (g^T x)^T

XLA's CPU products of matrices lay out one of x and g anew, by columns, and its compiler does that element by element in
one loop with whatever computes it. Autodiff writes the second form, so what is laid out is g: behind an activation or a
softmax the wide one, whose derivative is then computed twice, the second time in the order of columns. Here it is the
narrower of the two. The sums are the same; on an accelerator the compiler chooses layouts, whatever is written.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float


def matmul(x: Float[Array, "*T K"], w: Float[Array, "*B K N"], dtype: Any = None) -> Float[Array, "*T N"]:
    """x W, added up in ``dtype`` (without it as `jax.lax.dot_general` does), which the result has.

    Axes B of ``w`` are a batch, and the first ones of T. Reverse mode only. What is not differentiated has no gradient
    and costs no product. Raises TypeError where x and w are of different dtypes.
    """
    if x.dtype != w.dtype:
        raise TypeError(f"x and w are of one dtype, not {x.dtype} and {w.dtype}")
    return _matmul(_Form(w.ndim - 2, dtype), x, w)


class _Form(NamedTuple):
    """What is static."""

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
