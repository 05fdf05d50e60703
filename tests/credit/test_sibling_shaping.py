"""Rewards shaped by parents and siblings (MARS^2): golden numbers, a slow twin on ragged trees, a law, grown trees."""

from functools import partial

import jax
import numpy as np
import pytest

from jaxmarl_llm.credit.advantages import sibling_shaping
from jaxmarl_llm.credit.returns import returns_to_go
from jaxmarl_llm.credit.rules import GroupRelative, PerCompletion, ShapeBySiblings, chain
from tests.recipes.test_fidelity import Table

pytestmark = pytest.mark.usefixtures("numpy_tables")

NAMES = ("num_tasks", "max_turns", "strength", "mix", "shaped_parents")
shaping = jax.jit(sibling_shaping, static_argnames=NAMES)


def rule(ddof):
    return chain(ShapeBySiblings(), PerCompletion(), GroupRelative("task", ddof=ddof, eps=1e-9))


@pytest.mark.parametrize("ddof, want", [(0, [-0.532, 0.642, 1.229, -1.339]), (1, [-0.461, 0.556, 1.065, -1.160])])
def test_golden_numbers(ddof, want):
    """a = .4 and b = .8 at the root, c = 1 and d = 0 under a; population and sample standard deviation."""
    table = Table()
    a = table.act(0, 0, 0, pay=0.4)
    table.act(0, 0, 1, pay=0.8)
    table.act(0, 0, 2, a, pay=1.0)
    table.act(0, 0, 3, a, pay=0.0)
    returns, advantage = table.credit(rule(ddof))
    np.testing.assert_allclose(returns, [0.2, 1.0, 1.4, -0.35], atol=1e-6)
    np.testing.assert_allclose(advantage, want, atol=6e-4)


def test_the_term_added_to_the_standard_deviation():
    """Rewards that differ by 2e-6 have a standard deviation of 1e-6, far above 1e-9."""
    table = Table()
    for pay in (0.0, 2e-6):
        table.act(0, 0, 0, pay=pay)
    plain = chain(ShapeBySiblings(0.0), PerCompletion(), GroupRelative("task"))
    np.testing.assert_allclose(table.credit(plain)[1], [-0.5, 0.5], atol=1e-3)
    exact = chain(ShapeBySiblings(0.0), PerCompletion(), GroupRelative("task", eps=1e-9))
    np.testing.assert_allclose(table.credit(exact)[1], [-1.0, 1.0], atol=2e-3)


def grown(rng, tasks=3, expansions=7, roles=2):
    """Trees grown node by node, expansions count as turns; some rewards are unknown, and the last rows are padding."""
    task = np.tile(np.arange(tasks), expansions + 1).astype(np.int32)
    turn = np.repeat(np.arange(expansions + 1), tasks).astype(np.int32)
    parent, valid = np.full(len(task), -1, np.int32), rng.random(len(task)) < 0.8
    for j in range(expansions * tasks):
        parent[j] = rng.choice([-1, *(i for i in range(j) if task[i] == task[j])])
    valid[expansions * tasks :] = False
    rewards = rng.random((len(task), roles)).astype(np.float32)
    rewards[~valid] = rng.choice([np.nan, np.inf, 1e30])
    order = rng.permutation(len(task))
    place = np.argsort(order).astype(np.int32)
    return rewards[order], np.where(parent < 0, -1, place[parent])[order], task[order], turn[order], valid[order]


def twin(rewards, parent, task, valid, strength, mix, shaped_parents):
    """The docstring of `sibling_shaping`, one transition after another."""

    def shaped(j):
        own = rewards[j].astype(float)
        same = [i for i in range(len(parent)) if i != j and valid[i] and task[i] == task[j] and parent[i] == parent[j]]
        parts = []
        if parent[j] >= 0 and valid[parent[j]]:
            above = shaped(parent[j]) if shaped_parents else rewards[parent[j]].astype(float)
            parts.append((1 - mix, above))
        if same:
            parts.append((mix, np.mean([rewards[i].astype(float) for i in same], axis=0)))
        if len(parts) == 1:
            parts = [(1.0, parts[0][1])]
        if not parts:
            return own
        return own + strength * (own - sum(weight * value for weight, value in parts))

    return np.array([shaped(j) if valid[j] else np.zeros(rewards.shape[1]) for j in range(len(parent))])


