"""JoyAgents-R1's mechanisms on `relay_dispatch`, where each can win or lose:

    python -m experiments.studies.mechanisms                       the page, from what is recorded
    python -m experiments.studies.mechanisms --run=all             run what is not recorded yet
    python -m experiments.studies.mechanisms --run=pilot --seeds=2 areas of both plans by group size, seeds 100 and 101

Arms and claims are in `experiments.studies.mechanism_arms`. All arms of a seed start from the same parameters after
stage 0, and have the same tasks, held-out tasks and keys. Held-out success is measured at eleven places of a run. The
primary figure is the area under this curve, divided by the length of the run. A contrast is the paired difference of
two arms over seeds. Holm's correction holds for the family of all contrasts.

A part is some seeds of one arm, five by default. Parts go to docs/results/mechanisms.json one by one, and the table to
docs/mechanisms.md. A study that was stopped goes on at its next part. Parameters after stage 0 are kept in ``--work``,
and all arms read them there. A recorded part of another configuration, or of other claims, is refused.

The group sizes of the arms are constants in `mechanism_arms`. The pilot measures them anew, on seeds of its own.
With the flags of `make demo` in XLA_FLAGS, compilation takes half its time on a CPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.claims import FAILS, HOLDS, OPEN, Finding, arms, minus
from experiments.studies import mechanism_arms
from experiments.studies.common import Parts, column, interval, origin, read_record, seeds_of, stated_in, write
from experiments.studies.mechanism_arms import (
    ARMS,
    CLAIMS,
    CONTRASTS,
    GROUP,
    Arm,
    Start,
    base,
    budget,
    claims_version,
    figures,
    pilot_arms,
    play,
    settings_of,
    start,
)
from experiments.studies.paired import LEVEL, detectable, holm, p_value
from jaxmarl_llm import json_files
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import joyagents_r1

SEEDS = 20  # of the study: no contrast is decided before both of its arms have as many
FIRST_PILOT_SEED = 100
# What states the claims and their budgets.
STATED = ("experiments/studies/mechanism_arms.py", "experiments/studies/mechanism_changes.py", "jaxmarl_llm/configs")
PART_FORM = {
    "seeds": list, "curve": list, "area": list, "tokens": list, "hit": list, "steps": int, "minutes": float,
    "settings": str, "claims": (str, type(None)), "date": str, "commit": str,
}  # fmt: skip
BY_SEED = ("seeds", "curve", "area", "tokens", "hit")  # the lists of a part


# -- parts -------------------------------------------------------------------------------------------------------------


def made_with(arm: Arm, reference: joyagents_r1.Config, claims: str | None) -> dict[str, str | None]:
    """What a part records of the configuration and the claims that it was run with; None: a pilot has no claims."""
    return {"settings": settings_of(arm, reference), "claims": claims}


def check_parts(
    done: Mapping[str, Any], wanted: Mapping[str, Arm], reference: joyagents_r1.Config, claims: str | None, where: str
) -> None:
    """Refuse parts that were not run with the present configuration and claims.

    Args:
        done: Arm -> its recorded parts.
        wanted: The arms that there are.
        reference: The configuration that the arms change.
        claims: Version of the claims.
        where: Name of the record, for errors.
    """
    for name, parts in done.items():
        if name not in wanted:
            raise ConfigError(f"{where}: no arm {name!r}; take another file with --records")
        if not isinstance(parts, list):
            raise ConfigError(f"{where}: {name}: expected a list of parts, found {json_files.shown(parts)}")
        now = made_with(wanted[name], reference, claims)
        for number, part in enumerate(parts):
            place = f"{where}: {name}, part {number}"
            if not isinstance(part, dict):
                raise ConfigError(f"{place}: expected an object, found {json_files.shown(part)}")
            json_files.check(part, PART_FORM, place)
            if len({len(part[key]) for key in BY_SEED}) > 1:
                raise ConfigError(f"{place}: expected one value a seed in each of {', '.join(BY_SEED)}")
            for key, what in (("settings", "configuration"), ("claims", "version of the claims")):
                if part[key] != now[key]:
                    raise ConfigError(
                        f"{place}: recorded with another {what} ({part[key]}, now {now[key]}); "
                        "take another file with --records"
                    )


def measure(arm: Arm, reference: joyagents_r1.Config, begin: Start, claims: str | None) -> dict[str, Any]:
    """Run an arm on the seeds of ``begin``.

    Returns:
        The part to record.
    """
    clock = time.time()
    curves = play(arm, reference, begin)
    return {
        "seeds": [int(seed) for seed in begin.seeds],
        **figures(curves),
        "steps": mechanism_arms.config_of(arm, reference).steps,
        "minutes": round((time.time() - clock) / 60, 1),
        **made_with(arm, reference, claims),
        **origin(),
    }


def run(
    wanted: Mapping[str, Arm],
    parts: Sequence[Sequence[int]],
    reference: joyagents_r1.Config,
    done: dict[str, Parts],
    claims: str | None,
    work: Path,
) -> Iterator[str]:
    """Run what ``done`` does not hold: all arms on the seeds of the first part, then on those of the second.

    Args:
        wanted: The arms.
        parts: Seeds that run together.
        reference: The configuration that the arms change.
        done: Arm -> its recorded parts; a part is added after its run.
        claims: Version of the claims; None for a pilot.
        work: Folder of the parameters after stage 0.

    Yields:
        A line about each new part. The caller saves ``done`` then.
    """
    for seeds in parts:
        for name, arm in wanted.items():
            recorded = done.setdefault(name, [])
            missing = [seed for seed in seeds if seed not in seeds_of(recorded)]
            if missing:
                recorded.append(measure(arm, reference, start(reference, missing, work), claims))
                new = recorded[-1]
                yield f"{name}, seeds {missing}: area {interval(new['area'])} ({new['minutes']} min)"


def cut(seeds: Sequence[int], together: int) -> list[Sequence[int]]:
    """The seeds of each part: ``together`` at a time."""
    return [seeds[i : i + together] for i in range(0, len(seeds), together)]


# -- decisions ---------------------------------------------------------------------------------------------------------


def findings(done: Mapping[str, Parts]) -> list[Finding]:
    """The contrasts of the seeds that both arms have, by seed in rising order. ``done``: arm -> its recorded parts."""
    areas = {name: dict(zip(seeds_of(p), column(p, "area"), strict=True)) for name, p in done.items()}
    out = []
    for name, pair in CONTRASTS.items():
        shared = sorted(set.intersection(*(set(areas.get(arm, ())) for arm in pair)))
        if shared:
            one, other = ([areas[arm][seed] for seed in shared] for arm in pair)
            out.append(Finding(name, minus(one, other), arms("area", dict(zip(pair, (one, other), strict=True)))))
    return out


def decisions(found: Sequence[Finding]) -> dict[str, dict[str, Any]]:
    """What each contrast shows, with Holm's correction over all of CONTRASTS, recorded or not.

    A contrast holds, or does not hold, where its mean differs from delta at LEVEL after the correction. Nothing is
    decided with fewer than SEEDS seeds: a look at each part would make errors more frequent than LEVEL.
    """
    p = {f.claim: p_value(f.effect, CLAIMS[f.claim].delta) for f in found}
    adjusted = holm({**dict.fromkeys(CONTRASTS, 1.0), **p})
    out = {}
    for f in found:
        x, claim = np.asarray(f.effect, float), CLAIMS[f.claim]
        side = HOLDS if x.mean() > claim.delta else FAILS
        spread = float(x.std(ddof=1)) if len(x) > 1 else np.nan
        out[f.claim] = {
            "verdict": side if adjusted[f.claim] <= LEVEL and len(x) >= SEEDS else OPEN,
            "seeds": len(x),
            "p": p[f.claim],
            "holm": adjusted[f.claim],
            "p_of_nothing": p_value(f.effect),
            "detectable": detectable(spread, len(x), LEVEL / len(CONTRASTS)),
        }
    return out


# -- the page ----------------------------------------------------------------------------------------------------------


INTRO = """# The mechanisms of JoyAgents-R1 where they can win or lose

