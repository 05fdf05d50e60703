"""How well runs predicted the time to the end of each phase:

    python -m experiments.studies.time_to_end RUN [RUN...]

The forecast is replayed over metrics.jsonl. It is compared with the seconds that the rest of the phase took, at every
step from the tenth of the phase on. The last three steps are left out: their rest is a fraction of a second. So is the
save after the last step, whose time is in no row.
The comparison leaves compilations out, and so does the forecast where fewer than half of the steps compile. The last
column has them in: a batch of a new shape compiles, and nothing announces it. A row: steps that are compared, share of
steps within 20 %, median and largest error, share within 20 % with compilations. A run has to be finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmarl_llm import json_files
from jaxmarl_llm.cli import arguments, config_flags
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.runs.loop import schedule_of
from jaxmarl_llm.telemetry.forecast import Forecast, Schedule
from jaxmarl_llm.telemetry.metrics_file import read_metrics

FROM, LEFT_OUT, NEAR = 10, 3, 0.2


class Phase(NamedTuple):
    """Errors of the forecast in one phase.

    Attributes:
        name: Of the phase.
        seconds: Of the phase, as measured.
        errors: Forecast divided by the truth, minus 1, for each step that is compared.
        compiled: As ``errors``, with the seconds of compilations in the truth.
    """

    name: str
    seconds: float
    errors: np.ndarray
    compiled: np.ndarray


def errors(schedule: Schedule, rows: Sequence[dict[str, Any]]) -> list[Phase]:
    """Replay the forecast of a run.

    Args:
        schedule: Of the run.
        rows: Its metrics, one a step.
    """
    forecast, predicted = Forecast(schedule), []
    for row in rows:
        forecast.see(row["step"], row)
        predicted.append(forecast.seconds(row["step"], last_save=False))
    every = np.array([row["time/step"] for row in rows])
    plain = every - [row.get("time/compile") or 0.0 for row in rows]
    out, begin = [], 0
    for name, end in schedule.ends:
        compared = slice(FROM - 1, max(end - begin - LEFT_OUT, FROM - 1))
        said = np.array(predicted[begin:end])[compared]
        wrong = [said / _after(seconds[begin:end])[compared] - 1 for seconds in (plain, every)]
        out.append(Phase(name, float(every[begin:end].sum()), *wrong))
        begin = end
    return out


def _after(seconds: np.ndarray) -> np.ndarray:
    """Seconds of the steps after each step."""
    return seconds[::-1].cumsum()[::-1] - seconds


def measured(folder: Path) -> list[Phase]:
    """`errors` of the run in ``folder``.

    Raises:
        ConfigError: It is no finished run.
    """
    rows = read_metrics(folder)
    config = json_files.read_object(folder / "config.json")
    module = config_flags.recipe_module(config["recipe"])
    cfg = from_dict(module.Config, config)
    recipe = module.make(cfg)
    recipe.env_runner.close()
    if [row["step"] for row in rows] != list(range(1, recipe.total_steps + 1)):
        raise ConfigError(f"{folder}: expected the {recipe.total_steps} steps of a finished run")
    return errors(schedule_of(cfg, recipe), rows)


def main(given: Any) -> int:
    """Print a row for each phase of the runs in ``given.run``."""
    print("| run | phase | seconds | steps compared | within 20 % | median error | largest | with compilations |")
    print("| --- | --- |" + " ---: |" * 6)
    for folder in map(Path, given.run):
        for phase in measured(folder):
            size = np.abs(phase.errors)
            if not len(size):
                continue
            figures = f"{np.mean(size <= NEAR):.1%} | {np.median(size):.1%} | {size.max():.1%}"
            figures += f" | {np.mean(np.abs(phase.compiled) <= NEAR):.1%}"
            print(f"| {folder.name} | {phase.name} | {phase.seconds:.0f} | {len(size)} | {figures} |")
    return 0


if __name__ == "__main__":
    parser = arguments.Parser("time_to_end", __doc__)
    parser.add_argument("run", metavar="RUN", nargs="+", help="workdir of a finished run")
    arguments.run(parser, main)
