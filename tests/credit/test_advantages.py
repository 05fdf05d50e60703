"""Returns, credit and group-relative advantages: golden numbers of the papers, slow twins, laws, hostile numbers."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxmarl_llm.credit import advantages
from jaxmarl_llm.credit import returns as return_rules
from tests import reference, toys

BASELINES, NORMALISATIONS = ("mean", "loo", "max", "none"), ("std", "none")
quick = settings(max_examples=25, deadline=None, database=None)
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)

returns_to_go = jax.jit(return_rules.returns_to_go, static_argnames=("max_turns", "discount"))
step_returns = jax.jit(return_rules.step_returns, static_argnames=("num_steps", "reduce"))
_group_advantage = jax.jit(
    advantages.group_advantage, static_argnames=("num_groups", "baseline", "normalise", "ddof", "eps", "singleton")
)


def group_advantage(values, group=None, valid=None, *, num_groups=1, baseline="mean", normalise="none", **kwargs):
    values = jnp.asarray(values, jnp.float32)
    group = jnp.zeros(len(values), jnp.int32) if group is None else jnp.asarray(group, jnp.int32)
    valid = jnp.ones(len(values), bool) if valid is None else jnp.asarray(valid, bool)
    return _group_advantage(
        values, group, valid, num_groups=num_groups, baseline=baseline, normalise=normalise, **kwargs
    )


def returns(rewards, parent, turn, valid=None, **kwargs):
    """One role, so that rewards are given as a list of numbers."""
    rewards = jnp.asarray(rewards, jnp.float32)[:, None]
    valid = jnp.ones(len(parent), bool) if valid is None else jnp.asarray(valid)
    out, ok = returns_to_go(rewards, jnp.asarray(parent), jnp.asarray(turn), valid, **kwargs)
    return np.asarray(out[:, 0]), np.asarray(ok)


def random_groups(rng, members=20, groups=6):
    """Ragged groups, some empty, some of one, some of equal members."""
    values = rng.normal(size=members) * 10.0 ** rng.integers(-3, 4)
    group = rng.integers(0, int(rng.integers(1, groups + 1)), members)
    values = np.where(group == 0, values[0], values).astype(np.float32)
    return values, group.astype(np.int32), rng.random(members) < 0.8


# Golden numbers


def test_magrpo_flat():
    """Four chains of two turns: return-to-go minus the mean over the group at the same turn."""
    rewards = [1, 3, 0, 2, 2, 0, 4, 2]
    to_go, _ = returns(rewards, [-1] * 4 + [0, 1, 2, 3], [0] * 4 + [1] * 4, max_turns=2)
    advantage, _ = group_advantage(to_go, [0] * 4 + [1] * 4, num_groups=2)
    np.testing.assert_allclose(advantage, [-0.5, -0.5, 0.5, 0.5, 0, -2, 2, 0], atol=1e-6)


def test_magrpo_tree():
    rewards, parent = [1, 3, 2, 4, 0, 2], [-1, -1, 0, 0, 1, 1]
    to_go, _ = returns(rewards, parent, [0, 0, 1, 1, 1, 1], max_turns=2, discount=0.9)
    np.testing.assert_allclose(to_go[:2], [3.7, 3.9], rtol=1e-6)
    advantage, _ = group_advantage(to_go, [0, 0, 1, 1, 2, 2], num_groups=3)
    np.testing.assert_allclose(advantage, [-0.1, 0.1, -1, 1, -1, 1], atol=1e-6)


@pytest.mark.parametrize("reduce, credit", [("sum", [1, 2, 1, 2]), ("mean", [0.5, 1, 0.5, 1])])
def test_magrpo_cross_credit(reduce, credit):
    """Joint rewards [[1, 0], [0, 2]] over two completions of each of two agents."""
    steps = jnp.array([[0, 2], [0, 3], [1, 2], [1, 3]])
    joint = jnp.tile(jnp.array([[1.0], [0.0], [0.0], [2.0]]), (1, 2))
    roles, valid = jnp.array([0, 0, 1, 1]), jnp.ones(4, bool)
    values, ok = step_returns(steps, roles, joint, valid, num_steps=4, reduce=reduce)
    np.testing.assert_allclose(values, credit)
    assert ok.all()
    advantage, _ = group_advantage(values, roles, num_groups=2)
    np.testing.assert_allclose(advantage, np.array([-0.5, 0.5, -0.5, 0.5]) / (1 if reduce == "sum" else 2))


def test_dr_mas():
    """Statistics of a role's steps inside a prompt, and those of the prompt's trajectories instead."""
    solver, verifier = [0, 0, 1, 0, 0, 1], [0, 1, 0]
    task = jnp.zeros(9, jnp.int32)
    role = jnp.array([0] * 6 + [1] * 3)
    group, num = advantages.group_ids(task, role, sizes=(1, 2))
    advantage, _ = group_advantage(solver + verifier, group, num_groups=num, normalise="std", ddof=1)
    np.testing.assert_allclose(advantage[:3], [-0.6455, -0.6455, 1.2910], atol=1e-4)
    np.testing.assert_allclose(advantage[6:], [-0.5773, 1.1547, -0.5773], atol=1e-4)
    globally, _ = group_advantage([0, 1, 0, 1], normalise="std", ddof=1)
    np.testing.assert_allclose(globally, [-0.8660, 0.8660, -0.8660, 0.8660], atol=1e-4)


def test_marshal():
    """Turn rewards [0, 1] and [0, 0, -1] of one player, summed from each turn on, then centred together."""
    to_go, _ = returns([0, 1, 0, 0, -1], [-1, 0, -1, 2, 3], [0, 1, 0, 1, 2], max_turns=3)
    advantage, _ = group_advantage(to_go)
    np.testing.assert_allclose(advantage, [1.2, 1.2, -0.8, -0.8, -0.8], rtol=1e-6)


def test_variances_of_joyagents():
    values = np.array([[1, 1, 1, 1], [0, 1, 0, 1], [0.2, 0.9, 0.9, 1], [0, 0, 0, 1]])
    _, stats = group_advantage(values.ravel(), np.repeat(np.arange(4), 4), num_groups=4)
    np.testing.assert_allclose(stats.variance, [0, 0.25, 0.1025, 0.1875], rtol=1e-6)
    np.testing.assert_allclose(stats.mean, values.mean(1), rtol=1e-6)
    assert stats.count.tolist() == [4] * 4


# Twins


@quick
@given(seeds)
def test_returns_equal_the_recursion(rng):
    rewards, parent, turn, valid = toys.random_forest(rng)
    expected, expected_valid = reference.returns_to_go(rewards, parent, valid, 0.9)
    args = map(jnp.asarray, (rewards, parent, turn, valid))
    out, ok = returns_to_go(*args, max_turns=4, discount=0.9)
    np.testing.assert_array_equal(ok, expected_valid)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@quick
@given(seeds, st.integers(1, 3))
def test_returns_until_the_next_turn_equal_the_recursion(rng, roles):
    """Any number of roles, several or none acting at a row, invalid rows behind the end of one role's return."""
    rewards, parent, turn, valid = toys.random_forest(rng, roles=3)
    acts = rng.random((len(parent), 3)) < 0.5
    rewards, acts = np.where(np.arange(3) < roles, rewards, 0.0), acts & (np.arange(3) < roles)
    expected, expected_valid = reference.turn_returns(rewards, acts, parent, valid, 0.9)
    args = map(jnp.asarray, (rewards.astype(np.float32), parent, turn, valid))
    out, ok = returns_to_go(*args, max_turns=4, discount=0.9, acts=jnp.asarray(acts))
    np.testing.assert_array_equal(ok, expected_valid)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@settings(quick, max_examples=10)
