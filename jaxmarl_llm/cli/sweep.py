"""Train many settings of a configuration on this machine, one after the other, and print a table:

    jaxmarl-llm sweep --config=grpo:tiny --workdir=runs/sweep --over=group=2,4,8 --over=seed=0,1,2
    jaxmarl-llm sweep --config=grpo:tiny --workdir=runs/draws --over=optimizer.learning_rate=1e-4:1e-2 --trials=8

`--over` names a key with its values. Several of them make a grid. A range LOW:HIGH is drawn on a logarithmic scale, and
needs `--trials`. With `--trials` every key is drawn anew for each trial, by `--draws` as the seed.

Each run has a folder of its own in the workdir, and is a process of its own. The same command goes on where it was
stopped: what has ended is not trained again, and a run in progress is resumed. A run that fails is shown, the others go
on, and the exit code is 1.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from jaxmarl_llm import json_files
from jaxmarl_llm.cli import compare, config_flags
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import comparison

flags.DEFINE_multi_string("over", [], "KEY=VALUE,VALUE,... or KEY=LOW:HIGH; KEY is one of the config, without config.")
flags.DEFINE_integer("trials", None, "Draw this many settings instead of the whole grid.", lower_bound=1)
flags.DEFINE_integer("draws", 0, "Seed of the draws.")
flags.DEFINE_string("metric", None, "Evaluation of the table, as behind eval/ in metrics.jsonl; default: success.")

STATE = "sweep.json"  # exit codes of the runs that ended
STOPPED = (75, 130)  # exit codes of a run that asks to be run again, or that Ctrl-C ended
Setting = tuple[tuple[str, str], ...]  # (key, text of the value)


class Axis(NamedTuple):
    """Values of one key.

    Attributes:
        key: Without ``config.``.
        values: Texts; empty for a range.
        bounds: Lowest and highest value of a range.
    """

    key: str
    values: tuple[str, ...]
    bounds: tuple[float, float] | None = None


def parse_axis(text: str) -> Axis:
    """Read ``KEY=VALUE,VALUE`` or ``KEY=LOW:HIGH``.

    Args:
        text: Of ``--over``.

    Raises:
        ConfigError: It is neither.
    """
    key, equals, values = text.partition("=")
    if not equals or not key or not values:
        raise ConfigError(f"--over={text}: expected KEY=VALUE,VALUE,... or KEY=LOW:HIGH")
    if match := re.fullmatch(r"([^:,]+):([^:,]+)", values):
        try:
            low, high = map(float, match.groups())
        except ValueError:
            return Axis(key, (values,))  # a text with a colon, such as package.module:name
        if not 0 < low < high < math.inf:
            raise ConfigError(f"--over={text}: expected 0 < LOW < HIGH, for a logarithmic scale")
        return Axis(key, (), (low, high))
    found = tuple(values.split(","))
    if len(set(found)) < len(found) or not all(found):
        raise ConfigError(f"--over={text}: expected different values")
    return Axis(key, found)


def settings(axes: Sequence[Axis], trials: int | None, seed: int) -> list[Setting]:
    """List the settings of a sweep.

    Args:
        axes: One a key.
        trials: How many settings are drawn; None: all combinations.
        seed: Of the draws. A setting depends on it and on the number of its trial alone.

    Raises:
        ConfigError: A range without ``trials``, or a key twice.
    """
    keys = [axis.key for axis in axes]
    if doubled := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(f"--over={doubled}: given twice; its values belong into one --over")
    if trials is None:
        if ranged := next((axis for axis in axes if axis.bounds), None):
            raise ConfigError(f"--over={ranged.key}: a range needs --trials")
        return [tuple(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]
    drawn = [tuple(draw(axis, f"{seed} {trial} {axis.key}") for axis in axes) for trial in range(trials)]
    return list(dict.fromkeys(tuple(zip(keys, values, strict=True)) for values in drawn))


def draw(axis: Axis, seed: str) -> str:
    """Draw a value: evenly among those of an axis, or evenly in the logarithm of its range.

    Args:
        axis: The axis.
        seed: Of this draw.
    """
    rng = random.Random(seed)
    if axis.bounds is None:
        return rng.choice(axis.values)
    low, high = map(math.log, axis.bounds)
    return f"{math.exp(rng.uniform(low, high)):.4g}"


def folder_name(setting: Setting) -> str:
    """Name of a run's folder: its setting, in characters that every file system takes."""
    return re.sub(r"[^\w.=,+-]", "_", ",".join(f"{key}={value}" for key, value in setting))


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> int:
    """Run the sweep of ``cfg`` in ``workdir``. ``flag_values``: the flags of this module.

    Returns 1 if a run failed, and the exit code of a run that was stopped.
    """
    del cfg  # each setting is checked as a whole below
    assert workdir is not None  # required by `config_flags.run`
    if "://" in workdir:
        raise ConfigError(f"--workdir={workdir}: a sweep runs on this machine; expected a folder")
    axes = [parse_axis(text) for text in flag_values.over]
    if not axes:
        raise ConfigError("--over: expected at least one, as in --over=seed=0,1,2")
    fixed = config_flags.given_overrides()
    todo = settings(axes, flag_values.trials, flag_values.draws)
    for setting in todo:
        config_flags.load(flag_values.config, [*fixed, *setting])
    root = Path(workdir)
    root.mkdir(parents=True, exist_ok=True)
    ended = _ended(root)
    for number, setting in enumerate(todo, 1):
        name = folder_name(setting)
        if ended.get(name) == 0:
            continue
        print(f"run {number} of {len(todo)}: {name}", flush=True)
        code = train(flag_values.config, [*fixed, *setting], root / name)
        if code in STOPPED:
            return code
        _record(root, ended | {name: code})
        ended[name] = code
    names = [folder_name(setting) for setting in todo]
    print("\n".join(table(root, names, ended, flag_values.metric)))
    return int(any(ended[name] for name in names))


