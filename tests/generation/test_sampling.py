"""The sampled distribution: an exact inverse CDF, filters by their definitions, and one meaning of a log-prob."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling, kept, sample, score
from jaxmarl_llm.kernels.head.sample import BLOCK, first_over

LAST = np.float32(1 - 2**-24)  # the largest float32 below 1
TINY = np.float32(2**-24)
FILTERS = {
    "plain": Sampling(),
    "temperature": Sampling(temperature=0.7),
    "top_k": Sampling(top_k=7),
    "top_p": Sampling(top_p=0.8),
    "min_p": Sampling(min_p=0.1),
    "all": Sampling(temperature=1.3, top_k=12, top_p=0.9, min_p=0.05),
}

invert = jax.jit(lambda weights, u: first_over(weights, u * weights.sum(-1))[0])
draw = jax.jit(sample, static_argnames=("sampling",))
grade = jax.jit(score, static_argnames=("sampling",))
keep = jax.jit(kept, static_argnames=("sampling",))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def reference_kept(logits, sampling):
    """Each filter by its definition on one row of logits, float64: top-k, then top-p, then min-p."""
    scaled = np.asarray(logits, np.float64) / sampling.temperature
    keep = np.ones(len(scaled), bool)
    if sampling.top_k:
        keep &= scaled >= np.sort(scaled)[::-1][min(sampling.top_k, len(scaled)) - 1]
    if sampling.top_p < 1:
        prob = softmax(np.where(keep, scaled, -np.inf))
        mass, least = 0.0, 0.0
        for p in sorted(prob, reverse=True):
            mass, least = mass + p, p
            if mass >= sampling.top_p:
                break
        keep &= prob >= least
    if sampling.min_p:
        prob = softmax(scaled)
        keep &= prob >= sampling.min_p * prob.max()
    return keep


def reference_log_probs(logits, sampling, always=None):
    keep = reference_kept(logits, sampling)
    if always is not None:
        keep[always] = True
    scaled = np.where(keep, np.asarray(logits, np.float64) / sampling.temperature, -np.inf)
    return scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())


def random_logits(seed, shape=(60, 60)):
    """One shape for most tests, so that each program compiles once."""
    return np.random.default_rng(seed).normal(0, 2.0, shape).astype(np.float32)


def random_u(seed, n=60):
    return np.random.default_rng(seed).random(n, dtype=np.float32)


def reference_entropy(log):
    return -(np.exp(log) * np.where(log > -np.inf, log, 0.0)).sum()


# ----------------------------------------------------------------------------------------------- the inverse CDF


def exact_index(weights, u):
    """First index whose running sum exceeds u * total; both are exact in float64 for small integers."""
    running = np.cumsum(np.asarray(weights, np.float64))
    return int(np.searchsorted(running, float(u) * running[-1], side="right"))


def integer_weights(rng, v):
    """Integers below 8, half of them zero, zeros at both ends, and where there is room a whole block of zeros."""
    w = rng.integers(0, 8, v) * (rng.random(v) < 0.5)
    if v >= 8:
        w[:2] = w[-2:] = 0
        w[v // 2] = 3
    if v > 2 * BLOCK:
        w[BLOCK : 2 * BLOCK] = 0
    if not w.any():
        w[-1] = 1
    return w.astype(np.float32)


@pytest.mark.parametrize("v", [1, 2, 7, 40, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 17])
def test_the_inverse_cdf_is_exact_on_integer_weights(v):
    rng = np.random.default_rng(v)
    rows = np.stack([integer_weights(rng, v) for _ in range(64)])
    assert rows.sum(-1).max() < 2**12
    u = (rng.integers(0, 2**12, 64) / 2**12).astype(np.float32)  # u * total has at most 24 bits: float32 is exact
    # Exactly at boundaries: with a power of two for the total, u = running / total is exact.
    for row in range(16):
        position = int(np.argmax(rows[row] > 0))
        rows[row, position] += 2**12 - rows[row].sum()
        u[row] = rng.choice(np.cumsum(rows[row])[:-1] if v > 1 else [0.0]) / 2**12
        u[row] = u[row] if u[row] < 1 else 0.0
    u[-2:] = 0.0
    got = np.asarray(invert(rows, u))
    want = [exact_index(w, x) for w, x in zip(rows, u)]
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)
    ends = lambda x: np.asarray(invert(rows, np.full(64, x, np.float32)))
    np.testing.assert_array_equal(ends(TINY), [np.flatnonzero(w)[0] for w in rows])
    np.testing.assert_array_equal(ends(LAST), [np.flatnonzero(w)[-1] for w in rows])


@pytest.mark.parametrize("where", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 5, 3 * BLOCK - 1])
def test_a_single_positive_weight_is_always_found(where):
    weights = np.zeros((4, 3 * BLOCK), np.float32)
    weights[:, where] = [1.0, 1e-30, 1e30, 0.3]
    for u in (0.0, TINY, 0.5, LAST):
        np.testing.assert_array_equal(invert(weights, np.full(4, u, np.float32)), where)


def test_the_inverse_cdf_never_returns_weight_zero():
    """Weights over 30 orders of magnitude, so that rounding decides; zeros everywhere between."""
    rng = np.random.default_rng(5)
    rows = (10.0 ** rng.uniform(-30, 0, (4000, 2 * BLOCK + 9)) * (rng.random((4000, 2 * BLOCK + 9)) < 0.1)).astype(
        np.float32
    )
    rows[:, -40:] = 0
    for u in (rng.random(4000, dtype=np.float32), np.zeros(4000, np.float32), np.full(4000, LAST)):
        index = np.asarray(invert(rows, u))
        assert (rows[np.arange(4000), index] > 0).all()


def test_the_inverse_cdf_takes_any_leading_axes():
    rng = np.random.default_rng(0)
    weights, u = rng.random((2, 3, 300), np.float32), rng.random((2, 3), np.float32)
    flat = invert(weights.reshape(6, 300), u.reshape(6))
    np.testing.assert_array_equal(invert(weights, u), np.asarray(flat).reshape(2, 3))
    assert int(invert(weights[0, 0], u[0, 0])) == int(flat[0])


# ------------------------------------------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("name, vocab", [("plain", 23), *((name, 2 * BLOCK + 90) for name in FILTERS)])
def test_draws_follow_the_distribution(name, vocab):
    """Chi-square with random numbers, and counts to within rounding with equally spaced ones."""
    draws = 40_000
    logits = np.random.default_rng(3).uniform(-1.3, 1.3, vocab).astype(np.float32)
    prob = np.exp(reference_log_probs(logits, FILTERS[name]))
    tokens = jax.jit(jax.vmap(lambda u: sample(jnp.asarray(logits), u, FILTERS[name])[0]))
    counts = np.bincount(tokens(np.random.default_rng(11).random(draws, dtype=np.float32)), minlength=vocab)
    assert not counts[prob == 0].any()
    observed, expected = counts[prob > 0], draws * prob[prob > 0]
    assert expected.min() >= 5  # else the statistic means little
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert freedom >= 4 and statistic < freedom + 4 * np.sqrt(2 * freedom)
    counts = np.bincount(tokens(((np.arange(draws) + 0.5) / draws).astype(np.float32)), minlength=vocab)
    np.testing.assert_allclose(counts, draws * prob, atol=1.5)


def test_a_row_does_not_depend_on_the_others():
    logits, u = random_logits(0), random_u(0)
    token, logprob = draw(logits, u, FILTERS["all"])
    back, back_logprob = draw(logits[::-1], u[::-1], FILTERS["all"])
    np.testing.assert_array_equal(token, np.asarray(back)[::-1])
    np.testing.assert_allclose(logprob, np.asarray(back_logprob)[::-1], atol=1e-6)


@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.2}])
def test_greedy(filters):
    logits = random_logits(0)
    logits[0, [4, 9]] = 50.0  # a tie: the first
    token, logprob = draw(logits, np.full(60, LAST), Sampling(temperature=0.0, **filters))
    np.testing.assert_array_equal(token, logits.argmax(-1))
    assert token[0] == 4 and token.dtype == jnp.int32
    np.testing.assert_array_equal(logprob, np.zeros(60, np.float32))
    with pytest.raises(ConfigError, match="greedy has no gradient") as error:
        score(jnp.asarray(logits), token, Sampling(temperature=0.0, **filters))
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------------------------- filters


COMBINED = [
    Sampling(top_k=1),
    Sampling(top_k=500),
    Sampling(top_p=1e-6),
    Sampling(top_p=0.999),
    Sampling(min_p=0.999),
    Sampling(temperature=0.3, top_p=0.7),
    Sampling(temperature=2.0, min_p=0.2),
    Sampling(top_k=5, top_p=0.9),
    Sampling(top_k=10, top_p=0.6, min_p=0.3),
    Sampling(temperature=0.5, top_k=20, min_p=0.01),
    *FILTERS.values(),
]


@pytest.mark.parametrize("sampling", COMBINED, ids=lambda s: f"{s.temperature}-{s.top_k}-{s.top_p}-{s.min_p}")
def test_filters_keep_what_their_definitions_keep(sampling):
    logits = random_logits(7)
    ours = np.asarray(keep(jnp.asarray(logits) / sampling.temperature, sampling))
    np.testing.assert_array_equal(ours, [reference_kept(row, sampling) for row in logits])
    assert ours[np.arange(60), logits.argmax(-1)].all()


def survivors(prob, **filters):
    row = np.log(np.asarray(prob, np.float32))
    return np.flatnonzero(keep(row, Sampling(**filters))).tolist()


def test_filters_by_hand():
    prob = [0.125, 0.5, 0.125, 0.25]
    assert survivors(prob, top_k=1) == [1]
    assert survivors(prob, top_k=2) == [1, 3]
    assert survivors(prob, top_k=3) == [0, 1, 2, 3]  # the third is a tie: both are kept
    assert survivors(prob, top_k=4) == survivors(prob, top_k=9) == survivors(prob) == [0, 1, 2, 3]
    assert survivors(prob, top_p=0.49) == [1]  # the smallest set that reaches the mass
    assert survivors(prob, top_p=0.51) == survivors(prob, top_p=0.74) == [1, 3]
    assert survivors(prob, top_p=0.76) == [0, 1, 2, 3]  # ties of the last one needed
    assert survivors(prob, min_p=0.24) == [0, 1, 2, 3]
    assert survivors(prob, min_p=0.26) == [1, 3]
    assert survivors(prob, min_p=0.51) == [1]


def test_order_of_filters():
    """Top-p takes its mass from what top-k left; min-p compares with the most probable token."""
    prob = [0.4, 0.3, 0.2, 0.1]
    assert survivors(prob, top_p=0.5) == [0, 1]
    assert survivors(prob, top_p=0.65, top_k=4) == [0, 1]
    assert survivors(prob, top_p=0.5, top_k=2) == [0]  # 0.4 / 0.7 reaches 0.5
    assert survivors(prob, top_p=0.8, top_k=3) == [0, 1, 2]  # 0.7 / 0.9 does not reach 0.8
    assert survivors(prob, top_p=0.75, top_k=3) == [0, 1]  # without top-k: 0.7 < 0.75 would need the third
    assert survivors(prob, top_p=0.75, top_k=3, min_p=0.8) == [0]


@pytest.mark.parametrize("name", FILTERS)
def test_log_probs_sum_to_one_over_what_is_kept(name):
    sampling, logits = FILTERS[name], random_logits(2)[0]
    members = reference_kept(logits, sampling)
    logprob, _ = grade(np.tile(logits, (60, 1)), np.arange(60, dtype=np.int32), sampling)
    assert np.exp(np.asarray(logprob, np.float64))[members].sum() == pytest.approx(1.0, abs=1e-5)
    np.testing.assert_allclose(logprob[members], reference_log_probs(logits, sampling)[members], atol=2e-6)


# --------------------------------------------------------------------------------------------------------- score


@pytest.mark.parametrize("name", FILTERS)
def test_score_equals_the_log_prob_of_sample_and_the_entropy_is_right(name):
    sampling, logits = FILTERS[name], random_logits(4)
    token, logprob = draw(logits, random_u(1), sampling)
    again, entropy = grade(logits, token, sampling)
    np.testing.assert_allclose(again, logprob, atol=1e-6)
    for row, t, got, h in zip(logits, token, logprob, entropy, strict=True):
        log = reference_log_probs(row, sampling)
        assert float(got) == pytest.approx(log[t], abs=5e-6)
        assert float(h) == pytest.approx(reference_entropy(log), abs=1e-5)


def test_score_takes_any_leading_axes():
    logits = random_logits(4)
    token, logprob = draw(logits, random_u(1), FILTERS["all"])
    entropy = grade(logits, token, FILTERS["all"])[1]
    got = grade(logits.reshape(3, 20, 60), token.reshape(3, 20), FILTERS["all"])
    np.testing.assert_allclose(got[0], logprob.reshape(3, 20), atol=1e-6)
    np.testing.assert_allclose(got[1], entropy.reshape(3, 20), atol=1e-6)


def test_entropy_of_point_mass_and_of_uniform():
    zeros, token = np.zeros((60, 60), np.float32), np.full(60, 3, np.int32)
    np.testing.assert_allclose(grade(zeros, token, Sampling())[1], np.log(60), atol=2e-6)
    zeros[:, 3] = 1.0
    logprob, entropy = grade(zeros, token, Sampling(top_k=1))
    np.testing.assert_array_equal(logprob, 0.0)
    np.testing.assert_allclose(entropy, 0.0, atol=1e-6)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "all"])
def test_a_token_that_the_filter_would_drop_keeps_a_finite_score(name):
    sampling, logits = FILTERS[name], random_logits(8)
    token = logits.argmin(-1).astype(np.int32)
    logprob, entropy = grade(logits, token, sampling)
    for row, t, got, h in zip(logits, token, logprob, entropy, strict=True):
        assert not reference_kept(row, sampling)[t]
        log = reference_log_probs(row, sampling, always=t)
        assert float(got) == pytest.approx(log[t], abs=1e-5) and np.isfinite(got)
        assert float(h) == pytest.approx(reference_entropy(log), abs=1e-5)


@pytest.mark.parametrize("name", FILTERS)
def test_gradient_of_the_score(name):
    """(one-hot - probability) / temperature over what was kept, and exactly 0 elsewhere; the entropy's is finite."""
    sampling, logits = FILTERS[name], random_logits(9)
    token = logits.argmax(-1)
    token[0] = logits[0].argmin()
    total = lambda x: jnp.stack([y.sum() for y in score(x, jnp.asarray(token), sampling)])
    ours, of_entropy = np.asarray(jax.jit(jax.jacrev(total))(logits))
    for row, t, got in zip(logits, token, ours, strict=True):
        prob = np.exp(reference_log_probs(row, sampling, always=t))
        np.testing.assert_allclose(got, ((np.arange(60) == t) - prob) / sampling.temperature, atol=1e-5)
        assert not got[prob == 0].any()
    assert np.isfinite(of_entropy).all() and of_entropy.any()


