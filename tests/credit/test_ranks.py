"""Rank agreement of local and shared rewards: golden values, a slow twin on ragged groups, ties, the order of rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.credit.ranks import WeighByRanks, mean_over_ties, rank_agreement
from jaxmarl_llm.errors import ConfigError

GOLDEN = [0.9, 0.1, 0.5, 0.3]
ROWS, GROUPS = 40, 6  # of every case, so that a function is compiled once


@functools.cache
def compiled():
    return jax.jit(functools.partial(rank_agreement, num_groups=GROUPS))


def of_groups(*groups):
    """NDCG of groups of (local, shared) rewards, in one table whose rows behind them are no members."""
    rows = [(x, y, k) for k, group in enumerate(groups) for x, y in zip(*group, strict=True)]
    rows += [(np.nan, np.nan, 0)] * (ROWS - len(rows))
    local, shared, group = (np.array(column) for column in zip(*rows, strict=True))
    valid = jnp.arange(ROWS) < sum(len(group[0]) for group in groups)
    columns = (jnp.array(column, jnp.float32) for column in (local, shared))
    return np.asarray(compiled()(*columns, jnp.array(group, jnp.int32), valid))[: len(groups)]


def ndcg(order, shared, first_rank=0):
    """NDCG of one order of members. Relevance: members below, and half of those that are equal, one by one."""
    relevance = [first_rank + sum(y < x for y in shared) + (sum(y == x for y in shared) - 1) / 2 for x in shared]
    dcg = lambda members: sum(relevance[i] / np.log2(place + 2) for place, i in enumerate(members))
    ideal = dcg(sorted(range(len(shared)), key=lambda i: -relevance[i]))
    return dcg(order) / ideal if ideal else 1.0


def twin(local, shared):
    """The mean of `ndcg` over all orders in which no member is before one with a higher local reward."""
    orders = [
        order
        for order in itertools.permutations(range(len(local)))
        if all(local[a] >= local[b] for a, b in itertools.pairwise(order))
    ]
    return np.mean([ndcg(order, shared) for order in orders])


def test_golden_values():
    """The same order has 1, the reverse .6138; from rank 1 on it would be .7489."""
    same, reverse = of_groups((GOLDEN, GOLDEN), ([-x for x in GOLDEN], GOLDEN))
    assert (same, round(float(reverse), 4)) == (1.0, 0.6138)
    assert ndcg([1, 3, 2, 0], GOLDEN) == pytest.approx(float(reverse), abs=1e-6)
    assert round(ndcg([1, 3, 2, 0], GOLDEN, first_rank=1), 4) == 0.7489


@pytest.mark.parametrize("seed", range(6))
def test_ragged_groups_with_ties_are_those_of_a_slow_twin(seed):
    """Few different values, so that most groups have ties of either reward."""
    rng = np.random.default_rng(seed)
    draw = lambda size: (rng.integers(-1, 3, size) / 4, rng.integers(0, 2 + seed % 2, size) * 0.7)
    groups = [draw(size) for size in [0, *rng.integers(1, 7, GROUPS - 1)]]
    np.testing.assert_allclose(of_groups(*groups)[1:], [twin(*group) for group in groups[1:]], atol=1e-6)
    assert of_groups(*groups)[0] == 1


def test_the_order_of_rows_does_not_count():
    """A group of eight with binary answers and equal local rewards: an argsort would give several values."""
    local, shared = np.array([0.2, 0.5, 0.5, 0.5, 0.9, 0.9, 0.1, 0.5]), np.array([1, 0, 1, 0, 1, 0, 0, 1.0])
    by_argsort = lambda order: ndcg_of_argsort(local[order], shared[order])
    orders = [np.random.default_rng(k).permutation(8) for k in range(30)]
    values = [float(of_groups((local[order], shared[order]))[0]) for order in orders]
    assert np.ptp(values) < 1e-6 and np.ptp([by_argsort(order) for order in orders]) > 0.03
    mixed = [(local, shared), (shared, local), (GOLDEN, GOLDEN[::-1])]
    one = of_groups(*mixed)
    np.testing.assert_allclose(of_groups(*mixed[::-1]), one[::-1], atol=1e-6)


def ndcg_of_argsort(local, shared):
    """What an implementation without regard to ties computes."""
    relevance = np.argsort(np.argsort(shared, kind="stable"), kind="stable")
    discount = 1 / np.log2(np.arange(len(local)) + 2)
    return (relevance[np.argsort(-local, kind="stable")] * discount).sum() / (np.sort(relevance)[::-1] * discount).sum()


def test_equal_shared_rewards_tell_nothing():
    assert of_groups(([0.1, 0.2, 0.3], [1, 1, 1]), ([0.5], [1]), ([1, 2, 3], [0, 0, 0])).tolist() == [1, 1, 1]


def test_sums_in_another_order_are_ties():
    """.8 + .2 * 1/3 in float32, summed either way."""
    noisy = [0.5, 0.5 + 1e-7, 0.5 - 1e-7, 0.1]
    exact = [0.5, 0.5, 0.5, 0.1]
    one, other = of_groups((noisy, GOLDEN), (exact, GOLDEN))
    assert one == other == pytest.approx(twin(exact, GOLDEN), abs=1e-6)


def test_members_are_ranked_in_their_group():
    key = jnp.array([5.0, 1.0, 5.0, 7.0, 2.0, 0.0])
    group, valid = jnp.array([0, 1, 0, 0, 1, 0]), jnp.array([True, True, True, True, True, False])
    got = mean_over_ties(key, group, valid, lambda place: place, num_groups=2)
    assert got.tolist() == [0.5, 0.0, 0.5, 2.0, 1.0, 0.0]


def test_how_far_weights_can_differ():
    """Over 5,000 random orders of eight: v is .80 +- .09. The reverse order has the least v, so no weight of one task
    is more than 1.5 times another."""
    rng = np.random.default_rng(0)
    values = [ndcg(list(rng.permutation(8)), range(8)) for _ in range(5000)]
    least = ndcg(range(8), range(8))
    assert (round(np.mean(values), 2), round(np.std(values), 2)) == (0.80, 0.09)
    assert 0.607 < least < 0.608 and min(values) >= least and np.exp(1 - least) < 1.5
    assert min(ndcg(order, range(6)) for order in itertools.permutations(range(6))) == ndcg(range(6), range(6))


BAD = [
    (((),), r"^WeighByRanks\.local: expected pairs \(component, weight\), got none$"),
    (((("own", float("inf")),),), r"^WeighByRanks\.local\.own: expected a finite number, got inf$"),
    (((("own", 1.0),), "rank"), r"^WeighByRanks\.weights: unknown value 'rank'; did you mean 'ranks'\?$"),
]


@pytest.mark.parametrize("args, message", BAD, ids=[m for _, m in BAD])
def test_bad_settings(args, message):
    with pytest.raises(ConfigError, match=message):
        WeighByRanks(*args)