`python -m experiments.studies.mechanisms --run=all` measures what is not recorded and writes this page. A command that
was stopped goes on at its next part.

The environment is `relay_dispatch` in the form of `experiments/configs/joyagents_r1.py:harder`.

- A master routes a query of 3 to 5 hops to eight specialists. Each specialist reads the last answer.
- Queries have no operation `add`.
- The settings were calibrated on seeds 100 and 101. The configuration says what was tried.
- An episode has 7, 9 or 11 turns. Accuracy is paid at the end alone.
- A node is a group. A task has at least 7 groups, so a selection of K = 5 leaves groups out.
- The reward is pay and form. The paper also charges for tokens, which is an arm here.
- High stakes are rare, so the memory's 97.5 % threshold lies inside the range of rewards.
- Every operation has three spellings, so a memory entry of the same text is rare.
- The eight specialists share one model of 27 thousand parameters. Each has a memory of its own.

An arm changes one mechanism of the reference. The reference has node-wise sampling, 5 groups by variance, memory,
advantages divided by the standard deviation, and no cost of tokens. All arms of a seed start from the same parameters,
with the same tasks and keys. The primary figure is the area under the curve of held-out success, measured at eleven
places of a run. Held-out tasks are tasks that no seed trains on.

- Flat sampling compares the completions of one turn of a task. It trains on all groups, as its partner here does.
- Equal tokens: the flat arm has its own G and as many steps as sample the same number of completions. This number is of
  episodes that are played to their end. The table of arms has the tokens that were decoded.
