"""Every published system in the repository, and what was shown of it:

    python -m experiments.systems                       the table, from the last recorded runs
    python -m experiments.systems --run=dr_mas,rema     run them and record it

U: golden numbers and slow twins, as tests. L: learns, against a stated control. X: what the paper's own ingredient
brings, measured by taking it out. A system is a module of `experiments.claims`. Its claims have to be committed before
a run records anything. Records go to docs/results/systems.json, the table to docs/systems.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from experiments import claims
from experiments.claims import HOLDS, Claim, Finding, decide
from experiments.studies.common import interval, origin, read_record, stated_in
from jaxmarl_llm import json_files
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.errors import ConfigError

INTRO = """# Systems

`python -m experiments.systems` writes this page; `--run=NAME` measures one system anew.

- U: golden numbers and slow references, as tests, and exact counts.
- L: the system learns, against a control.
- X: the paper's own ingredient is taken out.
- Against: the control, and the training of each arm.
- Effect: the statistic of a claim, one value a seed. Both arms of a difference have the same seed, tasks and keys.
- A claim **holds** when the 95 % interval of the mean effect (Student's t over seeds) lies above delta, the smallest
  effect worth having. Below delta it does not hold. An interval around delta decides nothing.
- Every claim, with its delta, was committed before its run: the commit is in the first row of a system.
- Held-out tasks are tasks that no seed trains on. Tasks and demonstrations differ between seeds.
- "mechanism implemented": a rule of the paper had to be inferred.
"""


# Types of a record's keys that the table reads.
RECORD = {
    "status": str, "golden": {"file": str, "holds": bool}, "claims_commit": str, "findings": list, "seeds": int,
    "minutes": float, "date": str, "commit": str,
}  # fmt: skip
FINDING = {
    "kind": str, "text": str, "effect": str, "delta": float, "control": str, "budget": str, "values": list,
    "figures": dict,
}  # fmt: skip


def known() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(claims.__path__))


def claimed_in(name: str) -> str:
    """The commit that last changed the claims of a system, or the configurations with their budgets.

    Raises:
        ConfigError: Code or claims have changes that are not committed.
    """
    return stated_in(f"experiments/claims/{name}.py", "jaxmarl_llm/configs")


def checked(name: str, module: Any, findings: list[Finding]) -> list[dict[str, Any]]:
    """The findings beside their claims. ValueError where a claim has no finding, or a finding no claim."""
    if [f.claim for f in findings] != list(module.CLAIMS):
        raise ValueError(f"{name}: findings {[f.claim for f in findings]} are not of the claims {list(module.CLAIMS)}")
    return [
        {**vars(module.CLAIMS[f.claim]), "values": f.effect, "figures": f.figures, "verdict": decide(claim, f.effect)}
        for f, claim in zip(findings, module.CLAIMS.values(), strict=True)
    ]


def record(name: str, seeds: int | None, say: Any) -> dict[str, Any]:
    """Run the tests and claims of one system."""
    module = importlib.import_module(f"experiments.claims.{name}")
    seeds, stated, clock = seeds or module.SEEDS, claimed_in(name), time.time()
    tested = subprocess.run([sys.executable, "-m", "pytest", "-q", module.GOLDEN], capture_output=True, text=True)
    say(f"{name}: U {tested.stdout.strip().splitlines()[-1] if tested.stdout.strip() else tested.stderr.strip()}")
    findings = module.run(list(range(seeds)), say)
    return {
        "status": module.STATUS,
        "golden": {"file": module.GOLDEN, "holds": tested.returncode == 0},
        "claims_commit": stated,
        "findings": checked(name, module, findings),
        "seeds": seeds,
        "minutes": round((time.time() - clock) / 60, 1),
        **origin(),
    }


def table(records: dict[str, dict]) -> str:
    """One row a claim: the effect with its interval beside delta, and figures by arm."""
    mark = lambda verdict: verdict if verdict == HOLDS else f"**{verdict}**"
    lines = ["| system | | claim | against | effect | delta | | figures |", "|" + " --- |" * 8]
    for name in known():
        if name not in records:
            lines.append(f"| {name} | | not recorded yet | | | | | |")
            continue
        r = records[name]
        where = f"{r['seeds']} seeds, {r['minutes']} min, {r['date']}, `{r['commit']}`; claims `{r['claims_commit']}`"
        golden = r["golden"]
        verdict = mark(HOLDS if golden["holds"] else "does not hold")
        lines.append(f"| {name} | U | {r['status']}; `{golden['file']}` | | | | {verdict} | {where} |")
        for f in r["findings"]:
            claim = claim_of(f)
            figures = "; ".join(f"{arm} {interval(values)}" for arm, values in f["figures"].items())
            effect = f"{claim.effect}: {interval(f['values'])}"
            verdict = mark(decide(claim, f["values"]))
            against = f"{claim.control}; {claim.budget}"
            delta = f"{claim.delta:g}"
            lines.append(f"| | {claim.kind} | {claim.text} | {against} | {effect} | {delta} | {verdict} | {figures} |")
    return "\n".join(lines)


def page(records: dict[str, dict]) -> str:
    """The page of the records."""
    return f"{INTRO}\n{table(records)}\n"


def claim_of(finding: Mapping[str, Any]) -> Claim:
    """The claim of a recorded finding."""
    return Claim(**{field.name: finding[field.name] for field in dataclasses.fields(Claim)})


def recorded(file: Path) -> dict[str, Any]:
    """Records of a file by system. Left out: records of claims without a commit, a control or a budget."""
    kept = {}
    stated = lambda finding: not isinstance(finding, dict) or {"control", "budget"} <= set(finding)
    for name, r in read_record(file).items():
        where = f"{file}: {name!r:.80}"
        _check_object(r, {}, where)
        found = r.get("findings")
        if "claims_commit" not in r or (isinstance(found, list) and not all(map(stated, found))):
            continue
        _check_object(r, RECORD, where)
        for number, finding in enumerate(r["findings"]):
            _check_finding(finding, f"{where}: finding {number}")
        kept[name] = r
    return kept


def _check_finding(finding: Any, where: str) -> None:
    _check_object(finding, FINDING, where)
    for label, values in (("values", finding["values"]), *finding["figures"].items()):
        if not isinstance(values, list) or not values or not all(type(v) in (int, float) for v in values):
            raise ConfigError(f"{where}: {label!r:.80}: expected numbers, found {json_files.shown(values)}")
        if not all(abs(v) <= 1e300 or v != v for v in values):
            raise ConfigError(f"{where}: {label!r:.80}: expected numbers up to 1e300")
    try:
        claim_of(finding)
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{where}: {json_files.reason(error)}") from None


def _check_object(value: Any, form: dict[str, Any], where: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object, found {json_files.shown(value)}")
    json_files.check(value, form, where)


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    from jaxmarl_llm.config import nearest

    file = Path(flag_values.records)
    names = known() if flag_values.run == ["all"] else flag_values.run
    for name in names:
        if name not in known():
            raise ConfigError(f"--run: no system {name!r}; {nearest(name, known())}")
    for name in names:
        new = record(name, flag_values.seeds, lambda line: print(line, flush=True))
        records = {**recorded(file), name: new}  # read again: another process may have recorded a system meanwhile
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(records, indent=1))
        Path(flag_values.page).write_text(page(records))
    records = recorded(file)
    Path(flag_values.page).write_text(page(records))
    print(table(records))


if __name__ == "__main__":
    flags.DEFINE_list("run", [], "Systems to run; all: every one.")
    flags.DEFINE_integer("seeds", None, "Seeds 0 to N-1; default: the module's.", lower_bound=2)
    flags.DEFINE_string("records", "docs/results/systems.json", "JSON file of the records.")
    flags.DEFINE_string("page", "docs/systems.md", "Markdown file of the table, written after every system.")
    config_flags.run(main, required=())
