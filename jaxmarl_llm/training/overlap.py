"""Plays the rollout of the next step in a thread while this step updates: see ``config.staleness``."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import jax

from jaxmarl_llm.rollout.env_runner import EnvRunner
from jaxmarl_llm.rollout.watching import watched_later
from jaxmarl_llm.types import PyTree

T = TypeVar("T")
Inputs = tuple[int, PyTree]  # number of a step, and the arrays that its rollout depends on


class NextRollout:
    """At most one rollout that was begun ahead.

    A rollout is taken only where its inputs are those that the step has: the same arrays, not equal ones. So a state
    from elsewhere, as one of a checkpoint, is played anew. Keys and parameters are the same, and so are the samples.

    Args:
        env_runner: Runner that plays. Its watcher sees a rollout when the rollout is taken.
    """

    def __init__(self, env_runner: EnvRunner):
        self._runner = env_runner
        self._begun: tuple[Inputs, Future] | None = None

    def begin(self, inputs: Inputs, play: Callable[[], Any]) -> None:
        """Begin to play, and return at once.

        Args:
            inputs: Number of the step, and the arrays that the rollout depends on.
            play: Plays. It is called in a thread.
        """
        self.drop()
        future: Future = Future()

        def work() -> None:
            try:
                with watched_later() as seen:
                    future.set_result((play(), seen))
            except BaseException as error:  # of any kind: the step that takes the rollout raises it
                future.set_exception(error)

        self._begun = inputs, future
        threading.Thread(target=work, name="next rollout").start()  # the interpreter waits for it at its end

    def take(self, inputs: Inputs, play: Callable[[], T]) -> T:
        """The result of ``play``, which may have been called already. Raises what it raised.

        Args:
            inputs: As in `begin`.
            play: Plays, where no rollout of these inputs was begun.
        """
        if self._begun is None:
            return play()
        begun, future = self._begun
        if not _same(begun, inputs):
            self.drop()
            return play()
        self._begun = None
        result, seen = future.result()
        for arguments in seen:
            self._runner.see(*arguments)
        return result

    def wait(self) -> None:
        """Return when no rollout is in progress. The rollout stays, and can be taken."""
        if self._begun is not None:
            self._begun[1].exception()

    def drop(self) -> None:
        """Wait for the rollout in progress, and forget it."""
        self.wait()
        self._begun = None


def _same(one: Inputs, other: Inputs) -> bool:
    """Whether two inputs have one number and the same arrays."""
    (number, arrays), (wanted, others) = one, other
    mine, theirs = jax.tree.leaves(arrays), jax.tree.leaves(others)
    return number == wanted and len(mine) == len(theirs) and all(map(operator.is_, mine, theirs))
