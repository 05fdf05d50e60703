"""Rollouts and evaluations of a run: which steps are written, under which fingerprint, and what each task brought."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmarl_llm.config import flatten
from jaxmarl_llm.distributed import deadlines
from jaxmarl_llm.distributed.sharding import to_host
from jaxmarl_llm.rollout.env_runner import EnvRunner, RolloutResult
from jaxmarl_llm.telemetry.evaluations_file import EvaluationsFile
from jaxmarl_llm.telemetry.rollouts import Row
from jaxmarl_llm.telemetry.rollouts_writer import RolloutsFolder, shortest
from jaxmarl_llm.training import held_out_rows, rollout_rows
from jaxmarl_llm.training.algorithm import StepParts, StepResult
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.types import PyTree, Team, TrainState

# Configuration keys that a resumed run may change. They change no computed value; a mesh changes only rounding, and an
# engine samples from the same distribution.
CHANGEABLE = (
    "config.steps",
    "config.run.",
    "config.env.workers",
    "config.env.timeout",
    "config.mesh",
    "config.engine.",
)


class Recorder:
    """Writer of every ``every``-th RL step of a run. It only reads: samples and parameters stay the same.

    cfg: Configuration of the run. folder: Where it writes; None in processes of a run other than the first. commit: Git
    commit of the run; None: unknown.
    """

    def __init__(self, cfg: BaseConfig, folder: RolloutsFolder | None, commit: str | None = None):
        self._settings, self._folder = cfg.run.rollouts, folder
        self._made_with: dict[str, Any] = {"fingerprint": fingerprint(cfg), "commit": commit}

    def __call__(
        self, step: StepParts, number: int, rl_step: int, before: PyTree, after: PyTree, result: StepResult
    ) -> None:
        """Write a step, if it is one of those that are written.

        step: Parts of the step. number: Its number, as in metrics.jsonl. rl_step: Its number in its phase, from 0.
        before, after: Memories. result: Of the step, on the host. A collective where memories or log-probs are on other
        processes.
        """
        if rl_step % self._settings.every:
            return
        before, after = to_host((before, after))
        logprobs = {} if result.logprobs is None else result.logprobs.by_row()
        if self._folder is None or self._folder.full:
            return
        with deadlines.stage("save"):
            tasks = self._settings.tasks
            header = rollout_rows.header(step, result, number, rl_step, tasks)._replace(**self._made_with)
            rows = rollout_rows.rows(step, result, rl_step, tasks, before, after, logprobs)
            contents = step.env_runner.contents([int(number) for number in result.tasks[:tasks]], False)
            self._folder.write(header, held_out_rows.with_contents(rows, contents))


class EvaluationRecorder:
    """Writer of what every evaluation of a run played and measured. It only reads, as `Recorder`.

    cfg: Configuration of the run. team: Roles and models. env_runner: Runner of the environment. folder: Where episodes
    of the first ``run.rollouts.eval_tasks`` held-out tasks are written, as they were sampled in training. table: Where
    return and success of every held-out task are written. Both are None in processes of a run other than the first.
    commit: Git commit of the run; None: unknown.
    """

    def __init__(
        self,
        cfg: BaseConfig,
        team: Team,
        env_runner: EnvRunner,
        folder: RolloutsFolder | None,
        table: EvaluationsFile | None,
        commit: str | None = None,
    ):
        self._cfg, self._team, self._env_runner = cfg, team, env_runner
        self._folder, self._table = folder, table
        self._made_with: dict[str, Any] = {"fingerprint": fingerprint(cfg), "commit": commit}
        self._rows: list[Row] = []
        self._sizes = held_out_rows.Sizes()

    def batch(self, state: TrainState, suffix: str, numbers: Sequence[int], played: RolloutResult) -> None:
        """See a batch, as `EvaluationWatcher.batch`. A collective where memories are on other processes."""
        kept = numbers[: max(0, self._cfg.run.rollouts.eval_tasks - self._sizes.tasks)]
        if suffix or not len(kept):
            return
        memory = to_host(state.memory)
        if self._folder is not None and not self._folder.full:
            given = self._cfg, self._team, self._env_runner, played, kept, memory, self._sizes
            self._rows += held_out_rows.rows(*given)
        self._sizes = self._sizes.after(played, len(numbers))

    def end(self, state: TrainState, rows: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Write an evaluation, as `EvaluationWatcher.end`."""
        step, written = int(state.step), self._rows
        self._rows, self._sizes = [], held_out_rows.Sizes()
        with deadlines.stage("save"):
            if self._folder is not None and written:
                tasks = self._cfg.run.rollouts.eval_tasks
                header = held_out_rows.header(self._cfg, self._team, self._env_runner, step, tasks)
                contents = self._env_runner.contents(range(header.tasks), True)
                self._folder.write(header._replace(**self._made_with), held_out_rows.with_contents(written, contents))
            if self._table is not None:
                self._table.write(step, task_values(rows, self._cfg.reward))


def task_values(
    rows: Mapping[str, Mapping[str, np.ndarray]], reward: Mapping[str, float]
) -> dict[str, tuple[float | None, ...]]:
    """Return and success of every held-out task, by the names of their metrics behind ``eval/``.

    Args:
        rows: As in `EvaluationWatcher.end`.
        reward: Weight of each paid component.
    """
    out: dict[str, tuple[float | None, ...]] = {}
    for suffix, values in rows.items():
        out[f"return{suffix}"] = shortest(sum(weight * values[name] for name, weight in reward.items()))
        if "accuracy" in values:
            out[f"success{suffix}"] = shortest(values["accuracy"])
    return out


def fingerprint(cfg: Any) -> str:
    """SHA-256 of the configuration ``cfg`` without the keys that change no computed value."""
    kept = {key: value for key, value in flatten(cfg).items() if not key.startswith(CHANGEABLE)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