@given(seeds)
def test_on_chains_returns_until_the_next_turn_are_own_turns(rng):
    """And with nobody who acts again, they are the returns to go."""
    parent, turn = np.array([-1, 0, 1, 2, -1, 4, 5, -1]), np.array([0, 1, 2, 3, 0, 1, 2, 0])
    rewards, acts = rng.normal(size=(8, 2)).astype(np.float32), rng.random((8, 2)) < 0.5
    args, valid = map(jnp.asarray, (rewards, parent, turn)), jnp.ones(8, bool)
    rewards, parent, turn = args
    out, ok = returns_to_go(rewards, parent, turn, valid, max_turns=4, acts=jnp.asarray(acts))
    own = return_rules.own_turns(rewards, jnp.asarray(acts), parent, max_turns=4)
    np.testing.assert_allclose(np.where(acts, out, 0.0), own, rtol=1e-5, atol=1e-6)
    nobody, _ = returns_to_go(rewards, parent, turn, valid, max_turns=4, acts=jnp.zeros((8, 2), bool))
    plain, _ = returns_to_go(rewards, parent, turn, valid, max_turns=4)
    np.testing.assert_array_equal(nobody, plain)
    assert ok.all()


def test_unknown_children_make_a_return_unknown():
    parent, turn = [-1, 0, 0, -1, 3, 3, -1], [0, 1, 1, 0, 1, 1, 0]
    valid = [True, False, False, True, False, True, False]
    out, ok = returns([1.0, np.nan, 1, 1, np.inf, 5, 1], parent, turn, valid, max_turns=3)
    assert ok.tolist() == [False, False, False, True, False, True, False]
    assert out.tolist() == [0, 0, 0, 6, 0, 5, 0]


