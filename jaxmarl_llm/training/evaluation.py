"""Evaluation on held-out tasks, named as in telemetry/keys.py, and episodes for people to read."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.credit.assign import Credited
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.array_runner import ArrayEnvRunner
from jaxmarl_llm.rollout.env_runner import EnvRunner, RolloutResult
from jaxmarl_llm.rollout.keys import EVALUATION, stream
from jaxmarl_llm.rollout.plans import Plan, flat, single
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.step_metrics import episode_values
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
    numbers: np.ndarray | None = None,
) -> Iterator[tuple[int, RolloutResult]]:
    """Play held-out tasks in batches. Every call with the same tasks draws the same samples.

    Args:
        cfg: Configuration of the run.
        team: Roles, models and critics.
        env_runner: Runner of the environment.
        state: State of training.
        plan: Plan of sampling.
        sampling: Distribution of tokens.
        memory_config: Settings of the memory; None: no memory.
        assignment: [A] or [M A], as in `rollout.make_rollout`, the same for every task.
        numbers: Numbers of the held-out tasks that are played [n]; None: all.

    Yields:
        Number of tasks of a batch, and its rollout.
    """
    if numbers is None:
        numbers = np.arange(env_runner.held_out_size)
    count = len(numbers)
    chunk = count if env_runner.array else min(count, 4 * cfg.batch)
    for start in range(0, count, chunk):
        indices = numbers[start : start + chunk].tolist()
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


def eval_samplings(cfg: BaseConfig) -> dict[str, Sampling]:
    """Distributions of an evaluation: "" as the policy samples, and ``_greedy`` unless ``run.eval_greedy`` is False.

    Args:
        cfg: Configuration of the run.
    """
    greedy = {"_greedy": Sampling(temperature=0.0)} if cfg.run.eval_greedy else {}
    return {"": cfg.sampling, **greedy}


def evaluate(
    cfg: BaseConfig,
    team: Team,
    env_runner: EnvRunner,
    state: TrainState,
    memory_config: MemoryConfig | None,
    samplings: Mapping[str, Sampling] | None = None,
) -> dict[str, float]:
    """Play one episode of each held-out task, for each sampling.

    Args:
        cfg: Configuration of the run.
        team: Roles, models and critics.
        env_runner: Runner of the environment.
        state: State of training.
        memory_config: Settings of the memory; None: no memory.
        samplings: Suffix of the names -> distribution; None: those of `eval_samplings`.

    Returns:
        ``eval/return``, ``eval/return_greedy``, the components, and the accuracy ``eval/success`` where the environment
        pays one. Return and success again with ``@part`` for the parts that an `ArrayTask` names.
    """
    parts = env_runner.task.parts if isinstance(env_runner, ArrayEnvRunner) else {}
    watcher, every, out = env_runner.evaluations, dict[str, dict[str, np.ndarray]](), dict[str, float]()
    for suffix, sampling in (samplings or eval_samplings(cfg)).items():
        seen = None if watcher is None else functools.partial(watcher.batch, state, suffix)
        rows = by_task(cfg, team, env_runner, state, sampling=sampling, memory_config=memory_config, seen=seen)
        every[suffix] = rows
        out |= {f"eval/{name}{suffix}": _mean(values) for name, values in rows.items()}
        out |= _scores(rows, cfg.reward, suffix)
        for part, mine in parts.items():
            out |= _scores(
                {name: values[np.asarray(mine)] for name, values in rows.items()}, cfg.reward, f"{suffix}@{part}"
            )
    if watcher is not None:
        watcher.end(state, every)
    return out


def _scores(rows: Mapping[str, np.ndarray], reward: Mapping[str, float], suffix: str) -> dict[str, float]:
    """Return and success of tasks from their values by component [n]."""
    out = {f"eval/return{suffix}": sum(weight * _mean(rows[name]) for name, weight in reward.items())}
    if "accuracy" in rows:
        out[f"eval/success{suffix}"] = _mean(rows["accuracy"])
    return out


def _mean(values: np.ndarray) -> float:
    """Of what is known; NaN when nothing is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def by_task(
    cfg: BaseConfig,
    team: Team,
    env_runner: EnvRunner,
    state: TrainState,
    *,
    sampling: Sampling | None = None,
    memory_config: MemoryConfig | None = None,
    assignment: np.ndarray | None = None,
    numbers: np.ndarray | None = None,
    seen: Callable[[Sequence[int], RolloutResult], None] | None = None,
) -> dict[str, np.ndarray]:
    """Each component's mean over roles, summed over the episode, of held-out tasks [n]; NaN where it is unknown.

    Args:
        cfg: configuration of the run.
        team: the players.
        env_runner: where they play.
        state: parameters and memories.
        sampling: how completions are drawn; None: as in training.
        memory_config: settings of the memory that is read; None: none is read.
        assignment: [A] or [M A], as in `held_out`.
        numbers: numbers of the held-out tasks [n]; None: all.
        seen: called with the numbers of the tasks of each batch, and with its rollout; None: nothing is called.
    """
    out: dict[str, list[float]] = {}
    sampling, done = sampling or cfg.sampling, 0
    rollouts = held_out(cfg, team, env_runner, state, single(), sampling, memory_config, assignment, numbers)
    for tasks, played in rollouts:
        if seen is not None:
            batch = range(done, done + tasks)
            seen(batch if numbers is None else numbers[done : done + tasks].tolist(), played)
        done += tasks
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
    """Held-out accuracy of the most frequent answer of k episodes of each task: ``eval/accuracy_majority@k``.

    An episode's answer is the text of its last completion; ties go to the first episode.

    Args:
        cfg: Configuration of the run.
        team: Roles, models and critics.
        env_runner: Runner of the environment.
        state: State of training.
        votes: Episodes of each task, k.
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
    """Index of the first of the most frequent ``answers``."""
    counts = collections.Counter(answers)
    return max(range(len(answers)), key=lambda i: (counts[answers[i]], -i))


def episodes_of(
    team: Team,
    played: RolloutResult,
    tasks: Sequence[int],
    credited: Credited | None = None,
    selected: Array | None = None,
) -> list[list[dict]]:
    """First line of play of some tasks as text, for reports. Each role has its own rewards.

    Args:
        team: Roles and models.
        played: A rollout.
        tasks: Numbers of tasks in the rollout.
        credited: Advantages of the rollout; None: turns have none.
        selected: Groups that are trained [K]; None: turns do not say.

    Returns:
        Episodes: lists of turns. A task that was not played has none.
    """
    tree, out = played.tree, []
    moves = tree.transitions
    for task in tasks:
        parent, episode = -1, []
        while True:
            here = np.flatnonzero(moves.played & (moves.task == task) & (moves.parent == parent))
            if not len(here):
                break
            j = int(here[0])
            for s in moves.steps[j][moves.steps[j] >= 0]:
                role = int(tree.nodes.role[tree.steps.node[s]])
                turn = {
                    "turn": int(moves.turn[j]),
                    "role": team.roles[role].name,
                    "prompt": played.prompt_text(int(s)),
                    "completion": played.completion_text(int(s)),
                    "rewards": {k: float(v[j, role]) if moves.valid[j] else None for k, v in moves.rewards.items()},
                }
                if credited is not None:
                    turn["advantage"] = float(credited.advantage[s])
                    if selected is not None:
                        turn["selected"] = bool(selected[credited.group[s]])
                episode.append(turn)
            parent = j
        if episode:
            out.append(episode)
    return out
