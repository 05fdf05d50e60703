"""Statistics of paired experiments: area under a curve, a t test against delta, Holm's correction, and the power."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy import optimize, stats

LEVEL = 0.05  # of a whole family of tests
NOTHING = 1e-12  # rounding


def area(curve: Sequence[float], at: Sequence[float]) -> float:
    """The mean height of a curve: the area under its straight lines, divided by the length of its base.

    Args:
        curve: Heights.
        at: Where they were measured, rising.
    """
    x, y = np.asarray(at, float), np.asarray(curve, float)
    if x.shape != y.shape or len(x) < 2 or not (np.diff(x) > 0).all():
        raise ValueError(f"area: expected as many heights as rising places, at least 2, got {len(y)} and {len(x)}")
    return float(((y[1:] + y[:-1]) / 2 * np.diff(x)).sum() / (x[-1] - x[0]))


def p_value(effect: Sequence[float], delta: float = 0.0) -> float:
    """Two-sided p of a paired t test: the mean of ``effect`` [seeds] differs from ``delta``.

    Without any spread it is 1 where the mean is delta, else 0. For one seed it is 1.
    """
    x = np.asarray(effect, float) - delta
    if len(x) < 2:
        return 1.0
    mean, error = x.mean(), x.std(ddof=1) / len(x) ** 0.5
    if error < NOTHING:
        return float(abs(mean) < NOTHING)
    return float(2 * stats.t.sf(abs(mean) / error, len(x) - 1))


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values: those of at most LEVEL are rejected together at that level, whatever is true."""
    out: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p, key=lambda name: p[name])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        out[name] = largest
    return {name: out[name] for name in p}


def power(effect: float, spread: float, seeds: int, level: float = LEVEL) -> float:
    """Probability that a two-sided paired t test at ``level`` finds a true mean difference of ``effect``.

    Args:
        effect: True mean, measured from delta.
        spread: Standard deviation of the differences over seeds.
        seeds: Number of pairs.
        level: Of this one test.
    """
    bound, shift = stats.t.ppf(1 - level / 2, seeds - 1), effect / spread * seeds**0.5
    above = stats.nct.sf(bound, seeds - 1, shift)
    return float(above + stats.nct.sf(bound, seeds - 1, -shift))


def detectable(spread: float, seeds: int, level: float = LEVEL, wanted: float = 0.8) -> float:
    """The smallest true difference that a paired t test at ``level`` finds with probability ``wanted``.

    NaN for one seed, 0 without any spread.
    """
    if seeds < 2 or spread < NOTHING:
        return np.nan if seeds < 2 else 0.0
    most = 1.0
    while power(most, 1.0, seeds, level) < wanted:
        most *= 2
    return spread * float(optimize.brentq(lambda d: power(d, 1.0, seeds, level) - wanted, 0.0, most))
