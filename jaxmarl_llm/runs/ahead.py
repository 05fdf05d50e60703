"""Rollouts of the RL phase, compiled in threads beside the first step of stage 0."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from jaxmarl_llm.distributed import processes
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.env_runner import ArrayEnvRunner
from jaxmarl_llm.rollout.plans import single
from jaxmarl_llm.training.evaluation import eval_samplings
from jaxmarl_llm.training.train_step import TrainStep
from jaxmarl_llm.types import TrainState

# State -> what compiles one program each.
Compilers = Callable[[TrainState], list[Callable[[], object]]]


def rollouts_of(step: TrainStep) -> Compilers:
    """Compilers of a step's rollout and of the evaluation.

    Args:
        step: Training step. One with past policies or several models of a role has none: its rollout takes more
            arguments.
    """
    cfg, env_runner, remembers = step.cfg, step.env_runner, step.algorithm.memory
    simple = not cfg.past.size and not any(role.co_players for role in step.team.roles)

    def compilers(state: TrainState) -> list[Callable[[], object]]:
        if not isinstance(env_runner, ArrayEnvRunner) or not simple:
            return []

        def one(sampling: Sampling, held_out: bool) -> Callable[[], object]:
            team, plan = (step.team, single()) if held_out else (step.players, step.plan)
            count = env_runner.held_out_size if held_out else cfg.batch
            parts = state.params, state.memory, range(count)
            return env_runner.compiler(team, *parts, plan, sampling, remembers, held_out=held_out)

        evaluations = eval_samplings(cfg).values() if env_runner.held_out_size else ()
        return [one(cfg.sampling, False), *(one(sampling, True) for sampling in evaluations)]  # the longest first

    return compilers


class Ahead:
    """Threads that compile, as many as there are cores. An error is left to the run, which meets the same one.

    Args:
        compilers: As `rollouts_of` gives them; None: nothing is compiled.
        state: State at the beginning of stage 0, whose shapes stay.
    """

    def __init__(self, compilers: Compilers | None, state: TrainState):
        self._todo = [] if compilers is None or processes.count() > 1 else compilers(state)
        count = min(len(self._todo), os.cpu_count() or 1)
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name=f"compile ahead {i}") for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while self._todo:
            with contextlib.suppress(Exception):  # the run meets the same error where it can be shown
                self._todo.pop(0)()

    @property
    def busy(self) -> bool:
        """Whether something is still compiled."""
        return any(thread.is_alive() for thread in self._threads)

    def wait(self) -> None:
        """Return when everything is compiled."""
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *error: object) -> None:
        """Compile nothing more, and wait for the end of a compilation in progress."""
        self._todo.clear()
        self.wait()
