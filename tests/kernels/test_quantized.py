"""Quantized matrices against a numpy twin of rounding and of the product, which knows nothing of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.kernels.matmul import matmul
from jaxmarl_llm.kernels.quantized import VALUES, ScaledMatrix, quantize

# x [*T K] and w [*B K N], and the sum in letters
CASES = {
    "rows": ((7, 24), (24, 9), "tk,kn->tn"),
    "rows along two axes": ((2, 3, 24), (24, 5), "stk,kn->stn"),
    "one row": ((24,), (24, 4), "k,kn->n"),
    "a batch": ((3, 4, 24), (3, 24, 6), "btk,bkn->btn"),
    "a batch, rows along two axes": ((3, 2, 4, 24), (3, 24, 4), "bstk,bkn->bstn"),
}
DTYPES = ("float32", "bfloat16")
# All bit patterns of float8_e4m3fn, and the finite values of each form in order. 0 is in the middle.
PATTERNS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
TABLES = {"int8": np.arange(-127.0, 128), "fp8": np.unique(PATTERNS[np.isfinite(PATTERNS)])}
HLO = {"int8": "s8", "fp8": "f8e4m3fn"}  # a dtype in a compiled program
forms = pytest.mark.parametrize("form", VALUES)


def nearest(x, form):
    """The value of a form that is nearest to each number, found among all. Of two that are as near, the even one."""
    table = TABLES[form]
    off = np.abs(np.asarray(x, np.float64)[..., None] - table)
    even = (np.arange(len(table)) - len(table) // 2) % 2 == 0
    return table[((off == off.min(-1, keepdims=True)) * (1 + even)).argmax(-1)]


def matrix(shape, dtype, seed=0):
    """Columns of very different size; the first has one large entry, the last is zero."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=shape) * 10.0 ** rng.integers(-6, 4, shape[-1])
    w[..., 3, 0], w[..., -1] = 50.0, 0.0
    return np.array(jnp.asarray(w, dtype).astype(jnp.float32))


def twin(w, form):
    """Values and scales of a matrix [*B K N], column by column."""
    values, scales = np.zeros(w.shape), np.ones((*w.shape[:-2], w.shape[-1]))
    for at in np.ndindex(*scales.shape):
        column = w[(*at[:-1], slice(None), at[-1])].astype(np.float64)
        if (top := np.abs(column).max()) > 0:
            scales[at] = top / TABLES[form].max()
            values[(*at[:-1], slice(None), at[-1])] = nearest(column / scales[at], form)
    return values, scales


@forms
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(24, 9), (3, 24, 6)])
def test_values_and_scales_are_those_of_the_twin(shape, dtype, form):
    w = matrix(shape, dtype)
    got = quantize(jnp.asarray(w, dtype), VALUES[form])
    values, scales = twin(w, form)
    assert (got.values.dtype, got.scales.dtype) == (VALUES[form], jnp.float32)
    found = np.asarray(got.values).astype(np.float64)
    exact = w.astype(np.float64) / scales[..., None, :]  # a number halfway may go to both sides: scales are rounded
    assert ((found == nearest(exact * (1 - 1e-6), form)) | (found == nearest(exact * (1 + 1e-6), form))).all()
    used = values.any(-2)
    np.testing.assert_allclose(np.asarray(got.scales)[used], scales[used], rtol=3e-7)
    assert not used[..., -1].any() and used[..., :-1].all()  # the column of zeros
    assert (np.asarray(got.scales) > 0).all()  # nothing is divided by 0
    assert np.abs(found).max(-2)[used].min() == TABLES[form].max()  # each column uses the whole range


@forms
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(0, 9))
def test_an_entry_is_half_the_distance_of_its_neighbours_off_at_most(form, seed, spread):
    rng = np.random.default_rng(seed)
    w = (rng.normal(size=(40, 12)) * np.exp(spread * rng.normal(size=(40, 12)))).astype(np.float32)
    got, table = quantize(jnp.asarray(w), VALUES[form]), TABLES[form]
    scales = np.asarray(got.scales, np.float64)
    off, exact = np.abs(w - np.asarray(got.values).astype(np.float64) * scales), w / scales
    above = np.clip(np.searchsorted(table, exact), 1, len(table) - 1)
    assert (off <= (table[above] - table[above - 1]) / 2 * scales + 1e-5 * np.abs(w)).all()
    claimed = np.abs(w).max(0) / 254 if form == "int8" else np.maximum(np.abs(w) / 16, scales * 2.0**-10)
    assert (off <= claimed * (1 + 1e-5)).all()


