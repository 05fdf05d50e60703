"""Teams of language models on real text: what stage 0 and RL bring on held-out tasks.

    python -m experiments.studies.real_text --team=two_writers                        the page, from what is recorded
    python -m experiments.studies.real_text --team=two_writers --run=all --data=DIR   run what is not recorded yet
    python -m experiments.studies.real_text --team=two_writers --run=team --seeds=1 --data=DIR

Teams, arms and claims are in `experiments.studies.text_teams`. An arm is stage 0 and RL of one seed. Arms that differ
in RL alone share stage 0. Held-out tasks are played greedily: by the base model, after stage 0, and after RL. An
interval is a percentile bootstrap over held-out tasks and seeds. An effect pairs the same tasks of the same seeds.

What was measured goes to the record as soon as it is there. Runs are kept in ``--work``, and a run that was stopped
goes on at its last checkpoint. Of the first seed, twenty held-out tasks drawn at random are written as episodes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.claims import FAILS, HOLDS, OPEN
from experiments.studies.common import bootstrap, make, origin, read_record, replace_section, stated_in, write
from experiments.studies.text_teams import SEEDS, TEAM, TEAMS, Arm, TextTeam, configuration
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import fingerprint, nearest
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.env_runner import RolloutResult
from jaxmarl_llm.telemetry.metrics_file import read_metrics
from jaxmarl_llm.telemetry.report import episodes_markdown
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.evaluation import episodes_of
from jaxmarl_llm.types import Team, TrainState

STATED = ("experiments/studies/text_teams.py", "jaxmarl_llm/configs")
WATCHED = 16  # held-out tasks that a run itself evaluates; the study evaluates all of them
EPISODES = 20
BASE, TAUGHT, TRAINED = "base", "stage 0", "RL"
Rows = dict[str, list[float]]  # component, or "return" -> value of each held-out task; NaN: unknown
Record = dict[str, Any]


# -- playing -----------------------------------------------------------------------------------------------------------


class Watch:
    """Keeps what an evaluation measured, and some of its episodes as text.

    team: Roles and models. numbers: Numbers of the held-out tasks whose episodes are kept.
    """

    def __init__(self, team: Team, numbers: Sequence[int]):
        self._team, self._numbers = team, frozenset(numbers)
        self.rows: Mapping[str, np.ndarray] = {}
        self.episodes: dict[int, list[dict]] = {}

    def batch(self, state: TrainState, suffix: str, numbers: Sequence[int], played: RolloutResult) -> None:
        """See a batch, as `EvaluationWatcher.batch`."""
        for i, number in enumerate(numbers):
            found = episodes_of(self._team, played, [i]) if number in self._numbers else []
            if found:  # a task that could not be played has none
                self.episodes[number] = found[0]

    def end(self, state: TrainState, rows: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """Keep an evaluation, as `EvaluationWatcher.end`."""
        (self.rows,) = rows.values()


def measure(cfg: BaseConfig, state: TrainState | None) -> tuple[Rows, list[list[dict]]]:
    """Play every held-out task once, greedily.

    Args:
        cfg: Configuration of the arm; its ``env.eval_tasks`` are the held-out tasks.
        state: State of the run; None: the base models.

    Returns:
        What each task brought, and the episodes of EPISODES tasks drawn at random.
    """
    greedy = replace(cfg, sampling=Sampling(temperature=0.0), run=replace(cfg.run, eval_greedy=False))
    recipe = make(greedy)
    try:
        runner = recipe.env_runner
        count = runner.held_out_size
        drawn = np.random.default_rng(0).choice(count, min(EPISODES, count), replace=False)
        runner.evaluations = watch = Watch(recipe.team, sorted(drawn.tolist()))
        recipe.evaluate(recipe.init(0) if state is None else state)
    finally:
        recipe.env_runner.close()
    total = np.sum([weight * watch.rows[name] for name, weight in cfg.reward.items()], axis=0)
    rows = {**watch.rows, "return": total}
    listed = {name: [round(float(v), 5) for v in values] for name, values in rows.items()}
    return listed, [watch.episodes[number] for number in sorted(watch.episodes)]


def fitted(cfg: BaseConfig, folder: Path, changed: Sequence[str] = ()) -> TrainState:
    """The last state of a run, which is started, continued or only read.

    Args:
        cfg: Configuration of the arm.
        folder: Folder of the run.
        changed: Keys that differ from those of the checkpoint in ``folder``.
    """
    from jaxmarl_llm.runs.loop import fit

    watched = replace(cfg, env=replace(cfg.env, eval_tasks=WATCHED))
    recipe = make(watched)
    try:
        return fit(watched, recipe, folder, allow_config_change=changed)
    finally:
        recipe.env_runner.close()


def begun(cfg: BaseConfig, folder: Path) -> TrainState:
    """The state after stage 0, which is run where ``folder`` lacks it. ``cfg``: configuration of the arm."""
    return fitted(replace(cfg, steps=0), folder)


def trained(cfg: BaseConfig, start: Path, folder: Path, changed: Sequence[str]) -> TrainState:
    """The state after RL.

    Args:
        cfg: Configuration of the arm.
        start: Run that ended with stage 0.
        folder: Run that goes on from there; it is made of ``start`` where it is not there.
        changed: Keys of ``cfg`` that are not those of stage 0.
    """
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(start, partial)
        partial.rename(folder)
    return fitted(cfg, folder, changed)


def spent(folder: Path) -> dict[str, float]:
    """Minutes of all steps of a run, and tokens that RL decoded, from its metrics."""
    rows = read_metrics(folder)
    total = lambda key: sum(row.get(key) or 0.0 for row in rows)
    seconds = sum(total(f"time/{part}") for part in ("step", "evaluation", "save"))
    return {"minutes": round(seconds / 60, 1), "tokens": total("count/completion_tokens")}


# -- the record --------------------------------------------------------------------------------------------------------


def start_name(arm: Arm) -> str:
    """Name of the stage 0 of an arm in the record and in the folder of runs."""
    return "start" + "".join(f", {key}={value}" for key, value in sorted(arm.start.items()))


def check(team: TextTeam, done: Mapping[str, Any], where: str) -> None:
    """Refuse a record of arms or configurations that the team does not have now. ``where``: name of the record."""
    for name, seeds in done.get("arms", {}).items():
        if name not in team.arms:
            raise ConfigError(f"{where}: no arm {name!r}; take another file with --records")
        for seed, part in seeds.items():
            now = fingerprint(configuration(team, team.arms[name], int(seed)))
            if part["settings"] != now:
                raise ConfigError(
                    f"{where}: {name}, seed {seed}: recorded with another configuration; take another file "
                    "with --records"
                )


def run(
    team: TextTeam, names: Sequence[str], seeds: int, done: Record, work: Path, save: Any, data: str | None = None
) -> None:
    """Run what ``done`` lacks.

    Args:
        team: The team.
        names: Arms.
        seeds: Seeds 0 to N - 1.
        done: The record, which grows.
        work: Folder of the runs.
        save: Called with episodes by place after each new part; the episodes are those of the first seed and arm.
        data: Folder of the data; None: the sample in the package.
    """
    for seed in range(seeds):
        for name in names:
            arm = team.arms[name]
            cfg = configuration(team, arm, seed, data)
            begin, starts = start_name(arm), done.setdefault("starts", {})
            place = work / f"seed_{seed}"
            at_start = configuration(team, Arm(start=arm.start), seed, data)
            known = starts.setdefault(begin, {})
            if str(seed) not in known:
                base, first = measure(at_start, None)
                rows, second = measure(at_start, begun(at_start, place / begin))
                known[str(seed)] = {BASE: base, TAUGHT: rows, **spent(place / begin), **origin()}
                save({BASE: first, TAUGHT: second} if seed == 0 and name == TEAM else {})
            recorded = done.setdefault("arms", {}).setdefault(name, {})
            if str(seed) not in recorded:
                begun(at_start, place / begin)
                state = trained(cfg, place / begin, place / name, [*arm.changes])
                rows, episodes = measure(cfg, state)
                made = {
                    "settings": fingerprint(configuration(team, arm, seed)),
                    "steps": cfg.steps,
                    **spent(place / name),
                    **origin(),
                }
                recorded[str(seed)] = {TRAINED: rows, **made}
                save({TRAINED: episodes} if seed == 0 and name == TEAM else {})
            jax.clear_caches()


def values(parts: Mapping[str, Any], place: str, metric: str, only: str | None = None) -> dict[str, np.ndarray]:
    """Values [n] by seed.

    Args:
        parts: Seed -> what was recorded.
        place: BASE, TAUGHT or TRAINED.
        metric: Component, or ``return``.
        only: Component that is 1 for the tasks that count; other tasks are NaN. None: all tasks count.
    """
    out = {}
    for seed, part in parts.items():
        row = np.array(part[place][metric], float)
        out[seed] = row if only is None else np.where(np.array(part[place][only]) == 1, row, np.nan)
    return out


def effect(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> tuple[float, float, float] | None:
    """Mean and 95 % interval of one minus other over the tasks and seeds that both have; None without any."""
    seeds = sorted(set(one) & set(other))
    return bootstrap(np.stack([one[s] - other[s] for s in seeds])) if seeds else None


def verdict(found: tuple[float, float, float] | None, delta: float, seeds: int) -> str:
    """Whether an effect is above ``delta``: the whole interval decides, and at least SEEDS seeds."""
    if found is None or seeds < SEEDS:
        return OPEN
    return HOLDS if found[1] > delta else FAILS if found[2] < delta else OPEN


# -- the page ----------------------------------------------------------------------------------------------------------


def shown(found: tuple[float, float, float] | None) -> str:
    """A mean with its interval."""
    return "" if found is None else f"{found[0]:.3f} ({found[1]:.3f} to {found[2]:.3f})"


def mean_of(parts: Mapping[str, Any], place: str, metric: str, only: str | None = None) -> str:
    """The cell of a mean over tasks and seeds. It is empty where the environment does not pay what it needs.

    Arguments as of `values`.
    """
    if any(name is not None and name not in part[place] for part in parts.values() for name in (metric, only)):
        return ""
    return f"{np.nanmean(np.concatenate([*values(parts, place, metric, only).values()])):.3f}"


def components(team: TextTeam, starts: Mapping[str, Any], ends: Mapping[str, Any]) -> list[str]:
    """The components of the arm ``team`` with their intervals, as lines of Markdown; none before the arm has a record.

    A component that the environment does not pay is left out.

    Args:
        team: The team.
        starts: What was recorded of stage 0, by seed.
        ends: What was recorded of RL, by seed.
    """
    if not ends:
        return []
    lines = ["", "| team | base | stage 0 | RL | RL above stage 0 |", "|" + " --- |" * 5]
    both = {seed: starts[seed] for seed in ends}
    paid = set.intersection(*(set(part[TRAINED]) for part in ends.values()))
    for metric in filter(paid.__contains__, (team.metric, *team.shown)):
        rows = values(both, BASE, metric), values(both, TAUGHT, metric), values(ends, TRAINED, metric)
        found = [bootstrap(np.stack(list(row.values()))) for row in rows]
        cells = " | ".join(map(shown, [*found, effect(rows[2], rows[1])]))
        lines.append(f"| {metric} | {cells} |")
    return lines


def section(name: str, team: TextTeam, done: Mapping[str, Any], episodes: str) -> str:
    """The section of a team on the page, as Markdown.

    Args:
        name: Name of the team.
        team: The team.
        done: Its record.
        episodes: Link from the page to the list of episodes.
    """
    of_all = lambda rows: bootstrap(np.stack(list(rows.values())))
    columns = [team.metric, *team.parts.values(), *team.shown]
    lines = [
        f"| arm | {' | '.join(columns)} | above stage 0 | seeds | steps | tokens of RL | minutes |",
        "|" + " --- |" * (len(columns) + 6),
    ]

    def cells(parts: Mapping[str, Any], place: str) -> str:
        others = [mean_of(parts, place, team.metric, only) for only in team.parts]
        others += [mean_of(parts, place, metric) for metric in team.shown]
        return " | ".join([shown(of_all(values(parts, place, team.metric))), *others])

    starts = done.get("starts", {})
    for begin, parts in starts.items():
        label = begin.removeprefix("start").removeprefix(", ") or TEAM
        for place in (BASE, TAUGHT):
            minutes = "" if place == BASE else f"{np.mean([p['minutes'] for p in parts.values()]):.0f}"
            lines.append(f"| {label}, {place} | {cells(parts, place)} | | {len(parts)} | | | {minutes} |")
    decided = ""
    for arm, setting in team.arms.items():
        parts = done.get("arms", {}).get(arm, {})
        if not parts:
            lines.append(f"| {arm}, {TRAINED} | not recorded yet |" + " |" * (len(columns) + 4))
            continue
        before = values(starts[start_name(setting)], TAUGHT, team.metric)
        gain = effect(values(parts, TRAINED, team.metric), before)
        mean = lambda key, parts=parts: np.mean([p[key] for p in parts.values()])
        lines.append(
            f"| {arm}, {TRAINED} | {cells(parts, TRAINED)} | {shown(gain)} | {len(parts)} | {mean('steps'):.0f} | "
            f"{mean('tokens'):,.0f} | {mean('minutes'):.0f} |"
        )
        if arm == TEAM:
            decided = verdict(gain, team.claim.delta, len(parts))
    lines += components(team, starts.get(start_name(team.arms[TEAM]), {}), done.get("arms", {}).get(TEAM, {}))
    tasks = next((len(p[TAUGHT]["return"]) for s in starts.values() for p in s.values()), 0)
    runs = sorted({f"{p['date']}, commit `{p['commit']}`, {p['machine']}" for s in starts.values() for p in s.values()})
    lines += ["", f"Claim: {team.claim.text}, by more than {team.claim.delta:g}: **{decided or OPEN}**."]
    if tasks:
        lines += [
            f"{tasks} held-out tasks. `python -m experiments.studies.real_text --team={name} --run=all --data=DIR`."
        ]
        lines += [f"{'; '.join(runs)}. [Twenty episodes]({episodes}), before and after."]
    return "\n".join(["", *lines, ""])


def write_episodes(file: Path, episodes: Mapping[str, list[list[dict]]]) -> None:
    """Write the episodes of some places, each to a file of its own beside ``file``, and a list of them to ``file``."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for place, played in episodes.items():
        episodes_markdown(played, file.with_name(f"{file.stem}_{place.replace(' ', '_')}.md"))
    there = sorted(file.parent.glob(f"{file.stem}_*.md"))
    lines = [f"- [{path.stem.removeprefix(file.stem + '_')}]({path.name})" for path in there]
    file.write_text("\n".join([f"# Held-out episodes of {file.stem}", "", *lines, ""]))


