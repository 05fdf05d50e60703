"""The metrics of a run while it is in progress: each step is written once, to every backend.

Backends are JSON lines, TensorBoard, W&B, the console (`backends`), and those that a user passes. Keys are paths.
`keys.KEYS` lists them all; panel, report and notebooks read metrics by these patterns.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmarl_llm.distributed import deadlines
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry.backends import Backend, Panel, TensorBoard, Trackio, Wandb
from jaxmarl_llm.telemetry.completion_table import table_of
from jaxmarl_llm.telemetry.forecast import Schedule
from jaxmarl_llm.telemetry.metrics_file import JsonLines
from jaxmarl_llm.telemetry.rollouts import Row

# What JAX reports of a compilation: tracing, lowering, and compiling or reading a program that is kept.
COMPILES = tuple(
    f"/jax/core/compile/{part}_duration" for part in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)
CLOCK = 1e-4  # seconds by which JAX's clock and ours may differ


class Logger:
    """Writes the metrics of every step once, to all backends, also when the process is killed and resumed.

    ``workdir``: folder of the run. ``resume_step``: step of the checkpoint that was restored; lines of later steps,
    which will run again, are dropped. None starts anew and renames an old metrics file to ``metrics.jsonl.old``.
    ``total_steps``: of the run. ``schedule``: its phases, evaluations and saves, for the time to the end; None: one
    phase of ``total_steps``. ``interval``: steps between two updates of the console. ``tensorboard``: write TensorBoard
    files. ``wandb_project``: of W&B; None: no W&B. ``run_id``: of the W&B run; None: a random one.
    ``trackio_project``: of Trackio; None: no Trackio.
    ``config``: configuration of the run as nested dictionaries, which W&B and Trackio show.
    ``primary``: True on the first host only; on other hosts the logger measures stages and writes nothing.
    ``console``: of rich; None: standard output. ``backends``: your own, which the logger also closes.

    A backend that fails is named once in a warning and never stops training. Lines of metrics.jsonl wait in memory
    until the disk takes them.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        resume_step: int | None,
        total_steps: int,
        schedule: Schedule | None = None,
        interval: int = 1,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        run_id: str | None = None,
        trackio_project: str | None = None,
        config: Mapping[str, Any] | None = None,
        primary: bool = True,
        console: Any = None,
        backends: Sequence[Backend] = (),
    ):
        if "://" in str(workdir):
            raise ConfigError(
                f"workdir: metrics are appended to a file, which {str(workdir)!r} cannot do; use a folder"
            )
        self.workdir = Path(workdir)
        self._last = -1 if resume_step is None else resume_step
        self._stages: dict[str, float] = {}
        self._compiles: list[tuple[float, float]] = []  # start and end of each compilation of the step, in order
        self._thread = threading.get_ident()
        self._seen: set[str] = set()
        self._warned: set[str] = set()
        self._clock = time.perf_counter()
        self._backends: list[Backend] = []
        self._panel: Panel | None = None
        if not primary:
            return
        from rich.console import Console

        self._panel = Panel(console or Console(), schedule or total_steps, interval)
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._backends.append(JsonLines(self.workdir / "metrics.jsonl", resume_step))
        if tensorboard:
            self._open(TensorBoard.name, lambda: TensorBoard(self.workdir, resume_step))
        if wandb_project is not None and wandb_project:
            self._open(Wandb.name, lambda: Wandb(self.workdir, wandb_project, run_id, config or {}))
        if trackio_project is not None and trackio_project:
            self._open(Trackio.name, lambda: Trackio(self.workdir, trackio_project, config or {}))
        self._backends += [*backends, self._panel]

    def __enter__(self) -> Logger:
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        import jax

        jax.monitoring.unregister_event_duration_listener(self._on_event)
        self.close()

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Take in the seconds of a compilation, for ``time/compile``. A listener for ``jax.monitoring``.

        A function that is traced inside another one is reported first, and its seconds are part of the other's. A
        compilation in another thread is left out, because the step does not wait for the compilation.
        """
        if event in COMPILES and threading.get_ident() == self._thread:
            now = time.perf_counter()
            start = now - duration_secs
            while self._compiles and self._compiles[-1][0] >= start - CLOCK:
                self._compiles.pop()
            self._compiles.append((start, now))

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, float | None]:
        """Write the metrics of one step with the times of the stages since the last call; returns what was written.

        ``step``: larger than that of the last call. ``metrics``: numbers, or arrays without dimensions, by key.
        """
        if step <= self._last:
            raise ValueError(f"step {step} was logged after step {self._last}: each step is logged once, in order")
        now = time.perf_counter()
        times = {**self._stages, "step": now - self._clock}
        if self._compiles:
            times["compile"] = times.get("compile", 0.0) + sum(end - start for start, end in self._compiles)
        self._last, self._clock, self._stages, self._compiles = step, now, {}, []
        row = {**metrics, **{f"time/{k}": v for k, v in times.items()}, **throughput(metrics, times)}
        clean = {key: _scalar(key, value) for key, value in row.items()}
        nonfinite = sum(value is None for value in clean.values())
        if nonfinite:
            clean["nonfinite_metrics"] = nonfinite
        for backend in self._backends:
            self._guard(_name(backend), functools.partial(backend.write, step, clean))
        return clean

    def log_completions(self, step: int, rows: Sequence[Row]) -> None:
        """Show completions of a step in the backends that have tables.

        ``step``: as in `log`. ``rows``: rows of the step's rollout, of any kinds.
        """
        table = table_of(rows)
        for backend in self._backends:
            if (write := getattr(backend, "write_completions", None)) is not None:
                self._guard(_name(backend), functools.partial(write, step, table))

    @contextlib.contextmanager
    def stage(self, name: str, deadline: str | None = None) -> Iterator[None]:
        """Time a section as ``time/<name>``; the section also has a deadline (`deadlines.stage`).

        Results must be ready (``block_until_ready``) before the section ends.

        ``deadline``: stage whose deadline holds; None: that of ``name``.
        """
        start = time.perf_counter()
        try:
            with deadlines.stage(deadline or name):
                yield
        finally:
            self._stages[name] = self._stages.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def first(self, name: str) -> Iterator[None]:
        """Print that ``name`` is compiled when it runs for the first time, which takes far longer than later runs."""
        if name in self._seen or self._panel is None:
            yield
            return
        self._seen.add(name)
        start = time.perf_counter()
        self.print(f"compiling {name}…")
        yield
        self.print(f"compiled {name} in {time.perf_counter() - start:.1f} s")

    def print(self, text: str) -> None:
        """Print a line of plain text, above the panel if there is one."""
        if self._panel is not None:
            self._guard(Panel.name, functools.partial(self._panel.print, text))

    def close(self) -> None:
        """Close all backends. The logger is also a context manager."""
        for backend in self._backends:
            self._guard(_name(backend), backend.close)
        self._backends = []

    def _open(self, name: str, make: Callable[[], Backend]) -> None:
        """Add a backend; one that fails to open is left out with a warning."""
        self._guard(name, lambda: self._backends.append(make()))

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        """Run an action of the backend ``name``; its first error becomes a warning."""
        try:
            action()
        except ConfigError:
            raise
        except Exception as error:  # a lost connection or a full disk must not end the run
            if name not in self._warned:
                self._warned.add(name)
                logging.getLogger(__name__).warning("%s fails, training goes on: %r", name, error)


def _name(backend: Backend) -> str:
    return getattr(backend, "name", type(backend).__name__)


def throughput(counts: Mapping[str, float], times: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of each stage, as ``speed/<stage>``; stages without a time are left out.

    ``counts``: completion_tokens and prompt_tokens, with or without ``count/``. ``times``: seconds of the stages, with
    or without ``time/``. Rollout and reward count completion tokens; update and step count prompt tokens too.
    """
    completed, prompts = (
        float(counts.get(f"count/{key}", counts.get(key, 0.0))) for key in ("completion_tokens", "prompt_tokens")
    )
    if not completed:
        return {}
    times = {key.removeprefix("time/"): value for key, value in times.items()}
    everything = completed + prompts
    tokens = {"rollout": completed, "reward": completed, "update": everything, "step": everything}
    return {f"speed/{name}": n / times[name] for name, n in tokens.items() if times.get(name, 0.0) > 0.0}


def _scalar(key: str, value: Any) -> float | int | None:
    """A Python number of any scalar (NumPy and JAX arrays of no dimension too); None where it is not finite."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, (int, float)):
        raise TypeError(f"{key}: a metric is a number, got {type(value).__name__}")
    return value if math.isfinite(value) else None
