"""Draws from hidden states: the float64 inverse CDF, chi-square, ties, padding ids, filters."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.generation.sampling import Sampling, kept, sample
from jaxmarl_llm.kernels.head.head import Head
from jaxmarl_llm.kernels.head.sample import BLOCK, argmax, head_sample, sample_logits

LAST = np.float32(1 - 2**-24)
# One block, whole blocks of 256, 128 and 64, blocks with a rest, and so many that they go in groups.
VOCABS = [1, 5, 63, 3 * BLOCK, 5 * BLOCK // 2, 5 * BLOCK // 4, BLOCK + 1, 70 * BLOCK + 3]


def as_head(rows_of_logits, rows=True, used=None):
    """Hidden states and a head whose logits are exactly these, one hidden state for each row."""
    weight = jnp.asarray(rows_of_logits).T
    return jnp.eye(weight.shape[1], dtype=weight.dtype), Head(weight if rows else weight.T, rows, used)


def cdf64(z, temperature=1.0):
    z = np.asarray(z, np.float64) / temperature
    running = np.cumsum(np.exp(z - z.max(-1, keepdims=True)), -1)
    return running / running[..., -1:]


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("vocab", VOCABS)
def test_is_exactly_the_inverse_cdf_of_float64(vocab, rows):
    """Logits 0 and minus infinity have exact weights: even where u stands on a boundary there is one right answer."""
    rng = np.random.default_rng(vocab)
    n = 16
    open_ = rng.random((n, vocab)) < 0.4
    open_[np.arange(n), rng.integers(0, vocab, n)] = True
    for row in open_:  # as many open ids as a power of two: u = k / 2^m times their number is exact
        ids = np.flatnonzero(row)
        row[ids[1 << (len(ids).bit_length() - 1) :]] = False
    z = np.where(open_, 0.0, -1e30).astype(np.float32)
    count = open_.sum(-1)
    steps = rng.integers(0, 4 * count)
    u = (steps / (4 * count)).astype(np.float32)
    hidden, head = as_head(z, rows)
    draw = jax.jit(lambda hidden, weight, u: head_sample(hidden, Head(weight, rows), u))
    token, logprob = draw(hidden, head.weight, u)
    assert token.dtype == jnp.int32 and logprob.dtype == jnp.float32
    want = [np.flatnonzero(row)[s // 4] for row, s in zip(open_, steps)]
    np.testing.assert_array_equal(token, want)
    np.testing.assert_allclose(logprob, -np.log(count), atol=1e-6)
    for u, end in ((0.0, 0), (LAST, -1)):
        token, _ = draw(hidden, head.weight, np.full(n, u, np.float32))
        np.testing.assert_array_equal(token, [np.flatnonzero(row)[end] for row in open_])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("vocab", [63, 5 * BLOCK // 2, 70 * BLOCK + 3])
def test_equals_the_inverse_cdf_of_float64_away_from_boundaries(vocab, dtype):
    rng = np.random.default_rng(vocab)
    z = jnp.asarray(rng.normal(0, 3, (64, vocab)), dtype)
    u, temperature = rng.random(64, dtype=np.float32), 0.8
    token, logprob = jax.jit(partial(sample_logits, temperature=temperature))(z, u)
    cdf = cdf64(z, temperature)
    clear = np.abs(cdf - u[:, None]).min(-1) > 3e-6
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(np.asarray(token)[clear], (cdf <= u[:, None]).sum(-1)[clear])
    prob = np.diff(cdf, axis=-1, prepend=0.0)[np.arange(64), np.asarray(token)]
    np.testing.assert_allclose(logprob, np.log(prob), atol=1e-5)


def test_draws_follow_the_distribution_and_never_a_padding_id():
    vocab, used, draws = 2 * BLOCK + 90, 2 * BLOCK + 30, 40_000
    rng = np.random.default_rng(3)
    z = rng.uniform(-1.3, 1.3, (1, vocab)).astype(np.float32)
    z[:, used:] = 50.0
    hidden, head = as_head(z, used=used)
    prob = np.diff(cdf64(z[0, :used], 0.9), prepend=0.0)
    many = jax.jit(jax.vmap(lambda u: head_sample(hidden, head, u[None], temperature=0.9)[0][0]))
    counts = np.bincount(many(rng.random(draws, dtype=np.float32)), minlength=vocab)
    assert not counts[used:].any()
    expected, freedom = draws * prob, used - 1
    statistic = ((counts[:used] - expected) ** 2 / expected).sum()
    assert expected.min() >= 5 and statistic < freedom + 4 * np.sqrt(2 * freedom)
    even = np.bincount(many(((np.arange(draws) + 0.5) / draws).astype(np.float32)), minlength=vocab)
    np.testing.assert_allclose(even[:used], expected, atol=1.5)


def test_far_logits():
    """A point mass, everything equally unlikely, and logits of 1e4."""
    z = np.zeros((3, 3 * BLOCK), np.float32)
    z[0, 300], z[1], z[2, :5] = 200.0, -1e30, [1e4, 9999.0, 1e4, -1e4, 0.0]
    token, logprob = jax.jit(sample_logits)(z, np.array([LAST, 0.5, 0.3], np.float32))
    np.testing.assert_array_equal(token, [300, 3 * BLOCK // 2, 0])
    share = 1 / (2 + np.exp(-1.0))
    np.testing.assert_allclose(logprob, [0.0, -np.log(3 * BLOCK), np.log(share)], atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_greedy_takes_the_first_of_the_largest(dtype):
    z = np.random.default_rng(0).normal(size=(40, 700)).astype(np.float32).round(1)  # many ties
    z[0], z[1, -1], z[2, 0] = -1e30, 9.0, 9.0
    z[3] = -np.inf
    z = jnp.asarray(z, dtype)
    want = np.asarray(z, np.float32).argmax(-1)
    assert (np.sort(np.asarray(z, np.float32), -1)[:, -1] == np.sort(np.asarray(z, np.float32), -1)[:, -2]).any()
    token = jax.jit(argmax)(z)
    assert token.dtype == jnp.int32
    np.testing.assert_array_equal(token, want)
    hidden, head = as_head(np.where(np.isinf(z), -1e30, z).astype(np.float32))
    token, logprob = head_sample(hidden, head, np.zeros(40, np.float32), temperature=0.0)
    np.testing.assert_array_equal(token, want)
    assert not np.asarray(logprob).any()


def test_broken_logits_stay_in_range():
    z = jnp.full((2, 300), jnp.nan)
    for temperature in (0.0, 1.0):
        token, _ = sample_logits(z, jnp.array([0.2, 0.9]), temperature=temperature)
        assert ((token >= 0) & (token < 300)).all()


@pytest.mark.parametrize("sampling", [Sampling(top_k=5), Sampling(0.7, top_p=0.8), Sampling(1.2, min_p=0.1)], ids=str)
def test_filters_are_those_of_sampling(sampling):
    rng = np.random.default_rng(2)
    z, u = rng.normal(0, 2, (32, 100)).astype(np.float32), rng.random(32, dtype=np.float32)
    hidden, head = as_head(z)
    token, logprob = head_sample(
        hidden, head, u, temperature=sampling.temperature, keep=partial(kept, sampling=sampling)
    )
    want, want_logprob = sample(jnp.asarray(z), jnp.asarray(u), sampling)
    np.testing.assert_array_equal(token, want)
    np.testing.assert_allclose(logprob, want_logprob, atol=1e-6)
    keep = np.asarray(kept(jnp.asarray(z) / sampling.temperature, sampling))
    assert keep[np.arange(32), np.asarray(token)].all() and not keep.all(-1).any()
    log_p = np.log(np.where(keep, np.exp(z / sampling.temperature), 0).sum(-1))
    np.testing.assert_allclose(logprob, z[np.arange(32), np.asarray(token)] / sampling.temperature - log_p, atol=1e-5)


# ------------------------------------------------------------------------------------------------ the Pallas forms


@pytest.mark.parametrize("impl", ["gpu", "tpu"])
@pytest.mark.parametrize(
    "vocab, dim, rows, used, dtype",
    [(1300, 72, True, 1290, jnp.float32), (1300, 72, False, None, jnp.float32), (200, 128, True, 130, jnp.bfloat16)],
)
def test_pallas_forms_draw_what_the_portable_one_draws(impl, vocab, dim, rows, used, dtype):
    """Blocks, tiles and hidden units with rests; the first hidden unit is a bias that makes padding ids tempting."""
    rng = np.random.default_rng(vocab)
    hidden = jnp.asarray(rng.normal(size=(4, 5, dim)), dtype).at[..., 0].set(1.0)
    weight = rng.normal(0, 0.3, (vocab, dim))
    weight[vocab if used is None else used :, 0] = 30.0
    head = Head(jnp.asarray(weight if rows else weight.T, dtype), rows, used)
    u = rng.random((4, 5), dtype=np.float32)
    u[0, :2] = 0.0, LAST
    want, want_logprob = head_sample(hidden, head, u, temperature=0.8, impl="xla")
    token, logprob = head_sample(hidden, head, u, temperature=0.8, impl=impl, interpret=True)
    assert token.dtype == jnp.int32 and len(np.unique(want)) > 10
    np.testing.assert_array_equal(token, want)
    np.testing.assert_allclose(logprob, want_logprob, atol=1e-5 if dtype == jnp.float32 else 1e-3)


def test_a_form_that_cannot_do_what_is_asked_says_so():
    hidden, head = as_head(np.zeros((4, 300), np.float32))
    u = np.zeros(4, np.float32)
    wide = Head(jax.ShapeDtypeStruct((300, 1 << 14), jnp.float32))
    ask = lambda *args, **options: jax.eval_shape(lambda u: head_sample(*args, u, **options), u)
    with pytest.raises(ValueError, match="impl is auto, xla, gpu, tpu or mosaic, not 'cuda'"):
        ask(hidden, head, impl="cuda")
    with pytest.raises(ValueError, match="impl 'gpu' has no filters and no temperature 0; auto and xla do"):
        ask(hidden, head, impl="gpu", keep=lambda z: z > 0)
    with pytest.raises(ValueError, match="impl 'tpu' has no filters and no temperature 0"):
        ask(hidden, head, impl="tpu", temperature=0.0)
    with pytest.raises(ValueError, match="impl 'tpu' does not take hidden states of size 16384; auto and xla do"):
        ask(jax.ShapeDtypeStruct((4, 1 << 14), jnp.float32), wide, impl="tpu")
    for impl in ("gpu", "tpu"):  # not on this machine
        with pytest.raises(Exception, match="Only interpret mode is supported on CPU"):
            head_sample(hidden, head, u, impl=impl)


def test_bad_input():
    hidden, head = as_head(np.zeros((4, 300), np.float32))
    with pytest.raises(ValueError, match="hidden states of size 3 do not fit a head of 4"):
        head_sample(hidden[:, :3], head, np.zeros(4, np.float32))