@quick
@given(seeds, st.sampled_from(["mean", "sum"]))
def test_step_returns_equal_the_loop(rng, reduce):
    steps = rng.integers(-1, 8, (12, 3)).astype(np.int32)
    role = rng.integers(0, 2, 8).astype(np.int32)
    values = rng.normal(size=(12, 2)).astype(np.float32)
    valid = rng.random((12, 2) if rng.random() < 0.5 else 12) < 0.6  # by role, or the same for all
    values[~valid] = np.nan
    expected, expected_valid = reference.step_returns(steps, role, values, valid, reduce)
    out, ok = step_returns(*map(jnp.asarray, (steps, role, values, valid)), num_steps=8, reduce=reduce)
    np.testing.assert_array_equal(ok, expected_valid)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("normalise, ddof, singleton", [("none", 0, "raw"), ("std", 0, "zero"), ("std", 1, "raw")])
@settings(quick, max_examples=10)
@given(rng=seeds)
def test_group_advantage_equals_the_loop(baseline, normalise, ddof, singleton, rng):
    values, group, valid = random_groups(rng)
    options = {"num_groups": 6, "baseline": baseline, "normalise": normalise, "ddof": ddof, "singleton": singleton}
    expected, expected_stats = reference.group_advantage(values, group, valid, **options)
    advantage, stats = group_advantage(values, group, valid, **options)
    size = max(1.0, float(np.abs(values).max())) if normalise == "none" else 1.0
    np.testing.assert_allclose(advantage, expected, rtol=2e-4, atol=2e-5 * size)
    for name, column in zip(("mean", "variance", "count", "low", "high"), expected_stats, strict=True):
        np.testing.assert_allclose(getattr(stats, name), column, rtol=1e-4, atol=1e-5 * size, err_msg=name)


@pytest.mark.parametrize("baseline, normalise", [("mean", "std"), ("loo", "none"), ("max", "none")])
@settings(quick, max_examples=15)
@given(rng=seeds)
def test_members_outside_the_statistics_equal_the_loop(baseline, normalise, rng):
    values, group, valid = random_groups(rng)
    counted = rng.random(len(values)) < 0.6
    options = {
        "num_groups": 6,
        "baseline": baseline,
        "normalise": normalise,
        "ddof": 1,
        "singleton": "raw",
        "counted": counted,
    }
    expected, expected_stats = reference.group_advantage(values, group, valid, **options)
    lonely = [k for k in range(6) if not (valid & counted & (group == k)).any()]
    advantage, stats = group_advantage(values, group, valid, **options)
    told = ~np.isin(group, lonely)
    size = float(np.abs(expected).max()) + 1.0
    np.testing.assert_allclose(advantage[told], expected[told], rtol=5e-4, atol=2e-5 * size)
    np.testing.assert_array_equal(advantage[~told], 0.0)  # nobody to be compared with
    np.testing.assert_array_equal(stats.count, expected_stats[2])


@settings(quick, max_examples=40)
@given(rng=seeds)
def test_episodes_equal_the_climb(rng):
    """Forests with padding, empty seats, completions of several joint actions and of none."""
    _, parent, _, _ = toys.random_forest(rng)
    steps = rng.integers(-1, 12, (len(parent), 2)).astype(np.int32)
    out = _step_episodes(jnp.asarray(steps), jnp.asarray(parent), num_steps=12)
    np.testing.assert_array_equal(out, reference.step_episodes(steps, parent, 12))


@settings(quick, max_examples=40)
@given(rng=seeds)
def test_first_of_each_equals_the_loop(rng):
    a, b, valid = rng.integers(3, size=15), rng.integers(4, size=15), rng.random(15) < 0.7
    seen: set = set()
    expected = [bool(v) and (x, y) not in seen and not seen.add((x, y)) for x, y, v in zip(a, b, valid)]
    out = advantages.first_of_each(jnp.asarray(a), jnp.asarray(b), valid=jnp.asarray(valid))
    assert out.tolist() == expected
    none = advantages.first_of_each(jnp.zeros(1, int), valid=jnp.zeros(1, bool))
    assert none.tolist() == [False]