@forms
def test_numbers_between_two_values_go_to_the_nearest_or_to_the_even_one(form):
    """Numbers halfway and those beside them, which a rounding in two steps would take for halfway."""
    table = TABLES[form]
    halfway = ((table[1:] + table[:-1]) / 2).astype(np.float32)
    numbers = np.concatenate([table, halfway, *(np.nextafter(halfway, np.float32(to)) for to in (-500, 500))])
    got = quantize(jnp.asarray(numbers, jnp.float32)[:, None], VALUES[form])
    assert got.scales == 1
    np.testing.assert_array_equal(np.asarray(got.values)[:, 0].astype(np.float64), nearest(numbers, form))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_values_are_exact_in_the_dtype_of_activations(dtype):
    for values, exact in ((jnp.arange(256, dtype=jnp.uint8).view(VALUES["fp8"]), PATTERNS), (TABLES["int8"],) * 2):
        got = jax.jit(lambda x: x.astype(dtype))(jnp.asarray(values))
        np.testing.assert_array_equal(np.asarray(got).astype(np.float64), exact)


def test_fp8_is_nearer_where_a_column_has_outliers_and_int8_elsewhere():
    w = np.random.default_rng(4).normal(size=(400, 1)).astype(np.float32)
    for largest, better, worse in ((None, "int8", "fp8"), (1000, "fp8", "int8")):
        w[0] = w[0] if largest is None else largest
        made = {form: quantize(jnp.asarray(w), VALUES[form]) for form in VALUES}
        off = {form: np.abs(w - x.values.astype(jnp.float32) * x.scales).mean() for form, x in made.items()}
        assert 2 * off[better] < off[worse]


@forms
def test_a_column_that_is_not_finite_is_seen_in_the_product(form):
    w = np.ones((8, 4), np.float32)
    w[2, 1], w[5, 2] = np.nan, np.inf
    y = np.asarray(matmul(jnp.ones((3, 8)), quantize(jnp.asarray(w), VALUES[form])))
    assert not np.isfinite(y[:, 1:3]).any()
    np.testing.assert_allclose(y[:, [0, 3]], 8, rtol=1e-6)


@forms
@pytest.mark.parametrize(
    "dtype, added, gap", [("float32", None, 3e-6), ("bfloat16", None, 1e-2), ("bfloat16", "float32", 3e-6)]
)
@pytest.mark.parametrize("case", CASES)
def test_the_product_is_that_of_the_twin(case, dtype, added, gap, form):
    """Summed in float32, bfloat16 rows are as exact as float32 rows: values are exact in both."""
    shape, size, letters = CASES[case]
    x = jnp.asarray(np.random.default_rng(2).normal(size=shape), dtype)
    w = matrix(size, "float32")
    values, scales = twin(w, form)
    with jax.default_matmul_precision("highest"):
        y = matmul(x, quantize(jnp.asarray(w), VALUES[form]), added)
    assert y.dtype == (added or dtype)  # activations of float32 are not made smaller
    exact = np.einsum(letters, np.asarray(x, np.float64), values * scales[..., None, :])
    most = np.abs(exact).max(axis=tuple(range(exact.ndim - 1)), keepdims=True)
    assert (np.abs(np.asarray(y, np.float64) - exact) <= gap * most).all()


@forms
def test_rows_are_differentiated(form):
    x, w = jnp.asarray(np.random.default_rng(3).normal(size=(5, 24)), jnp.float32), matrix((24, 9), "float32")
    values, scales = twin(w, form)
    got = jax.grad(lambda x: matmul(x, quantize(jnp.asarray(w), VALUES[form])).sum())(x)
    np.testing.assert_allclose(got, np.broadcast_to((values * scales).sum(-1), got.shape), rtol=1e-4)


@forms
def test_a_loop_reads_the_values_and_converts_inside(form):
    """Values that are converted before the loop would be a second, larger copy, which the loop carries."""
    w = quantize(jnp.asarray(matrix((64, 64), "float32")), VALUES[form])

    def run(x, w):
        return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(matmul(x, w)), x)

    text = jax.jit(run).lower(jnp.ones((2, 64)), w).compile().as_text()
    loop = next(line for line in text.splitlines() if " while(" in line)
    assert f"{HLO[form]}[64,64]" in loop and "f32[64,64]" not in loop
    assert isinstance(w, ScaledMatrix)
