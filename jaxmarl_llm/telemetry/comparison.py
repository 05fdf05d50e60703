"""Comparison of runs: what their configurations differ in, their held-out results, and paired tests over seeds.

`task_pairs` has the tests over the held-out tasks of two runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmarl_llm import json_files
from jaxmarl_llm.config import flatten
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry.evaluations_file import Evaluations, read_evaluations
from jaxmarl_llm.telemetry.metrics_file import read_metrics

SEED = "config.seed"
# Keys that change no result.
HARMLESS = re.compile(r"config\.(run\.(?!best$|patience$).*|env\.workers|env\.timeout)")
LEVEL = 0.95


class Run(NamedTuple):
    """A run that is compared.

    Attributes:
        folder: Its workdir.
        config: Values by dotted key.
        rows: Lines of its metrics.
        evaluations: Values of each held-out task; None: the run has no evaluations.jsonl.
    """

    folder: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    evaluations: Evaluations | None = None

    @property
    def seed(self) -> Any:
        """Seed of the run."""
        return self.config.get(SEED)

    def last(self, metric: str) -> float | None:
        """Newest value of an evaluation; None where there is none.

        Args:
            metric: Name behind ``eval/`` and ``final/``.
        """
        keys = (f"final/{metric}", f"eval/{metric}")
        return next((row[k] for row in reversed(self.rows) for k in keys if row.get(k) is not None), None)

    def curve(self, metric: str) -> tuple[list[int], list[float]]:
        """Completed steps and values of every evaluation.

        Args:
            metric: As in `last`.
        """
        points = {}
        for row in self.rows:
            if (value := row.get(f"eval/{metric}")) is not None:
                points[row["step"] - 1] = value  # the evaluation came before the step
            if (value := row.get(f"final/{metric}")) is not None:
                points[row["step"]] = value
        return list(points), list(points.values())


class Arm(NamedTuple):
    """Runs of one configuration, which differ in nothing but the seed.

    Attributes:
        name: What tells the arm from the others.
        runs: In the order given.
    """

    name: str
    runs: list[Run]


def open_run(folder: str | Path) -> Run:
    """Read the configuration, the metrics and the evaluations of a run.

    Args:
        folder: Workdir.

    Raises:
        ConfigError: It is no workdir, or a file is damaged.
    """
    path = Path(folder)
    rows = read_metrics(path)
    config = json_files.read_object(path / "config.json")
    return Run(path, flatten(config), rows, read_evaluations(path))


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Keys whose values differ, with the value of each configuration.

    Args:
        configs: Values by dotted key. A key that a configuration lacks has the value None.

    Returns:
        The keys in their order, without those that change no result.
    """
    keys = dict.fromkeys(key for config in configs for key in config)
    values = {key: [config.get(key) for config in configs] for key in keys if not HARMLESS.fullmatch(key)}
    return {key: found for key, found in values.items() if any(value != found[0] for value in found)}


def arms(runs: Sequence[Run]) -> list[Arm]:
    """Group runs of one configuration.

    Args:
        runs: Runs of any configurations.

    Raises:
        ConfigError: Two runs have the same configuration and the same seed.
    """
    differing = [key for key in differences([run.config for run in runs]) if key != SEED]
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        name = ", ".join(f"{key.removeprefix('config.')}={run.config.get(key)}" for key in differing)
        grouped.setdefault(name, []).append(run)
    for own in grouped.values():
        for i, run in enumerate(own):
            if twin := next((other for other in own[:i] if other.seed == run.seed), None):
                raise ConfigError(f"{run.folder}: the same configuration and seed {run.seed} as {twin.folder}")
    if len(grouped) == 1:
        return [Arm(str(runs[0].folder.name) if len(runs) == 1 else "all runs", list(runs))]
    return [Arm(name, own) for name, own in grouped.items()]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval over seeds (Student's t).

    Args:
        values: One a seed.

    Returns:
        The half-width is NaN for a single value.
    """
    from scipy import stats

    x = np.asarray(values, float)
    if len(x) < 2:
        return float(x.mean()), math.nan
    return float(x.mean()), float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5)


def paired(first: Arm, second: Arm, metric: str) -> list[float]:
    """Second minus first of the newest evaluations, for each seed that both arms have.

    Args:
        first: Arm that is subtracted.
        second: The other arm.
        metric: As in `Run.last`.
    """
    values = {run.seed: run.last(metric) for run in first.runs}
    pairs = ((values.get(run.seed), run.last(metric)) for run in second.runs)
    return [b - a for a, b in pairs if a is not None and b is not None]


def pairs_of_runs(first: Arm, second: Arm) -> list[tuple[Run, Run]]:
    """Pairs of runs whose held-out tasks are compared: those of one seed, or the only run of each arm.

    Args:
        first: Arm.
        second: The other arm.
    """
    of_seed = {run.seed: run for run in first.runs}
    pairs = [(of_seed[run.seed], run) for run in second.runs if run.seed in of_seed]
    alone = len(first.runs) == len(second.runs) == 1
    return pairs or ([(first.runs[0], second.runs[0])] if alone else [])


def draw(compared: Sequence[Arm], metric: str, path: str | Path) -> None:
    """Draw the curves of an evaluation: a line for each arm, with the 95 % interval of its mean over seeds.

    Args:
        compared: Arms.
        metric: As in `Run.last`.
        path: Image to write.

    Raises:
        ConfigError: No run was evaluated by ``metric``, or the image cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from jaxmarl_llm.telemetry.report import COLOURS

    figure = Figure(figsize=(7.2, 4.4), layout="constrained", dpi=110)
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for i, arm in enumerate(compared):
        curves = [dict(zip(*run.curve(metric), strict=True)) for run in arm.runs]
        shared = sorted(set.intersection(*(set(curve) for curve in curves)))
        if not shared:
            continue
        means, halves = np.array([interval([curve[step] for curve in curves]) for step in shared]).T
        colour = COLOURS[i % len(COLOURS)]
        count = f" ({len(curves)} seeds)" if len(curves) > 1 else ""
        axis.plot(shared, means, color=colour, marker="o", ms=3, label=(arm.name or "run") + count)
        if not np.isnan(halves).any():
            axis.fill_between(shared, means - halves, means + halves, color=colour, alpha=0.18, linewidth=0)
    if not axis.lines:
        raise ConfigError(f"eval/{metric}: no run was evaluated by it at the same steps as the others of its arm")
    axis.set_xlabel("step")
    axis.set_ylabel(metric.replace("_", " "))
    axis.set_title(f"Held-out {metric.replace('_', ' ')}", loc="left", weight="bold")
    axis.grid(axis="y", color="#E4E4E4")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path)
    except ValueError:
        raise ConfigError(f"{path}: expected the name of an image, such as compare.png or compare.svg") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from None
