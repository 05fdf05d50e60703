"""Stages of a training step and their deadlines.

A stage is a part of a step, such as rollout or update. The watchdog thread of `processes` reads the current stage and
ends the process when the stage exceeds its deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from jaxmarl_llm.config import at_least


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a stage counts as hanging and the run ends. 0 means no deadline."""

    compile: float = 3600.0  # one program; this time is not part of the stage that needs the program
    rollout: float = 7200.0  # rollouts of training and of evaluation
    reward: float = 3600.0  # from the rewards of a batch to its advantages
    update: float = 7200.0  # includes the update of the agents' memory
    save: float = 3600.0  # checkpoints, metrics, and waiting for other processes at the end of a step

    def check(self, path: str) -> None:
        """Raise ConfigError for a negative deadline. ``path``: name of these settings in the message."""
        for name in ("compile", "rollout", "reward", "update", "save"):
            at_least(f"{path}.{name}", getattr(self, name), 0)


@dataclass
class Stage:
    """One stage that is in progress.

    name: a field of `Deadlines`. since: start, in seconds of ``time.monotonic``. excluded: seconds since the start that
    were spent on compilation and on stages inside this one.
    """

    name: str
    since: float
    excluded: float = 0.0


@dataclass
class Progress:
    """Stages and compilations that are in progress in this process.

    stages: the nested stages, innermost last. compiling: thread id -> start of the compilation in that thread; models
    may compile at the same time. span: start of the period in which at least one thread compiles. limits: the deadlines
    in force; None outside a run. step: number of completed training steps.
    """

    stages: list[Stage] = field(default_factory=list)
    compiling: dict[int, float] = field(default_factory=dict)
    span: float = 0.0
    limits: Deadlines | None = None
    step: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, name: str) -> None:
        """Start a stage named ``name``."""
        self.stages.append(Stage(name, time.monotonic()))
        self._forget_uncompiled()

    def end(self) -> None:
        """End the innermost stage. Its time is excluded from the stage around it."""
        done = self.stages.pop()
        self._forget_uncompiled()
        if self.stages:
            self.stages[-1].excluded += time.monotonic() - done.since

    def on_compile_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Record that this thread lowered a program, which JAX then compiles, or finished compiling one.

        A listener for ``jax.monitoring``. event: the name of JAX's event. duration_secs: the seconds that JAX measured.
        """
        now, thread = time.monotonic(), threading.get_ident()
        with self.lock:
            if event.endswith("/jaxpr_to_mlir_module_duration"):
                self.span = self.span if self.compiling else now
                self.compiling[thread] = now
            elif event.endswith("/backend_compile_duration"):
                known = self.compiling.pop(thread, None) is not None
                if self.stages and not self.compiling:
                    self.stages[-1].excluded += now - self.span if known else duration_secs

    def _forget_uncompiled(self) -> None:
        """Forget programs that were lowered but not compiled; at a stage boundary none is in progress."""
        with self.lock:
            self.compiling.clear()

    def current_stage(self) -> tuple[str, float]:
        """Name of the innermost stage, or "compile", and the seconds spent in it."""
        with self.lock:
            since = min(self.compiling.values(), default=None)
        now = time.monotonic()
        if since is not None:
            return "compile", now - since
        for top in self.stages[-1:]:  # a slice: the main thread may end the last stage at any moment
            return top.name, now - top.since - top.excluded
        return "no stage", 0.0

    def late(self) -> str | None:
        """Message naming the stage that exceeded its deadline, or None."""
        name, seconds = self.current_stage()
        limit = getattr(self.limits, name, 0.0) if self.limits else 0.0
        return f"longer than config.run.deadlines.{name}={limit:g}" if limit and seconds > limit else None

    def __str__(self) -> str:
        name, seconds = self.current_stage()
        return f"in {name} after step {self.step}, for {seconds:.0f} s"


PROGRESS = Progress()


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Context manager: time its body as one stage.

    name: a field of `Deadlines`; any other name counts as "update". Time in a stage inside another stage counts for the
    inner stage only.
    """
    PROGRESS.begin(name if name in Deadlines.__dataclass_fields__ else "update")
    try:
        yield
    finally:
        PROGRESS.end()


def set_step(step: int) -> None:
    """Record that ``step`` training steps are complete. Messages of the watchdog name this number."""
    PROGRESS.step = step
