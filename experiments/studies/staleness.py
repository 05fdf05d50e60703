"""Learning curves of JoyAgents-R1 on `dispatch` with rollouts that are some steps behind, by arm, over paired seeds:

    python -m experiments.studies.staleness              the table, from what is recorded
    python -m experiments.studies.staleness --run=all    run what is not recorded yet

An arm is ``config.staleness`` with or without ``loss.tis_clip``. All arms of a seed have the same initial parameters,
demonstrations, tasks and keys. The primary figure is the mean over the steps of RL of the share of sampled training
episodes that succeed. The success on held-out tasks after the last step is shown beside it. The seeds of an arm run as
one program. Records go to docs/results/staleness.json, and the table to docs/training_tools.md.

With the flags of `make demo` in XLA_FLAGS, compilation takes half its time on a CPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.claims import OPEN, Claim, decide, minus
from experiments.studies.common import (
    column,
    interval,
    origin,
    read_record,
    replace_section,
    seeds_of,
    stated_in,
    write,
)
from jaxmarl_llm.agents.team import Backbone
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import fingerprint, replace_path
from jaxmarl_llm.configs import joyagents_r1 as configs
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import joyagents_r1
from jaxmarl_llm.runs.compiled import make_evaluation, make_program, task_data

SEEDS = 20  # no claim is decided before both of its arms have as many
TOGETHER = 10  # seeds of one program
CLIP, FAR = 2.0, 8
STATED = ("experiments/studies/staleness.py", "jaxmarl_llm/configs")
NOW, ONE, ONE_WEIGHED = "of the newest policy", "1 step behind", "1 step behind and weighed"
MANY, MANY_WEIGHED = f"{FAR} steps behind", f"{FAR} steps behind and weighed"
ARMS: dict[str, dict[str, Any]] = {
    NOW: {},
    ONE_WEIGHED: {"staleness": 1, "loss.tis_clip": CLIP},
    ONE: {"staleness": 1},
    MANY_WEIGHED: {"staleness": FAR, "loss.tis_clip": CLIP},
    MANY: {"staleness": FAR},
}
MARKS = "<!-- staleness -->", "<!-- /staleness -->"


def base() -> joyagents_r1.Config:
    """The configuration that the arms change: the team of the demo with a smaller model and smaller batches."""
    cfg = configs.tiny()
    backbone = Backbone(hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=1)
    return replace(
        cfg,
        steps=80,
        batch=8,
        team=replace(cfg.team, backbone=backbone),
        optimizer=replace(cfg.optimizer, learning_rate=1e-3, total_steps=80),
        sft=replace(cfg.sft, steps=300, batch=64),
    )


def _claim(text: str, effect: str, delta: float, control: str) -> Claim:
    cfg = base()
    budget = f"{cfg.sft.steps} supervised steps and {cfg.steps} RL steps of {cfg.batch} tasks in both arms"
    return Claim("L", text, f"mean training success, by seed: {effect}", delta, control, budget)


CLAIMS: dict[str, tuple[Claim, str, str]] = {
    "no worse": (
        _claim(
            "rollouts one step behind with the weight learn no worse than rollouts of the newest policy",
            "one step behind, weighed, minus the newest policy",
            -0.02,
            "rollouts of the newest policy",
        ),
        ONE_WEIGHED,
        NOW,
    ),
    "weight": (
        _claim(
            f"{FAR} steps behind, the weight helps",
            f"{FAR} steps behind, weighed, minus not weighed",
            0.02,
            f"rollouts {FAR} steps behind without the weight",
        ),
        MANY_WEIGHED,
        MANY,
    ),
}


def configuration(changes: Mapping[str, Any]) -> joyagents_r1.Config:
    """The configuration of an arm. ``changes``: dotted key -> value."""
    cfg = base()
    for path, value in changes.items():
        cfg = replace_path(cfg, path, value)
    cfg.check("config")
    return cfg


def measure(cfg: joyagents_r1.Config, seeds: Sequence[int]) -> dict[str, Any]:
    """Run one arm.

    Args:
        cfg: Its configuration.
        seeds: Of the runs.

    Returns:
        By seed: the learning curve and its mean, and held-out success after the last step.
    """
    clock, recipe = time.time(), joyagents_r1.make(cfg)
    data, keys = task_data(recipe, seeds), jnp.array(seeds, jnp.int32)
    score = make_evaluation(cfg, memory=cfg.memory if cfg.use_memory else None)

    def whole(seed: jax.Array, own: Any) -> tuple[jax.Array, jax.Array]:
        state, figures = make_program(recipe).run(seed, own)
        return figures["accuracy"], score(state.params, seed, own.held_out, state.memory)["accuracy"]

    curve, last = jax.device_get(jax.jit(jax.vmap(whole))(keys, data))
    return {
        "seeds": list(seeds),
        "curve": np.round(curve, 4).tolist(),
        "area": np.round(curve.mean(1), 5).tolist(),
        "last": np.round(last, 5).tolist(),
        "minutes": round((time.time() - clock) / 60, 1),
        "settings": fingerprint(cfg),
        **origin(),
    }


def by_seed(parts: list[dict[str, Any]], key: str) -> dict[int, float]:
    """One figure of all parts of an arm: seed -> value, in rising order. ``key``: name of the figure."""
    return dict(sorted(zip(seeds_of(parts), column(parts, key), strict=True)))


def check(done: Mapping[str, Any], where: str) -> None:
    """Refuse records of arms or configurations that are not those of now. ``where``: name of the record."""
    for name, parts in done.items():
        if name not in ARMS:
            raise ConfigError(f"{where}: no arm {name!r}; take another file with --records")
        if any(part["settings"] != fingerprint(configuration(ARMS[name])) for part in parts):
            raise ConfigError(f"{where}: {name}: recorded with another configuration; take another file with --records")


def table(done: Mapping[str, Any]) -> str:
    """The arms and the claims, as Markdown. ``done``: arm -> its recorded parts."""
    lines = ["| rollouts | training success, mean | held-out success, last | seeds | minutes |", "|" + " --- |" * 5]
    for name in ARMS:
        parts = done.get(name, [])
        if not parts:
            lines.append(f"| {name} | not recorded yet | | | |")
            continue
        minutes = sum(part["minutes"] for part in parts)
        area, last = ([*by_seed(parts, key).values()] for key in ("area", "last"))
        lines.append(f"| {name} | {interval(area)} | {interval(last)} | {len(area)} | {minutes:.0f} |")
    lines += ["", "| claim | effect | delta | |", "|" + " --- |" * 4]
    for claim, one, other in CLAIMS.values():
        first, second = (by_seed(done.get(arm, []), "area") for arm in (one, other))
        shared = [seed for seed in first if seed in second]
        if len(shared) < 2:
            lines.append(f"| {claim.text} | not recorded yet | {claim.delta:g} | |")
            continue
        effect = minus([first[seed] for seed in shared], [second[seed] for seed in shared])
        verdict = decide(claim, effect) if len(effect) >= SEEDS else OPEN
        lines.append(f"| {claim.text} | {interval(effect)} | {claim.delta:g} | **{verdict}** |")
    runs = sorted({f"{p['date']}, commit `{p['commit']}`, {p['machine']}" for parts in done.values() for p in parts})
    return "\n".join(["", *lines, "", *([f"Measured {'; '.join(runs)}.", ""] if runs else [])])


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    asked, file, page = flag_values.run, Path(flag_values.records), Path(flag_values.page)
    for name in asked:
        if name not in ("all", *ARMS):
            raise ConfigError(f"--run: no arm {name!r}; expected all or one of {'; '.join(ARMS)}")
    records = read_record(file)
    done: dict[str, Any] = records.setdefault("arms", {})
    check(done, str(file))

    def save() -> None:
        if asked:
            write(file, json.dumps(records, separators=(",", ":")))
        write(page, replace_section(page.read_text(), *MARKS, table(done)))

    if asked:
        records.setdefault("claims_commit", stated_in(*STATED))
    for first in range(flag_values.first, flag_values.first + flag_values.seeds, TOGETHER):
        for name in ARMS if "all" in asked else asked:
            recorded = done.setdefault(name, [])
            last = min(first + TOGETHER, flag_values.first + flag_values.seeds)
            missing = [s for s in range(first, last) if s not in seeds_of(recorded)]
            if missing:
                recorded.append(measure(configuration(ARMS[name]), missing))
                new = recorded[-1]
                print(f"{name}, seeds {missing}: {interval(new['area'])}, {interval(new['last'])}", flush=True)
                save()
    save()
    print(table(done))


if __name__ == "__main__":
    flags.DEFINE_list("run", [], "Arms to run; all: every one.")
    flags.DEFINE_integer("seeds", SEEDS, "How many seeds.", lower_bound=1)
    flags.DEFINE_integer("first", 0, "The first seed; from 100 on: calibration, with --records and --page elsewhere.")
    flags.DEFINE_string("records", "docs/results/staleness.json", "JSON file of the records.")
    flags.DEFINE_string("page", "docs/training_tools.md", "Markdown file whose section is written.")
    config_flags.run(main, required=())
