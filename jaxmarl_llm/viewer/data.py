"""What the page shows, as values of JSON: curves of a run, the rows of a step by column, and figures of each task."""

from __future__ import annotations

import collections
import gzip
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.telemetry.metrics_file import read_metrics
from jaxmarl_llm.telemetry.rollouts import Completion, Rollout, Transition

POINTS = 400  # of a curve, at most: each is the mean of steps that follow each other
DIGITS = 4  # decimals of a log-prob and of a similarity
FIGURES = 3  # significant figures of a difference of log-probs
# Title, unit and pattern of the keys of metrics.jsonl; the pattern's group is the name of the line.
CURVES = (
    ("Reward by role", "mean return", r"agent/([^/]+)/reward"),
    ("Tasks solved", "share", r"(success|(?:eval|final)/success(?:_greedy)?)"),
    ("Reward by component", "mean", r"reward/(.+)"),
    ("Group variance by role", "variance of returns", r"agent/([^/]+)/variance"),
    ("All-equal groups by role", "share", r"agent/([^/]+)/zero_variance"),
    ("Groups selected by role", "share", r"agent/([^/]+)/selected"),
    ("Memory by role", "entries", r"agent/([^/]+)/memory_size"),
    ("Joint actions without a valid reward", "share", r"count/(invalid_share)"),
)


Step = int | str  # number of a recorded step, or ``eval-50`` for the evaluation after step 50
EVALUATION = re.compile(r"eval-(\d{1,18})")


class Run(NamedTuple):
    """A run that the page shows.

    Attributes:
        given: The path as the user gave it.
        name: Short name: that of the workdir, or of the one file.
        folder: Where a page of this run is written.
        workdir: Workdir with metrics.jsonl; None: there are no metrics.
        evaluated: Its episodes are of `jaxmarl-llm evaluate` and not of training.
    """

    given: str
    name: str
    folder: Path
    workdir: Path | None
    evaluated: bool = False

    def files(self) -> dict[Step, Path]:
        """Each step that is there now, then each evaluation, with its file. `ConfigError` where there is none."""
        found = rollouts.by_split(self.given)
        if not found[rollouts.HELD_OUT]:
            found[rollouts.TRAIN] = rollouts.files(self.given)  # says what is missing
        named: dict[Step, Path] = dict(found[rollouts.TRAIN].items())
        named.update((f"eval-{number}", path) for number, path in found[rollouts.HELD_OUT].items())
        return named


def step_named(text: str) -> Step:
    """Step of an address of the page.

    Args:
        text: A number, or ``eval-50``.

    Raises:
        ValueError: It is neither.
    """
    return text if EVALUATION.fullmatch(text) else int(text)


def open_run(given: str | os.PathLike) -> Run:
    """Find a run.

    Args:
        given: Workdir of a run, its folder rollouts/, or one file of that folder.

    Raises:
        ConfigError: There is no file of rollouts.
    """
    place = Path(given)
    if place.is_file():
        run = Run(str(given), place.name, place.parent, None)
    else:
        if not (place / rollouts.FOLDER).is_dir() and place.resolve().name == rollouts.FOLDER:
            place = place.resolve().parent
        run = Run(str(given), place.resolve().name, place, place if (place / "metrics.jsonl").is_file() else None)
    run.files()
    return run


def open_runs(given: Sequence[str]) -> list[Run]:
    """Find runs, each with what `jaxmarl-llm evaluate` wrote of it behind it.

    Args:
        given: As of `open_run`. A workdir may have episodes of `jaxmarl-llm evaluate` alone.

    Raises:
        ConfigError: There is no file of rollouts.
    """
    runs: list[Run] = []
    named = {Path(name).resolve() for name in given}
    for name in given:
        behind = rollouts.evaluated_folders(name)
        if not behind or any(rollouts.by_split(name).values()):
            runs.append(open_run(name))
        for place in behind:
            if place.resolve() not in named:
                shown = f"{place.resolve().parent.name}/{place.name}"
                runs.append(Run(str(place), shown, Path(name), None, evaluated=True))
    return runs


