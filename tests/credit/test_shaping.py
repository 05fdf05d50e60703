"""GDPO, the soft penalty of long completions and the mask of truncated ones: by hand, against loops, and laws."""

import numpy as np
import pytest

from jaxmarl_llm.credit.assign import Credit, assign, standard_rule
from jaxmarl_llm.credit.rules import GroupRelative, PerCompletion, ReturnToGo, Whiten, chain
from jaxmarl_llm.credit.shaping import (
    GroupDecoupled,
    Reweigh,
    SoftOverlong,
    SumOfCredits,
    complete_episodes,
    complete_steps,
    soft_overlong,
)
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.training import unequal_groups
from tests.recipes.test_fidelity import ROWS, SIZES, Table

pytestmark = pytest.mark.usefixtures("numpy_tables")

EQUAL = {"right": 1.0, "short": 1.0}


def scores(rows):
    """One turn of role 0 for each row (task, right, short)."""
    table = Table(("right", "short"))
    for task, right, short in rows:
        table.act(0, task, 0, right=right, short=short)
    return table


def gdpo(weights, **of):
    return GroupDecoupled(tuple(weights.items()), Credit(group="task_role"), **of)


def episodes(lengths, truncated, *, turns=1):
    """The tree of episodes of one task whose completions have these lengths; rewards count up."""
    table = Table()
    for first in range(0, len(lengths), turns):
        parent = -1
        for turn in range(turns):
            parent = table.act(0, 0, turn, parent, pay=float(first + turn))
    tree, n = table.tree(), len(lengths)
    pad = lambda x: np.array([*x, *[0] * (ROWS - n)])
    steps = tree.steps.replace(length=pad(lengths).astype(np.int32), truncated=pad(truncated).astype(bool))
    return tree.replace(steps=steps)


def credit(rule, tree):
    return assign(rule, tree, weights={"pay": 1.0}, sizes=SIZES)


# GDPO


def test_gdpo_by_hand():
    """The paper's example: rewards (0, 1) and (0, 2) of two samples. GRPO's advantages are the same for both groups.

    GDPO adds one normalised component in the first group and two in the second one: (-1, 1) and (-2, 2), whose standard
    deviation over the batch is sqrt(2.5).
    """
    table = scores([(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1)])
    _, grpo = table.credit(standard_rule(Credit(group="task_role")), **EQUAL)
    np.testing.assert_allclose(grpo, [-1, 1, -1, 1], atol=1e-4)
    returns, ours = table.credit(gdpo(EQUAL), **EQUAL)
    np.testing.assert_allclose(returns, [0, 1, 0, 2])
    np.testing.assert_allclose(ours, np.array([-1, 1, -2, 2]) / np.sqrt(2.5), atol=1e-4)


@pytest.mark.parametrize("ddof", (0, 1))
def test_gdpo_equals_the_loop(ddof):
    weights, rule = {"right": 1.0, "short": 0.3}, gdpo({"right": 1.0, "short": 0.3}, ddof=ddof)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        rows = [(t, *rng.normal(size=2)) for t in range(3) for _ in range(rng.integers(2, 6))]
        tasks = np.array([t for t, *_ in rows])
        total = np.zeros(len(rows))
        for k, weight in enumerate(weights.values(), start=1):
            values = np.array([r[k] for r in rows], np.float64)
            for t in range(3):
                mine = values[tasks == t]
                total[tasks == t] += weight * (mine - mine.mean()) / (mine.std() + 1e-6)
        expected = (total - total.mean()) / (total.std(ddof=ddof) + 1e-6)
        np.testing.assert_allclose(scores(rows).credit(rule, **weights)[1], expected, atol=1e-4)


def test_gdpo_of_one_component_is_grpo_and_a_whitened_batch():
    rows = [(t, v, 0.0) for t, v in ((0, 1.0), (0, 4.0), (0, 4.5), (1, 2.0), (1, -1.0))]
    standard = standard_rule(Credit(group="task_role"))
    expected = scores(rows).credit(chain(*standard.rules, Whiten()), right=1.0)[1]
    np.testing.assert_allclose(scores(rows).credit(gdpo({"right": 2.5}), right=1.0)[1], expected, atol=1e-5)