@pytest.mark.parametrize("shaped_parents", [False, True])
def test_ragged_trees_equal_the_twin(shaped_parents):
    singles = 0
    for seed in range(12):
        rewards, parent, task, _, valid = grown(np.random.default_rng(seed))
        options = {"strength": 0.4, "mix": 0.3, "shaped_parents": shaped_parents}
        got = shaping(rewards, parent, task, valid, num_tasks=3, max_turns=7, **options)
        np.testing.assert_allclose(got, twin(rewards, parent, task, valid, **options), atol=1e-5)
        families = [(task[j], parent[j]) for j in range(len(task)) if valid[j]]
        singles += sum(families.count(f) == 1 for f in families)
    assert singles > 20


def test_without_strength_rewards_stay():
    rewards, parent, task, _, valid = grown(np.random.default_rng(5))
    got = shaping(rewards, parent, task, valid, num_tasks=3, max_turns=7, strength=0.0, mix=0.5)
    np.testing.assert_array_equal(got, np.where(valid[:, None], rewards, 0))


def test_advantages_of_a_tree_equal_the_twin():
    """The whole rule: the trees of a batch are compared each with itself."""
    for seed in range(4):
        rng, table, rows = np.random.default_rng(seed), Table(), []
        for turn in range(5):
            for task in range(2):
                mine = [i for i, row in enumerate(rows) if row[0] == task]
                up = int(rng.choice([-1, *mine]))
                rows.append((task, up, float(rng.random())))
                table.act(0, task, turn, up, pay=rows[-1][2])
        task, parent, pay = (np.array(x) for x in zip(*rows))
        shaped = twin(pay[:, None], parent, task, np.ones(len(pay), bool), 0.5, 0.5, False)[:, 0]
        want = np.zeros(len(pay))
        for t in range(2):
            own = shaped[task == t]
            want[task == t] = (own - own.mean()) / (own.std() + 1e-9)
        returns, advantage = table.credit(rule(0))
        np.testing.assert_allclose(returns, shaped, atol=1e-5)
        np.testing.assert_allclose(advantage, want, atol=1e-4)


def test_returns_of_grown_trees_equal_the_twin():
    """`returns_to_go` with the number of the expansion as turn, on trees that grew node by node."""
    back_up = jax.jit(partial(returns_to_go, max_turns=7, discount=0.9))
    for seed in range(12):
        rewards, parent, _, turn, valid = grown(np.random.default_rng(seed))

        def value(j, parent=parent, valid=valid, rewards=rewards):
            below = [value(i) for i in np.flatnonzero(parent == j)]
            fine = [v for v in below if v is not None]
            if not valid[j] or (below and not fine):
                return None
            return rewards[j].astype(float) + 0.9 * (np.mean(fine, axis=0) if fine else 0.0)

        want = [value(j) for j in range(len(parent))]
        got, known = back_up(rewards, parent, turn, valid)
        assert [v is not None for v in want] == known.tolist()
        np.testing.assert_allclose(got, [np.zeros(2) if v is None else v for v in want], atol=1e-5)


def test_sizes_are_those_of_the_batch():
    """Children of the root are siblings within their task alone."""
    table = Table()
    for task, pay in ((0, 1.0), (0, 3.0), (1, 10.0)):
        table.act(0, task, 0, pay=pay)
    returns, _ = table.credit(rule(0))
    np.testing.assert_allclose(returns, [0.0, 4.0, 10.0])