def curves(workdir: str | os.PathLike) -> list[dict[str, Any]]:
    """Curves of metrics.jsonl, one panel for each entry of `CURVES` that the run has.

    Args:
        workdir: Workdir of the run.

    Returns:
        Panels ``{"title", "unit", "lines": {name: [steps, values]}}``. A line has at most `POINTS` points.

    Raises:
        ConfigError: The file is damaged.
    """
    rows = read_metrics(workdir, allow_empty=True)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    panels = []
    for title, unit, pattern in CURVES:
        lines = {m[1]: _line(rows, key) for key in keys if (m := re.fullmatch(pattern, key))}
        lines = {name: line for name, line in lines.items() if line[0]}
        if lines:
            panels.append({"title": title, "unit": unit, "lines": lines})
    return panels


def _line(rows: Sequence[Mapping[str, Any]], key: str) -> list[list[float]]:
    """Steps and values of ``key``; means of pieces of equal length where the line is long."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    size = -(-len(points) // POINTS) or 1
    pieces = [points[i : i + size] for i in range(0, len(points), size)]
    return [[p[len(p) // 2][0] for p in pieces], [float(f"{sum(v / len(p) for _, v in p):.6g}") for p in pieces]]


def index(runs: Sequence[Run], kept: Sequence[Sequence[Step]] | None = None, live: bool = False) -> dict[str, Any]:
    """List the runs of a page with their curves and steps: all that the page knows before it opens a step.

    Args:
        runs: The runs.
        kept: Steps of each run that the page holds; None: all.
        live: A server answers, and steps may be added.
    """
    shown = []
    for r, run in enumerate(runs):
        there = list(run.files())
        held = there if kept is None else list(kept[r])
        parts = {
            "steps": [step for step in held if isinstance(step, int)],
            "held_out": [step for step in held if isinstance(step, str)],
            "left_out": [step for step in there if step not in set(held)],
        }
        lines = curves(run.workdir) if run.workdir else []
        shown.append({"name": run.name, "path": run.given, **parts, "curves": lines, "evaluated": run.evaluated})
    return {"live": live, "runs": shown}


def step_data(rollout: Rollout) -> dict[str, Any]:
    """The rows of a step for the page.

    Args:
        rollout: The rows.

    Returns:
        ``header``, ``tasks`` (see `task_rows`), and ``tables``: kind -> column -> values. Prompts have their text and
        number of tokens, without ids. Log-probs and similarities have `DIGITS` decimals. In place of the learner's
        log-probs a completion has ``gaps``, see `gaps`. All else is as in the file.
    """
    tables: dict[str, dict[str, list[Any]]] = {}
    for kind, rows in rollout.tables.items():
        cls = rollouts.KINDS[kind]
        tables[kind] = {name: [getattr(row, name) for row in rows] for name in cls._fields}
    nodes, steps = tables["node"], tables["step"]
    nodes["prompt_tokens"] = [len(ids) for ids in nodes.pop("prompt_ids")]
    nodes["memory_similarity"] = [_rounded(values) for values in nodes["memory_similarity"]]
    steps["logprobs"] = [_rounded(values) for values in steps["logprobs"]]
    del steps["learner_logprobs"]
    steps["gaps"] = [gaps(step) for step in rollout.steps]
    header = rollout.header._asdict()
    del header["columns"], header["rows"]
    return {"header": header, "tasks": task_rows(rollout), "tables": tables}


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, DIGITS) for value in values]


def gaps(step: Completion) -> list[float | None]:
    """Log-prob of each token by the update, minus that by the sampler, with `FIGURES` significant figures.

    Args:
        step: The completion.

    Returns:
        A number for each token, None where one of the two is unknown; empty where the update computed none.
    """
    pairs = zip(step.learner_logprobs, step.logprobs)
    return [None if a is None or b is None else float(f"{a - b:.{FIGURES}g}") for a, b in pairs]


def task_rows(rollout: Rollout) -> list[dict[str, Any]]:
    """Figures of each task, a row of the page's table.

    Args:
        rollout: The rows of a step.

    Returns:
        A dictionary for each task. ``task``, ``number`` and ``content`` are those of its row. ``nodes``,
        ``completions`` and ``trained`` are counts. ``reward`` is `episode_reward`. ``groups`` counts groups of two or
        more returns. ``equal`` counts those of them without a difference, and ``variance`` is their mean variance.
        ``invalid`` counts joint actions without a reward, or failures where these are more. ``advantage`` is the mean
        of its absolute value. ``cut`` counts completions that the length limit ended, and ``longest`` is the most
        tokens. What is unknown is None.
    """
    task_of = {node.node: node.task for node in rollout.nodes}
    steps, moves = collections.defaultdict(list), collections.defaultdict(list)
    for step in rollout.steps:
        steps[task_of[step.node]].append(step)
    for move in rollout.transitions:
        moves[move.task].append(move)
    groups = {group.group: group for group in rollout.groups}
    failures = collections.Counter(failure.number for failure in rollout.failures)
    nodes = collections.Counter(task_of.values())
    rows = []
    for task in rollout.tasks:
        own = steps[task.task]
        compared = [groups[g] for g in sorted({step.group for step in own if step.group >= 0})]
        several = [group for group in compared if group.size > 1]
        lost = sum(not move.valid for move in moves[task.task])
        rows.append(
            {
                "task": task.task,
                "number": task.number,
                "content": task.content,
                "nodes": nodes[task.task],
                "completions": len(own),
                "reward": episode_reward(rollout, moves[task.task]),
                "variance": _mean([g.variance for g in several]),
                "groups": len(several),
                "equal": sum(group.low == group.high for group in several),
                "invalid": max(lost, failures[task.number]),
                "advantage": _mean([None if s.advantage is None else abs(s.advantage) for s in own]),
                "cut": sum(step.truncated for step in own),
                "longest": max((len(step.token_ids) for step in own), default=0),
                "trained": sum(step.trained for step in own),
            }
        )
    return rows


def episode_reward(rollout: Rollout, moves: Sequence[Transition]) -> float | None:
    """Weighted, undiscounted reward of an episode of one task, a mean over roles and over valid continuations.

    Args:
        rollout: The rows of the step.
        moves: Transitions of the task, in order.
    """
    behind: dict[int, list[float]] = collections.defaultdict(list)  # by transition: rewards from each child on
    for move in sorted(moves, key=lambda move: move.transition, reverse=True):  # children have larger numbers
        paid = [
            [None if weight is None or value is None else weight * value for value in move.rewards[name]]
            for name, weight in rollout.header.weights.items()
            if name in move.rewards
        ]
        values = [value for component in paid for value in component]
        if move.valid and None not in values:
            now = sum(value for value in values if value is not None) / len(rollout.header.roles)
            behind[move.parent].append(now + (_mean(behind[move.transition]) or 0.0))
    return _mean(behind[-1])


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(value / len(known) for value in known) if known else None


def packed(value: Any) -> bytes:
    """``value`` as JSON, compressed by gzip: equal values give equal bytes."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), 6, mtime=0)


def read_step(run: Run, step: Step) -> bytes:
    """One step of a run, as the page reads it: `packed` `step_data`.

    Args:
        run: The run.
        step: The step, or the evaluation.

    Raises:
        ConfigError: The step is not there, or its file is damaged.
    """
    files = run.files()
    if step not in files:
        raise ConfigError(f"{run.given}: step {step} was not written, or was deleted when the run was resumed")
    return packed(step_data(rollouts.read_file(files[step])))
