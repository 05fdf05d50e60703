"""Command that prints the result of a run in a few lines: python -m jaxmarl_llm.cli.summary WORKDIR."""

import sys
from collections.abc import Mapping

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry.metrics_file import read_metrics


def main(workdir: str) -> int:
    """Print the success before and after RL of the run in ``workdir``. Returns 1 if the run is not evaluated yet."""
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
    if len(sys.argv) != 2:
        print(f"error: expected one WORKDIR, found {len(sys.argv) - 1} arguments", file=sys.stderr)
        sys.exit(2)
    try:
        sys.exit(main(sys.argv[1]))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
