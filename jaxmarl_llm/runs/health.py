"""What went wrong in the environment of a run: shown, kept in a file, and counted until there is too much of it."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxmarl_llm.errors import RunError
from jaxmarl_llm.rollout.env_runner import EnvRunner, RolloutResult
from jaxmarl_llm.rollout.failures import RolloutFailure, one_line
from jaxmarl_llm.rollout.host_runner import HostEnvRunner
from jaxmarl_llm.telemetry.failures_file import NAME, FailuresFile
from jaxmarl_llm.training.step_metrics import count_invalid

SHOWN = 3  # failures of a run on the console; failures.jsonl has all
WINDOW = 3  # steps over which `Health` takes the share of invalid joint actions
ENOUGH = 64  # joint actions that decide before there are that many steps


class Invalid(NamedTuple):
    """Joint actions without a valid reward, and all joint actions."""

    bad: int = 0
    tried: int = 0

    def plus(self, other: Invalid) -> Invalid:
        return Invalid(self.bad + other.bad, self.tried + other.tried)


class Health:
    """Watches the rollouts of a run.

    A run ends where the share of invalid joint actions in training is above ``max_invalid``. The share is that of the
    last `WINDOW` steps that played. With fewer steps it decides as soon as they have `ENOUGH` joint actions, and after
    the last step of the run. So one bad step among few joint actions ends nothing.

    folder: of failures.jsonl. max_invalid: largest share; with 1 a run never ends. say: prints one line or several.
    primary: False writes and prints nothing, in processes of a run other than the first.
    """

    def __init__(self, folder: Path, max_invalid: float, say: Callable[[str], None] = print, *, primary: bool = True):
        self.say = say
        self._limit, self._primary, self._file = max_invalid, primary, FailuresFile(folder)
        self._step = Invalid()  # of the step in progress
        self._steps: deque[Invalid] = deque(maxlen=WINDOW)
        self._done = self._failures = 0
        self._told: set[str] = set()
        self._last_failure = ""

    def watch(self, env_runner: EnvRunner, step: int) -> None:
        """See every rollout of ``env_runner`` from now on. step: completed steps."""
        self._done = step

        def see(played: RolloutResult, held_out: bool) -> None:
            self.see(played, env_runner, held_out)

        env_runner.watcher = see

    def see(self, played: RolloutResult, env_runner: EnvRunner, held_out: bool) -> None:
        """Show and count what went wrong in a rollout. held_out: of the tasks of the evaluation."""
        invalid = Invalid(*count_invalid(played))
        if not held_out:
            self._step = self._step.plus(invalid)
        self.report(played.failures, held_out)
        if invalid.bad and not played.failures:
            self._last_failure = "a reward is NaN or infinite"
            self._tell_once(
                "invalid",
                f"{invalid.bad} of {invalid.tried} joint actions have no valid reward: it is NaN or infinite; this is "
                "said once, and counted in count/invalid_share",
            )
        if played.records is not None and played.records.cut_prompts and isinstance(env_runner, HostEnvRunner):
            roles = ", ".join(f"{n} of role {role!r}" for role, n in played.records.cut_prompts.items())
            self._tell_once(
                "cut",
                f"prompts longer than env.max_prompt={env_runner.cfg.max_prompt} tokens were cut: {roles}, by "
                f"{played.records.cut_tokens:,} tokens; this is said once, and counted in count/cut_prompts",
            )

    def report(self, failures: Sequence[RolloutFailure], held_out: bool = False) -> None:
        """Show the first failures of the run, and write all of them to the file."""
        for failure in failures:
            self._failures += 1
            self._last_failure = one_line(failure.message)
            if not self._primary:
                continue
            if self._failures <= SHOWN:
                kind = "held-out " if held_out else ""
                self.say(f"failure {self._failures}: {kind}{failure}" + f"\n{failure.trace}".rstrip())
            if self._failures == SHOWN:
                self.say(f"later failures are not shown; all are in {NAME}")
            row = {**failure._asdict(), "held_out": held_out}
            self._file.write(self._done, row, row.pop("trace"))

    def end_step(self, step: int, *, last: bool, kept: Callable[[], str]) -> None:
        """Raise RunError where too many joint actions have no valid reward.

        step: completed steps. last: the run has no further step. kept: says what the run leaves.
        """
        self._done = step
        if self._step.tried:
            self._steps.append(self._step)
        self._step = Invalid()
        recent = functools.reduce(Invalid.plus, self._steps, Invalid())
        decided = len(self._steps) == WINDOW or recent.tried >= ENOUGH or last
        if not decided or recent.bad <= self._limit * recent.tried:
            return
        raise RunError(
            f"step {step}: {recent.bad} of the {recent.tried} joint actions of the last {len(self._steps)} steps have "
            f"no valid reward, a share above run.max_invalid={self._limit:g}; the last reason: {self._last_failure}; "
            f"{kept()}"
        )

    def close(self) -> None:
        """Say how many failures there were, if some were not shown."""
        if self._primary and self._failures > SHOWN:
            self.say(f"{self._failures} calls of the environment failed; {NAME} has all of them")

    def _tell_once(self, topic: str, line: str) -> None:
        if topic not in self._told and self._primary:
            self.say(line)
        self._told.add(topic)
