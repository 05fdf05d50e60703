"""Marginal-benefit selection: golden numbers, the slow twin, ties, and what is never selected."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.credit import selection
from jaxmarl_llm.types import Counts, Nodes, Retrieval, Steps, Transitions, Tree
from tests import reference

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


# One random round

one_round = jax.jit(selection.one_round)


def forest(episodes, order=None, pad=40):
    """A tree of chains: episodes of (task, roles by turn), its rows in any order; unused rows are padding."""
    rows = [(e, t, task, role) for e, (task, roles) in enumerate(episodes) for t, role in enumerate(roles)]
    place = np.arange(len(rows)) if order is None else np.asarray(order)  # where a row goes
    at = {row[:2]: int(p) for row, p in zip(rows, place)}
    column = lambda values, fill=0: np.array([dict(zip(place.tolist(), values)).get(i, fill) for i in range(pad)])
    parent = column([at.get((e, t - 1), -1) for e, t, _, _ in rows], -1)
    there, task = column([1] * len(rows)).astype(bool), column([r[2] for r in rows])
    turn, role, zero = column([r[1] for r in rows]), column([r[3] for r in rows]), np.zeros(pad, np.int32)
    none = np.zeros((pad, 1), np.int32)
    nodes = Nodes(none, zero, role, zero, task, turn, parent, Retrieval.empty(pad), there)
    ids, logs = np.arange(pad), none.astype(np.float32)
    steps = Steps(ids, none, zero, there[:, None], logs, ~there, zero, zero, there)
    pay = {"accuracy": np.zeros((pad, 3), np.float32)}
    moves = Transitions(np.where(there, ids, -1)[:, None], parent, task, turn, pay, there, there, there)
    tree = Tree(nodes, steps, moves, Counts(*[np.int32(0)] * 7))
    return jax.tree.map(jnp.asarray, tree), place


EPISODES = [(0, [0, 1, 0]), (0, [0, 1, 0]), (1, [0, 1, 0, 1, 0]), (2, [0, 2, 1, 0, 2]), (2, [1]), (5, [0, 1, 0])]


def drawn(episodes, seed, order=None, out=()):
    """Of each episode and role, the turns that are trained; rows of the pairs ``out`` may not be."""
    tree, place = forest(episodes, order)
    named = [(e, t) for e, (_, roles) in enumerate(episodes) for t in range(len(roles))]
    may = np.zeros(40, bool)
    may[[p for p, name in zip(place, named) if name not in out]] = True
    got = np.asarray(one_round(jax.random.key(seed), tree, jnp.asarray(may)))
    assert got.sum() == sum(got[p] for p in place)  # no padding
    turns = {(e, r): [] for e, (_, roles) in enumerate(episodes) for r in roles}
    for p, (e, t) in zip(place, named):
        if got[p]:
            turns[e, episodes[e][1][t]].append(t)
    return turns


def test_one_round_of_each_role_uniformly():
    tree, place = forest(EPISODES)
    keys = jax.vmap(jax.random.key)(jnp.arange(600))
    got = np.asarray(jax.jit(jax.vmap(selection.one_round, (0, None, None)))(keys, tree, tree.steps.valid))
    rows = {(e, t): p for p, (e, t) in zip(place, [(e, t) for e, (_, r) in enumerate(EPISODES) for t in range(len(r))])}
    assert not got[:, len(rows) :].any()
    drawn_turn = {}
    for e, (_, roles) in enumerate(EPISODES):
        for role in set(roles):
            can = [t for t, r in enumerate(roles) if r == role]
            table = got[:, [rows[e, t] for t in can]]
            assert (table.sum(1) == 1).all()
            np.testing.assert_allclose(table.mean(0), 1 / len(can), atol=0.08)
            drawn_turn[e, role] = table.argmax(1)
    alike = [drawn_turn[0, 0] == drawn_turn[e, 0] for e in (1, 5)]  # of the same task, of another
    assert all(0.4 < same.mean() < 0.6 for same in alike)  # episodes draw for themselves, and roles:
    assert 0.4 < (drawn_turn[2, 1] == drawn_turn[5, 0]).mean() < 0.6


@settings(max_examples=20, deadline=None, database=None)
@given(st.integers(0, 2**32 - 1).map(np.random.default_rng))
def test_one_round_does_not_depend_on_the_order_of_the_batch(rng):
    seed, want = 7, drawn(EPISODES, 7)
    tasks = rng.permutation(len({t for t, _ in EPISODES}))  # tasks anywhere; a task's episodes keep their order
    rank = dict(zip(sorted({t for t, _ in EPISODES}), tasks))
    moved = sorted(range(len(EPISODES)), key=lambda e: rank[EPISODES[e][0]])
    got = drawn([EPISODES[e] for e in moved], seed, sorted(rng.choice(40, sum(len(r) for _, r in EPISODES), False)))
    assert {(moved[e], role): turns for (e, role), turns in got.items()} == want
    fewer = drawn([EPISODES[e] for e in moved if EPISODES[e][0] != 1], seed)  # nor on what else is in it
    kept = [e for e in moved if EPISODES[e][0] != 1]
    assert all(want[kept[e], role] == turns for (e, role), turns in fewer.items())


def test_what_may_not_be_trained_is_never_drawn():
    turns = [drawn(EPISODES, seed, out={(2, 0), (2, 2), (1, 0), (1, 2)}) for seed in range(20)]
    assert {tuple(t[2, 0]) for t in turns} == {(4,)} and {tuple(t[1, 0]) for t in turns} == {()}


# Preference pairs


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
