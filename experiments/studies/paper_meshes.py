"""Meshes of the papers' runs on four machines, by the closed forms of `costs.meshes`:

    python -m experiments.studies.paper_meshes [--into=docs/paper_runs.md]

One 80 GB GPU, eight of them, and slices of 8 and 256 chips of TPU v5e. Where a run does not fit as it is configured,
the table names the settings that make it fit. The settings tried are those of `costs.meshes.fitting`, then smaller
batches, then adapters over one frozen model in place of separate models.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from experiments.studies.common import replace_section
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.configs.magrpo import PAPER_RUNS
from jaxmarl_llm.costs.chips import ChipSet, chip_set
from jaxmarl_llm.costs.meshes import Proposal, fitting

flags.DEFINE_string("into", "docs/paper_runs.md", "Page whose table of meshes is written.", allow_override=True)

RUNS = (*(f"magrpo:{name}" for name in PAPER_RUNS), "joyagents_r1:qwen2_5_3b")
MACHINES = ("h100:1", "h100:8", "v5e:8", "v5e:256")
BEGIN, END = "<!-- meshes -->", "<!-- /meshes -->"
HEAD = (
    "| runs | machine | mesh, data x fsdp x tensor (blocks x parts) | other settings | GB, generating | GB, updating | "
    "of | seconds |"
)


class Row(NamedTuple):
    """A run on a machine. changes: settings beside the mesh, by dotted key."""

    run: str
    machine: ChipSet
    proposal: Proposal
    changes: dict[str, Any]

    @property
    def flags(self) -> str:
        """Flags that make the run fit: of the mesh, and of the changed settings."""
        others = (f"--config.{key}={str(value).lower()}" for key, value in self.changes.items())
        return " ".join([self.proposal.flags, *others])


@functools.cache
def prepared(run: str, sharing: str | None) -> tuple[Any, Any, Any]:
    """Configuration without files, plan and workload of a run.

    Args:
        run: Name and variant of a shipped configuration.
        sharing: Value of ``team.parameter_sharing``; None: that of the configuration.
    """
    from experiments.tpu.plan_pod import prepare

    bare, plan, work, _ = prepare(config_flags.load(run, [("team.parameter_sharing", sharing)] if sharing else ()))
    return bare, plan, work


def settings(batch: int) -> Iterator[dict[str, Any]]:
    """Changes that are tried, the least first. ``batch``: that of the configuration."""
    for sharing in ({}, {"team.parameter_sharing": "lora"}):
        size = batch
        while size:
            yield sharing | ({} if size == batch else {"batch": size})
            size //= 2


@functools.cache
def row(run: str, machine: str) -> Row:
    """A run on a machine, with the fewest changes that make it fit; without any where nothing does.

    Args:
        run: Name and variant of a shipped configuration.
        machine: Set of chips, as ``h100:8``.
    """
    chips, first = chip_set(machine), None
    for changes in settings(prepared(run, None)[0].batch):
        bare, plan, work = prepared(run, changes.get("team.parameter_sharing"))
        size = changes.get("batch", bare.batch)
        cfg = dataclasses.replace(bare, batch=size)
        best, more = fitting(cfg, plan, work._replace(tasks=size), chips.chip, chips.size)
        first = first or Row(run, chips, best, {})
        if best.fits:
            return Row(run, chips, best, changes | more)
    assert first is not None
    return first


def line(names: Sequence[str], found: Row) -> str:
    """A line of the table for runs of equal cost."""
    best, gb = found.proposal, lambda x: f"{x / 1e9:.1f}"
    by, own = " x ".join, best.layout != (1, best.mesh[2])
    cells = [
        ", ".join(f"`{name}`" for name in names),
        f"{found.machine.size} x {found.machine.name}",
        by(map(str, best.mesh)) + (f" ({by(map(str, best.layout))})" if own else ""),
        ", ".join(f"`{key}={str(value).lower()}`" for key, value in found.changes.items()),
        gb(best.memory.generating),
        gb(best.memory.updating),
        f"{found.machine.chip.memory / 1e9:.0f}",
        f"{best.seconds:.3g}" if best.fits else "does not fit",
    ]
    return "| " + " | ".join(cells) + " |"


def table(runs: Sequence[str] = RUNS, machines: Sequence[str] = MACHINES) -> str:
    """Table of ``runs`` on ``machines``; runs of equal cost share their lines."""
    alike: dict[str, list[str]] = {}
    for run in runs:
        rows = [row(run, machine) for machine in machines]
        alike.setdefault(repr([r[1:] for r in rows]), []).append(run)
    lines = [HEAD, "|" + " --- |" * HEAD.count(" | ") + " --- |"]
    for names in alike.values():
        lines += [line(names if i == 0 else (), row(names[0], machine)) for i, machine in enumerate(machines)]
    return "\n".join(lines)


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    """Write the table between its marks. cfg, workdir: not read. flag_values: ``into`` is read."""
    page = Path(flag_values.into)
    page.write_text(replace_section(page.read_text(), BEGIN, END, "\n" + table() + "\n"))


if __name__ == "__main__":
    config_flags.run(main, required=())
