"""Speed and memory against what people use today, as ratios measured in turns in one process tree:

    python -m experiments.bench [--suite=cpu] [--only=decode,update] [--repeats=5] [--peers=DIR] [--out=FILE.json]
    python -m experiments.bench --table=FILE.json [--into=docs/bench/cpu.md]

Suites: cpu (naive JAX, transformers, PyTorch; TRL, CoMLRL and google-tunix in environments of their own, which
`make peers` makes) and accelerator (naive JAX, PyTorch and transformers on the same device, beside its measured
bandwidth and matmul peak; within 10 minutes). A ratio is the other's seconds or bytes over ours: above 1, ours is less;
median over rounds, least and largest. The first call of each form compiles and is apart. Random weights of true shapes,
end tokens disabled.

A row is added to ``--out`` as soon as it is measured, with the command, the date and the load of the machine, and
replaces one of the same comparison on the same machine: parts may be measured one by one, on several machines.
``--table`` writes the file as Markdown, a table for each, between the markers of ``--into`` where that is given.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import jax
from absl import flags

from experiments import bench
from jaxmarl_llm.cli import config_flags

# Other entry points, imported in the same process by tests, have flags of these names.
flags.DEFINE_string("suite", "cpu", f"One of {', '.join(bench.SUITES)}.", allow_override=True)
flags.DEFINE_list("only", [], "Parts to measure; default: all of the suite.", allow_override=True)
flags.DEFINE_integer("repeats", None, "Rounds; default: 5.", lower_bound=1, allow_override=True)
flags.DEFINE_string(
    "peers", None, "Folder of the virtual environments of other systems; default: .venv-peers.", allow_override=True
)
flags.DEFINE_string("out", None, "Also add what was measured to this JSON file.", allow_override=True)
flags.DEFINE_string("table", None, "Measure nothing: write this JSON file as Markdown.", allow_override=True)
flags.DEFINE_string(
    "into", None, "Markdown file whose part between the markers becomes the table.", allow_override=True
)

MARKERS = "<!-- bench: begin -->", "<!-- bench: end -->"
HEADING = "| part | case | ours | against | other | ratio | least to largest | limit | target | |"


def number(value: float, unit: str) -> str:
    if unit == "B":
        return f"{value / 1e6:.4g} MB"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def table(rows: list[bench.Row]) -> str:
    """Every row, whether its target was met or not; then what else is known of the cases."""
    lines, facts = [HEADING, "|" + " --- |" * 10], []
    for row in rows:
        for other in row.others():
            ratio, least, largest = row.ratio(other)
            limit, target = row.limits.get(other), row.targets.get(other)
            cells = [row.part, row.case, number(median(row.values["ours"]), row.unit), other]
            cells += [number(median(row.values[other]), row.unit), f"{ratio:.2f}", f"{least:.2f} to {largest:.2f}"]
            cells += ["" if x is None else f"{x:.3g}" for x in (limit, target)]
            cells += ["" if target is None else "met" if ratio >= target else "**missed**"]
            lines.append("| " + " | ".join(cells) + " |")
        facts += [f"- {row.part}, {row.case}: {name} {value}" for name, value in row.facts.items()]
    return "\n".join(lines + ([""] if facts else []) + facts)


def measured(part: str, suite: bench.Suite) -> Iterator[tuple[str, dict]]:
    """The rows of a part as JSON, with where they come from; key: machine, part, case, others."""
    from experiments.studies.common import origin

    clock, load = time.time(), os.getloadavg()[0]
    said = origin()
    where = {**said, "suite": suite.name, "cores": os.cpu_count(), "load": round(load, 2)}
    where["at"] = time.strftime("%H:%M", time.gmtime(clock))
    for row in importlib.import_module(f"experiments.bench.{part}").run(suite):
        print(table([row]), flush=True)
        yield (
            ", ".join([said["machine"], row.part, row.case, *row.others()]),
            {**dataclasses.asdict(row), "origin": {**where, "minutes": round((time.time() - clock) / 60, 1)}},
        )


def read(file: str) -> dict[str, dict]:
    from experiments.studies.common import read_record

    return read_record(file)


def written(held: dict[str, dict]) -> str:
    """The tables of a JSON file by machine, and which command measured which part and when."""
    names = [f.name for f in dataclasses.fields(bench.Row)]
    machines: dict[str, tuple[list[bench.Row], dict]] = {}
    for row in held.values():
        o = row["origin"]
        rows, said = machines.setdefault(f"{o['cores']} cores of {o['machine']}", ([], {}))
        rows.append(bench.Row(**{name: row[name] for name in names}))
        said[row["part"], o["date"], o["at"]] = (
            f"- {row['part']}: `{o['command']}`, {o['date']} {o['at']} UTC, commit {o['commit']}, JAX {o['jax']}, "
            f"{o['minutes']} min, load {o['load']} before"
        )
    parts = (f"### {name}\n\n{table(rows)}\n\n" + "\n".join(said.values()) for name, (rows, said) in machines.items())
    return "\n\n".join(parts)


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    from jaxmarl_llm.config import one_of
    from jaxmarl_llm.errors import ConfigError

    if flag_values.table:
        held = read(flag_values.table)
        if not held:
            raise ConfigError(f"--table: no rows in {flag_values.table!r}; measure some with --out={flag_values.table}")
        text = written(held)
        if not flag_values.into:
            print(text)
            return
        page = Path(flag_values.into).read_text()
        if any(page.count(mark) != 1 for mark in MARKERS):
            raise ConfigError(f"--into: {flag_values.into}: expected {MARKERS[0]} and {MARKERS[1]}, once each")
        before, after = page.split(MARKERS[0])[0], page.split(MARKERS[1])[1]
        Path(flag_values.into).write_text(f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}")
        return
    one_of("--suite", flag_values.suite, bench.SUITES)
    suite = bench.SUITES[flag_values.suite]
    for name in flag_values.only:
        one_of("--only", name, suite.parts)
    given = {"repeats": flag_values.repeats, "peers": flag_values.peers}
    suite = dataclasses.replace(suite, **{k: v for k, v in given.items() if v is not None})
    parts = flag_values.only or suite.parts
    if suite.name == "cpu":
        jax.config.update("jax_platforms", "cpu")
    for name in parts:
        print(f"{name} ...", flush=True)
        for key, row in measured(name, suite):
            if flag_values.out:
                Path(flag_values.out).write_text(json.dumps(read(flag_values.out) | {key: row}, indent=1) + "\n")


if __name__ == "__main__":
    config_flags.run(main, required=())
