"""Statistics of paired experiments against scipy, enumeration and simulation."""

import itertools

import numpy as np
import pytest
from scipy import integrate, stats

from experiments.studies.paired import area, detectable, holm, p_value, power


def test_the_area_is_the_integral_divided_by_the_base():
    rng = np.random.default_rng(0)
    for n in (2, 5, 11):
        at, curve = np.sort(rng.random(n)) * 300, rng.random(n)
        assert area(curve, at) == pytest.approx(integrate.trapezoid(curve, at) / (at[-1] - at[0]))
    assert area([0.3, 0.3, 0.3], [0, 1, 7]) == pytest.approx(0.3)
    assert area([0, 1, 1], [0, 2, 4]) == pytest.approx(0.75)


@pytest.mark.parametrize("curve, at", [([0.1], [0]), ([0.1, 0.2], [0]), ([0.1, 0.2], [1, 1]), ([0.1, 0.2], [1, 0])])
def test_an_area_without_a_base_is_refused(curve, at):
    with pytest.raises(ValueError, match="expected as many heights as rising places"):
        area(curve, at)


def test_p_values_are_those_of_a_paired_t_test():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=20), rng.normal(size=20) + 0.3
    assert p_value(b - a) == pytest.approx(stats.ttest_rel(b, a).pvalue)
    assert p_value(b - a, 0.5) == pytest.approx(stats.ttest_rel(b, a + 0.5).pvalue)
    assert p_value([0.0, 0.0]) == 1.0 and p_value([0.1, 0.1]) == 0.0 and p_value([0.4]) == 1.0


def closed(p):
    """Adjusted p-values of the closed test of Bonferroni's: of all families that contain a hypothesis, the largest."""
    names = list(p)
    families = [f for k in range(1, len(names) + 1) for f in itertools.combinations(names, k)]
    own = {f: min(1.0, len(f) * min(p[name] for name in f)) for f in families}
    return {name: max(own[f] for f in families if name in f) for name in names}


def test_holm_is_the_closed_test_of_all_families():
    rng = np.random.default_rng(2)
    for _ in range(50):
        p = {f"test {i}": float(x) for i, x in enumerate(rng.random(6) ** 3)}
        got = holm(p)
        assert list(got) == list(p) and got == pytest.approx(closed(p))
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({"a": 0.02, "b": 0.02}) == pytest.approx({"a": 0.04, "b": 0.04})


def test_power_is_that_of_simulated_experiments():
    rng, seeds, effect, spread, level = np.random.default_rng(3), 8, 0.06, 0.05, 0.02
    draws = rng.normal(effect, spread, (40_000, seeds))
    found = stats.ttest_1samp(draws, 0.0, axis=1).pvalue <= level
    assert power(effect, spread, seeds, level) == pytest.approx(found.mean(), abs=4 * 0.5 / 200)
    assert power(0.0, spread, seeds, level) == pytest.approx(level)
    assert power(-effect, spread, seeds, level) == pytest.approx(power(effect, spread, seeds, level))


@pytest.mark.parametrize("seeds", [2, 5, 20])
def test_the_smallest_difference_has_the_wanted_power(seeds):
    smallest = detectable(0.03, seeds, 0.05 / 7)
    assert power(smallest, 0.03, seeds, 0.05 / 7) == pytest.approx(0.8, abs=1e-6)
    assert detectable(0.06, seeds, 0.05 / 7) == pytest.approx(2 * smallest)


def test_the_smallest_difference_of_textbook_tables():
    """Cohen's table of one-sample tests: 34 pairs find half a standard deviation at .05 with power .8."""
    assert detectable(1.0, 34) == pytest.approx(0.5, abs=0.01)
    assert detectable(0.0, 20) == 0.0 and np.isnan(detectable(0.1, 1))
