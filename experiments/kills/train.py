"""`jaxmarl-llm train` that also writes rollouts.txt and events.txt to its workdir, one file for each process.

A line of rollouts: completed steps, "held_out" or "training", SHA-256 of the sampled tokens, their log-probabilities
and the rewards. A line of events: what has just begun, or the number of completed steps.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxmarl_llm.cli import config_flags, train


def write(name: str, *words: object) -> None:
    """Append one line with one call of the kernel, so that a kill leaves whole lines."""
    flags = config_flags.FLAGS
    path = f"{flags.workdir}/{name}{flags.process or 0}.txt"
    with contextlib.suppress(FileNotFoundError):  # before the workdir is there
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, (" ".join(map(str, words)) + "\n").encode())
        os.close(file)


def spy() -> None:
    """Make rollouts and stages write."""
    from jaxmarl_llm.distributed import deadlines
    from jaxmarl_llm.rollout.array_runner import ArrayEnvRunner
    from jaxmarl_llm.rollout.host_runner import HostEnvRunner

    def recorded(play: Any) -> Any:
        @functools.wraps(play)
        def wrapped(*args: Any, version: int = 0, held_out: bool = False, **more: Any) -> Any:
            part = "held_out" if held_out else "training"
            write("events", part)
            played = play(*args, version=version, held_out=held_out, **more)
            steps, moves = played.tree.steps, played.tree.transitions
            found = hashlib.sha256()
            for array in (steps.tokens, steps.valid, steps.logprobs, moves.valid, *moves.rewards.values()):
                found.update(np.ascontiguousarray(array).tobytes())
            write("rollouts", version, part, found.hexdigest())
            return played

        return wrapped

    def told(stage: Any) -> Any:
        @contextlib.contextmanager
        def wrapped(name: str) -> Iterator[None]:
            write("events", name)
            with stage(name):
                yield

        return wrapped

    def counted(set_step: Any) -> Any:
        def wrapped(step: int) -> None:
            write("events", "step", step)
            set_step(step)

        return wrapped

    for kind in (ArrayEnvRunner, HostEnvRunner):
        setattr(kind, "play", recorded(kind.play))  # noqa: B010 (to types, a method is no variable)
    deadlines.stage = told(deadlines.stage)
    deadlines.set_step = counted(deadlines.set_step)


if __name__ == "__main__":
    spy()
    config_flags.run(train.main)
