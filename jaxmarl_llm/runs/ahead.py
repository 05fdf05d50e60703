"""Programs of the RL phase, compiled in threads beside and after the first step of a run.

A run that begins in stage 0 compiles beside that step. One that begins in RL does so after the step, which has compiled
most programs; what is left are rare sizes. The second step waits in both, so that the steps to come have all cores.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

import jax

from jaxmarl_llm.distributed import processes
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.array_runner import ArrayEnvRunner
from jaxmarl_llm.rollout.plans import single
from jaxmarl_llm.training.algorithm import StepParts
from jaxmarl_llm.training.evaluation import eval_samplings
from jaxmarl_llm.training.programs import Compiler, step_programs
from jaxmarl_llm.types import TrainState, Tree

LONG = 50  # steps from which a run has all sizes of its updates compiled; a shorter one may never meet some of them


class Programs(Protocol):
    """Function from a state to compilers of the programs of RL."""

    def __call__(self, state: TrainState, *, rollouts: bool, updates: bool) -> list[Compiler]:
        """Compilers, the longest first. One that returns a list is followed by the compilers in it.

        Args:
            state: Its shapes are read, now and not later.
            rollouts: Whether rollouts of training and evaluation are among them.
            updates: Whether the programs that follow a rollout are among them.
        """


def no_programs(state: TrainState, *, rollouts: bool, updates: bool) -> list[Compiler]:
    """`Programs` of a run whose programs are not known ahead: no compilers.

    Args:
        state: Not read.
        rollouts: Not read.
        updates: Not read.
    """
    return []


def programs_of(step: StepParts) -> Programs:
    """Programs of a step, and of the evaluation.

    Args:
        step: Training step. One with past policies or several models of a role has none: its rollout takes more
            arguments.
    """
    cfg, env_runner, remembers = step.cfg, step.env_runner, step.algorithm.memory
    simple = not cfg.past.size and not any(role.co_players for role in step.team.roles)

    def programs(state: TrainState, *, rollouts: bool, updates: bool) -> list[Compiler]:
        if not isinstance(env_runner, ArrayEnvRunner) or not simple:
            return []

        def rollout(sampling: Sampling, held_out: bool) -> tuple[Any, tuple[Any, ...]]:
            team, plan = (step.team, single()) if held_out else (step.players, step.plan)
            count = env_runner.held_out_size if held_out else cfg.batch
            parts = state.params, state.memory, range(count)
            return env_runner.program(team, *parts, plan, sampling, remembers, held_out=held_out)

        def compiler(program: Any, shapes: tuple[Any, ...], others: Callable[[Tree], list[Compiler]]) -> Compiler:
            def lower() -> list[Compiler]:
                lowered = program.lower(*shapes)
                return [lowered.compile, *others(lowered.out_info)]

            return lower

        trained, shapes = rollout(cfg.sampling, False)
        kept = jax.eval_shape(lambda x: x, state)  # a step donates the arrays
        others = functools.partial(step_programs, step, kept)
        if not rollouts:
            return [lambda: others(jax.eval_shape(trained, *shapes))] if updates else []
        evaluations = eval_samplings(cfg).values() if env_runner.held_out_size else ()
        evaluated = [compiler(*rollout(sampling, True), lambda tree: []) for sampling in evaluations]
        return [compiler(trained, shapes, others if updates else lambda tree: []), *evaluated]

    return programs


class Ahead:
    """Threads that compile, as many as there are cores. An error is left to the run, which meets the same one.

    The end of a ``with`` block waits for compilations in progress, and compiles nothing more.
    """

    def __init__(self) -> None:
        self._todo: list[Compiler] = []
        self._threads: list[threading.Thread] = []
        self._running, self._ended = 0, False
        self._changed = threading.Condition()

    def begin(self, compilers: list[Compiler]) -> None:
        """Begin to compile, and return at once. A run of several processes compiles nothing.

        Args:
            compilers: For instance those of `programs_of`. One that returns a list of compilers is followed by these.
        """
        if processes.count() > 1 or not compilers:
            return
        self._todo = list(compilers)
        count = os.cpu_count() or 1
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name=f"compile ahead {i}") for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._todo or not self._running)
                if not self._todo:
                    return
                compiler = self._todo.pop(0)
                self._running += 1
            more: object = None
            with contextlib.suppress(Exception):  # the run meets the same error where it can be shown
                more = compiler()
            with self._changed:
                self._running -= 1
                if isinstance(more, list) and not self._ended:
                    self._todo += more
                self._changed.notify_all()

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
        with self._changed:
            self._todo.clear()
            self._ended = True
        self.wait()
