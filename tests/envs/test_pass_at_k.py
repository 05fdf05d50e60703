"""pass@k against enumeration of all draws, and the first-k family by hand."""

import itertools
import math

import pytest

from jaxmarl_llm.envs.coding import pass_at_k


@pytest.mark.parametrize("n", range(1, 8))
def test_unbiased_estimator_is_the_mean_over_all_draws(n):
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = [any(samples[i] for i in chosen) for chosen in itertools.combinations(range(n), k)]
            assert pass_at_k.pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws), abs=1e-15)


def test_first_k_over_all_orders_has_the_estimators_mean():
    samples = [True, True, False, False, False]
    orders = list(itertools.permutations(samples))
    for k in range(1, 6):
        mean = sum(pass_at_k.pass_or_not(order, k) for order in orders) / len(orders)
        assert mean == pytest.approx(pass_at_k.pass_at_k(5, 2, k))


def test_first_k_by_hand():
    assert [pass_at_k.pass_or_not([False, True, False], k) for k in (1, 2, 3)] == [0.0, 1.0, 1.0]
    assert [pass_at_k.accuracy([0.2, 0.8, 0.5], k) for k in (1, 2, 3)] == [0.2, 0.8, 0.8]
    assert [pass_at_k.max_coop([0.5, 0.0, 1.5], k) for k in (1, 2, 3)] == [0.5, 0.5, 1.5]


def test_large_numbers_are_exact():
    assert pass_at_k.pass_at_k(10_000, 1, 1) == pytest.approx(1e-4, rel=1e-12)
    assert pass_at_k.pass_at_k(2000, 1000, 1000) == 1.0
    assert pass_at_k.pass_at_k(200, 0, 100) == 0.0


@pytest.mark.parametrize("n, c, k", [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4), (0, 0, 1)])
def test_impossible_numbers_are_refused(n, c, k):
    with pytest.raises(ValueError, match="pass_at_k"):
        pass_at_k.pass_at_k(n, c, k)


def test_k_beyond_the_samples_is_refused():
    for name in ("pass_or_not", "accuracy", "max_coop"):
        for k in (0, 3):
            with pytest.raises(ValueError, match="expected 1 <= k <= 2"):
                getattr(pass_at_k, name)([1.0, 0.0], k)


def test_summary_is_the_mean_over_tasks():
    one = {"solved": [False, True], "tests": [0.5, 1.0], "cooperation": [0.0, 1.5]}
    two = {"solved": [False, False], "tests": [0.25, 0.0], "cooperation": [0.5, 0.0]}
    none = {"solved": [], "tests": [], "cooperation": []}
    got = pass_at_k.summary([one, two, none], (1, 2))
    assert got == {
        "tasks": 2.0, "skipped": 1.0,
        "pass@1": 0.25, "pass_or_not@1": 0.0, "accuracy@1": 0.375, "max_coop@1": 0.25,
        "pass@2": 0.5, "pass_or_not@2": 0.5, "accuracy@2": 0.625, "max_coop@2": 1.0,
    }  # fmt: skip
    assert math.isnan(pass_at_k.summary([none], (1,))["pass@1"])
    with pytest.raises(ValueError, match="n=2"):
        pass_at_k.summary([one], (3,))