- Equal updates: the flat arm has the same G and the same number of steps, so an update has as many samples.
- Shuffled memory: the keys of a role's entries are permuted whenever they are read.
- Cost of tokens: the component `efficiency` enters the reward with weight -1. The sum of components is divided by its
  standard deviation, as in the reference.
- Effect: the paired difference of two areas, one value a seed, with a 95 % interval (Student's t).
- A claim holds when the effect is above delta, after Holm's correction over all contrasts at level {level:g}. It does
  not hold when the effect is below delta. Otherwise nothing is decided.
- No claim is decided before both of its arms have {seeds} seeds.
- Detectable: the smallest distance from delta that these seeds find with probability 0.8 at level {level:g} / {claims}.
"""

PILOT = """Both plans with three group sizes, all groups trained on, at the same number of sampled completions. The arms
above have G = {node_wise} (node-wise) and G = {flat} (flat). The rows below are the pilot, on seeds from {first}."""


def page(records: Mapping[str, Any]) -> str:
    """The page: the contrasts, then the arms, then the pilot runs. ``records``: what the JSON file holds."""
    done = records.get("arms", {})
    intro = INTRO.format(seeds=SEEDS, level=LEVEL, claims=len(CONTRASTS))
    pilot = PILOT.format(**GROUP, first=FIRST_PILOT_SEED)
    lines = [intro, "## Decisions", "", *claim_table(findings(done)), ""]
    lines += [
        "## What each claim compares",
        "",
        "| claim | statistic | control | budget |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {c.text} | {c.effect} | {c.control} | {c.budget} |" for c in CLAIMS.values()]
    lines += ["", "## Arms", "", *arm_table(done, ARMS), "", "## Group sizes", "", pilot, ""]
    return "\n".join([*lines, *arm_table(records.get("pilot", {}), pilot_arms()), ""])


def claim_table(found: Sequence[Finding]) -> list[str]:
    """One row a claim."""
    lines = ["| claim | effect | seeds | delta | p, corrected | | detectable |", "|" + " --- |" * 7]
    effects, decided = {f.claim: f.effect for f in found}, decisions(found)
    for name, claim in CLAIMS.items():
        if name not in effects:
            lines.append(f"| {claim.text} | not recorded yet | 0 | {claim.delta:g} | | | |")
            continue
        d = decided[name]
        verdict = d["verdict"] if d["verdict"] == HOLDS else f"**{d['verdict']}**"
        lines.append(
            f"| {claim.text} | {interval(effects[name])} | {d['seeds']} | {claim.delta:g} | {d['holm']:.3g} | "
            f"{verdict} | {d['detectable']:.3f} |"
        )
    return lines


def arm_table(done: Mapping[str, Parts], wanted: Mapping[str, Arm]) -> list[str]:
    """One row an arm of ``wanted``. ``done``: arm -> its recorded parts."""
    lines = [
        "| arm | area | success, first | success, last | steps | tokens decoded | prompts with an entry | run |",
        "|" + " --- |" * 8,
    ]
    for name in wanted:
        parts = done.get(name)
        if not parts:
            lines.append(f"| {name} | not recorded yet | | | | | | |")
            continue
        curve = np.array(column(parts, "curve"))
        begin, end = (interval(curve[:, place].tolist()) for place in (0, -1))
        runs = ", ".join(dict.fromkeys(f"{part['date']}, `{part['commit']}`" for part in parts))
        minutes = sum(part["minutes"] for part in parts)
        lines.append(
            f"| {name} | {interval(column(parts, 'area'))} | {begin} | {end} | {parts[0]['steps']} | "
            f"{np.mean(column(parts, 'tokens')):,.0f} | {np.mean(column(parts, 'hit')):.2f} | "
            f"{len(seeds_of(parts))} seeds, {minutes:.1f} min, {runs} |"
        )
    return lines


# -- the command -------------------------------------------------------------------------------------------------------


def checked(file: Path) -> dict[str, Any]:
    """The records of ``file``, empty without it. ConfigError for parts of another configuration or other claims."""
    records = read_record(file, {"arms?": dict, "pilot?": dict})
    records = {key: value for key, value in records.items() if value is not None}
    check_parts(records.get("arms", {}), ARMS, base(), claims_version(), str(file))
    check_parts(records.get("pilot", {}), pilot_arms(), budget(), None, str(file))
    return records


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    jax.config.update("jax_compilation_cache_dir", str(Path("runs/.jax_cache").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    asked, file = flag_values.run, Path(flag_values.records)
    for name in asked:
        if name not in ("all", "pilot", *ARMS):
            raise ConfigError(f"--run: no arm {name!r}; expected all, pilot or one of {'; '.join(ARMS)}")
    records, work = checked(file), Path(flag_values.work)
    commit = stated_in(*STATED) if asked else None

    def save(lines: Iterator[str]) -> None:
        for line in lines:
            records["decisions"] = decisions(findings(records.get("arms", {})))
            write(file, json.dumps(records, indent=1))
            write(Path(flag_values.page), page(records))
            print(line, flush=True)

    parts = lambda first: cut(range(first, first + flag_values.seeds), flag_values.together)
    if "pilot" in asked:
        done = records.setdefault("pilot", {})
        save(run(pilot_arms(), parts(FIRST_PILOT_SEED), budget(), done, None, work))
    names = ARMS if "all" in asked else [name for name in ARMS if name in asked]
    if names:
        records.setdefault("claims_commit", commit)
        done = records.setdefault("arms", {})
        save(run({name: ARMS[name] for name in names}, parts(0), base(), done, claims_version(), work))
    write(Path(flag_values.page), page(records))
    print(page(records))


if __name__ == "__main__":
    flags.DEFINE_list("run", [], "Arms to run; all: every one; pilot: the group sizes.")
    flags.DEFINE_integer("seeds", SEEDS, "Seeds 0 to N-1; of the pilot: 100 to 99 + N.", lower_bound=2)
    flags.DEFINE_integer(
        "together", 5, "Seeds of a part, which run as one program: more take more memory.", lower_bound=1
    )
    flags.DEFINE_string("work", "runs/mechanisms", "Folder of the parameters after stage 0.")
    flags.DEFINE_string("records", "docs/results/mechanisms.json", "JSON file of the records.")
    flags.DEFINE_string("page", "docs/mechanisms.md", "Markdown file of the page, written after every part.")
    config_flags.run(main, required=())
