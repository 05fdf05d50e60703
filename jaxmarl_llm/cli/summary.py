"""What a run reached, in a few lines: jaxmarl-llm summary WORKDIR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmarl_llm.cli import arguments
from jaxmarl_llm.telemetry.metrics_file import read_metrics


def main(given: Any) -> int:
    """Print the success before and after RL of the run in ``given.workdir``. 1 if the run is not evaluated yet."""
    workdir = given.workdir
    rows = read_metrics(workdir)
    before = next((r for r in rows if "eval/success" in r), None)
    after = rows[-1]
    if before is None or "final/success" not in after:
        print(f"{workdir}: the run has no evaluation yet")
        return 1
    print(f"{workdir}: {after['step']} steps in {sum(r.get('time/step') or 0.0 for r in rows):.0f} s")
    for name, key in (("sampled", "success"), ("greedy", "success_greedy")):
        print(
            f"  task success on held-out tasks, {name:7}: {_figure(before, 'eval/' + key)} after stage 0"
            f" -> {_figure(after, 'final/' + key)}"
        )
    return 0


def _figure(row: Mapping[str, float | None], key: str) -> str:
    """Write a metric; one that is absent or was not finite is unknown."""
    value = row.get(key)
    return "unknown" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    parser = arguments.Parser("summary", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="folder of a run")
    arguments.run(parser, main)
