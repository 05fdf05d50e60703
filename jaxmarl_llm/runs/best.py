"""The best step of a run by one metric of its held-out tasks: kept beside the newest, and a reason to end early."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxmarl_llm.config import nearest
from jaxmarl_llm.errors import ConfigError

FOLDER = "best"  # of the workdir, as `storage.checkpoint.Checkpointer` writes it


class BestStep:
    """The best value so far. Its record is in the metadata of every checkpoint, so a resumed run goes on with it.

    metric: key of an evaluation, as ``eval/return``, with ``-`` in front where less is better; None: nothing is kept.
    patience: evaluations in a row without a better value, after which `exhausted` is true; 0: never. record: of the
    checkpoint that the run goes on from; it counts where it is of the same metric.
    """

    def __init__(self, metric: str | None, patience: int, record: Mapping[str, Any] | None = None):
        self.metric, self.patience = metric, patience
        self.value: float | None = None
        self.step, self.waited = -1, 0
        if record is not None and record["metric"] == metric:
            self.value, self.step, self.waited = record["value"], record["step"], record["waited"]

    def record(self) -> dict[str, Any] | None:
        """What the metadata of a checkpoint holds; None without a metric."""
        if self.metric is None:
            return None
        return {"metric": self.metric, "value": self.value, "step": self.step, "waited": self.waited}

    @property
    def exhausted(self) -> bool:
        """Whether the run is to end because the metric did not improve."""
        return bool(self.patience) and self.waited >= self.patience

    def see(self, evaluation: Mapping[str, float], step: int, save: Callable[[], None], *, last: bool = False) -> None:
        """Compare an evaluation with the best one; ``save`` the state where it is better.

        evaluation: metrics; empty where none was made. step: whose state was evaluated. last: the run ends here, so
        nothing is waited for. Raises ConfigError where the evaluation has no such metric.
        """
        if self.metric is None or not evaluation or step == self.step:
            return
        name = self.metric.removeprefix("-")
        if name not in evaluation:
            raise ConfigError(f"config.run.best: the evaluation has no {name!r}; {nearest(name, evaluation)}")
        value = float(evaluation[name])
        sign = -1 if self.metric.startswith("-") else 1
        if math.isfinite(value) and (self.value is None or sign * value > sign * self.value):
            self.value, self.step = value, step
            self.waited = self.waited if last else 0
            save()
        elif not last:
            self.waited += 1

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.metric} has had no value"
        return f"{self.metric} was best after step {self.step} ({self.value:.4g}), which is in {FOLDER}/"
