"""Every published system in the repository, and what was shown of it:

    python -m experiments.systems                       the table, from the last recorded runs
    python -m experiments.systems --run=dr_mas,rema     run them on --seeds=5 and record it

U: golden numbers and slow twins, as tests. L: learns, against a stated control. X: what the paper's own ingredient
brings, measured by taking it out. A system is a module of `experiments.claims` with ``GOLDEN`` (its test file),
``STATUS`` and ``run(seeds, say) -> [Finding]``. Records go to docs/systems.json, the table to docs/systems.md.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from absl import flags

from experiments import claims, cli
from experiments.budget import interval, origin

flags.DEFINE_list("run", [], "Systems to run; all: every one.")
flags.DEFINE_integer("seeds", 5, "Seeds 0 to N-1.", lower_bound=1)
flags.DEFINE_string("records", "docs/systems.json", "JSON file of the records; the table is written beside it.")

INTRO = """# Systems

Written by `python -m experiments.systems`; every row by `--run=NAME`, with seeds, date and commit. U: golden numbers
and slow twins (tests). L: it learns, against a control. X: the paper's own ingredient taken out. Means with 95 %
intervals over seeds (Student's t). "mechanism implemented": a rule of the paper had to be inferred.
"""


def known() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(claims.__path__))


def record(name: str, seeds: int, say: Any) -> dict[str, Any]:
    """Run the tests and claims of one system."""
    module = importlib.import_module(f"experiments.claims.{name}")
    clock = time.time()
    tested = subprocess.run([sys.executable, "-m", "pytest", "-q", module.GOLDEN], capture_output=True, text=True)
    say(f"{name}: U {tested.stdout.strip().splitlines()[-1] if tested.stdout.strip() else tested.stderr.strip()}")
    findings = module.run(list(range(seeds)), say)
    return {
        "status": module.STATUS,
        "golden": {"file": module.GOLDEN, "holds": tested.returncode == 0},
        "findings": [f._asdict() for f in findings],
        "seeds": seeds,
        "minutes": round((time.time() - clock) / 60, 1),
        **origin(),
    }


def table(records: dict[str, dict]) -> str:
    """One row a claim; figures by arm."""
    mark = lambda holds: "holds" if holds else "**does not hold**"
    lines = ["| system | | claim | figures | |", "| --- | --- | --- | --- | --- |"]
    for name in known():
        if name not in records:
            lines.append(f"| {name} | | not recorded yet | | |")
            continue
        r = records[name]
        where = f"{r['seeds']} seeds, {r['minutes']} min, {r['date']}, `{r['commit']}`"
        golden = r["golden"]
        lines.append(f"| {name} | U | {r['status']}; `{golden['file']}` | {where} | {mark(golden['holds'])} |")
        for f in r["findings"]:
            figures = "; ".join(f"{arm} {interval(values)}" for arm, values in f["figures"].items())
            lines.append(f"| | {f['kind']} | {f['claim']} | {figures} | {mark(f['holds'])} |")
    return "\n".join(lines)


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    from jaxmarl_llm.config import nearest
    from jaxmarl_llm.text import ConfigError

    file = Path(flag_values.records)
    records = json.loads(file.read_text()) if file.exists() else {}
    names = known() if flag_values.run == ["all"] else flag_values.run
    for name in names:
        if name not in known():
            raise ConfigError(f"--run: no system {name!r}; {nearest(name, known())}")
    for name in names:
        records[name] = record(name, flag_values.seeds, lambda line: print(line, flush=True))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(records, indent=1))
        file.with_suffix(".md").write_text(f"{INTRO}\n{table(records)}\n")
    print(table(records))


if __name__ == "__main__":
    cli.run(main, required=())
