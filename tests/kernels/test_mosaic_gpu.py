"""Forms for Pallas' Mosaic GPU backend: interpreted here against float64 and the portable form; lowered for CUDA."""

from __future__ import annotations

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.kernels import pallas_mosaic_gpu
from jaxmarl_llm.kernels.attention import group_decode_mosaic
from jaxmarl_llm.kernels.attention.group_decode import group_decode_attention
from jaxmarl_llm.kernels.attention.tree import tree_attention
from jaxmarl_llm.kernels.head.head import NEG, Head
from jaxmarl_llm.kernels.head.sample import head_sample
from jaxmarl_llm.kernels.head.sample_pallas import block_stats
from jaxmarl_llm.kernels.quantized import VALUES
from tests.kernels import test_group_attention, test_tree_attention
from tests.kernels.test_kernels import lowered, of_decode, programs, shape

try:
    from tests.kernels.mosaic_gpu import interpreted
except (ImportError, AttributeError):
    interpreted = None
needs_interpreter = pytest.mark.skipif(interpreted is None, reason="this JAX keeps its interpreter elsewhere")

CALL = "mosaic_gpu"


def assert_lowers(call, arguments):
    assert CALL in lowered(call, arguments, "cuda", impl="mosaic")
    assert CALL not in lowered(call, arguments, "cuda", impl="auto")  # nobody has measured it


def refused(why):
    return pytest.raises(ValueError, match=f"impl 'mosaic' {why}; auto and xla do")