def test_groups_without_a_gradient_are_not_selected():
    """Task 0: components that cancel. Task 1: equal sums of rewards, but advantages. Task 2: no differences."""
    table = scores([(0, 2, 0), (0, 0, 1), (1, 2, 0), (1, 2, 0), (1, 0, 2), (2, 1, 1), (2, 1, 1)])
    got = assign(gdpo({"right": 1.0, "short": 0.5}), table.tree(), weights=EQUAL, sizes=SIZES)
    selected = np.asarray(unequal_groups(got, 3))[np.asarray(got.group[:7])]
    np.testing.assert_array_equal(selected, np.abs(got.advantage[:7]) > 1e-5)
    np.testing.assert_array_equal(selected, [1, 1, 1, 1, 1, 0, 0])
    got = assign(gdpo(EQUAL), table.tree(), weights=EQUAL, sizes=SIZES)
    np.testing.assert_allclose(np.asarray(got.stats.variance)[np.asarray(got.group[:2])], 0, atol=1e-8)


# Long completions


def test_soft_penalty_by_hand():
    """DAPO's setting: 20480 tokens at most, of which the last 4096 are penalised."""
    lengths = np.array([1, 16384, 17408, 18432, 20480, 30000])
    np.testing.assert_allclose(soft_overlong(lengths, 20480, 4096), [0, 0, -0.25, -0.5, -1, -1])


def test_the_penalty_is_part_of_the_return_that_is_compared():
    tree = episodes([10, 12, 14, 20], [0, 0, 0, 1])
    rule = chain(ReturnToGo(), PerCompletion(), SoftOverlong(16, 8, weight=2.0), GroupRelative("task", "mean", "none"))
    got, value = credit(rule, tree), np.array([0 - 0.5, 1 - 1.0, 2 - 1.5, 3 - 2.0])
    np.testing.assert_allclose(got.returns[:4], value)
    np.testing.assert_allclose(got.advantage[:4], value - value.mean(), atol=1e-6)
    uncompared = credit(chain(ReturnToGo(), PerCompletion(), SoftOverlong(16, 8, weight=2.0)), tree)
    np.testing.assert_allclose(uncompared.advantage[:4], value)
    none = chain(ReturnToGo(), PerCompletion(), SoftOverlong(16, 8, weight=0.0), GroupRelative("task"))
    np.testing.assert_array_equal(
        credit(none, tree).advantage, credit(standard_rule(Credit(group="task")), tree).advantage
    )


