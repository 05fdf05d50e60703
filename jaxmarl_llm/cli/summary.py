"""What a run reached, in a few lines: jaxmarl-llm summary WORKDIR."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxmarl_llm.cli import arguments
from jaxmarl_llm.telemetry.comparison import Run
from jaxmarl_llm.telemetry.metrics_file import read_metrics

METRICS = ("success", "return")  # the first one that the run has


def main(given: Any) -> int:
    """Print the first and the newest evaluation of the run in ``given.workdir``. 1 if it is not evaluated yet."""
    workdir, rows = given.workdir, read_metrics(given.workdir)
    run = Run(Path(workdir), {}, rows)
    metric = next((name for name in METRICS if run.curve(name)[1]), None)
    if metric is None:
        print(f"{workdir}: the run has no evaluation yet")
        return 1
    print(f"{workdir}: {rows[-1]['step']} steps in {sum(r.get('time/step') or 0.0 for r in rows):.0f} s")
    for name, key in (("sampled", metric), ("greedy", f"{metric}_greedy")):
        steps, values = run.curve(key)
        if values:
            points = [f"{value:.3f} after step {step}" for step, value in zip(steps, values, strict=True)]
            print(f"  {metric} on held-out tasks, {name:7}: {' -> '.join(dict.fromkeys((points[0], points[-1])))}")
    return 0


if __name__ == "__main__":
    parser = arguments.Parser("summary", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="folder of a run")
    arguments.run(parser, main)