def test_bfloat16_logits_are_scored_in_float32():
    logits = jnp.asarray(random_logits(1)).astype(jnp.bfloat16)
    token, logprob = draw(logits, random_u(2), Sampling())
    assert logprob.dtype == grade(logits, token, Sampling())[0].dtype == jnp.float32
    want = [reference_log_probs(row, Sampling())[t] for row, t in zip(np.asarray(logits, np.float32), token)]
    np.testing.assert_allclose(logprob, want, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "bad, line",
    [
        ({"temperature": -0.1}, "a.b.temperature: expected >= 0, got -0.1"),
        ({"top_k": -1}, "a.b.top_k: expected >= 0, got -1"),
        ({"top_p": 0.0}, "a.b.top_p: expected in (0, 1], got 0.0"),
        ({"top_p": 1.01}, "a.b.top_p: expected in (0, 1], got 1.01"),
        ({"min_p": -0.1}, "a.b.min_p: expected in [0, 1), got -0.1"),
        ({"min_p": 1.0}, "a.b.min_p: expected in [0, 1), got 1.0"),
    ],
)
def test_check_names_the_option_in_one_line(bad, line):
    with pytest.raises(ConfigError) as error:
        Sampling(**bad).check("a.b")
    assert str(error.value) == line


def test_check_accepts_the_ends_of_every_range():
    for good in (Sampling(), Sampling(0.0), Sampling(top_k=1), Sampling(top_p=1e-9, min_p=0.0), Sampling(min_p=0.99)):
        good.check("a.b")
    assert not Sampling(temperature=0.5).filters
    change = partial(dataclasses.replace, Sampling())
    assert all(s.filters for s in (change(top_k=1), change(top_p=0.9), change(min_p=0.1)))