def train(config: str, overrides: Sequence[tuple[str, str]], workdir: Path) -> int:
    """Train one run in a process of its own, and return the exit code of that process.

    Args:
        config: As ``--config``.
        overrides: Pairs of a key and its value's text.
        workdir: Folder of the run.
    """
    own = [f"--config.{key}={value}" for key, value in overrides]
    command = [sys.executable, "-m", "jaxmarl_llm", "train", f"--config={config}", f"--workdir={workdir}", *own]
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:  # the run got it too: it saves and ends
                continue


def table(root: Path, names: Sequence[str], ended: dict[str, int], metric: str | None) -> list[str]:
    """Lines of the results, best first, then the comparison of arms where runs differ in their seeds.

    Args:
        root: Folder of the sweep.
        names: Folders of its runs.
        ended: Exit code by folder.
        metric: Evaluation; None: the one that `compare` takes.
    """
    lines = [f"{name}: failed with exit code {ended[name]}" for name in names if ended[name]]
    runs = [comparison.open_run(root / name) for name in names if not ended[name]]
    if not runs:
        return lines
    metric = metric or compare.common_metric(runs)
    compared = comparison.arms(runs)
    if any(len(arm.runs) > 1 for arm in compared):
        return [*compare.report(runs, metric), *lines]
    results = {run.folder.name: run.last(metric) for run in runs}
    ordered = sorted(results.items(), key=lambda row: -math.inf if row[1] is None else row[1], reverse=True)
    shown = (f"  {'unknown' if value is None else f'{value:.3f}'}  {name}" for name, value in ordered)
    return [f"held-out {metric}, newest evaluation", *shown, *lines]


def _ended(root: Path) -> dict[str, int]:
    """Exit codes of the runs in ``root`` that ended."""
    if not (root / STATE).exists():
        return {}
    found = json_files.read_object(root / STATE)
    json_files.check(found, dict.fromkeys(found, int), str(root / STATE))
    return found


def _record(root: Path, ended: dict[str, int]) -> None:
    partial = root / f".{STATE}.part"
    partial.write_text(json.dumps(ended, indent=1))
    os.replace(partial, root / STATE)


if __name__ == "__main__":
    config_flags.run(main)
