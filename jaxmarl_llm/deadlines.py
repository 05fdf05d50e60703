"""What this process is doing, since when, and how long it may take: looked at by the watch of `processes`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxmarl_llm.text import ConfigError


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a stage of a step counts as hanging and the run ends; 0: never."""

    compile: float = 3600.0  # of one program; not part of the stage that needs it
    rollout: float = 7200.0  # also of an evaluation
    reward: float = 3600.0
    update: float = 7200.0  # memory included
    save: float = 3600.0  # checkpoints, metrics, and waiting for the other processes at the end of a step

    def check(self, path: str) -> None:
        if min(self.compile, self.rollout, self.reward, self.update, self.save) < 0:
            raise ConfigError(f"{path}: expected seconds >= 0 (0: no deadline)")


@dataclass
class Stage:
    name: str
    since: float
    apart: float = 0.0  # seconds since then that went into compiling and other stages


@dataclass
class Work:
    """What this process is doing."""

    stages: list[Stage] = field(default_factory=list)
    compiling: float | None = None  # since when
    limits: Deadlines | None = None
    step: int = 0

    def begin(self, name: str) -> None:
        self.stages.append(Stage(name, time.monotonic()))
        self.compiling = None

    def end(self) -> None:
        done = self.stages.pop()
        self.compiling = None
        if self.stages:
            self.stages[-1].apart += time.monotonic() - done.since

    def compiles(self, event: str, seconds: float, **_: Any) -> None:
        """Listener of JAX: a program was lowered, so that it is compiled now, or has been compiled."""
        if event.endswith("/jaxpr_to_mlir_module_duration"):
            self.compiling = time.monotonic()
        elif event.endswith("/backend_compile_duration"):
            self.compiling = None
            if self.stages:
                self.stages[-1].apart += seconds

    def said(self) -> tuple[str, float]:
        """The innermost stage, or compiling, and seconds in it."""
        now, since = time.monotonic(), self.compiling
        if since is not None:
            return "compile", now - since
        for top in self.stages[-1:]:  # the main thread may end it now
            return top.name, now - top.since - top.apart
        return "no stage", 0.0

    def late(self) -> str | None:
        """What takes longer than it may."""
        name, seconds = self.said()
        limit = getattr(self.limits, name, 0.0) if self.limits else 0.0
        return f"longer than config.run.deadlines.{name}={limit:g}" if limit and seconds > limit else None

    def __str__(self) -> str:
        name, seconds = self.said()
        return f"in {name} after step {self.step}, for {seconds:.0f} s"


WORK = Work()


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """What runs inside is ``name`` to the deadlines: a field of `Deadlines`, anything else counts as ``update``.

    A stage inside of another one is not part of it.
    """
    WORK.begin(name if name in Deadlines.__dataclass_fields__ else "update")
    try:
        yield
    finally:
        WORK.end()


def at(step: int) -> None:
    """For messages: ``step`` steps are done."""
    WORK.step = step
