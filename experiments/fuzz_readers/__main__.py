"""Mutated files for every reader, and what each reader does with them:

    python -m experiments.fuzz_readers --count=10000 [--only=GGUF] [--seed=0] [--out=docs/results/fuzz.md]

A case is loaded, or ends in one line that names the file. Everything else is a defect: a traceback (or an error of
several lines), more than 5 s of CPU, or more than 200 MB above what the process held before. Exit code 1 with a defect.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from absl import flags

from experiments.fuzz_readers import run
from experiments.fuzz_readers.kinds import KINDS
from jaxmarl_llm.cli import config_flags

flags.DEFINE_integer("count", 10_000, "Cases, shared by the readers.", lower_bound=1, allow_override=True)
flags.DEFINE_integer("seed", 0, "Seed of the mutations.", allow_override=True)
flags.DEFINE_list("only", [], "Readers; default: all.", allow_override=True)
flags.DEFINE_string("out", None, "Write the page to this file.", allow_override=True)
flags.DEFINE_string(
    "work", None, "Run cases of one reader in this process and write them as JSON.", allow_override=True
)
flags.DEFINE_list("range", [], "With --work: the first case and the one behind the last.", allow_override=True)


def table(cases: list[run.Case]) -> str:
    """One row a reader: counts by outcome, the slowest case and the largest."""
    lines = ["| reader | cases | " + " | ".join(run.OUTCOMES) + " | slowest, s of CPU | largest, MB |"]
    lines.append("| --- |" + " ---: |" * (len(run.OUTCOMES) + 3))
    for name in [*dict.fromkeys(c.kind for c in cases), "all"]:
        own = [c for c in cases if name in (c.kind, "all")]
        counts = Counter(c.outcome for c in own)
        cells = [str(counts[outcome]) for outcome in run.OUTCOMES]
        worst = f"{max(c.seconds for c in own):.2f} | {max(c.megabytes for c in own):.0f}"
        lines.append(f"| {name} | {len(own)} | {' | '.join(cells)} | {worst} |")
    return "\n".join(lines)


def page(cases: list[run.Case], command: str, minutes: float) -> str:
    """The page of results."""
    from experiments.studies.common import processor

    slowest = max(cases, key=lambda c: c.seconds)
    machine = f"{len(os.sched_getaffinity(0))} cores of an {processor()}"
    return f"""# Fuzzed readers

Made on {time.strftime("%Y-%m-%d")} in {minutes:.0f} min on {machine} by

    {command}

Each case is a small valid set of files with one mutation, named by seed, reader and number. A reader loads it, or ends
in one line that names the file. Time is CPU time, memory is the peak above what the process held before. The limits are
{run.SECONDS:g} s and {run.MEGABYTES} MB.

{table(cases)}

Slowest case: {slowest.kind} {slowest.number}, {slowest.seconds:.2f} s ({slowest.outcome}).
"""


def main(cfg: object, workdir: str | None, flag_values: flags.FlagValues) -> int:
    """Run the command. Returns 1 if a case is a defect."""
    if flag_values.work:
        first, last = map(int, flag_values.range)
        run.work(flag_values.work, flag_values.seed, first, last)
        return 0
    from jaxmarl_llm.config import one_of

    names = [one_of("--only", name, KINDS) for name in flag_values.only] or list(KINDS)
    each, clock = -(-flag_values.count // len(names)), time.time()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        work = pool.map(lambda name: list(run.run_kind(name, flag_values.seed, each)), names)
        cases = [case for found in work for case in found]
    bad = [case for case in cases if case.outcome not in (run.LOADED, run.REFUSED)]
    for case in bad:
        print(f"{case.kind} {case.number}: {case.outcome}, {case.seconds:.1f} s, {case.megabytes:.0f} MB: {case.what}")
        print(f"    {case.said[:500]}")
    print(table(cases))
    if flag_values.out:
        command = " ".join(["python -m experiments.fuzz_readers", *sys.argv[1:]])
        Path(flag_values.out).write_text(page(cases, command, (time.time() - clock) / 60))
    return int(bool(bad))


if __name__ == "__main__":
    config_flags.run(main, required=())
