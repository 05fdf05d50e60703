"""What this process is doing, since when, and how long it may take: looked at by the watch of `processes`."""

from __future__ import annotations

import contextlib
import threading
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
    compiling: dict[int, float] = field(default_factory=dict)  # thread -> since when: models may compile at once
    span: float = 0.0  # since when any of them has
    limits: Deadlines | None = None
    step: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, name: str) -> None:
        self.stages.append(Stage(name, time.monotonic()))
        self._none_compiles()

    def end(self) -> None:
        done = self.stages.pop()
        self._none_compiles()
        if self.stages:
            self.stages[-1].apart += time.monotonic() - done.since

    def compiles(self, event: str, seconds: float, **_: Any) -> None:
        """Listener of JAX: a program was lowered, so that it is compiled now, or has been compiled, in this thread."""
        now, thread = time.monotonic(), threading.get_ident()
        with self.lock:
            if event.endswith("/jaxpr_to_mlir_module_duration"):
                self.span = self.span if self.compiling else now
                self.compiling[thread] = now
            elif event.endswith("/backend_compile_duration"):
                known = self.compiling.pop(thread, None) is not None
                if self.stages and not self.compiling:
                    self.stages[-1].apart += now - self.span if known else seconds

    def _none_compiles(self) -> None:
        """A stage begins or ends: what was lowered and not compiled, never will be."""
        with self.lock:
            self.compiling.clear()

    def said(self) -> tuple[str, float]:
        """The innermost stage, or compiling, and seconds in it."""
        with self.lock:
            since = min(self.compiling.values(), default=None)
        now = time.monotonic()
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
