"""int8 matrices against a numpy twin of rounding and of the product, which knows nothing of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.kernels.int8 import Int8Matrix, quantize
from jaxmarl_llm.kernels.matmul import matmul

# x [*T K] and w [*B K N], and the sum in letters
CASES = {
    "rows": ((7, 24), (24, 9), "tk,kn->tn"),
    "rows along two axes": ((2, 3, 24), (24, 5), "stk,kn->stn"),
    "one row": ((24,), (24, 4), "k,kn->n"),
    "a batch": ((3, 4, 24), (3, 24, 6), "btk,bkn->btn"),
    "a batch, rows along two axes": ((3, 2, 4, 24), (3, 24, 4), "bstk,bkn->bstn"),
}
DTYPES = ("float32", "bfloat16")


def matrix(shape, dtype, seed=0):
    """Columns of very different size; the first has one large entry, the last is zero."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 4, shape[-1])
    w[..., 3, 0], w[..., -1] = 50.0, 0.0
    return np.array(jnp.asarray(w, dtype).astype(jnp.float32))


def twin(w):
    """Values and scales of a matrix [*B K N], column by column."""
    values, scales = np.zeros(w.shape, int), np.ones((*w.shape[:-2], w.shape[-1]))
    for at in np.ndindex(*scales.shape):
        column = w[(*at[:-1], slice(None), at[-1])].astype(np.float64)
        if (top := np.abs(column).max()) > 0:
            scales[at] = top / 127
            values[(*at[:-1], slice(None), at[-1])] = np.rint(column / scales[at])
    return values, scales


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(24, 9), (3, 24, 6)])
def test_values_and_scales_are_those_of_the_twin(shape, dtype):
    w = matrix(shape, dtype)
    got = quantize(jnp.asarray(w, dtype))
    values, scales = twin(w)
    assert (got.values.dtype, got.scales.dtype) == (jnp.int8, jnp.float32)
    np.testing.assert_array_equal(got.values, values)
    used = values.any(-2)
    np.testing.assert_allclose(np.asarray(got.scales)[used], scales[used], rtol=3e-7)
    assert not used[..., -1].any() and used[..., :-1].all()  # the column of zeros
    assert (np.asarray(got.scales) > 0).all()  # nothing is divided by 0
    assert np.abs(np.asarray(got.values)).max(-2)[used].min() == 127  # each column uses the whole range


def test_an_entry_is_half_a_scale_off_at_most():
    w = matrix((4, 40, 12), "float32", seed=1)
    got = quantize(jnp.asarray(w))
    scales = np.asarray(got.scales, np.float64)[..., None, :]
    off = np.abs(w - np.asarray(got.values, np.float64) * scales)
    assert (off <= scales / 2 * (1 + 1e-5)).all() and (off > 0.4 * scales).any()


def test_a_column_that_is_not_finite_is_seen_in_the_product():
    w = np.ones((8, 4), np.float32)
    w[2, 1], w[5, 2] = np.nan, np.inf
    y = np.asarray(matmul(jnp.ones((3, 8)), quantize(jnp.asarray(w))))
    assert not np.isfinite(y[:, 1:3]).any()
    np.testing.assert_allclose(y[:, [0, 3]], 8, rtol=1e-6)


@pytest.mark.parametrize(
    "dtype, added, gap", [("float32", None, 3e-6), ("bfloat16", None, 1e-2), ("bfloat16", "float32", 3e-6)]
)
@pytest.mark.parametrize("case", CASES)
def test_the_product_is_that_of_the_twin(case, dtype, added, gap):
    """Summed in float32, bfloat16 rows are as exact as float32 rows: whole numbers up to 127 are exact in both."""
    shape, size, letters = CASES[case]
    x = jnp.asarray(np.random.default_rng(2).normal(size=shape), dtype)
    w = matrix(size, "float32")
    values, scales = twin(w)
    with jax.default_matmul_precision("highest"):
        y = matmul(x, quantize(jnp.asarray(w)), added)
    assert y.dtype == (added or dtype)  # activations of float32 are not made smaller
    exact = np.einsum(letters, np.asarray(x, np.float64), values * scales[..., None, :])
    most = np.abs(exact).max(axis=tuple(range(exact.ndim - 1)), keepdims=True)
    assert (np.abs(np.asarray(y, np.float64) - exact) <= gap * most).all()


def test_rows_are_differentiated():
    x, w = jnp.asarray(np.random.default_rng(3).normal(size=(5, 24)), jnp.float32), matrix((24, 9), "float32")
    values, scales = twin(w)
    got = jax.grad(lambda x: matmul(x, quantize(jnp.asarray(w))).sum())(x)
    np.testing.assert_allclose(got, np.broadcast_to((values * scales).sum(-1), got.shape), rtol=1e-4)


def test_a_loop_reads_int8_and_converts_inside():
    """Values that are converted before the loop would be a second, larger copy, which the loop carries."""
    w = quantize(jnp.asarray(matrix((64, 64), "float32")))

    def run(x, w):
        return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(matmul(x, w)), x)

    text = jax.jit(run).lower(jnp.ones((2, 64)), w).compile().as_text()
    loop = next(line for line in text.splitlines() if " while(" in line)
    assert "s8[64,64]" in loop and "f32[64,64]" not in loop
    assert isinstance(w, Int8Matrix)
