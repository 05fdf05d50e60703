"""The figure of a run, drawn from metrics.jsonl by the patterns of `keys`, and episodes as Markdown for a reader."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmarl_llm import json_files
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry.metrics_file import read_metrics, roles_of

# Title, unit, and pattern of the keys; the pattern's group is the name of the line.
PANELS = (
    ("Reward", "mean", r"reward/(.+)"),
    ("Tasks solved", "share", r"(success|eval/(?!.*_greedy@).*(?:success|accuracy|solved|pass).*)"),
    ("Evaluation", "", r"(eval/(?!.*(?:success|accuracy|solved|pass|@)).+)"),
    ("Reward by agent", "mean", r"agent/([^/]+)/reward"),
    ("Groups selected", "share", r"agent/([^/]+)/selected"),
    ("Steps in which the agent was updated", "share", r"agent/([^/]+)/updated"),
    ("Reward variance in a group", "", r"agent/([^/]+)/variance"),
    ("Groups without variance", "share", r"agent/([^/]+)/zero_variance"),
    ("Reward variance by turn", "", r"node/([^/]+)/variance"),
    ("Groups without variance by turn", "share", r"node/([^/]+)/zero_variance"),
    ("Groups selected by turn", "share", r"node/([^/]+)/selected"),
    ("Entropy", "nats per token", r"agent/([^/]+)/entropy"),
    ("Length of completions", "tokens", r"agent/([^/]+)/length"),
    ("Completions cut off", "share", r"agent/([^/]+)/truncated"),
    ("KL divergence", "nats per token", r"agent/([^/]+)/kl"),
    ("Gradient norm", "", r"agent/([^/]+)/grad_norm"),
    ("Tokens clipped", "share", r"agent/([^/]+)/clip_fraction"),
    ("Value error", "squared", r"critic/([^/]+)/loss"),
    ("Returns explained by the critic", "share", r"critic/([^/]+)/explained_variance"),
    ("Cooperation schemes", "share", r"scheme/(.+)"),
    ("Memory", "entries", r"agent/([^/]+)/memory_size"),
    ("Memory hits", "share", r"agent/([^/]+)/memory_hit"),
    ("Joint actions without a valid reward", "share", r"count/(invalid_share)"),
    ("Loss of supervised fine-tuning", "nats per token", r"(?:sft|imitation)/([^/]+)/nll"),
    ("Preferences in the right order", "share", r"dpo/([^/]+)/accuracy"),
    ("Throughput", "tokens per second", r"speed/(.+)"),
    ("Time of a step", "seconds", r"time/((?!step$|compile$).+)"),
)
# Phases of a run, by the keys that only their steps have.
PHASES = (
    (r"(sft|imitation)/.+", "supervised fine-tuning"),
    (r"dpo/.+", "preference optimization"),
    (r"reward/.+", "reinforcement learning"),
)
# Keys of older files -> their names now.
RENAMED = {"reward/invalid_share": "count/invalid_share"}
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B8A800")
FIXED_COLOURS = {"total": "#222222", "step": "#222222"}


def report(
    workdir: str | os.PathLike, path: str | os.PathLike | None = "report.png", *, max_rows: int | None = None
) -> Any:
    """Draw metrics.jsonl: one panel for each kind of key that is present. Returns the matplotlib ``Figure``.

    ``workdir``: folder of the run. ``path``: of the image, relative to ``workdir`` unless absolute; None saves nothing.
    ``max_rows``: rows of panels; None draws all. Faint lines are the values, strong lines their running mean. Lines
    break where steps are missing. An agent has the same colour in every panel.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    rows = [_current(row) for row in read_metrics(workdir)]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    panels = []
    for title, unit, pattern in PANELS:
        lines = {m[1]: key for key in keys if (m := re.fullmatch(pattern, key))}
        if lines:
            panels.append((title, unit, _merged(rows, lines)))
    if not panels:
        raise ConfigError(f"{Path(workdir) / 'metrics.jsonl'}: no key that this report knows")
    colours = {role: COLOURS[i % len(COLOURS)] for i, role in enumerate(roles_of(keys))}
    columns = min(3, len(panels))
    if max_rows is not None:
        panels = panels[: columns * max_rows]
    height = -(-len(panels) // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    figure = Figure(figsize=(5.2 * columns, 2.9 * height + 0.5), layout=layout, dpi=110)
    FigureCanvasAgg(figure)  # without pyplot: no global state, no display
    axes = figure.subplots(height, columns, squeeze=False).ravel()
    for axis, (title, unit, lines) in zip(axes, panels):
        _draw(axis, rows, title, unit, lines, colours)
    for axis in axes[len(panels) :]:
        axis.remove()
    figure.suptitle("\n".join(_title(Path(workdir), rows)), fontsize=13, weight="bold")
    if path is not None:
        figure.savefig(Path(workdir) / path)
    return figure


def _current(row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` with today's names of keys; the evaluation after the last step counts as the last evaluation."""
    renamed = {RENAMED.get(key, key): value for key, value in row.items()}
    return renamed | {f"eval/{k.removeprefix('final/')}": v for k, v in renamed.items() if k.startswith("final/")}


def _title(workdir: Path, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the run reached, then its name, recipe, seed and commit, and its steps."""
    config, versions = (_json(workdir / f"{name}.json") for name in ("config", "versions"))
    facts = [workdir.resolve().name, *(f"{key} {config[key]}" for key in ("recipe", "seed") if key in config)]
    commit = versions.get("commit")
    if isinstance(commit, str):
        facts.append(f"commit {commit[:7]}{commit[40:]}")
    return [*headline(rows), " · ".join([*facts, _steps(rows)])]


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is no file."""
    return json_files.read_object(path) if path.exists() else {}


def headline(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what training changed on held-out tasks, in at most one line.

    Args:
        rows: Metrics with the names of today. Success counts, else the return. Success has the half-width of a 95 %
            interval over tasks: 1.96 times the standard error of a share, which no variance of accuracies exceeds.
    """
    tasks = next((int(row["count/held_out"]) for row in reversed(rows) if row.get("count/held_out")), None)
    shown = "held-out tasks" if tasks is None else f"{tasks:,} held-out tasks"
    for name in ("success", "return"):
        seen = [row[f"eval/{name}"] for row in rows if row.get(f"eval/{name}") is not None]
        if len(seen) > 1:
            before, after = seen[0], seen[-1]
            error = ""
            if tasks is not None and name == "success" and 0 <= after <= 1:
                error = f" ± {1.96 * math.sqrt(after * (1 - after) / tasks):.2f}"
            return [f"{name} on {shown}: {before:.2f} → {after:.2f}{error}"]
    return []


def _steps(rows: Sequence[Mapping[str, Any]]) -> str:
    """The steps of the run, by phase if it has several, because a panel begins with the phase of its keys."""
    parts = []
    for pattern, name in PHASES:
        steps = [row["step"] for row in rows if any(re.fullmatch(pattern, key) for key in row)]
        if steps:
            parts.append(f"{min(steps)} to {max(steps)} {name}")
    if len(parts) < 2:
        return f"steps {rows[0]['step']} to {rows[-1]['step']}"
    return "steps " + ", ".join(parts)


def _merged(rows: Sequence[Mapping[str, Any]], lines: Mapping[str, str]) -> dict[str, str]:
    """``lines`` (name -> key) with equal curves of success and evaluation as one line, whose name lists all of them."""
    merged: dict[str, list[str]] = {}  # curve, or its key where it stands alone -> names
    keys: dict[str, str] = {}
    for name, key in lines.items():
        curve = str([(row["step"], row[key]) for row in rows if key in row]) if _evaluates(key) else key
        merged.setdefault(curve, []).append(name)
        keys.setdefault(curve, key)
    return {" = ".join(names): keys[curve] for curve, names in merged.items()}


def _evaluates(key: str) -> bool:
    return key == "success" or key.startswith("eval/")


def _draw(axis: Any, rows: list[dict], title: str, unit: str, lines: dict[str, str], colours: dict[str, str]) -> None:
    """One panel. ``lines``: name -> key. ``colours``: of roles."""
    palette = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(lines)} | FIXED_COLOURS | colours
    if title == "Time of a step":
        _stack(axis, rows, lines, palette)
        lines = {}
    top = 0.0
    for name, key in lines.items():
        steps, values = _series(rows, key)
        finite = [value for value in values if not math.isnan(value)]
        top = max([top, *finite])
        label = (f"turn {name}" if key.startswith("node/") else name).replace("_", " ")
        binary, few = set(finite) <= {0.0, 1.0}, len(finite) <= 12
        if not binary and not few:
            axis.plot(steps, values, color=palette[name], alpha=0.25, linewidth=0.8)
        mean = values if few else _running_mean(values, 8 if binary else 30)
        axis.plot(steps, mean, color=palette[name], linewidth=1.8, marker="o" if few else None, ms=3.5, label=label)
    if unit == "share":
        axis.set_ylim(-0.03, 1.03) if top > 0.5 or top == 0.0 else axis.set_ylim(bottom=min(axis.get_ylim()[0], 0.0))
    axis.set_title(title, loc="left", fontsize=10.5, weight="bold")
    axis.set_ylabel(unit, fontsize=8.5, color="#555555")
    axis.set_xlabel("step", fontsize=8.5, color="#555555")
    axis.tick_params(labelsize=8, colors="#555555", length=0)
    axis.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color("#BBBBBB")
    if axis.get_legend_handles_labels()[1]:
        longest = max(map(len, axis.get_legend_handles_labels()[1]))
        legend = axis.legend(
            fontsize=8, frameon=False, ncols=1 if longest > 24 else 2, loc="best", handlelength=1.2, columnspacing=1.0
        )
        legend.set_in_layout(False)  # a legend that is higher than its panel would leave no room for any panel


def _stack(axis: Any, rows: list[dict], lines: Mapping[str, str], palette: Mapping[str, str]) -> None:
    """The times of a step's stages as stacked areas."""
    stacks = [_series([{"step": row["step"], key: row.get(key) or 0.0} for row in rows], key) for key in lines.values()]
    heights = [_running_mean(values, 60) for _, values in stacks]
    axis.stackplot(
        stacks[0][0], heights, labels=list(lines), colors=[palette[name] for name in lines], alpha=0.85, linewidth=0
    )
    totals = sorted(total for total in map(sum, zip(*heights)) if not math.isnan(total))
    # The steps that compile take far longer than the rest and would flatten the other values.
    axis.set_ylim(0.0, max(min(totals[-1], 3 * totals[len(totals) // 2]) * 1.25, 1e-6))


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Steps and values of a key, NaN where the value was not finite and between two steps with others missing."""
    points = [(row["step"], row[key]) for row in rows if key in row]
    usual = sorted(b[0] - a[0] for a, b in itertools.pairwise(points))
    limit = 2.5 * usual[len(usual) // 2] if usual else 0
    steps: list[float] = []
    values: list[float] = []
    for step, value in points:
        if steps and step - steps[-1] > limit:
            steps.append((step + steps[-1]) / 2)
            values.append(math.nan)
        steps.append(step)
        values.append(math.nan if value is None else value)
    return steps, values


def _running_mean(values: Sequence[float], parts: int) -> list[float]:
    """Mean of the values around each value, in a window of 1 / ``parts`` of the run; missing values stay missing."""
    half = max(len(values) // (2 * parts), 1)
    means = []
    for i, value in enumerate(values):
        window = [v for v in values[max(i - half, 0) : i + half + 1] if not math.isnan(v)]
        means.append(math.nan if math.isnan(value) else sum(window) / len(window))
    return means


def episodes_markdown(episodes: Sequence[Sequence[Mapping[str, Any]]], path: str | os.PathLike, limit: int = 2000):
    """Write episodes as Markdown to ``path``. An episode is a list of turns, each a mapping

        {turn, role, prompt, completion, rewards: {component: value}, advantage, selected}

    of which all but ``role`` and ``completion`` may be absent. Of a text longer than ``limit`` characters the middle is
    left out, with a note.
    """
    out = ["# Episodes", ""]
    for number, episode in enumerate(episodes, 1):
        out += [f"## Episode {number}", ""]
        for position, turn in enumerate(episode):
            facts = [f"### Turn {turn.get('turn', position)} · {turn['role']}"]
            if turn.get("advantage") is not None:
                facts.append(f"advantage {turn['advantage']:+.3f}")
            if turn.get("selected") is not None:
                facts.append("selected" if turn["selected"] else "not selected")
            out += [" · ".join(facts), ""]
            rewards = turn.get("rewards") or {}
            if rewards:
                shown = ("invalid" if value is None else f"{value:.4g}" for value in rewards.values())
                out += ["Rewards: " + ", ".join(f"{k} **{v}**" for k, v in zip(rewards, shown)), ""]
            for heading in ("prompt", "completion"):
                if turn.get(heading) is not None:
                    out += [f"{heading.capitalize()}:", "", _fenced(turn[heading], limit), ""]
    Path(path).write_text("\n".join(out), encoding="utf-8", errors="backslashreplace")


def _fenced(text: str, limit: int) -> str:
    """``text`` in a code fence that is longer than any fence in the text."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"
    # Control characters, which begin escape sequences, must not reach a terminal that prints the file.
    text = "".join(c if c in "\n\t" or not re.match(r"[\x00-\x1f\x7f-\x9f]", c) else f"\\x{ord(c):02x}" for c in text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
