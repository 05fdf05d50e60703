"""Partners that did not learn together: a role of one seed plays with a role of another seed on held-out tasks.

    python -m experiments.studies.cross_play --team=reference_game                     the page, from what is recorded
    python -m experiments.studies.cross_play --team=reference_game --run --data=DIR    play what is not recorded yet

The runs are those of the arm ``team`` of `experiments.studies.real_text`, in ``--work``. The pair ``i-j`` has the first
crossed role of seed i and the second of seed j, each with its own adapter and memory. It plays the held-out tasks of
seed i, greedily, after stage 0 and after RL. All ordered pairs of recorded seeds are played, two seeds at least.

Pairs share seeds, so an interval draws seeds and held-out tasks, and takes the pairs of the seeds drawn. A draw of one
seed alone has no pair and is drawn again. With two seeds the interval is therefore over tasks alone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags

from experiments.studies import real_text
from experiments.studies.common import bootstrap, read_record, replace_section, stated_in
from experiments.studies.real_text import STATED, TAUGHT, TRAINED, Rows
from experiments.studies.text_teams import TEAM, TEAMS, Arm, TextTeam, configuration
from jaxmarl_llm.agents.team import make_team
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import nearest
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.storage.checkpoint import Checkpointer
from jaxmarl_llm.types import Team, TrainState

PLACES = (TAUGHT, TRAINED)
DRAWS = 2000


def mixed(team: Team, states: Mapping[str, TrainState]) -> TrainState:
    """A state to play with, whose roles come from several runs.

    Args:
        team: Roles and models, of all runs alike.
        states: Role -> state of the run that its adapter and its memory come from.

    Raises:
        ConfigError: A role is missing or unknown, two roles have one model, or the runs have other backbones.
    """
    models = {role.name: role.model for role in team.roles}
    if set(states) != set(models):
        raise ConfigError(f"cross-play: expected states of {', '.join(models)}, got {', '.join(states) or 'none'}")
    if len(set(models.values())) < len(models) or any(model.base is None for model in team.models):
        raise ConfigError("config.team.parameter_sharing: expected lora: cross-play exchanges the adapters of roles")
    first, *others = states.values()
    if not all(_equal(first.params["shared"], other.params["shared"]) for other in others):
        raise ConfigError("cross-play: the runs have different backbones; expected adapters of the same weights")
    agents = {models[name]: state.params["agents"][models[name]] for name, state in states.items()}
    memory = {name: state.memory[name] for name, state in states.items() if name in state.memory}
    return first.replace(params={"shared": first.params["shared"], "agents": agents}, memory=memory)


def _equal(one: Any, other: Any) -> bool:
    same = lambda a, b: a is b or (a.shape == b.shape and bool((a == b).all()))
    mine, theirs = (dict(jax.tree.leaves_with_path(tree)) for tree in (one, other))
    return mine.keys() == theirs.keys() and all(same(leaf, theirs[path]) for path, leaf in mine.items())


def loaded(name: str, team: TextTeam, seed: int, place: str, work: Path, data: str | None) -> TrainState:
    """The last state of a finished run of the arm ``team``.

    Args:
        name: Name of the team.
        team: The team.
        seed: Seed of the run.
        place: TAUGHT or TRAINED.
        work: Folder of the runs of the team.
        data: Folder of the data.

    Raises:
        ConfigError: The run is missing or has not ended.
    """
    cfg = configuration(team, Arm(), seed, data)
    folder = work / f"seed_{seed}" / (real_text.start_name(Arm()) if place == TAUGHT else TEAM)
    if not _finished(folder, cfg.sft.steps + (cfg.steps if place == TRAINED else 0)):
        raise ConfigError(
            f"--work: {folder} holds no finished run; copy it there, or make it with python -m "
            f"experiments.studies.real_text --team={name} --run={TEAM} --seeds={seed + 1} --work={work.parent} "
            "--data=DIR --records=NEW.json"
        )
    return real_text.begun(cfg, folder) if place == TAUGHT else real_text.fitted(cfg, folder)


def _finished(folder: Path, steps: int) -> bool:
    """Whether a run has saved its last step. ``steps``: number of its steps."""
    if not (folder / "checkpoints").is_dir():
        return False
    saver = Checkpointer(folder, read_only=True)
    try:
        return saver.steps()[-1:] == [steps]
    finally:
        saver.close()


def run(
    name: str,
    team: TextTeam,
    done: real_text.Record,
    work: Path,
    save: Callable[[], None],
    data: str | None = None,
) -> None:
    """Play the pairs that ``done`` lacks.

    Args:
        name: Name of the team.
        team: The team; it has roles to cross.
        done: The record of the team, which grows by ``cross_play[place]["i-j"]``.
        work: Folder of the runs of the team.
        save: Called after each pair.
        data: Folder of the data; None: the sample in the package.

    Raises:
        ConfigError: The team has nothing to cross, fewer than two seeds are recorded, or a run is missing.
    """
    seeds = sorted(map(int, done.get("arms", {}).get(TEAM, {})))
    if len(seeds) < 2:
        raise ConfigError(
            f"--run: expected two recorded seeds of arm {TEAM} at least, got {len(seeds)}; run python -m "
            f"experiments.studies.real_text --team={name} --run={TEAM} --data=DIR first"
        )
    first, second = crossed_roles(name, team)
    for place in PLACES:
        recorded = done.setdefault("cross_play", {}).setdefault(place, {})
        missing = [(i, j) for i, j in itertools.permutations(seeds, 2) if f"{i}-{j}" not in recorded]
        states = {s: loaded(name, team, s, place, work, data) for s in sorted({s for pair in missing for s in pair})}
        for i, j in missing:
            cfg = configuration(team, Arm(), i, data)
            state = mixed(make_team(cfg.team, cfg.env.roles()), {first: states[i], second: states[j]})
            recorded[f"{i}-{j}"], _ = real_text.measure(cfg, state)
            save()
            jax.clear_caches()


def crossed_roles(name: str, team: TextTeam) -> tuple[str, str]:
    """The two roles of a team that come from different seeds; ConfigError where there are none. ``name``: its name."""
    if team.crossed is None:
        known = ", ".join(key for key, other in TEAMS.items() if other.crossed)
        raise ConfigError(f"--team: team {name!r} has no roles to cross; expected one of {known}")
    return team.crossed


# -- figures and the page ----------------------------------------------------------------------------------------------


def interval(pairs: Mapping[tuple[int, int], Sequence[float] | np.ndarray]) -> tuple[float, float, float]:
    """Mean and 95 % interval over the ordered pairs of seeds, by a bootstrap over seeds and tasks.

    Args:
        pairs: Seeds of both roles -> value of each task; NaN: unknown.
    """
    seeds = sorted({seed for pair in pairs for seed in pair})
    cube = np.full((len(seeds), len(seeds), len(next(iter(pairs.values())))), np.nan)
    for (i, j), row in pairs.items():
        cube[seeds.index(i), seeds.index(j)] = row
    rng, means = np.random.default_rng(0), list[float]()
    while len(means) < DRAWS:
        drawn = rng.integers(0, len(seeds), len(seeds))
        if len(set(drawn.tolist())) > 1:
            means.append(float(np.nanmean(cube[np.ix_(drawn, drawn, rng.integers(0, cube.shape[2], cube.shape[2]))])))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(np.nanmean(cube)), float(low), float(high)


def section(name: str, team: TextTeam, done: Mapping[str, Any]) -> str:
    """The section of the page, as Markdown.

    Args:
        name: Name of the team.
        team: The team.
        done: Its record.
    """
    first, second = crossed_roles(name, team)
    lines = [f"| place | {team.metric}, same seed | seeds crossed | crossed minus same | pairs |", "|" + " --- |" * 5]
    alike = {
        TAUGHT: done.get("starts", {}).get(real_text.start_name(Arm()), {}),
        TRAINED: done.get("arms", {}).get(TEAM, {}),
    }
    for place in PLACES:
        found: Mapping[str, Rows] = done.get("cross_play", {}).get(place, {})
        if not found:
            lines.append(f"| {place} | not recorded yet | | | |")
            continue
        pairs = {
            (int(i), int(j)): np.array(rows[team.metric], float)
            for pair, rows in found.items()
            for i, j in [pair.split("-")]
        }
        same = real_text.values(alike[place], place, team.metric)
        same = {seed: row for seed, row in same.items() if any(int(seed) in pair for pair in pairs)}
        lost = {(i, j): row - same[str(i)] for (i, j), row in pairs.items()}
        cells = [bootstrap(np.stack([*same.values()])), interval(pairs), interval(lost)]
        lines.append(f"| {place} | {' | '.join(map(real_text.shown, cells))} | {len(pairs)} |")
    told = f"The {first} of one seed with the {second} of another, on the held-out tasks of the {first}'s seed."
    command = f"`python -m experiments.studies.cross_play --team={name} --run --data=DIR`."
    return "\n".join(["", *lines, "", f"{told} {command}", ""])


# -- the command -------------------------------------------------------------------------------------------------------


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    name = flag_values.team
    if name not in TEAMS:
        raise ConfigError(f"--team: no team {name!r}; {nearest(name, TEAMS)}")
    team = TEAMS[name]
    crossed_roles(name, team)
    file, page = Path(flag_values.records), Path(flag_values.page)
    records = read_record(file)
    done = records.setdefault(name, {})
    real_text.check(team, done, str(file))
    marks = f"<!-- {name} cross-play -->", f"<!-- /{name} cross-play -->"

    def save() -> None:
        file.write_text(json.dumps(records, separators=(",", ":")))
        page.write_text(replace_section(page.read_text(), *marks, section(name, team, done)))

    replace_section(page.read_text(), *marks, "")  # a page without marks shows before the runs
    if flag_values.run:
        stated_in(*STATED)
        run(name, team, done, Path(flag_values.work) / name, save, flag_values.data)
    save()
    print(section(name, team, done))


if __name__ == "__main__":
    real_text.define_flags()
    flags.DEFINE_bool("run", False, "Play the pairs that are not recorded.")
    config_flags.run(main, required=())
