"""Speed and memory against what people use today, as ratios measured in turns in one process:

    python -m experiments.bench [--shape=smollm2_135m] [--only=decode,update] [--repeats=5] [--out=FILE.json]

A ratio is the other's seconds over ours: above 1, ours is faster; median over rounds, least and largest. The first call
of each form compiles and is apart. Random weights of true shapes, float32 on CPU, end tokens disabled.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path
from typing import Any

from absl import flags

from experiments import bench, cli
from experiments.budget import origin

flags.DEFINE_string("shape", "smollm2_135m", f"One of {', '.join(bench.SHAPES)}.")
flags.DEFINE_list("only", [], "Parts to measure; default: all.")
flags.DEFINE_integer("repeats", 5, "Rounds.", lower_bound=1)
flags.DEFINE_string("out", None, "Also add what was measured to this JSON file.")


def parts() -> list[str]:
    found = [module.name for module in pkgutil.iter_modules(bench.__path__)]
    return [name for name in found if name != "__main__" and not name.endswith("_forms")]


def table(rows: list[bench.Row]) -> str:
    lines = ["| part | case | seconds, ours | against | seconds | ratio | least to largest |", "|" + " --- |" * 7]
    middle = lambda x: sorted(x)[len(x) // 2]
    for row in rows:
        for other in [name for name in row.seconds if name != "ours"]:
            ratio, least, largest = row.ratio(other)
            lines.append(
                f"| {row.part} | {row.case} | {middle(row.seconds['ours']):.3g} | {other} | "
                f"{middle(row.seconds[other]):.3g} | {ratio:.2f} | {least:.2f} to {largest:.2f} |"
            )
        if row.facts:
            lines.append(f"| {row.part} | " + "; ".join(f"{k} {v:,}" for k, v in row.facts.items()) + " | | | | | |")
    return "\n".join(lines)


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    from jaxmarl_llm.config import one_of

    one_of("--shape", flag_values.shape, bench.SHAPES)
    for name in flag_values.only:
        one_of("--only", name, parts())
    rows = []
    for name in flag_values.only or parts():
        print(f"{name} ...", flush=True)
        new = importlib.import_module(f"experiments.bench.{name}").run(flag_values.shape, flag_values.repeats)
        print(table(new), flush=True)
        rows += new
        if flag_values.out:
            file = Path(flag_values.out)
            held = json.loads(file.read_text()) if file.exists() else {}
            held |= {f"{r.part}, {r.case}": {**r._asdict(), **origin()} for r in new}
            file.write_text(json.dumps(held, indent=1) + "\n")


if __name__ == "__main__":
    cli.run(main, required=())
