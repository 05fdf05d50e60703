"""Rollouts of a run for `telemetry.rollouts`: which steps are written, and under which fingerprint."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from jaxmarl_llm.config import flatten
from jaxmarl_llm.distributed import deadlines
from jaxmarl_llm.distributed.sharding import to_host
from jaxmarl_llm.telemetry.rollouts_writer import RolloutsFolder
from jaxmarl_llm.training import rollout_rows
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.train_step import StepResult, TrainStep
from jaxmarl_llm.types import PyTree

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

    cfg: Configuration of the run. folder: Where it writes; None in processes of a run other than the first.
    """

    def __init__(self, cfg: BaseConfig, folder: RolloutsFolder | None):
        self._settings, self._folder = cfg.run.rollouts, folder
        self._fingerprint = fingerprint(cfg)

    def __call__(
        self, step: TrainStep, number: int, rl_step: int, before: PyTree, after: PyTree, result: StepResult
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
            header = rollout_rows.header(step, result, number, rl_step, tasks)._replace(fingerprint=self._fingerprint)
            self._folder.write(header, rollout_rows.rows(step, result, rl_step, tasks, before, after, logprobs))


def fingerprint(cfg: Any) -> str:
    """SHA-256 of the configuration ``cfg`` without the keys that change no computed value."""
    kept = {key: value for key, value in flatten(cfg).items() if not key.startswith(CHANGEABLE)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
