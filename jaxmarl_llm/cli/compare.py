"""Compare runs on their held-out tasks:

    jaxmarl-llm compare RUN [RUN...]                        differences, results, paired tests
    jaxmarl-llm compare RUN [RUN...] --out=compare.png      also draw the curves

Runs that differ in nothing but the seed are one arm. The first arm is compared with each other one. A difference is
taken within each seed, with Student's interval of 95 % over seeds. Where the interval contains 0, nothing is decided.

Two runs of one seed are also compared over the held-out tasks that both have. The exact sign test takes values of 0 and
1, and Student's paired interval of 95 % others. A line of tasks speaks of these two runs, and not of other seeds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmarl_llm.cli import arguments
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import comparison, task_pairs
from jaxmarl_llm.telemetry.comparison import SEED, Arm, Run
from jaxmarl_llm.telemetry.task_pairs import TaskPairs

EVALUATION = re.compile(r"(?:eval|final)/(.+)")


def main(given: Any) -> int:
    """Print the comparison of the runs in ``given.run``, and draw it to ``given.out``."""
    runs = [comparison.open_run(folder) for folder in given.run]
    metric = given.metric or common_metric(runs)
    print("\n".join(report(runs, metric)))
    if given.out:
        comparison.draw(comparison.arms(runs), metric, given.out)
        print(given.out)
    return 0


def common_metric(runs: Sequence[Run]) -> str:
    """The evaluation that all runs have: success before return, and these before others.

    Args:
        runs: At least one.

    Raises:
        ConfigError: There is none.
    """
    shared = set.intersection(*({m[1] for row in run.rows for m in map(EVALUATION.match, row) if m} for run in runs))
    if not shared:
        raise ConfigError("no evaluation that all runs have; --metric names one, as in eval/NAME of metrics.jsonl")
    return min(shared, key=lambda name: (name != "success", name != "return", name))


def report(runs: Sequence[Run], metric: str) -> list[str]:
    """Write the lines of a comparison.

    Args:
        runs: The runs.
        metric: Name of the evaluation, without ``eval/``.

    Raises:
        ConfigError: A run was never evaluated by ``metric``, or two runs are the same.
    """
    for run in runs:
        if run.last(metric) is None:
            raise ConfigError(f"{run.folder}: no evaluation {metric!r}; --metric names another one")
    compared, lines = comparison.arms(runs), []
    if differing := comparison.differences([run.config for run in runs]):
        lines.append("configurations differ in")
        lines += [
            f"  {key}: {', '.join(dict.fromkeys(map(str, found)))}" for key, found in differing.items() if key != SEED
        ]
        if SEED in differing:
            lines.append(f"  {SEED}: {', '.join(dict.fromkeys(str(run.seed) for run in runs))}")
    lines.append(f"held-out {metric}, newest evaluation")
    width = max(len(arm.name) for arm in compared)
    for arm in compared:
        values = [value for run in arm.runs if (value := run.last(metric)) is not None]
        lines.append(f"  {arm.name:{width}}  {_shown(values)}")
    for second in compared[1:]:
        lines.append(_difference(compared[0], second, metric))
    tasks = [line for second in compared[1:] for line in _over_tasks(compared[0], second, metric)]
    return (
        [*lines, "over the held-out tasks of two runs, which says nothing of other seeds", *tasks] if tasks else lines
    )


def _difference(first: Arm, second: Arm, metric: str) -> str:
    """The line of a paired difference, second minus first."""
    effect = comparison.paired(first, second, metric)
    names = f"  {second.name} minus {first.name}: "
    if len(effect) < 2:
        common = "no seed" if not effect else "one seed"
        return f"{names}{f'{effect[0]:+.3f}; ' if effect else ''}{common} in common, so nothing is decided"
    mean, half = comparison.interval(effect)
    verdict = "above 0" if mean - half > 0 else "below 0" if mean + half < 0 else "not decided"
    return f"{names}{mean:+.3f} ± {half:.3f} over {len(effect)} seeds: {verdict}"


def _over_tasks(first: Arm, second: Arm, metric: str) -> Iterator[str]:
    """A line for each two runs that have values of each held-out task, second minus first."""
    for one, two in comparison.pairs_of_runs(first, second):
        if one.evaluations is None or two.evaluations is None:
            continue
        if (pairs := task_pairs.pair_tasks(one.evaluations, two.evaluations, metric)) is None:
            continue
        seeds = f"seed {one.seed}" if one.seed == two.seed else f"seeds {one.seed} and {two.seed}"
        after = f", after steps {pairs.steps[0]} and {pairs.steps[1]}" if pairs.steps[0] != pairs.steps[1] else ""
        yield f"  {second.name} minus {first.name}, {seeds}{after}: {_effect(pairs)}"


def _effect(pairs: TaskPairs) -> str:
    """Difference over the tasks that two runs share, and what it decides."""
    of = pairs.counts[0] if len(set(pairs.counts)) == 1 else f"{pairs.counts[0]} and {pairs.counts[1]}"
    count = len(pairs.first)
    unknown = f" ({pairs.shared - count} without a value)" if pairs.shared > count else ""
    if not count:
        return (
            f"none of {of} tasks is the same in both{unknown}" if not pairs.shared else f"no task has a value{unknown}"
        )
    effect = task_pairs.effect_of(pairs)
    verdict = "not decided" if not effect.decided else "above 0" if effect.mean > 0 else "below 0"
    over = f"over {count} of {of} tasks{unknown}"
    if effect.p is None and count == 1:
        return f"{effect.mean:+.3f} {over}, so nothing is decided"
    if effect.p is None:
        return f"{effect.mean:+.3f} ± {effect.half:.3f} {over}: {verdict}"
    alone = f"{effect.wins} solved by the second run alone, {effect.losses} by the first alone"
    return f"{effect.mean:+.3f} {over}: {alone}, exact sign test p = {effect.p:.2g}: {verdict}"


def _shown(values: Sequence[float]) -> str:
    mean, half = comparison.interval(values)
    return f"{mean:.3f}" if math.isnan(half) else f"{mean:.3f} ± {half:.3f} over {len(values)} seeds"


if __name__ == "__main__":
    parser = arguments.Parser("compare", __doc__)
    parser.add_argument("run", metavar="RUN", nargs="+", help="workdir of a run")
    parser.add_argument("--metric", help="name behind eval/ in metrics.jsonl; default: success, else return")
    parser.add_argument("--out", metavar="IMAGE", help="draw the curves to this file")
    arguments.run(parser, main)
