"""Backends of the logger: where the metrics of a step are written.

A backend of your own is any object with the two methods of `Backend`; pass it as ``Logger(..., backends=[...])``.
"""

from __future__ import annotations

import re
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry.completion_table import COLUMNS, Table, markdown
from jaxmarl_llm.telemetry.forecast import Forecast, Schedule
from jaxmarl_llm.telemetry.metrics_file import roles_of

Metrics = Mapping[str, float | None]

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

# Losses of phases without rewards: key -> name on the console.
LOSSES = {"sft/nll": "loss", "imitation/nll": "loss", "dpo/loss": "loss"}


class Backend(Protocol):
    """A destination of metrics.

    The logger calls ``write`` once for each step, in increasing order of steps, and ``close`` at the end. An exception
    is reported once as a warning and never stops training; a `ConfigError` does.
    ``name`` (optional, a string) is used in that warning, the class's name otherwise. A backend may also have
    ``write_completions(step, table)``. It is called with a `Table` where rollouts of a step are kept, before ``write``.
    """

    def write(self, step: int, metrics: Metrics) -> None:
        """Write the metrics of one step. A value is None where it was NaN or infinite."""

    def close(self) -> None:
        """Write what is still waiting and free all resources."""


class TensorBoard:
    """TensorBoard event files in ``workdir``/tensorboard. Values that were not finite are left out.

    ``resume_step``: the last step that is kept of an earlier process; None: none. TensorBoard hides the later ones.
    """

    name = "TensorBoard"

    def __init__(self, workdir: Path, resume_step: int | None):
        from tensorboardX import SummaryWriter

        folder = workdir / "tensorboard"
        purge = None if not folder.is_dir() else 0 if resume_step is None else resume_step + 1
        # tensorboardX names a file by the second: a quick restart would overwrite the file of the process before.
        self._writer = SummaryWriter(str(folder), purge_step=purge, filename_suffix=f".{uuid.uuid4().hex[:8]}")

    def write(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def write_completions(self, step: int, table: Table) -> None:
        self._writer.add_text("completions", markdown(table), step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights and Biases. Values that were not finite are left out.

    ``project``: of W&B. ``run_id``: of the run; None: a random one. The id is stored in ``workdir``/wandb_id.txt, and a
    later process with the same ``workdir`` continues that run. ``config``: configuration of the run, which W&B shows;
    its recipe and environment are tags. The run has the name of the folder. Raises ConfigError when wandb is not
    installed.
    """

    name = "W&B"

    def __init__(self, workdir: Path, project: str, run_id: str | None, config: Mapping[str, Any]):
        try:
            import wandb
        except ImportError:
            raise ConfigError("wandb_project: wandb is not installed; pip install 'jaxmarl_llm[wandb]'") from None
        stored = workdir / "wandb_id.txt"
        run_id = stored.read_text().strip() if stored.is_file() else run_id or uuid.uuid4().hex[:12]
        stored.write_text(run_id + "\n")
        tags = [tag for tag in (config.get("recipe"), config.get("env", {}).get("name")) if tag]
        shown = {"name": workdir.resolve().name, "config": dict(config), "tags": tags}
        self._run = wandb.init(project=project, id=run_id, resume="allow", dir=str(workdir), **shown)
        self._table = wandb.Table
        # A metric of its own as the axis: W&B drops rows whose built-in step decreases, as it does after a resume.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log({"step": step, **{key: value for key, value in metrics.items() if value is not None}})

    def write_completions(self, step: int, table: Table) -> None:
        rows = [list(row) for row in table.rows]
        self._run.log({"step": step, "completions": self._table(columns=list(COLUMNS), data=rows)})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of Trackio, which keeps metrics on this machine. Values that were not finite are left out.

    ``project``: of Trackio. ``config``: configuration of the run, which the dashboard shows. The name of the run is the
    folder's with six random digits. ``workdir``/trackio_run.txt keeps the name, and a later process with the same
    ``workdir`` continues that run. Raises ConfigError when trackio is not installed.
    """

    name = "Trackio"

    def __init__(self, workdir: Path, project: str, config: Mapping[str, Any]):
        try:
            import trackio
        except ImportError:
            raise ConfigError("trackio_project: trackio is not installed; pip install 'jaxmarl_llm[trackio]'") from None
        stored = workdir / "trackio_run.txt"
        name = stored.read_text().strip() if stored.is_file() else f"{workdir.resolve().name}-{uuid.uuid4().hex[:6]}"
        stored.write_text(name + "\n")
        self._run = trackio.init(project=project, name=name, config=dict(config), resume="allow", embed=False)
        self._table = trackio.Table

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log({key: value for key, value in metrics.items() if value is not None}, step=step)

    def write_completions(self, step: int, table: Table) -> None:
        rows = [list(row) for row in table.rows]
        self._run.log({"completions": self._table(columns=list(COLUMNS), data=rows)}, step=step)

    def close(self) -> None:
        self._run.finish()


class Panel:
    """Progress on the console: a live panel on a terminal, lines of text elsewhere.

    ``console``: of rich. ``schedule``: of the run; a number is that of its steps. ``interval``: steps between two
    updates; the last step is always shown.
    """

    name = "the console"

    def __init__(self, console: Any, schedule: Schedule | int, interval: int = 1):
        schedule = Schedule((("", schedule),)) if isinstance(schedule, int) else schedule
        self._console, self._total, self._interval = console, schedule.total, max(interval, 1)
        self._forecast = Forecast(schedule)
        self._rewards: deque[float] = deque(maxlen=60)
        self._live: Any = None

    def write(self, step: int, metrics: Metrics) -> None:
        self._forecast.see(step, metrics)
        reward = metrics.get("reward/total")
        if reward is not None:
            self._rewards.append(float(reward))
        if step % self._interval and step != self._total:
            return
        if self._console.is_terminal:
            self._update(step, metrics)
        else:
            self.print(self._line(step, metrics))

    def print(self, text: str) -> None:
        """A line of plain text, above the panel if there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _eta(self, step: int) -> str:
        """Time to the end of the phase. Phases that have not begun are unknown, so the phase is named."""
        name, end = self._forecast.schedule.phase(step)
        left = _duration(self._forecast.seconds(step))
        return left if end == self._total else f"{left} of {name}"

    def _line(self, step: int, row: Metrics) -> str:
        keys = ["reward/total", "success", *(k for k in row if k.startswith("eval/")), *LOSSES, "speed/step"]
        keys += ["count/invalid_share"] if row.get("count/invalid_share") else []
        names = {"reward/total": "reward", "speed/step": "tokens/s", "count/invalid_share": "invalid share", **LOSSES}
        shown = " ".join(f"{names.get(k, k)} {_short(row[k])}" for k in keys if k in row)
        return f"step {step}/{self._total} {shown} {_short(row['time/step'])} s/step eta {self._eta(step)}"

    def _update(self, step: int, row: Metrics) -> None:
        from rich.live import Live
        from rich.panel import Panel as Box

        title = f"step {step}/{self._total} · {_short(row['time/step'])} s/step · eta {self._eta(step)}"
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        body = _body(row, sparkline(self._rewards))
        self._live.update(Box(body, title=title, title_align="left", expand=False), refresh=True)


def _body(row: Metrics, sparks: str) -> Any:
    """The content of the panel: reward, evaluation, one line for each agent, speeds and times."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text(f"reward {_short(row.get('reward/total'))}  {sparks}")
    head.append("".join(f"   {name} {_short(row[key])}" for key, name in LOSSES.items() if key in row))
    head.append("".join(f"   {k} {_short(v)}" for k, v in row.items() if re.match("success|eval/", k)))
    if row.get("count/invalid_share"):
        head.append(f"   invalid share {_short(row['count/invalid_share'])}")
    agents = Table("agent", box=None, padding=(0, 2), header_style="dim")
    for heading in AGENT_COLUMNS:
        agents.add_column(heading, justify="right")
    for role in roles_of(row):
        cells = ((row.get(f"agent/{role}/{key}"), form) for key, form in AGENT_COLUMNS.values())
        agents.add_row(role, *("–" if value is None else form.format(value) for value, form in cells))
    speeds = "   ".join(f"{k[6:]} {_short(v)} tokens/s" for k, v in row.items() if k.startswith("speed/"))
    split = "   ".join(f"{k[5:]} {v:.1f} s" for k, v in row.items() if k.startswith("time/") and v is not None)
    return Group(head, Text(), agents, Text(), Text(speeds, style="dim"), Text(split, style="dim"))


def sparkline(values: Sequence[float]) -> str:
    """Draw ``values`` as a row of bars, one character each. The lowest and the highest value end the scale."""
    low, high = min(values, default=0.0), max(values, default=0.0)
    if high == low:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[int((value - low) / (high - low) * (len(SPARKS) - 1) + 0.5)] for value in values)


def _short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    return f"{hours}h{minutes % 60:02d}m" if hours else f"{minutes}m" if minutes else f"{seconds:.0f}s"
