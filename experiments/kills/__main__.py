"""Training runs that are killed with signal 9 at random moments and resumed, compared with runs that nothing stopped:

    python -m experiments.kills --count=40 --out=docs/results/kills.md [--only=array] [--seed=0] [--work=build/kills]

Moments: a time after the start, a half-written checkpoint, a change of phase, and the beginning of a rollout, an
evaluation, an update, a save or a step. A resumed run has to be equal to the unbroken one: every array of the newest
checkpoint to the byte (parameters, optimizer states, memories, counters, key), metrics.jsonl without times, every
rollout, episodes.md and data sets. Nothing may be left over, and no process.

Every kill is recorded in OUT with the suffix .json at once. The same command goes on after what is recorded of the
same commit and seed. Exit code 1 with a problem; the workdir of such a run stays in --work.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from absl import flags, logging

from experiments.kills import run
from experiments.kills.kinds import KINDS
from experiments.studies.common import origin, read_record
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import one_of

flags.DEFINE_integer("count", 40, "Kills, shared by the kinds.", lower_bound=1, allow_override=True)
flags.DEFINE_integer("seed", 0, "Seed of the moments.", allow_override=True)
flags.DEFINE_list("only", [], "Kinds of runs; default: all.", allow_override=True)
flags.DEFINE_string(
    "out", None, "Write the page to this file, and the kills to one with the suffix .json.", allow_override=True
)
flags.DEFINE_string("work", "build/kills", "Folder of the runs and of compiled programs.", allow_override=True)

FORM = {"commit": str, "seed": int, "kills": list}


def page(record: dict[str, Any]) -> str:
    """The page of results."""
    kills = [run.Kill(**k) for k in record["kills"]]
    lines = ["| runs | kills | before the end | a save half written | equal to the unbroken run |"]
    lines.append("| --- |" + " ---: |" * 4)
    for kind in [*dict.fromkeys(k.kind for k in kills), "all"]:
        own = [k for k in kills if kind in (k.kind, "all")]
        counts = (len(own), sum(k.landed for k in own), sum(k.in_save for k in own), sum(not k.problems for k in own))
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    lines += ["", "| runs | number | killed | completed steps | resumed from step | problems |"]
    lines.append("| --- | ---: | --- | ---: | ---: | --- |")
    for k in kills:
        when = k.moment if k.landed else f"{k.moment}; the run had ended"
        problems = "; ".join(k.problems[:3]) or "none"
        lines.append(f"| {k.kind} | {k.number} | {when} | {k.step} | {k.resumed} | {problems} |")
    return f"""# Killed runs

Made on {record["date"]} at commit `{record["commit"]}` on {record["machine"]} with JAX {record["jax"]} by

    {record["command"]}

Each run is killed with signal 9 once, at a moment that a seed names, and resumed to its end. It has to be equal to a
run that nothing stopped: every array of the newest checkpoint to the byte, metrics without times, every rollout, and
the files beside them. Five kinds of tiny runs: array environments with memories, a host environment in a worker
process, LoRA adapters, a run of three phases with a stored data set (MALT), and two processes that share parameters.

{chr(10).join(lines)}
"""


def main(cfg: object, workdir: str | None, flag_values: flags.FlagValues) -> int:
    """Run the command. Returns 1 if a run differs."""
    logging.set_verbosity(logging.ERROR)  # Orbax tells every detail
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception: the run in progress is ended too
    kinds = [one_of("--only", name, KINDS) for name in flag_values.only] or list(KINDS)
    now, out = origin(), flag_values.out and Path(flag_values.out)
    old = read_record(out and out.with_suffix(".json"), FORM)
    record = {**now, "seed": flag_values.seed, "kills": []}
    if (old.get("commit"), old.get("seed")) == (now["commit"], flag_values.seed):
        record["kills"] = old["kills"]
    done = {(k["kind"], k["number"]) for k in record["kills"]}
    for i in range(flag_values.count):
        kind, number = kinds[i % len(kinds)], i // len(kinds)
        if (kind, number) in done:
            continue
        work = Path(flag_values.work).absolute() / now["commit"]
        work.mkdir(parents=True, exist_ok=True)
        whole = run.unbroken(kind, work)
        found = run.kill(kind, number, flag_values.seed, whole, work)
        print(f"{kind} {number}: {found.moment}: {'; '.join(found.problems) or 'equal'}", flush=True)
        record["kills"].append(found._asdict())
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            partial = out.with_suffix(".json.tmp")
            partial.write_text(json.dumps(record, indent=1))
            os.replace(partial, out.with_suffix(".json"))
            out.write_text(page(record))
    return int(any(k["problems"] for k in record["kills"]))


if __name__ == "__main__":
    config_flags.run(main, required=())
