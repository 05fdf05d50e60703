"""What a run reached, in a few lines: jaxmarl-llm summary WORKDIR."""

from __future__ import annotations

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
    print(f"{workdir}: {after['step']} steps in {sum(r['time/step'] for r in rows):.0f} s")
    for name, key in (("sampled", "success"), ("greedy", "success_greedy")):
        print(
            f"  task success on held-out tasks, {name:7}: {before['eval/' + key]:.3f} after stage 0"
            f" -> {after['final/' + key]:.3f}"
        )
    return 0


if __name__ == "__main__":
    parser = arguments.Parser("summary", __doc__)
    parser.add_argument("workdir", metavar="WORKDIR", help="folder of a run")
    arguments.run(parser, main)
