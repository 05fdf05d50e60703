"""Attention to quantized caches against a numpy twin: vectors rounded one by one, then dense attention in float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.kernels.attention.group import group_attention
from jaxmarl_llm.kernels.attention.group_decode import group_decode_attention, ring_decode_attention
from jaxmarl_llm.kernels.quantized import VALUES, ScaledVectors, attend_to, dequantize, quantize_vectors
from tests.kernels.test_group_attention import SHAPES, dense64, draw
from tests.kernels.test_quantized import HLO, TABLES, forms, nearest

DECODING = {name: shape for name, shape in SHAPES.items() if shape[2] == 1 and name.startswith("decoding")}
LONG = (2, 3, 1, 600, 9, 6, 2, 64, 4)  # several blocks of keys of the form for TPU


def twin(x, form):
    """Vectors [*B H] as their values stand for them, in float64, one after another."""
    out = np.zeros(np.shape(x))
    for at in np.ndindex(*out.shape[:-1]):
        vector = np.asarray(x[at], np.float64)
        if (top := np.abs(vector).max()) > 0:
            scale = top / TABLES[form].max()
            out[at] = nearest(vector / scale, form) * scale
    return out


def caches(args, form):
    """Arguments of attention, with quantized caches."""
    q, pk, pv, length, ok, ov, t = args
    made = partial(quantize_vectors, dtype=VALUES[form])
    return q, *map(made, (pk, pv)), length, *map(made, (ok, ov)), t


def by_hand(args, form):
    q, pk, pv, length, ok, ov, t = args
    return dense64(q, twin(pk, form), twin(pv, form), length, twin(ok, form), twin(ov, form), t)


def vectors(shape, seed=0):
    """Vectors of very different size. The first has one large entry, the last is zero."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=shape) * 10.0 ** rng.integers(-6, 4, (*shape[:-1], 1))).astype(np.float32)
    flat = x.reshape(-1, shape[-1])
    flat[0, 3], flat[-1] = 50.0, 0.0
    return x


# Rounding


@forms
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vectors_are_rounded_as_the_twin_rounds_them(dtype, form):
    x = np.array(jnp.asarray(vectors((3, 5, 2, 16)), dtype).astype(jnp.float32))
    got = quantize_vectors(jnp.asarray(x, dtype), VALUES[form])
    assert (got.values.dtype, got.scales.dtype) == (VALUES[form], jnp.float32)
    assert got.shape == x.shape and got.scales.shape == (3, 5, 2, 1)
    np.testing.assert_allclose(dequantize(got, jnp.float32), twin(x, form), rtol=1e-6, atol=0)
    largest = np.abs(np.asarray(got.values).astype(float)).max(-1)
    assert (largest.reshape(-1)[:-1] == TABLES[form].max()).all()  # each vector uses the whole range


@forms
def test_multiples_of_a_scale_are_kept(form):
    rng = np.random.default_rng(2)
    exact = rng.choice(TABLES[form], (6, 3, 8))
    exact[..., 0] = TABLES[form].max()
    x = (exact * 2.0 ** rng.integers(-5, 6, (6, 3, 1))).astype(np.float32)
    got = quantize_vectors(jnp.asarray(x), VALUES[form])
    np.testing.assert_array_equal(np.asarray(got.values).astype(float), exact)
    np.testing.assert_array_equal(dequantize(got, jnp.float32), x)


# Decoding


@forms
@pytest.mark.parametrize("name", DECODING)
def test_decoding_is_that_of_the_twin(name, form):
    args = draw(DECODING[name])
    got = jax.jit(partial(group_decode_attention, impl="xla"))(*caches(args, form))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, by_hand(args, form), rtol=1e-5, atol=1e-5)
    assert np.abs(got - dense64(*args)).max() > 1e-3  # rounding is not nothing


@forms
def test_every_scale_has_its_own_place(form):
    """Keys and values of very different sizes by token and by head: a scale of another place would be far off."""
    q, pk, pv, length, ok, ov, t = draw(SHAPES["decoding, middle"])
    rng = np.random.default_rng(5)
    sized = lambda x: x * 10.0 ** rng.uniform(-2, 0.3, (*x.shape[:-1], 1)).astype(np.float32)
    args = q, *map(sized, (pk, pv)), length, *map(sized, (ok, ov)), t
    got = group_decode_attention(*caches(args, form), impl="xla")
    np.testing.assert_allclose(got, by_hand(args, form), rtol=1e-4, atol=1e-5)


@forms
def test_several_queries_of_a_sample(form):
    args = draw(SHAPES["a chunk of tokens"])
    np.testing.assert_allclose(group_attention(*caches(args, form)), by_hand(args, form), rtol=1e-5, atol=1e-5)


@forms
def test_bfloat16_queries(form):
    args = draw(SHAPES["decoding, middle"])
    low = [jnp.asarray(x, jnp.bfloat16) if x.dtype == np.float32 else x for x in args]
    got = group_decode_attention(*caches(low, form), impl="xla")
    wide = [np.asarray(x, np.float32) if x.dtype == jnp.bfloat16 else x for x in low]
    gap = np.abs(np.asarray(got, np.float64) - by_hand(wide, form))
    assert got.dtype == jnp.bfloat16 and gap.max() < 0.03 and gap.mean() < 0.005