def test_a_long_chain_is_one_episode():
    parent = jnp.arange(-1, 99)
    steps = jnp.arange(100)[:, None]
    np.testing.assert_array_equal(_step_episodes(steps, parent, num_steps=100), 0)


_step_episodes = jax.jit(advantages.step_episodes, static_argnames="num_steps")


# Laws


@quick
@given(seeds)
def test_order_of_rows_does_not_matter(rng):
    rewards, parent, turn, valid = toys.random_forest(rng)
    order = rng.permutation(len(parent))
    moved = np.where(parent >= 0, np.argsort(order)[parent], -1)[order]
    one, one_ok = returns_to_go(*map(jnp.asarray, (rewards, parent, turn, valid)), max_turns=4)
    two, two_ok = returns_to_go(
        *map(jnp.asarray, (rewards[order], moved.astype(np.int32), turn[order], valid[order])), max_turns=4
    )
    np.testing.assert_array_equal(one_ok[order], two_ok)
    np.testing.assert_allclose(one[order], two, rtol=1e-5, atol=1e-5)
    values, group, valid = random_groups(rng)
    order = rng.permutation(len(values))
    one, _ = group_advantage(values, group, valid, num_groups=6, normalise="std")
    two, _ = group_advantage(values[order], group[order], valid[order], num_groups=6, normalise="std")
    np.testing.assert_allclose(one[order], two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("baseline", BASELINES)
def test_invalid_members_change_nothing(baseline):
    values, group = np.array([1.0, 2, 4, 8, 3, 3]), np.array([0, 0, 0, 1, 1, 2])
    valid = np.array([1, 1, 1, 1, 0, 0], bool)
    garbage, lost = np.where(valid, values, [0, 0, 0, 0, np.nan, np.inf]), np.where(valid, group, -7)
    one, stats = group_advantage(values, group, valid, num_groups=3, baseline=baseline, normalise="std")
    two, other = group_advantage(garbage, lost, valid, num_groups=3, baseline=baseline, normalise="std")
    chex.assert_trees_all_equal((one, stats), (two, other))
    assert one[4:].tolist() == [0, 0]
    assert stats.count.tolist() == [3, 1, 0]
    assert [float(column[2]) for column in (stats.mean, stats.variance, stats.low, stats.high)] == [0] * 4


def test_loo_is_mean_up_to_a_factor():
    values = np.random.default_rng(0).normal(size=5)
    loo, mean = (group_advantage(values, baseline=baseline)[0] for baseline in ("loo", "mean"))
    np.testing.assert_allclose(loo, np.asarray(mean) * 5 / 4, rtol=1e-5)


def test_max_and_none_are_mean_up_to_a_shift():
    values = np.random.default_rng(1).normal(size=5)
    for baseline in ("max", "none"):
        shift = group_advantage(values, baseline=baseline)[0] - group_advantage(values)[0]
        np.testing.assert_allclose(shift, np.full(5, shift[0]), rtol=1e-4)
        assert abs(shift[0]) > 0.01


def test_centres_differ_unless_scaled_by_the_std():
    """MAREINFORCE, MARLOO, MAREMAX and MAGRPO are one algorithm once advantages are standardised, and only then."""
    values = [0.3, 2.0, 0.7, 1.1]
    for normalise, same in (("none", False), ("std", True)):
        got = [np.asarray(group_advantage(values, baseline=baseline, normalise=normalise)[0]) for baseline in BASELINES]
        for i, one in enumerate(got):
            for two in got[:i]:
                assert np.array_equal(one, two) == same


# Hostile numbers


@pytest.mark.parametrize("baseline", ("mean", "loo", "max"))
@pytest.mark.parametrize("normalise", NORMALISATIONS)
def test_equal_members_get_exactly_zero(baseline, normalise):
    """0.1 seven times over: the rounded mean is not 0.1, and a difference of one ulp over eps would be an advantage."""
    values = np.concatenate([np.full(7, v) for v in (0.1, 1e6 / 3, -1e-30, 0.95, 0.0)])
    group = np.repeat(np.arange(5), 7)
    advantage, stats = group_advantage(values, group, num_groups=5, baseline=baseline, normalise=normalise, eps=0.0)
    assert not np.any(advantage)
    assert not np.any(stats.variance)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("eps", (0.0, 1e-6))
@settings(quick, max_examples=20)
@given(
    members=st.lists(
        st.tuples(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(0, 2), st.booleans()), max_size=8
    )
)
@example(members=[(0.0, 0, True)] + [(0.949999988079071, 0, True)] * 7)
@example(members=[(1e6, 0, True), (1e6 + 0.0625, 0, True)])
@example(members=[(1.0000000031710769e-30, 0, True), (0.0, 0, True)])
@example(members=[(5.0, 0, True)] + [(7.0, 0, False)] * 7)
@example(members=[(1e-45, 0, True), (0.0, 0, True)])
def test_finite_whatever_the_values(baseline, eps, members):
    padded = members + [(0.0, 0, False)] * (8 - len(members))
    values, group, valid = (list(column) for column in zip(*padded, strict=True))
    for ddof in (0, 1):
        advantage, stats = group_advantage(
            values, group, valid, num_groups=3, baseline=baseline, normalise="std", ddof=ddof, eps=eps
        )
        assert np.isfinite(advantage).all()
        assert np.isfinite(stats.mean).all() and (np.asarray(stats.variance) >= 0).all()
        if baseline == "mean":
            assert np.abs(advantage).max() <= np.sqrt(8)


def test_large_offset_keeps_the_small_difference():
    """E[x^2] - E[x]^2 in float32 would be 0 or negative here."""
    advantage, stats = group_advantage([4096.0, 4096.5, 4097.0, 4097.5], normalise="std")
    np.testing.assert_allclose(stats.variance, [0.3125], rtol=1e-6)
    np.testing.assert_allclose(advantage, [-1.34164, -0.44721, 0.44721, 1.34164], rtol=1e-4)


def test_loo_of_one_odd_reward():
    """[0, .95 x7]: the std of the others vanishes; the group's own does not."""
    advantage, _ = group_advantage([0.0] + [0.95] * 7, baseline="loo", normalise="std")
    np.testing.assert_allclose(advantage, [-np.sqrt(7)] + [1 / np.sqrt(7)] * 7, rtol=1e-4)


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("normalise", NORMALISATIONS)
def test_singletons(baseline, normalise):
    for singleton, expected in (("zero", 0.0), ("raw", 3.0)):
        advantage, _ = group_advantage([3.0], baseline=baseline, normalise=normalise, singleton=singleton, ddof=1)
        assert advantage.tolist() == [3.0 if (baseline, normalise) == ("none", "none") else expected]


# Small print


def test_scalarise():
    rng = np.random.default_rng(0)
    rewards = {name: rng.normal(size=(5, 2)).astype(np.float32) for name in ("accuracy", "format", "effort")}
    weights = {"accuracy": 1.0, "effort": -0.5}
    out = return_rules.scalarise({name: jnp.asarray(r) for name, r in rewards.items()}, weights)
    np.testing.assert_allclose(out, reference.scalarise(rewards, weights), rtol=1e-5, atol=1e-6)
    with pytest.raises(KeyError, match="no reward component acuracy; the environment pays accuracy, effort, format"):
        return_rules.scalarise({name: jnp.asarray(r) for name, r in rewards.items()}, {"acuracy": 1.0})
    with pytest.raises(ValueError, match="empty"):
        return_rules.scalarise({name: jnp.asarray(r) for name, r in rewards.items()}, {})


def test_group_ids_are_mixed_radix():
    columns = [jnp.asarray(c.ravel()) for c in np.indices((3, 2, 4), dtype=np.int32)]
    ids, num = advantages.group_ids(*columns, sizes=(3, 2, 4))
    assert num == 24
    np.testing.assert_array_equal(ids, np.arange(24))
    with pytest.raises(ValueError, match="2 columns for 1 sizes"):
        advantages.group_ids(*columns[:2], sizes=(3,))
    with pytest.raises(ValueError, match="more keys"):
        advantages.group_ids(*columns[:2], sizes=(2**20, 2**20))


def test_unknown_words_are_refused():
    one, ids, valid = jnp.ones(1), jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    call = partial(advantages.group_advantage, one, ids, valid, num_groups=1)
    for words in (("median", "std", "zero"), ("mean", "iqr", "zero"), ("mean", "std", "one")):
        with pytest.raises(ValueError, match=r"not '(median|iqr|one)'"):
            call(baseline=words[0], normalise=words[1], singleton=words[2])
    with pytest.raises(ValueError, match="not 'max'"):
        return_rules.step_returns(ids[:, None], ids, one[:, None], valid, num_steps=1, reduce="max")
    with pytest.raises(ValueError, match="num_steps is 2"):
        return_rules.step_returns(ids[:, None], ids, one[:, None], valid, num_steps=2)