@pytest.mark.parametrize(
    "select, kept",
    ((complete_steps, [0, 2, 3, 5]), (complete_episodes, [2, 3])),
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_truncated_completions_or_their_episodes_are_left_out(select, kept):
    tree = episodes([1] * 6, [0, 1, 0, 0, 1, 0], turns=2)
    trained = np.asarray(tree.steps.valid)
    assert np.flatnonzero(select(None, tree, trained)).tolist() == kept
    assert np.flatnonzero(select(None, tree, trained & (np.arange(ROWS) != 3))).tolist() == [k for k in kept if k != 3]
    whole = episodes([1] * 6, [0] * 6, turns=2)
    np.testing.assert_array_equal(select(None, whole, trained), trained)


@pytest.mark.parametrize(
    "make, message",
    (
        (lambda: GroupDecoupled(()), r"^GroupDecoupled.weights: expected pairs"),
        (lambda: SoftOverlong(8, 9), r"^SoftOverlong.cache: expected .*9"),
        (lambda: SoftOverlong(0, 1), r"^SoftOverlong.max_length: expected .*0"),
        (lambda: SoftOverlong(8, 4, -1.0), r"^SoftOverlong.weight: expected .*-1.0"),
    ),
)
def test_a_bad_setting_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


# Several credits


def test_a_sum_of_credits_by_hand():
    """Two samples of one task: the standard advantage of the first reward, and three times the second one as it is."""
    table = scores([(0, 0, 1.0), (0, 4, 2.0)])
    own = chain(Reweigh((("short", 3.0),)), ReturnToGo(), PerCompletion(), GroupRelative("task", "none", "none"))
    returns, got = table.credit(SumOfCredits((standard_rule(Credit(group="task")), own)), right=1.0)
    np.testing.assert_allclose(returns, [0, 4])
    np.testing.assert_allclose(got, [-1 + 3, 1 + 6], atol=1e-5)


SUM = SumOfCredits(
    (
        chain(ReturnToGo(), PerCompletion(), GroupRelative("task_role", normalise="none")),
        chain(
            Reweigh((("short", -0.5), ("right", 2.0))),
            ReturnToGo(discount=0.0),
            PerCompletion(),
            GroupRelative("role", "none", "none"),
        ),
    )
)


@pytest.mark.parametrize("seed", range(10))
def test_a_sum_of_credits_on_ragged_trees_equals_the_loop(seed):
    """Random forests with invalid joint actions: a part that compares returns, and one of rewards as they are."""
    rng = np.random.default_rng(seed)
    table, rows, parents = Table(("right", "short")), [], []
    for task in range(3):
        begin = len(rows)
        for _ in range(rng.integers(4, 16)):
            above = [j for j in range(begin, len(rows)) if rows[j][1] < 5]
            up = int(rng.choice(above)) if above and rng.random() < 0.7 else -1
            turn, role = (rows[up][1] + 1 if up >= 0 else 0), int(rng.integers(3))
            right, short = (float(x) for x in rng.integers(-3, 4, 2))
            table.act(role, task, turn, up, right=right, short=short)
            rows.append((task, turn, role, right, short))
            parents.append(up)
    tree, n = table.tree(), len(rows)
    paid = rng.random(n) < 0.8
    tree = tree.replace(transitions=tree.transitions.replace(valid=np.pad(paid, (0, ROWS - n))))
    got = assign(SUM, tree, weights={"right": 1.0}, sizes=SIZES)

    children = [[c for c in range(n) if parents[c] == j] for j in range(n)]
    known, value = [False] * n, [0.0] * n
    for j in reversed(range(n)):  # a child has a later row
        counted = [c for c in children[j] if known[c]]
        known[j] = bool(paid[j]) and (bool(counted) or not children[j])
        # The role of the completion is paid in the table, and no other role is.
        value[j] = returns_of(j, rows, children, known, rows[j][2])
    for j in range(n):
        group = [value[i] for i in range(n) if known[i] and rows[i][0] == rows[j][0] and rows[i][2] == rows[j][2]]
        want = value[j] - np.mean(group) + 2 * rows[j][3] - 0.5 * rows[j][4] if known[j] else 0.0
        if len(group) == 1 and known[j]:
            want = 2 * rows[j][3] - 0.5 * rows[j][4]
        assert bool(got.valid[j]) == known[j]
        assert float(got.advantage[j]) == pytest.approx(want, abs=1e-4)
    assert 0 < sum(known) < n


def returns_of(j, rows, children, known, role):
    """Return of a role from joint action ``j`` on: its own reward, and the mean over the known children."""
    later = [returns_of(c, rows, children, known, role) for c in children[j] if known[c]]
    return (rows[j][3] if rows[j][2] == role else 0.0) + (np.mean(later) if later else 0.0)


def test_parts_that_disagree_on_validity_and_bad_sums():
    def one_unknown(tree, signal):
        return signal.replace(valid=signal.valid & (np.arange(ROWS) != 1))

    first = chain(ReturnToGo(), PerCompletion(), GroupRelative("task", normalise="none"))
    tree = scores([(0, 0, 1.0), (0, 4, 2.0), (0, 5, 0.0)]).tree()
    for parts in ((first, chain(*first.rules, one_unknown)), (chain(*first.rules, one_unknown), first)):
        got = assign(SumOfCredits(parts), tree, weights={"right": 1.0}, sizes=SIZES)
        np.testing.assert_array_equal(got.valid[:3], [True, False, True])
        np.testing.assert_allclose(got.advantage[:3], [-6, 0, 4], atol=1e-5)
    with pytest.raises(ConfigError, match=r"^SumOfCredits\.parts: expected at least one credit rule, got none$"):
        SumOfCredits(())
    with pytest.raises(ConfigError, match=r"^Reweigh\.weights: expected pairs \(component, weight\), got none$"):
        Reweigh(())
    with pytest.raises(ConfigError, match=r"^Reweigh\.weights\.short: expected a finite number, got inf$"):
        Reweigh((("short", float("inf")),))
    with pytest.raises(ConfigError, match=r"^config\.some: the environment pays no 'long'; it pays right, short"):
        scores([(0, 0, 1.0)]).credit(chain(Reweigh((("long", 1.0),), "config.some"), *first.rules), right=1.0)