@forms
@pytest.mark.parametrize("shape", [*(shape for shape in DECODING.values() if shape[7] % 8 == 0), LONG], ids=str)
def test_the_form_for_tpu_is_the_portable_one(shape, form):
    args = draw(shape)
    right = by_hand(args, form)
    for more in ({"impl": "tpu", "interpret": True}, {"impl": "xla"}):
        got = group_decode_attention(*caches(args, form), **more)
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=2e-5)


@forms
def test_the_form_for_tpu_never_reads_behind_the_prefix(form):
    q, pk, pv, length, ok, ov, t = caches(draw(LONG), form)
    behind = (np.arange(600) >= length[:, None])[..., None, None]
    assert behind.any()
    odd = {"int8": 99, "fp8": jnp.nan}[form]
    broken = lambda x: ScaledVectors(jnp.where(behind, odd, x.values), jnp.where(behind, jnp.nan, x.scales))
    assert broken(pk).values.dtype == VALUES[form]
    run = partial(group_decode_attention, impl="tpu", interpret=True)
    np.testing.assert_array_equal(run(q, broken(pk), broken(pv), length, ok, ov, t), run(q, pk, pv, length, ok, ov, t))


@forms
def test_a_ring_is_attention_of_each_node_by_itself(form):
    args = draw(SHAPES["decoding, middle"])
    time, begun, slots = 9, np.array([5, 8, 9]), args[4].shape[2]
    q, pk, pv, length, ok, ov, _ = caches(args, form)
    got = ring_decode_attention(q, pk, pv, length, ok, ov, jnp.int32(time), begun)
    q, pk, pv, length, ok, ov, _ = args
    for n, first in enumerate(begun):
        own = [t % slots for t in range(first, time + 1)]
        one = [x[n : n + 1] for x in (q, pk, pv, length)] + [x[n : n + 1][:, :, own] for x in (ok, ov)]
        np.testing.assert_allclose(got[n : n + 1], by_hand([*one, time - first], form), atol=1e-5)


# New tokens behind a cached prompt


@forms
def test_new_tokens_attend_as_the_twin(form):
    rng = np.random.default_rng(3)
    n, t, p, heads, kv, h = 3, 4, 9, 6, 2, 8
    q, k, v = (rng.normal(0, 1.5, (n, *of, h)).astype(np.float32) for of in ((t, heads), (p, kv), (p, kv)))
    last = rng.integers(0, p, (n, t))
    visible = np.arange(p) <= last[..., None]
    cached = (quantize_vectors(x, VALUES[form]) for x in (k, v))
    got = attend_to(jnp.asarray(q), *cached, jnp.asarray(visible))
    whole_k, whole_v, want = twin(k, form), twin(v, form), np.zeros(q.shape)
    for i, j, head in np.ndindex(n, t, heads):
        of, seen = head // (heads // kv), last[i, j] + 1
        score = whole_k[i, :seen, of] @ q[i, j, head].astype(np.float64) / np.sqrt(h)
        weight = np.exp(score - score.max())
        want[i, j, head] = weight @ whole_v[i, :seen, of] / weight.sum()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


# Memory


@forms
def test_a_loop_carries_the_values_and_no_copy_of_another_dtype(form):
    """A prefix that is converted before the loop would be a second, larger cache."""
    args = caches(draw((2, 3, 1, 50, 6, 4, 2, 8, 3)), form)

    def run(q, *rest):
        return jax.lax.fori_loop(0, 4, lambda _, q: group_decode_attention(q, *rest, impl="xla"), q)

    text = jax.jit(run).lower(*args).compile().as_text()
    loop = next(line for line in text.splitlines() if " while(" in line)
    assert f"{HLO[form]}[2,50,2,8]" in loop
    assert not [size for size in ("2,50,2,8", "2,2,50,8", "2,2,8,50") if f"f32[{size}]" in loop]


# Refusals


@forms
def test_what_does_not_take_quantized_caches_says_so(form):
    q, pk, pv, length, ok, ov, t = caches(draw(SHAPES["decoding, middle"]), form)
    with pytest.raises(ValueError, match="impl 'gpu' does not take quantized caches; auto and xla do"):
        group_decode_attention(q, pk, pv, length, ok, ov, t, impl="gpu")
    with pytest.raises(ValueError, match="all arrays or all quantized"):
        group_decode_attention(q, pk, dequantize(pv, jnp.float32), length, ok, ov, t)
    with pytest.raises(ValueError, match="shapes do not fit"):
        group_decode_attention(q, pk, ScaledVectors(pv.values[:, 1:], pv.scales[:, 1:]), length, ok, ov, t)
    args = caches(draw(SHAPES["training"]), form)
    with pytest.raises(ValueError, match="impl 'tpu' does not take quantized caches; auto and xla do"):
        group_attention(*args[:-1], impl="tpu")
