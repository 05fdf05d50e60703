"""What a step and a policy look like: metrics by the naming scheme of metrics.py, evaluation, episodes for people."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.credit.assign import Credited
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.env_runner import ArrayEnvRunner, EnvRunner, RolloutResult
from jaxmarl_llm.rollout.keys import EVALUATION, stream
from jaxmarl_llm.rollout.plans import Plan, flat, single
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.step_metrics import _episode_mean, episode_values
from jaxmarl_llm.types import Array, Team, TrainState, Transitions


def held_out(
    cfg: BaseConfig,
    team: Team,
    env_runner: EnvRunner,
    state: TrainState,
    plan: Plan,
    sampling: Sampling,
    memory_config: MemoryConfig | None = None,
    assignment: np.ndarray | None = None,
) -> Iterator[tuple[int, RolloutResult]]:
    """All held-out tasks in batches: the number of tasks, and how they were played. The same draws at every call.

    ``assignment``: [A] or [M A], as in `rollout.make_rollout`, the same for every task.
    """
    count = len(jax.tree.leaves(env_runner.held_out)[0]) if env_runner.array else len(env_runner.held_out)
    chunk = count if env_runner.array else min(count, 4 * cfg.batch)
    for start in range(0, count, chunk):
        indices = range(start, min(start + chunk, count))
        key = jax.random.fold_in(stream(cfg.seed, EVALUATION), start)
        params, version = state.params, int(state.step)
        yield (
            len(indices),
            env_runner.play(
                team,
                params,
                state.memory,
                indices,
                plan,
                key,
                sampling,
                memory_config,
                version=version,
                held_out=True,
                assignment=None
                if assignment is None
                else np.broadcast_to(assignment, (len(indices), *assignment.shape)),
            ),
        )


def evaluate(
    cfg: BaseConfig,
    team: Team,
    env_runner: EnvRunner,
    state: TrainState,
    memory_config: MemoryConfig | None,
    samplings: Mapping[str, Sampling] | None = None,
) -> dict[str, float]:
    """Held-out tasks, one episode each: ``eval/return`` as the policy samples, ``eval/return_greedy``, the components,
    and ``eval/success``, the accuracy, where the environment pays one. Return and success again with ``@part`` for the
    parts that an `ArrayTask` names.
    """
    samplings = samplings or {"": cfg.sampling, "_greedy": Sampling(temperature=0.0)}
    out: dict[str, float] = {}
    for suffix, sampling in samplings.items():
        totals: dict[str, list[float]] = {}
        rows: dict[str, list[float]] = {}
        count = 0
        for tasks, played in held_out(cfg, team, env_runner, state, single(), sampling, memory_config):
            count += tasks
            moves = played.tree.transitions
            for name, values in moves.rewards.items():
                totals.setdefault(name, []).append(_episode_mean(moves, values.mean(1)) * tasks)
                rows.setdefault(name, []).extend(_by_task(moves, values, tasks))
        out |= {f"eval/{name}{suffix}": sum(v) / count for name, v in totals.items()}
        out[f"eval/return{suffix}"] = sum(w * out[f"eval/{name}{suffix}"] for name, w in cfg.reward.items())
        if "accuracy" in totals:
            out[f"eval/success{suffix}"] = out[f"eval/accuracy{suffix}"]
        out |= _of_parts(env_runner, rows, suffix, cfg.reward)
    return out


def _of_parts(
    env_runner: EnvRunner, rows: Mapping[str, Sequence[float]], suffix: str, reward: Mapping[str, float]
) -> dict[str, float]:
    """Return and success of each part of the held-out tasks, from the values of ``rows`` by component and task."""
    out: dict[str, float] = {}
    for part, mine in (env_runner.task.parts if isinstance(env_runner, ArrayEnvRunner) else {}).items():
        values = {name: np.array(row)[np.asarray(mine)] for name, row in rows.items()}
        means = {name: float(v[~np.isnan(v)].mean()) for name, v in values.items() if (~np.isnan(v)).any()}
        if "accuracy" in means:
            out[f"eval/success{suffix}@{part}"] = means["accuracy"]
        if set(reward) <= set(means):
            out[f"eval/return{suffix}@{part}"] = sum(w * means[name] for name, w in reward.items())
    return out


def by_task(
    cfg: BaseConfig, team: Team, env_runner: EnvRunner, state: TrainState, assignment: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Each component's mean over roles, summed over the episode, of every held-out task [n]; NaN where it is unknown.
    Episodes are sampled as in training; ``assignment`` as in `held_out`.
    """
    out: dict[str, list[float]] = {}
    for tasks, played in held_out(cfg, team, env_runner, state, single(), cfg.sampling, assignment=assignment):
        moves = played.tree.transitions
        for name, values in moves.rewards.items():
            out.setdefault(name, []).extend(_by_task(moves, values, tasks))
    return {name: np.array(values) for name, values in out.items()}


