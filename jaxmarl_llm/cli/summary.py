"""Command that prints the result of a run in a few lines: python -m jaxmarl_llm.cli.summary WORKDIR."""

import sys

from jaxmarl_llm.telemetry.metrics_file import read_metrics


def main(workdir: str) -> int:
    """Print the success before and after RL of the run in ``workdir``. Returns 1 if the run is not evaluated yet."""
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
    sys.exit(main(sys.argv[1]))
