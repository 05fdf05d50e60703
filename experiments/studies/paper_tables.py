"""Rows of MAGRPO's tables from runs, beside the published figures:

    python -m experiments.studies.paper_tables RUN... [--samples=15] [--mesh=1,1,1] [--best]

A RUN is the folder of a run of `magrpo:tldr` or of another of the paper's configurations. Each held-out task is played
15 times with the newest checkpoint. The samples of a run are kept in RUN/paper_samples.json, and read from there the
next time. Runs of one configuration share a row, with a 95 % interval over the runs (Student's t).

Figures are percentages of the largest reward, of an episode's last turn. ``structure`` of a text are the lengths, their
ratio and the ratio of different words; ``coherence`` are transition words, ``consistency`` is the Jaccard index. pass@k
is the chance that one of k samples passes all tests. coop@k is the expected largest cooperation reward of k samples.
Both are unbiased (`envs.coding.pass_at_k`).

The published figures come from secondary sources, because the text of the paper was not at hand: see `PUBLISHED`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.studies.common import interval
from jaxmarl_llm import json_files
from jaxmarl_llm.cli import arguments
from jaxmarl_llm.configs.magrpo import PAPER_RUNS
from jaxmarl_llm.configs.magrpo import PUBLISHED as TASKS
from jaxmarl_llm.envs.coding.pass_at_k import best_of_k
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling

FILE = "paper_samples.json"
KS = (1, 3, 5, 10)
# Environment -> figure -> components whose sum it is, and their largest sum. The return is over all of them.
FIGURES: Mapping[str, Mapping[str, tuple[tuple[str, ...], float]]] = {
    "writing": {
        "structure": (("words", "ratio", "unique"), 2.0),
        "coherence": (("transitions",), 0.4),
        "consistency": (("jaccard",), 0.6),
    },
    "coding": {
        "structure": (("structure",), 1.0),
        "syntax": (("syntax",), 0.5),
        "tests": (("tests",), 1.0),
        "cooperation": (("cooperation",), 1.5),
    },
}
# How the authors' scripts sample for these figures.
EVALUATION = {
    "writing": Sampling(temperature=0.7, top_p=0.9),
    "coding": Sampling(temperature=0.8, top_p=0.95),
}
_WIKI = "an encyclopedia's page on the paper"
_NOTE = "a reader's note on the paper's first version, which does not say which of the two coding tasks"
ONE_TURN = {"return": 83.7, "structure": 100.0, "syntax": 97.8, "tests": 61.6, "cooperation": 83.4}
TWO_TURNS = {"return": 85.8, "structure": 99.9, "syntax": 97.3, "tests": 67.9, "cooperation": 84.9}
# Run -> source, and figures in percent. Sources are secondary, and none of them could be checked against the paper.
PUBLISHED: Mapping[str, tuple[tuple[str, Mapping[str, float]], ...]] = {
    "tldr": ((_WIKI, {"return": 94.5}),),
    "arxiv": ((_WIKI, {"return": 93.1}),),
    "humaneval": ((_WIKI, {"return": 86.7}), (_NOTE, ONE_TURN)),
    "coophumaneval": ((_WIKI, {"return": 88.5}), (_NOTE, ONE_TURN)),
    "humaneval_expert": ((_NOTE, TWO_TURNS),),
    "coophumaneval_expert": ((_NOTE, TWO_TURNS),),
}
Samples = Sequence[Mapping[str, Sequence[float]]]  # of each task: component -> one value for each sample


def run_name(env: str, args: Mapping[str, Any]) -> str:
    """Name of the paper's configuration that an environment and its arguments are, as ``humaneval_expert``.

    Args:
        env: Name of the environment.
        args: Its arguments.

    Raises:
        ConfigError: It is none of them.
    """
    task = args.get("task" if env == "writing" else "benchmark")
    form = "" if args.get("max_turns", 1) == 1 else "expert" if args.get("feedback") == "expert" else "two_turns"
    name = f"{task}_{form}" if form else str(task)
    if env not in FIGURES or task not in TASKS or name not in PAPER_RUNS:
        raise ConfigError(f"RUN: environment {env!r} with {dict(args)} is none of the paper's: {', '.join(PAPER_RUNS)}")
    return name


# ---- samples --------------------------------------------------------------------------------------------------------


def last_rewards(moves: Any, tasks: int) -> list[dict[str, list[float]]]:
    """Rewards of the last turn of each episode, by task and component; the mean over roles.

    An episode whose last turn has no valid reward is left out.

    Args:
        moves: Transitions of a rollout (`types.Transitions`), J rows.
        tasks: Number of tasks.
    """
    played, valid = np.asarray(moves.played), np.asarray(moves.valid)
    parents = np.asarray(moves.parent)[played]
    last = played.copy()
    last[parents[parents >= 0]] = False
    out: list[dict[str, list[float]]] = [{name: [] for name in moves.rewards} for _ in range(tasks)]
    for j in np.flatnonzero(last & valid):
        for name, values in moves.rewards.items():
            out[int(moves.task[j])][name].append(float(np.mean(values[j])))
    return out


def play(workdir: str, samples: int, mesh: Sequence[str], best: bool) -> dict[str, Any]:
    """Play every held-out task of a run, and return the record that `figures` reads.

    Args:
        workdir: Folder of the run.
        samples: Episodes of each task.
        mesh: Devices along data, fsdp and tensor, as texts.
        best: Take the step that ``run.best`` kept, and not the newest.
    """
    from jaxmarl_llm.cli.trained_run import open_run
    from jaxmarl_llm.rollout.plans import flat
    from jaxmarl_llm.training.evaluation import held_out

    cfg, recipe, state = open_run(workdir, "RUN", tuple(mesh), best)
    name = run_name(cfg.env.name, cfg.env.args)
    found: list[dict[str, list[float]]] = []
    try:
        sampling = EVALUATION[cfg.env.name]
        for tasks, rollout in held_out(cfg, recipe.team, recipe.env_runner, state, flat(samples), sampling):
            found += last_rewards(rollout.tree.transitions, tasks)
    finally:
        recipe.env_runner.close()
    return {"run": name, "env": cfg.env.name, "step": int(state.step), "samples": samples, "tasks": found}


def record_of(workdir: str, samples: int, mesh: Sequence[str], best: bool) -> dict[str, Any]:
    """Record of a run: the one that it keeps, or of samples that are played now and kept. Arguments as for `play`."""
    file = Path(workdir) / FILE
    if not file.exists():
        file.write_text(json.dumps(play(workdir, samples, mesh, best)))
    record = json_files.read_object(file)
    json_files.check(record, {"run": str, "env": str, "step": int, "samples": int, "tasks": list}, str(file))
    if record["samples"] != samples:
        raise ConfigError(f"--samples: {file} has {record['samples']} of each task, not {samples}; delete it")
    return record


# ---- figures --------------------------------------------------------------------------------------------------------


def figures(env: str, tasks: Samples) -> dict[str, float]:
    """Figures of a run in percent; NaN where no task has enough samples.

    Args:
        env: Name of the environment, a key of `FIGURES`.
        tasks: Rewards of each task by component.
    """
    parts = FIGURES[env]
    total = tuple(name for names, _ in parts.values() for name in names), sum(most for _, most in parts.values())
    out = {}
    for label, (names, most) in {"return": total, **parts}.items():
        sums = [[sum(sample) / most for sample in zip(*(task[name] for name in names))] for task in tasks]
        out[label] = 100 * _mean([float(np.mean(values)) for values in sums if values])
    if env == "coding":
        most = parts["cooperation"][1]
        for label, name, scale in (("pass", "accuracy", 1.0), ("coop", "cooperation", most)):
            for k in KS:
                each = [best_of_k(task[name], k) / scale for task in tasks if len(task[name]) >= k]
                out[f"{label}@{k}"] = 100 * _mean(each)
    return out


def _mean(values: Sequence[float]) -> float:
    """Mean, NaN of nothing."""
    return float(np.mean(values)) if values else math.nan


def table(env: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Table of the runs of an environment, with a row of published figures for each source.

    Args:
        env: Name of the environment.
        records: Records of runs, see `record_of`.
    """
    by_run: dict[str, list[dict[str, float]]] = {}
    for record in records:
        by_run.setdefault(record["run"], []).append(figures(env, record["tasks"]))
    labels = list(next(iter(by_run.values()))[0])
    lines = ["| run | " + " | ".join(labels) + " |", "|" + " --- |" * (len(labels) + 1)]
    shown = lambda values: "-" if any(map(math.isnan, values)) else interval([round(v, 6) for v in values])
    for name, found in by_run.items():
        cells = [shown([one[label] for one in found]) for label in labels]
        lines.append(f"| `{name}`, {len(found)} run{'s' * (len(found) > 1)} | " + " | ".join(cells) + " |")
        for source, published in PUBLISHED.get(name, ()):
            cells = [f"{published[label]:.1f}" if label in published else "" for label in labels]
            lines.append(f"| published, by {source} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(given: Any) -> int:
    """Print a table for writing and one for coding. ``given``: the parsed arguments."""
    if given.samples < 1:
        raise ConfigError(f"--samples: expected at least 1, got {given.samples}")
    records = [record_of(run, given.samples, given.mesh.split(","), given.best) for run in given.runs]
    for env in FIGURES:
        mine = [record for record in records if record["env"] == env]
        if mine:
            tasks = ", ".join(f"{record['run']} step {record['step']}: {len(record['tasks'])} tasks" for record in mine)
            print(f"{tasks}; {given.samples} samples of each; percent\n\n{table(env, mine)}\n")
    return 0


def parser() -> arguments.Parser:
    """The parser of the command line."""
    found = arguments.Parser("paper_tables", __doc__)
    found.prog = "python -m experiments.studies.paper_tables"
    found.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run")
    found.add_argument("--samples", type=int, default=15, help="episodes of each held-out task")
    found.add_argument("--mesh", default="1,1,1", help="devices along data, fsdp and tensor")
    found.add_argument("--best", action="store_true", help="take the step that run.best kept")
    return found


if __name__ == "__main__":
    arguments.run(parser(), main)
