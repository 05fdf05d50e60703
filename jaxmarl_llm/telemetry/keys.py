"""What a run says about itself while it runs: metrics.jsonl, TensorBoard, W&B, a live panel.

Keys are paths; everything that reads metrics (panel, report, notebooks) goes by these patterns:

    reward/<component>  reward/total     mean rewards            success  success_greedy   share of tasks solved
    eval/<anything>                      on held-out tasks
    agent/<role>/{reward, variance, zero_variance, entropy, length, selected, updated, truncated,
                  memory_size, memory_hit, grad_norm, kl, clip_fraction}
    node/<turn>/{variance, zero_variance, selected}
    critic/<model>/{loss, value, explained_variance}
    scheme/<name>                        cooperation schemes, shares of joint actions
    count/{sequences, branch_sequences, prompt_tokens, completion_tokens, env_calls, invalid, launches}
    count/trunk_tokens                   tokens that an epoch of the update sends through the models, without padding
    time/{rollout, reward, update, memory, step}   seconds; written by the logger from its stages
    speed/{rollout, reward, update, step}          tokens per second; written by the logger where counts allow
    nonfinite_metrics                              how many values of this step were NaN or infinite (absent: none)
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmarl_llm import deadlines
from jaxmarl_llm.text import ConfigError

SPARKS = "▁▂▃▄▅▆▇█"
# Panel columns: heading -> (key of the agent, format).
AGENT_COLUMNS = {
    "reward": ("reward", "{:.2f}"),
    "updated": ("updated", "{:.0%}"),
    "entropy": ("entropy", "{:.2f}"),
    "length": ("length", "{:.0f}"),
    "memory": ("memory_size", "{:.0f}"),
    "hit": ("memory_hit", "{:.0%}"),
}


class Logger:
    """Writes every step once, whatever happened to the process before; shows progress every ``interval`` steps.

    ``resume_step`` is the last step of the checkpoint that was restored: later lines, from steps that will run again,
    are dropped. None starts anew; a metrics file that is already there is kept as ``metrics.jsonl.old``. A backend
    that fails is named once and never stops training; lines of metrics.jsonl wait in memory until the disk takes them.
    ``workdir`` is the run's folder. On several hosts only the first has ``primary=True``; the others measure stages and
    write nothing.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        *,
        resume_step: int | None,
        total_steps: int,
        interval: int = 1,
        tensorboard: bool = True,
        wandb_project: str | None = None,
        run_id: str | None = None,
        primary: bool = True,
        console: Any = None,
    ):
        if "://" in str(workdir):
            raise ConfigError(
                f"workdir: metrics are appended to a file, which {str(workdir)!r} cannot do; use a folder"
            )
        self.workdir, self._primary = Path(workdir), primary
        self._total, self._interval = total_steps, max(interval, 1)
        self._last = -1 if resume_step is None else resume_step
        self._stages: dict[str, float] = {}
        self._seen: set[str] = set()
        self._warned: set[str] = set()
        self._rewards: deque[float] = deque(maxlen=60)
        self._step_times: deque[float] = deque(maxlen=20)
        self._clock = time.perf_counter()
        self._backends: dict[str, tuple[Callable[[int, dict], None], Callable[[], None]]] = {}
        self._live: Any = None
        if not primary:
            return
        from rich.console import Console

        self._console = console or Console()
        self.workdir.mkdir(parents=True, exist_ok=True)
        self._file = _JsonLines(self.workdir / "metrics.jsonl", resume_step)
        self._backends["metrics.jsonl"] = (self._file.write, self._file.flush)
        if tensorboard:
            self._guard("TensorBoard", lambda: self._open_tensorboard(resume_step))
        if wandb_project:
            self._guard("W&B", lambda: self._open_wandb(wandb_project, run_id))

    def __enter__(self) -> Logger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, float | None]:
        """Write one step, with the times of the stages since the last call; returns the line that was written."""
        if step <= self._last:
            raise ValueError(f"step {step} was logged after step {self._last}: each step is logged once, in order")
        now = time.perf_counter()
        times = {**self._stages, "step": now - self._clock}
        self._last, self._clock, self._stages = step, now, {}
        self._step_times.append(times["step"])
        row = {**metrics, **{f"time/{k}": v for k, v in times.items()}, **throughput(metrics, times)}
        clean = {key: _scalar(key, value) for key, value in row.items()}
        nonfinite = sum(value is None for value in clean.values())
        if nonfinite:
            clean["nonfinite_metrics"] = nonfinite
        for name, (write, _) in self._backends.items():
            self._guard(name, functools.partial(write, step, clean))
        if self._primary:
            self._show(step, clean)
        return clean

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a section as ``time/<name>``, which also has its deadline (`deadlines.stage`). Results must be ready
        (``block_until_ready``) before the section ends.
        """
        start = time.perf_counter()
        try:
            with deadlines.stage(name):
                yield
        finally:
            self._stages[name] = self._stages.get(name, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def first(self, name: str) -> Iterator[None]:
        """Say that ``name`` is being compiled, the first time; so that nobody takes the first step for a hang."""
        if name in self._seen or not self._primary:
            yield
            return
        self._seen.add(name)
        start = time.perf_counter()
        self.print(f"compiling {name}…")
        yield
        self.print(f"compiled {name} in {time.perf_counter() - start:.1f} s")

    def print(self, text: str) -> None:
        """A line of plain text; above the panel where there is one."""
        if self._primary:
            self._guard("the console", lambda: self._console.print(text, markup=False, highlight=False, soft_wrap=True))

    def close(self) -> None:
        """Flush and close everything. The logger is also a context manager."""
        for name, (_, close) in self._backends.items():
            self._guard(name, close)
        self._backends = {}
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except ConfigError:
            raise
        except Exception as error:  # a lost connection or a full disk must not cost the run
            if name not in self._warned:
                self._warned.add(name)
                logging.getLogger(__name__).warning("%s fails, training goes on: %r", name, error)

    def _open_tensorboard(self, resume_step: int | None) -> None:
        from tensorboardX import SummaryWriter

        folder = self.workdir / "tensorboard"
        # Steps from purge_step on come again: TensorBoard hides what an earlier process wrote for them.
        purge = None if not folder.is_dir() else 0 if resume_step is None else resume_step + 1
        # tensorboardX names a file by the second: a quick restart would write over the file of the process before.
        writer = SummaryWriter(str(folder), purge_step=purge, filename_suffix=f".{uuid.uuid4().hex[:8]}")

        def write(step: int, row: Mapping[str, float | None]) -> None:
            for key, value in row.items():
                if value is not None:
                    writer.add_scalar(key, value, step)
            writer.flush()

        self._backends["TensorBoard"] = (write, writer.close)

    def _open_wandb(self, project: str, run_id: str | None) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("wandb_project: wandb is not installed; pip install 'jaxmarl_llm[wandb]'") from None
        stored = self.workdir / "wandb_id.txt"
        run_id = stored.read_text().strip() if stored.is_file() else run_id or uuid.uuid4().hex[:12]
        stored.write_text(run_id + "\n")
        run = wandb.init(project=project, id=run_id, resume="allow", dir=str(self.workdir))
        # A metric of its own as the axis: W&B drops rows whose built-in step goes back, as it does on resume.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        finite = lambda row: {key: value for key, value in row.items() if value is not None}
        self._backends["W&B"] = (lambda step, row: run.log({"step": step, **finite(row)}), run.finish)

    def _show(self, step: int, row: Mapping[str, float | None]) -> None:
        if row.get("reward/total") is not None:
            self._rewards.append(float(row["reward/total"] or 0.0))
        if step % self._interval and step != self._total:
            return
        if self._console.is_terminal:
            self._guard("the console", lambda: self._update_panel(step, row))
        else:
            self.print(self._line(step, row))

    def _eta(self, step: int) -> str:
        seconds = sorted(self._step_times)[len(self._step_times) // 2]  # median: the compiling step is no guide
        return _duration(seconds * max(self._total - step, 0))

    def _line(self, step: int, row: Mapping[str, float | None]) -> str:
        keys = ["reward/total", "success", "success_greedy", *(k for k in row if k.startswith("eval/")), "speed/step"]
        names = {"reward/total": "reward", "speed/step": "tokens/s"}
        shown = " ".join(f"{names.get(k, k)} {_short(row[k])}" for k in keys if k in row)
        return f"step {step}/{self._total} {shown} {_short(row['time/step'])} s/step eta {self._eta(step)}"

    def _update_panel(self, step: int, row: Mapping[str, float | None]) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        head = Text(f"reward {_short(row.get('reward/total'))}  {sparkline(self._rewards)}")
        head.append("".join(f"   {k} {_short(v)}" for k, v in row.items() if re.match("success|eval/", k)))
        agents = Table("agent", box=None, padding=(0, 2), header_style="dim")
        for heading in AGENT_COLUMNS:
            agents.add_column(heading, justify="right")
        for role in roles_of(row):
            cells = ((row.get(f"agent/{role}/{key}"), form) for key, form in AGENT_COLUMNS.values())
            agents.add_row(role, *("–" if value is None else form.format(value) for value, form in cells))
        speeds = "   ".join(f"{k[6:]} {_short(v)} tokens/s" for k, v in row.items() if k.startswith("speed/"))
        split = "   ".join(f"{k[5:]} {v:.1f} s" for k, v in row.items() if k.startswith("time/") and v is not None)
        body = Group(head, Text(), agents, Text(), Text(speeds, style="dim"), Text(split, style="dim"))
        title = f"step {step}/{self._total} · {_short(row['time/step'])} s/step · eta {self._eta(step)}"
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(Panel(body, title=title, title_align="left", expand=False), refresh=True)


class _JsonLines:
    """metrics.jsonl: one object a line, each step once."""

    def __init__(self, path: Path, resume_step: int | None):
        self._path = path
        self._pending: list[bytes] = []
        if path.exists() and resume_step is None:
            os.replace(path, path.with_suffix(".jsonl.old"))
        elif path.exists():
            kept = [row for row in read_metrics(path.parent, allow_empty=True) if row["step"] <= resume_step]
            partial = path.with_suffix(".jsonl.tmp")
            with open(partial, "wb") as file:
                file.writelines(_encode(row) for row in kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        self._size = path.stat().st_size if path.exists() else 0

    def write(self, step: int, row: Mapping[str, float | None]) -> None:
        self._pending.append(_encode({"step": step, **row}))
        self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        with open(self._path, "ab") as file:
            file.truncate(self._size)  # a write that failed half-way must not leave half a line
            file.write(b"".join(self._pending))
            file.flush()
            self._size = file.tell()
        self._pending = []


def read_metrics(workdir: str | os.PathLike, *, allow_empty: bool = False) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. A torn last line (the machine died, or it is being written) is left out."""
    path = Path(workdir) / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; is this the workdir of a run?")
    lines = path.read_bytes().splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        elif number < len(lines):
            raise ConfigError(f"{path}:{number}: not a JSON object with a step")
    if not rows and not allow_empty:
        raise ConfigError(f"{path}: no step has been logged yet")
    return rows


def throughput(counts: Mapping[str, float], times: Mapping[str, float]) -> dict[str, float]:
    """Tokens per second of each stage. Keys with or without their ``count/`` and ``time/``; absent ones are left out.

    Rollout and reward are measured by the tokens completed; update and the whole step by prompts and completions.
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


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of bars, the lowest and the highest of them at the ends of the scale."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high == low:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[int((value - low) / (high - low) * (len(SPARKS) - 1) + 0.5)] for value in values)


def _encode(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n").encode()


def _scalar(key: str, value: Any) -> float | int | None:
    """A Python number of any scalar (NumPy and JAX arrays of no dimension too); None where it is not finite."""
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, (int, float)):
        raise TypeError(f"{key}: a metric is a number, got {type(value).__name__}")
    return value if math.isfinite(value) else None


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{hours}h{minutes % 60:02d}m" if hours else f"{minutes}m" if minutes else f"{seconds:.0f}s"


def roles_of(keys: Iterable[str]) -> list[str]:
    """Roles in the order in which their keys come."""
    return list(dict.fromkeys(key.split("/")[1] for key in keys if re.match(r"agent/[^/]+/", key)))
