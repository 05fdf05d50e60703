"""After a run: its figure, drawn from metrics.jsonl by the naming scheme of metrics.py, and episodes for people."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmarl_llm.metrics import read_metrics, roles_of
from jaxmarl_llm.text import ConfigError

# Title, unit, and which keys: the group of the pattern is the name of the line.
PANELS = (
    ("Reward", "mean", r"reward/(.+)"),
    ("Tasks solved", "share", r"(success|success_greedy|eval/.*(?:success|accuracy|solved|pass).*)"),
    ("Evaluation", "", r"(eval/(?!.*(?:success|accuracy|solved|pass)).+)"),
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
    ("Throughput", "tokens per second", r"speed/(.+)"),
    ("Time of a step", "seconds", r"time/((?!step$).+)"),
)
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B8A800")
FIXED_COLOURS = {"total": "#222222", "step": "#222222"}


def report(workdir: str | os.PathLike, path: str | os.PathLike | None = "report.png") -> Any:
    """Draw metrics.jsonl: one panel for each kind of key that is present. Returns the matplotlib ``Figure``.

    A relative ``path`` lies in ``workdir``; None saves nothing. Faint lines are the values, strong ones their running
    mean; lines break where steps are missing. An agent has the same colour in every panel.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # What a run ends with is its last evaluation.
    last = lambda row: {f"eval/{k.removeprefix('final/')}": v for k, v in row.items() if k.startswith("final/")}
    rows = [row | last(row) for row in read_metrics(workdir)]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    panels = []
    for title, unit, pattern in PANELS:
        lines = {m[1]: key for key in keys if (m := re.fullmatch(pattern, key))}
        if lines:
            panels.append((title, unit, lines))
    if not panels:
        raise ConfigError(f"{Path(workdir) / 'metrics.jsonl'}: no key that this report knows")
    colours = {role: COLOURS[i % len(COLOURS)] for i, role in enumerate(roles_of(keys))}
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 2.9 * height + 0.5), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)  # pyplot is not involved: nothing global, no display
    axes = figure.subplots(height, columns, squeeze=False).ravel()
    for axis, (title, unit, lines) in zip(axes, panels):
        _draw(axis, rows, title, unit, lines, colours)
    for axis in axes[len(panels) :]:
        axis.remove()
    steps = [row["step"] for row in rows]
    figure.suptitle(f"{Path(workdir).resolve().name} · steps {steps[0]} to {steps[-1]}", fontsize=13, weight="bold")
    if path is not None:
        figure.savefig(Path(workdir) / path)
    return figure


def _draw(axis: Any, rows: list[dict], title: str, unit: str, lines: dict[str, str], colours: dict[str, str]) -> None:
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
        axis.set_ylim(-0.03, 1.03) if top > 0.5 else axis.set_ylim(bottom=min(axis.get_ylim()[0], 0.0))
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
        axis.legend(fontsize=8, frameon=False, ncols=2, loc="best", handlelength=1.2, columnspacing=1.0)


def _stack(axis: Any, rows: list[dict], lines: Mapping[str, str], palette: Mapping[str, str]) -> None:
    """Stages of a step, one on the other."""
    stacks = [_series([{"step": row["step"], key: row.get(key) or 0.0} for row in rows], key) for key in lines.values()]
    heights = [_running_mean(values, 60) for _, values in stacks]
    axis.stackplot(
        stacks[0][0], heights, labels=list(lines), colors=[palette[name] for name in lines], alpha=0.85, linewidth=0
    )
    totals = sorted(total for total in map(sum, zip(*heights)) if not math.isnan(total))
    # The steps that compile take far longer than the rest and would flatten it.
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
    """Mean over a window of one of ``parts`` parts of the run around each value; missing values stay missing."""
    half = max(len(values) // (2 * parts), 1)
    means = []
    for i, value in enumerate(values):
        window = [v for v in values[max(i - half, 0) : i + half + 1] if not math.isnan(v)]
        means.append(math.nan if math.isnan(value) else sum(window) / len(window))
    return means


def episodes_markdown(episodes: Sequence[Sequence[Mapping[str, Any]]], path: str | os.PathLike, limit: int = 2000):
    """Write episodes for a person to read. An episode is a list of turns, each a mapping

        {turn, role, prompt, completion, rewards: {component: value}, advantage, selected}

    of which all but ``role`` and ``completion`` may be absent. Text beyond ``limit`` characters is left out of its
    middle, and says so.
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
    """``text`` in a code fence that nothing in the text can close."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"
    # Escape sequences and other control characters must not reach the terminal of whoever prints the file.
    text = "".join(c if c in "\n\t" or not re.match(r"[\x00-\x1f\x7f-\x9f]", c) else f"\\x{ord(c):02x}" for c in text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
