"""What a run reached, and what it warned of, in a few lines: jaxmarl-llm summary WORKDIR."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jaxmarl_llm import json_files
from jaxmarl_llm.cli import arguments
from jaxmarl_llm.config import flatten
from jaxmarl_llm.runs import alarms
from jaxmarl_llm.telemetry.comparison import Run
from jaxmarl_llm.telemetry.metrics_file import read_metrics

METRICS = ("success", "return")  # the first one that the run has
BACKBONE = r"(config\.)?team\.(backbone|overrides\..*)\.path"


def main(given: Any) -> int:
    """Print the first and the newest evaluation of the run in ``given.workdir``, and what the run warned of.

    Args:
        given: Its ``workdir`` is the folder.

    Returns:
        1 if the run is not evaluated yet, else 0.
    """
    workdir, rows = given.workdir, read_metrics(given.workdir)
    run = Run(Path(workdir), {}, rows)
    metric = next((name for name in METRICS if run.curve(name)[1]), None)
    if metric is None:
        print(f"{workdir}: the run has no evaluation yet")
        _warnings(Path(workdir), rows)
        return 1
    print(f"{workdir}: {rows[-1]['step']} steps in {sum(r.get('time/step') or 0.0 for r in rows):.0f} s")
    for name, key in (("sampled", metric), ("greedy", f"{metric}_greedy")):
        steps, values = run.curve(key)
        if values:
            points = [f"{value:.3f} after step {step}" for step, value in zip(steps, values, strict=True)]
            print(f"  {metric} on held-out tasks, {name:7}: {' -> '.join(dict.fromkeys((points[0], points[-1])))}")
    _warnings(Path(workdir), rows)
    return 0


def _warnings(workdir: Path, rows: list[dict[str, Any]]) -> None:
    """Print the alarms of a run. A folder without config.json has those of models that are trained from nothing."""
    file = workdir / "config.json"
    config = flatten(json_files.read_object(file)) if file.exists() else {}
    weights = [value for key, value in config.items() if re.fullmatch(BACKBONE, key) and value is not None]
    for line in alarms.replay(rows, pretrained=bool(weights)):
        print(f"  {line}")


if __name__ == "__main__":
    parser = arguments.Parser("summary", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="folder of a run")
    arguments.run(parser, main)
