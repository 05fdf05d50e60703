"""Forecast of the time to the end of a phase: what its steps take, and what evaluations and saves add."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

WINDOW = 30  # steps


class Schedule(NamedTuple):
    """Steps of a run: where its phases end, when it evaluates and saves.

    Attributes:
        ends: Name of each phase and its last step, in order.
        evaluates: Completed steps -> whether an evaluation comes before the next step.
        saves: Completed steps -> whether a save follows.
    """

    ends: tuple[tuple[str, int], ...]
    evaluates: Callable[[int], bool] = lambda step: False
    saves: Callable[[int], bool] = lambda step: False

    @property
    def total(self) -> int:
        """Number of steps of the run."""
        return self.ends[-1][1]

    def phase(self, step: int) -> tuple[str, int]:
        """Name and last step of the phase of a step.

        Args:
            step: Number of a step, from 1. Beyond the end it belongs to the last phase.
        """
        return next(((name, end) for name, end in self.ends if step <= end), self.ends[-1])


class Forecast:
    """Seconds to the end of a phase, from the rows of metrics so far.

    A step of another phase is left out, and so is a step that compiles, unless most of the others compile too. Where at
    least half of the known steps compile, the next ones are expected to do so for as long. The first step of the phase
    does not count for this. The first evaluation and the first save, which are slower, are left out as long as another
    one is known.

    Args:
        schedule: Of the run.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self._phase = ""
        self._first = 0.0  # first known step of the phase without its compilations
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # the others, and their compilations apart
        self._added: dict[str, list[float]] = {"evaluation": [], "save": []}

    def see(self, step: int, row: Mapping[str, float | None]) -> None:
        """Take in the metrics of a step.

        Args:
            step: Its number, from 1.
            row: Its metrics; the times in seconds are read.
        """
        seconds, compiled = (row.get(f"time/{key}") or 0.0 for key in ("step", "compile"))
        added = 0.0
        for kind, known in self._added.items():
            if spent := row.get(f"time/{kind}") or 0.0:
                known.append(spent)
                added += spent
        own = max(seconds - added - compiled, 0.0)
        name, _ = self.schedule.phase(step)
        if name != self._phase:
            self._phase, self._first = name, own
            self._steps.clear()
            if compiled:
                return
        self._steps.append((own, compiled))

    def seconds(self, step: int, *, last_save: bool = True) -> float:
        """Seconds from the end of a step to the end of its phase.

        Args:
            step: Number of the newest step, from 1.
            last_save: Whether the save after the last step of the run counts. No row of metrics has its time.
        """
        _, end = self.schedule.phase(step)
        if step >= end:
            return 0.0
        saves = sum(map(self.schedule.saves, range(step, end)))
        evaluations = sum(map(self.schedule.evaluates, range(step, end)))
        if end == self.schedule.total:
            evaluations, saves = evaluations + 1, saves + last_save
        return (end - step) * self._step() + evaluations * self._mean("evaluation") + saves * self._mean("save")

    def _step(self) -> float:
        """Mean seconds of the middle half of the known steps without evaluations and saves, and of compilations."""
        if not self._steps:
            return self._first
        plain = [seconds for seconds, compiled in self._steps if not compiled]
        known = sorted(plain if 4 * len(plain) >= len(self._steps) else [seconds for seconds, _ in self._steps])
        quarter = (len(known) + 1) // 4
        middle = known[quarter : len(known) - quarter]
        often = 2 * len(plain) <= len(self._steps)
        return sum(middle) / len(middle) + often * sum(c for _, c in self._steps) / len(self._steps)

    def _mean(self, kind: str) -> float:
        """Mean seconds of an evaluation or of a save; the first one counts only when it is the only one."""
        known = self._added[kind]
        rest = known[1:] or known
        return sum(rest) / len(rest) if rest else 0.0