# -- the command -------------------------------------------------------------------------------------------------------


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    name, asked = flag_values.team, flag_values.run
    if name not in TEAMS:
        raise ConfigError(f"--team: no team {name!r}; {nearest(name, TEAMS)}")
    team = TEAMS[name]
    for arm in asked:
        if arm not in ("all", *team.arms):
            raise ConfigError(f"--run: no arm {arm!r}; expected all or one of {', '.join(team.arms)}")
    file, page = Path(flag_values.records), Path(flag_values.page)
    records = read_record(file)
    done = records.setdefault(name, {})
    check(team, done, str(file))
    marks = f"<!-- {name} -->", f"<!-- /{name} -->"

    listed = file.with_suffix("") / f"{name}.md"
    table = lambda: section(name, team, done, os.path.relpath(listed, page.parent))

    def written(lines: str) -> str:
        """The page with ``lines`` as the section of the team. A page that is not there begins with it."""
        return replace_section(page.read_text() if page.exists() else "\n".join(marks), *marks, lines)

    def save(episodes: Mapping[str, list[list[dict]]]) -> None:
        write(file, json.dumps(records, separators=(",", ":")))
        write(page, written(table()))
        if episodes:
            write_episodes(listed, episodes)

    written("")  # a page without marks shows before the runs
    if asked:
        work = Path(flag_values.work)
        # Arms and seeds have the same programs, which are forgotten after each arm to free memory.
        jax.config.update("jax_compilation_cache_dir", str((work / ".jax_cache").absolute()))
        done.setdefault("claims_commit", stated_in(*STATED))
        names = list(team.arms) if "all" in asked else [arm for arm in team.arms if arm in asked]
        run(team, names, flag_values.seeds, done, work / name, save, flag_values.data)
    save({})
    print(table())


def define_flags() -> None:
    """Flags that this command and `cross_play` share."""
    flags.DEFINE_string("team", None, f"Team: {', '.join(TEAMS)}.", required=True)
    flags.DEFINE_string("data", None, "Folder of the full data; without it the samples of the package are played.")
    flags.DEFINE_string("work", "runs/real_text", "Folder of the runs.")
    flags.DEFINE_string("records", "docs/results/real_text.json", "JSON file of the records.")
    flags.DEFINE_string("page", "docs/real_text.md", "Markdown file whose section is written.")


if __name__ == "__main__":
    define_flags()
    flags.DEFINE_list("run", [], "Arms to run; all: every one.")
    flags.DEFINE_integer("seeds", SEEDS, "Seeds 0 to N-1.", lower_bound=1)
    config_flags.run(main, required=())
