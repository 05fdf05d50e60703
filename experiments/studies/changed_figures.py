"""Published figures before and after their tasks were split by content, with the reason of each change:

    python -m experiments.studies.changed_figures [--before=8499bd1] [--out=docs/results/changed_figures.md]

The figures before are those of the records in commit ``--before``. The figures after are those of
docs/results/systems.json. Figures of equal names are compared. A system without a new record is listed as such.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from absl import flags

from experiments.studies.common import interval
from experiments.systems import known, recorded
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.errors import ConfigError

SPLIT = "held-out tasks are unseen, tasks differ between seeds"
STREAMS = "the tasks are one game; random streams and the order of tasks are new"
REASONS = {
    "advantage_alignment": STREAMS,
    "dr_mas": SPLIT,
    "malt": SPLIT,
    "marshal": f"{STREAMS}; the code's form centres and whitens as the authors' code does",
    "maze": SPLIT,
    "rema": f"{SPLIT}; averages over turns, then trajectories",
    "waltzrl": SPLIT,
}
INTRO = """# Published figures, before and after

`python -m experiments.studies.changed_figures` writes this page. Before: the records of commit `{before}`. After: the
records of [systems](../systems.md). Means over seeds with 95 % intervals (Student's t).
"""


def figures(record: Mapping[str, Any]) -> dict[str, list[float]]:
    """Figures of all claims of a record: label -> one value a seed."""
    out: dict[str, list[float]] = {}
    for finding in record["findings"]:
        out |= finding["figures"]
    return out


def rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Rows of the table: every figure that both records of a system have.

    Args:
        before: Records by system.
        after: Records by system.
    """
    lines = ["| system | figure | before | after | reason |", "|" + " --- |" * 5]
    for name in known():
        if name not in before:
            continue
        if name not in after:
            lines.append(f"| {name} | not recorded anew yet | | | {REASONS[name]} |")
            continue
        old, new = figures(before[name]), figures(after[name])
        seeds = f"{before[name]['seeds']} and {after[name]['seeds']} seeds"
        shown = [label for label in old if label in new]
        for i, label in enumerate(shown):
            why = f"{REASONS[name]}; {seeds}" if i == 0 else ""
            lines.append(
                f"| {name if i == 0 else ''} | {label} | {interval(old[label])} | {interval(new[label])} | {why} |"
            )
    return lines


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    show = subprocess.run(["git", "show", f"{flag_values.before}:docs/systems.json"], capture_output=True, text=True)
    if show.returncode:
        raise ConfigError(f"--before: {flag_values.before!r} has no docs/systems.json: {show.stderr.strip()}")
    table = rows(json.loads(show.stdout), recorded(Path("docs/results/systems.json")))
    Path(flag_values.out).write_text("\n".join([INTRO.format(before=flag_values.before), *table, ""]))
    print("\n".join(table))


if __name__ == "__main__":
    flags.DEFINE_string("before", "8499bd1", "Commit of the earlier records.")
    flags.DEFINE_string("out", "docs/results/changed_figures.md", "The page.")
    config_flags.run(main, required=())
