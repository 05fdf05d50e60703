"""Marginal-benefit selection: golden numbers, the slow twin, ties, and what is never selected."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm import selection

top_k_variance = jax.jit(selection.top_k_variance, static_argnames=("k", "num_scopes", "tol"))
everyone = jnp.ones(4, bool)
golden = jnp.array([0.0, 0.25, 0.1025, 0.1875])


@pytest.mark.parametrize("k, expected", [(1, [0, 1, 0, 0]), (2, [0, 1, 0, 1]), (5, [0, 1, 1, 1]), (None, [0, 1, 1, 1])])
def test_joyagents(k, expected):
    """Top-2 is the second and the fourth; the group of equal rewards is never in, however large k."""
    assert top_k_variance(golden, everyone, k).tolist() == [bool(e) for e in expected]


@settings(max_examples=30, deadline=None, database=None)
@given(st.integers(0, 2**32 - 1).map(np.random.default_rng), st.sampled_from([1, 2, 3, None]), st.booleans())
def test_equals_the_sort(rng, k, whole_batch):
    variance = rng.integers(0, 5, 16).astype(np.float32) / 4  # many ties, many zeros
    eligible, scope = rng.random(16) < 0.7, rng.integers(0, 3, 16).astype(np.int32)
    expected = reference.top_k_variance(variance, eligible, k, np.zeros(16, int) if whole_batch else scope, 0.25)
    scopes = {} if whole_batch else {"scope": jnp.asarray(scope), "num_scopes": 3}
    selected = top_k_variance(jnp.asarray(variance), jnp.asarray(eligible), k, tol=0.25, **scopes)
    np.testing.assert_array_equal(selected, expected)


def test_ties_go_to_the_lower_index():
    assert top_k_variance(jnp.full(4, 0.5), everyone, 2).tolist() == [True, True, False, False]


def test_garbage_is_never_selected():
    variance = jnp.array([jnp.nan, 1.0, jnp.inf, 2.0])
    assert top_k_variance(variance, jnp.array([True, True, False, True]), 2).tolist() == [False, True, False, True]
    assert not top_k_variance(variance, jnp.zeros(4, bool), None).any()


def test_k_is_positive():
    with pytest.raises(ValueError, match="at least 1"):
        selection.top_k_variance(golden, everyone, 0)


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(0, 2**32 - 1).map(np.random.default_rng), st.sampled_from([0, 1, 2, 5, 17]))
def test_pairs_equal_the_double_loop(rng, rows):
    """Ragged nodes in any order, some of one step, invalid rows in between; every pair once and in order."""
    parent = rng.integers(0, 5, rows).astype(np.int32)
    label, valid = rng.random(rows) < rng.choice([0.2, 0.5, 0.8]), rng.random(rows) < 0.8
    pairs = selection.same_parent_pairs(parent, label, valid)
    assert pairs.shape[1:] == (2,)
    assert [tuple(p) for p in pairs.tolist()] == reference.same_parent_pairs(parent, label, valid)


def test_no_pairs_when_all_siblings_are_alike():
    parent = np.array([0, 0, 1, 1], np.int32)
    for label in ([1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 0]):
        assert selection.same_parent_pairs(parent, np.array(label, bool), np.ones(4, bool)).shape == (0, 2)
