"""Cost of sampling: predictions before a run, and measurements:

    python -m experiments.studies.complexity plan --config=FILE.py[:variant] [--config.k=v] [--calibrate] [--chip=h200]
    python -m experiments.studies.complexity run --out=runs/complexity.jsonl [--sweeps=k,group,agents] [--k=1,2,4] ...
    python -m experiments.studies.complexity report --out=runs/complexity.jsonl [--doc=docs/complexity.md]

``plan`` predicts the cost of one training step without running it, as `jaxmarl-llm plan` does and with its flags
(`jaxmarl_llm/cli/plan.py`): counts, tokens, bytes, FLOPs, and seconds on a chip at its peak. With ``--calibrate`` it
also predicts seconds of generation on this machine.

``run`` measures sweeps and writes one JSON line for each setting. A second call continues where the first one stopped.
``report`` compares measurements with predictions, and writes a table and a figure.
"""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.cli import plan as plan_command

flags.DEFINE_bool("calibrate", False, "plan: time generation on this machine (some seconds), and predict with it.")
flags.DEFINE_string("out", "runs/complexity.jsonl", "run, report: file of the measurements.")
flags.DEFINE_list("sweeps", ["k", "group", "agents"], "run: axes to sweep.")
flags.DEFINE_list("plans", ["node_wise_local", "node_wise", "product", "flat", "handoff"], "run: plans of k and group.")
flags.DEFINE_list("k", ["1", "2", "4", "8", "16", "32", "64"], "run: turns.")
flags.DEFINE_list("group", ["2", "4", "8", "16", "32", "64"], "run: samples a node.")
flags.DEFINE_list("agents", ["2", "4", "8", "16", "32", "64", "128", "256"], "run: agents that act at once.")
flags.DEFINE_list("share", ["shared", "lora", "separate"], "run: whose parameters the agents have.")
flags.DEFINE_integer("repeats", 5, "run: timed repeats of a setting.", lower_bound=3)
flags.DEFINE_integer("rounds", 3, "run: times that the sweeps of k and group are gone through.", lower_bound=1)
flags.DEFINE_integer("most", 20_000, "run: settings of more sequences are not run.", lower_bound=1)
flags.DEFINE_string("doc", "docs/complexity.md", "report: page whose section is written; its figure goes to results/.")

VERBS = ("plan", "run", "report")


def calibrated(cfg: Any, flag_values: flags.FlagValues) -> None:
    """Print the prediction of `jaxmarl-llm plan`, and with ``--calibrate`` seconds of generation on this machine."""
    predicted = plan_command.predict(cfg, flag_values)
    if not flag_values.calibrate:
        return
    from experiments.studies.sampling_sweeps import calibrate_generation
    from jaxmarl_llm.costs import model as costs

    found = calibrate_generation(predicted.work.models[0])
    seconds = found.predict(costs.features(*predicted))
    print(f"seconds of generation on this machine {seconds:.3g} (repeats spread by {found.spread:.0%})")
    if not found.stable:
        print("unstable: repeats lie too far apart (a busy machine?); calibrate again before relying on it")


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    if VERB == "plan":
        return calibrated(cfg, flag_values)
    from experiments.studies import sampling_sweeps
    from jaxmarl_llm.runs.preflight import host_memory

    return sampling_sweeps.run(flag_values, host_memory()) if VERB == "run" else sampling_sweeps.report(flag_values)


if __name__ == "__main__":
    VERB = config_flags.verb(VERBS)
    config_flags.run(main, required=("config",) if VERB == "plan" else ())