def _by_task(moves: Transitions, values: Array, tasks: int) -> list[float]:
    """The mean over roles of a component [J A], summed over the episode, of each of ``tasks``; NaN where unknown."""
    total, roots = episode_values(moves, values.mean(1))
    row = np.full(tasks, np.nan)
    row[moves.task[roots]] = total[roots]
    return row.tolist()


def majority(cfg: BaseConfig, team: Team, env_runner: EnvRunner, state: TrainState, votes: int) -> dict[str, float]:
    """``eval/accuracy_majority@k``: held-out accuracy when each task's answer is the most frequent of k episodes'.

    An episode's answer is the text of its last completion; ties go to the first episode.
    """
    scores: list[float] = []
    for tasks, played in held_out(cfg, team, env_runner, state, flat(votes), cfg.sampling):
        moves = played.tree.transitions
        scored, roots = episode_values(moves, moves.rewards["accuracy"].mean(1))
        last = np.arange(len(moves.parent))
        for j in np.argsort(-moves.turn, kind="stable"):
            if moves.played[j] and moves.parent[j] >= 0:
                last[moves.parent[j]] = last[j]
        for task in range(tasks):
            episodes = np.flatnonzero(roots & (moves.task == task))
            answers = [played.completion_text(int(moves.steps[last[j]].max())) for j in episodes]
            if answers:
                scores.append(float(scored[episodes[most_frequent(answers)]]))
    return {f"eval/accuracy_majority@{votes}": float(np.mean(scores)) if scores else float("nan")}


def most_frequent(answers: Sequence[Any]) -> int:
    """Index of the first of the most frequent answers."""
    counts = collections.Counter(answers)
    return max(range(len(answers)), key=lambda i: (counts[answers[i]], -i))


def episodes_of(team: Team, played: RolloutResult, credited: Credited, selected: Array, count: int) -> list[list[dict]]:
    """The first line of play of the first tasks, for people."""
    tree, out = played.tree, []
    moves = tree.transitions
    for task in range(count):
        parent, episode = -1, []
        while True:
            here = np.flatnonzero(moves.played & (moves.task == task) & (moves.parent == parent))
            if not len(here):
                break
            j = int(here[0])
            for s in moves.steps[j][moves.steps[j] >= 0]:
                group = credited.group[s]
                episode.append(
                    {
                        "turn": int(moves.turn[j]),
                        "role": team.roles[tree.nodes.role[tree.steps.node[s]]].name,
                        "prompt": played.prompt_text(int(s)),
                        "completion": played.completion_text(int(s)),
                        "rewards": {k: float(v[j, 0]) if moves.valid[j] else None for k, v in moves.rewards.items()},
                        "advantage": float(credited.advantage[s]),
                        "selected": bool(selected[group]),
                    }
                )
            parent = j
        if episode:
            out.append(episode)
    return out