def assert_near(got, want):
    """Errors of a few roundings to bfloat16."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    np.testing.assert_allclose(got, want, atol=1e-2 * max(1.0, np.abs(want).max()), rtol=0)


# --------------------------------------------------------------------------------------------------------- the head


def of_head(rng, n, vocab, dim, rows, used):
    """The first hidden unit is a bias that makes padding ids tempting."""
    hidden = jnp.asarray(rng.normal(size=(n, dim)), jnp.bfloat16).at[:, 0].set(1.0)
    weight = rng.normal(0, 0.3, (vocab, dim))
    weight[vocab if used is None else used :, 0] = 30.0
    return hidden, Head(jnp.asarray(weight if rows else weight.T, jnp.bfloat16), rows, used)


# Rows and ids that do not fill blocks; fewer products and more than there are stages; a last block of padding alone.
@pytest.mark.parametrize(
    "n, vocab, dim, rows, used",
    [(70, 200, 320, True, None), (3, 320, 64, False, 250), (65, 264, 128, True, 250)],
)
@needs_interpreter
def test_statistics_of_blocks(n, vocab, dim, rows, used):
    hidden, head = of_head(np.random.default_rng(n), n, vocab, dim, rows, used)
    with interpreted():
        top, total = jax.jit(partial(block_stats, temperature=0.8, impl="mosaic"))(hidden, head)
    weight = np.asarray(head.weight, np.float64)
    z = np.asarray(hidden, np.float64) @ (weight.T if rows else weight) / 0.8
    z[:, vocab if used is None else used :] = NEG
    z = np.pad(z, ((0, 0), (0, -vocab % 128)), constant_values=NEG).reshape(n, -1, 128)
    assert top.shape == total.shape == (z.shape[1], n)
    np.testing.assert_allclose(top.T, z.max(-1), rtol=1e-6, atol=1e-5)
    seen = z.max(-1) > NEG  # a block of padding alone has weight 0 whatever its sum
    want = np.exp(z - z.max(-1, keepdims=True)).sum(-1)
    np.testing.assert_allclose(total.T[seen], want[seen], rtol=1e-5)


@pytest.mark.parametrize("rows", [True, False])
@needs_interpreter
def test_draws_what_the_portable_form_draws(rows):
    rng = np.random.default_rng(0)
    hidden, head = of_head(rng, 66, 192, 128, rows, 150)
    u = rng.random(66, dtype=np.float32)
    draw = lambda impl: jax.jit(partial(head_sample, temperature=0.8, impl=impl))(hidden, head, u)
    want, want_logprob = draw("xla")
    with interpreted():
        token, logprob = draw("mosaic")
    assert len(np.unique(want)) > 20
    np.testing.assert_array_equal(token, want)
    np.testing.assert_allclose(logprob, want_logprob, atol=1e-3)


@pytest.mark.parametrize("rows", [True, False])
def test_the_head_lowers(rows):
    draw = lambda hidden, weight, u, impl: head_sample(hidden, Head(weight, rows, 151_900), u, impl=impl)
    weight = shape(151_936, 896) if rows else shape(896, 151_936)
    assert_lowers(draw, (shape(4, 8, 896), weight, shape(4, 8, dtype=jnp.float32)))


def test_the_head_has_no_gradient_rather_than_a_wrong_one():
    head = jnp.ones((128, 64), jnp.bfloat16)
    logprob = lambda h: head_sample(h, Head(head), jnp.zeros(4), impl="mosaic")[1].sum()
    with pytest.raises(NotImplementedError, match="impl 'mosaic' of head_sample has no gradient; xla does"):
        jax.eval_shape(jax.grad(logprob), shape(4, 64))


def test_a_head_it_cannot_take_is_refused():
    def ask(vocab=256, dim=64, rows=True, dtype=jnp.bfloat16, other=None, **options):
        weight = shape(vocab, dim, dtype=other or dtype) if rows else shape(dim, vocab, dtype=other or dtype)
        draw = lambda hidden, weight, u: head_sample(hidden, Head(weight, rows), u, impl="mosaic", **options)
        return jax.eval_shape(draw, shape(4, dim, dtype=dtype), weight, shape(4, dtype=jnp.float32))

    assert ask()[0].shape == (4,)
    with refused("takes bfloat16 and not float32"):
        ask(dtype=jnp.float32)
    with refused("takes bfloat16 and not float16"):
        ask(other=jnp.float16)
    with refused("does not take hidden states of size 72"):
        ask(dim=72)
    for vocab, rows in ((260, True), (120, True), (264, False)):
        with refused(f"does not take {vocab} ids"):
            ask(vocab, rows=rows)
    with refused("has no filters and no temperature 0"):
        ask(temperature=0.0)
    with refused("has no interpreter that JAX makes public"):
        ask(interpret=True)
    with mock.patch.object(pallas_mosaic_gpu, "mosaic_gpu", None), refused("needs a JAX with Pallas' Mosaic GPU .*"):
        ask()


# ------------------------------------------------------------------------------------------------------- the decode


@pytest.mark.parametrize(
    "n, g, p, s, share, kv, h, part",
    [
        (2, 3, 136, 5, 2, 2, 64, 64),  # parts of one block; the last block of keys is moved back
        (1, 9, 384, 3, 8, 1, 128, 384),  # two blocks of rows; more blocks of keys than are in memory at once
    ],
)
@needs_interpreter
def test_decode(n, g, p, s, share, kv, h, part, monkeypatch):
    rng = np.random.default_rng(p)
    (q, *_, ok, ov), length, t = of_decode(rng, n, g, p, s, share, kv, h, jnp.bfloat16, t=s - 2)
    length[0] = p - 3  # the last block has keys that are not read
    prefix = rng.normal(0, 1.5, (2, n, p, kv, h))
    prefix[0] *= np.linspace(0.2, 1.5, p)[:, None, None]  # the maximum rises from block to block
    prefix = jnp.asarray(prefix, jnp.bfloat16)
    want = test_group_attention.dense64(q, *prefix, length, ok, ov, t)
    broken = jnp.where((np.arange(p) >= length[:, None])[..., None, None], jnp.nan, prefix)
    monkeypatch.setattr(group_decode_mosaic, "PART", part)
    with interpreted():
        got = jax.jit(partial(group_decode_attention, impl="mosaic"))(q, *broken, length, ok, ov, t)
    assert got.dtype == jnp.bfloat16
    assert_near(got, want)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # auto, from JAX 0.11
@pytest.mark.parametrize("h", [64, 128])
def test_the_decode_lowers(h):
    program = programs(h=h)["decode"]
    assert_lowers(program.call, program.arguments)


def test_a_decode_it_cannot_take_is_refused():
    def ask(name="decode", **sizes):
        program = programs(**sizes)[name]
        return jax.eval_shape(partial(program.call, impl="mosaic"), *program.arguments)

    with refused("does not take heads of size 96"):
        ask(h=96)
    with refused("takes bfloat16 and not float32"):
        ask(dtype=jnp.float32)
    for keys in (0, 56, 100):
        with refused(f"does not take a prefix of {keys} keys"):
            ask(p=keys)
    with refused("does not take quantized caches"):
        ask(f"decode, {next(iter(VALUES))}")


# --------------------------------------------------------------------------------------------------------- the tree


@pytest.mark.parametrize(
    "t, spare, before, join, share, kv, h",
    [(200, 10, 37, 0.99, 2, 1, 128), (320, 70, 0, None, 1, 2, 64)],
)
@needs_interpreter
def test_tree(t, spare, before, join, share, kv, h):
    """More blocks of keys than are in memory at once, rests, blocks that are not visited, keys that are no queries."""
    rng = np.random.default_rng(t)
    if join:
        parent, end = test_tree_attention.forest(rng, t, spare, join)
    else:  # a prompt of 20 tokens and two responses of 150: the second one visits no block of the first
        parent, end = np.arange(-1, t + spare - 1), np.repeat([t, 170, t, 0], [20, 150, 150, spare])
        parent[170] = 19
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in test_tree_attention.draw(rng, parent[None], share * kv, kv, h))
    real = (end[before:] > 0)[None, :, None, None]
    want = test_tree_attention.dense64(q, k, v, parent[None])[:, before:]
    form = lambda impl: lambda q, k, v: tree_attention(q[:, before:], k, v, end[None], impl=impl)
    pull = jnp.asarray(np.where(real, rng.normal(size=want.shape), 0.0), jnp.bfloat16)
    with interpreted():
        got, back = jax.jit(lambda *x: jax.vjp(form("mosaic"), *x))(q, k, v)
        gradients = back(pull)
    assert got.dtype == jnp.bfloat16 and jnp.isfinite(got).all()
    assert_near(np.where(real, got, 0.0), np.where(real, want, 0.0))
    portable = jax.jit(lambda *x: jax.vjp(form("xla"), *x)[1](pull))(q, k, v)
    for x, y in zip(gradients, portable, strict=True):
        assert np.abs(np.asarray(y, np.float32)).max() > 0.1
        assert_near(x, y)


@pytest.mark.parametrize("h", [64, 128])
def test_the_tree_lowers_with_its_gradient(h):
    *arguments, end = programs(h=h)["tree"].arguments
    loss = lambda *x, end, impl: tree_attention(*x, end, impl=impl).astype(jnp.float32).sum()
    assert_lowers(lambda *x, impl: jax.value_and_grad(loss, (0, 1, 2))(*x[:3], end=x[3], impl=impl), (*arguments, end))


def test_a_tree_it_cannot_take_is_refused():
    def ask(h=64, dtype=jnp.bfloat16, **options):
        x, end = shape(1, 100, 2, h, dtype=dtype), shape(1, 100, dtype=jnp.int32)
        return jax.eval_shape(lambda x, end: tree_attention(x, x, x, end, impl="mosaic", **options), x, end)

    assert ask(block=64).shape == (1, 100, 2, 64)
    with refused("does not take heads of size 72"):
        ask(h=72)
    with refused("takes bfloat16 and not float32"):
        ask(dtype=jnp.float32)
    with refused("does not take blocks of 32"):
        ask(block=32)
    with refused("has no interpreter that JAX makes public"):
        ask(interpret=True)
