"""Comparison of two runs task by task: held-out tasks that both have, by the hash of their contents.

It says how far two policies differ on tasks, and nothing about runs of other seeds: a run is one draw of training.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxmarl_llm.telemetry.evaluations_file import Evaluations

LEVEL = 0.95


class TaskPairs(NamedTuple):
    """Values of the held-out tasks that two runs share, at the newest evaluation of each.

    Attributes:
        first: Value of each shared task in the first run [n].
        second: Its value in the second run [n].
        shared: Number of shared tasks, those of unknown value included.
        counts: Number of held-out tasks of each run.
        steps: Completed steps of each run.
    """

    first: list[float]
    second: list[float]
    shared: int
    counts: tuple[int, int]
    steps: tuple[int, int]


class TaskEffect(NamedTuple):
    """Difference of two runs over the tasks that both have, second minus first.

    Attributes:
        mean: Mean difference.
        half: Half-width of its 95 % interval over tasks (paired Student's t); NaN for fewer than two tasks.
        wins: Tasks that the second run alone solves; None: a value is neither 0 nor 1.
        losses: Tasks that the first run alone solves; None as ``wins``.
        p: Two-sided p-value of the exact sign test (McNemar's) of wins and losses; None as ``wins``.
    """

    mean: float
    half: float
    wins: int | None
    losses: int | None
    p: float | None

    @property
    def decided(self) -> bool:
        """Whether the tasks decide at a level of 95 %: by the sign test where there is one, else by the interval."""
        return abs(self.mean) > self.half if self.p is None else self.p < 1 - LEVEL


def pair_tasks(first: Evaluations, second: Evaluations, metric: str) -> TaskPairs | None:
    """Pair the held-out tasks of two runs by content. Of equal contents, the k-th is paired with the k-th.

    Args:
        first: Evaluations of the first run.
        second: Evaluations of the second run.
        metric: Name behind ``eval/``.

    Returns:
        None where a run has no value of the metric for each task.
    """
    newest = [next((row for row in reversed(run.rows) if metric in row.values), None) for run in (first, second)]
    if newest[0] is None or newest[1] is None:
        return None
    one, two = (
        dict(zip(_named(run.tasks), row.values[metric])) for run, row in zip((first, second), newest) if row is not None
    )
    shared = [name for name in one if name in two and name[0]]
    known = [(a, b) for name in shared if (a := one[name]) is not None and (b := two[name]) is not None]
    counts = (len(first.tasks), len(second.tasks))
    steps = (newest[0].step, newest[1].step)
    return TaskPairs([a for a, _ in known], [b for _, b in known], len(shared), counts, steps)


def _named(contents: Sequence[str]) -> list[tuple[str, int]]:
    """Content of each task, and how many tasks before have the same one."""
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for content in contents:
        names.append((content, seen[content]))
        seen[content] += 1
    return names


def effect_of(pairs: TaskPairs) -> TaskEffect:
    """Difference of two runs over their tasks.

    Args:
        pairs: Tasks with known values, at least one.
    """
    from scipy import stats

    differences = [b - a for a, b in zip(pairs.first, pairs.second, strict=True)]
    count = len(differences)
    mean, half = sum(differences) / count, math.nan
    if count > 1:
        spread = math.sqrt(sum((d - mean) ** 2 for d in differences) / (count - 1))
        half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1)) * spread / math.sqrt(count)
    if not {*pairs.first, *pairs.second} <= {0.0, 1.0}:
        return TaskEffect(mean, half, None, None, None)
    wins, losses = (sum(d == sign for d in differences) for sign in (1.0, -1.0))
    p = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    return TaskEffect(mean, half, wins, losses, p)
