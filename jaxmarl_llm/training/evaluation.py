"""What a step and a policy look like: metrics by the naming scheme of metrics.py, evaluation, episodes for people."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmarl_llm.arena import Arena, Played
from jaxmarl_llm.credit import Credited
from jaxmarl_llm.memory import MemoryConfig
from jaxmarl_llm.plans import Plan, flat, single
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.stages import BaseConfig
from jaxmarl_llm.types import Team, TrainState


def diagnose(
    cfg: BaseConfig,
    team: Team,
    arena: Arena,
    played: Played,
    credited: Credited,
    selected: np.ndarray,
    updated: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """The metrics of one step, by the naming scheme of metrics.py."""
    tree = played.tree
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    out = {f"count/{k}": float(v) for k, v in dataclasses.asdict(tree.counts).items()}
    out["count/trunk_tokens"] = sum(m["trunk_tokens"] for m in updated.values())
    ended = moves.valid & moves.done
    total = 0.0
    for name, values in moves.rewards.items():
        # Mean over roles and episodes; each transition counts by its share of the episodes through it.
        mean = _episode_mean(moves, values.mean(1))
        out[f"reward/{name}"] = mean
        total += cfg.reward.get(name, 0.0) * mean
    out["reward/total"] = total
    if "accuracy" in moves.rewards:
        out["success"] = out["reward/accuracy"] if ended.any() else float("nan")
    out["reward/invalid_share"] = float(moves.played.sum() - moves.valid.sum()) / max(1, int(moves.played.sum()))
    role_of, turn_of = nodes.role[steps.node], nodes.turn[steps.node]
    multi = credited.stats.count >= 2
    flat = multi & (credited.stats.high == credited.stats.low)
    for index, role in enumerate(team.roles):
        mine = credited.valid & (role_of == index)
        if not mine.any():
            continue
        groups = multi & (credited.group_role == index)
        key = f"agent/{role.name}/"
        out[key + "reward"] = float(credited.returns[mine].mean())
        out[key + "length"] = float(steps.length[mine].mean())
        out[key + "truncated"] = float(steps.truncated[mine].mean())
        if groups.any():
            out[key + "variance"] = float(credited.stats.variance[groups].mean())
            out[key + "zero_variance"] = float(flat[groups].mean())
            out[key + "selected"] = float(selected[groups].mean())
        m = updated.get(role.model)
        out[key + "updated"] = float(m is not None)
        if m is not None:
            names = {
                "entropy": "entropy",
                "grad_norm": "grad_norm",
                "clip_fraction": "clip_fraction",
                "ref_kl": "kl",
                "logprob_gap": "logprob_gap",
                "nll": "nll",
                "ratio": "ratio",
            }
            out |= {key + to: m[k] for k, to in names.items() if k in m}
    for turn in range(arena.env.max_turns):
        groups = multi & (credited.group_turn == turn)
        if groups.any() and (turn_of[credited.valid] == turn).any():
            out[f"node/{turn}/variance"] = float(credited.stats.variance[groups].mean())
            out[f"node/{turn}/zero_variance"] = float(flat[groups].mean())
            out[f"node/{turn}/selected"] = float(selected[groups].mean())
    out |= played.watched
    out["bad"] = float(any(not m["ok"] for m in updated.values()))
    out["logprob_gap"] = max((m["logprob_gap"] for m in updated.values()), default=0.0)
    return out


def _episode_mean(moves: Any, values: np.ndarray) -> float:
    """Mean over tasks of the sum of ``values`` along an episode, siblings averaged: the root value without discount.
    NaN when none is known.
    """
    total, roots = episode_values(moves, values)
    return float(total[roots].mean()) if roots.any() else float("nan")


def episode_values(moves: Any, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sum of ``values`` from each transition on, siblings averaged [J], and which transitions are valid roots.

    As in `advantages.returns_to_go`, a transition none of whose continuations is valid is not valid either.
    """
    order = np.argsort(-moves.turn, kind="stable")
    below, count, total = (np.zeros(len(values)) for _ in range(3))
    known, ends = moves.valid.copy(), np.ones(len(values), bool)
    for j in order:
        known[j] &= ends[j] or count[j] > 0
        parent = moves.parent[j]
        if parent >= 0 and moves.played[j]:
            ends[parent] = False
        if known[j]:
            total[j] = values[j] + (below[j] / count[j] if count[j] else 0.0)
            if parent >= 0:
                below[parent] += total[j]
                count[parent] += 1
    return total, known & (moves.parent < 0)


def held_out(
    cfg: BaseConfig,
    team: Team,
    arena: Arena,
    state: TrainState,
    plan: Plan,
    sampling: Sampling,
    memory_config: MemoryConfig | None = None,
    cast: np.ndarray | None = None,
) -> Iterator[tuple[int, Played]]:
    """All held-out tasks in batches: the number of tasks, and how they were played. The same draws at every call.

    ``cast``: [A] or [M A], as in `rollout.make_rollout`, the same for every task.
    """
    count = len(jax.tree.leaves(arena.held_out)[0]) if arena.array else len(arena.held_out)
    chunk = count if arena.array else min(count, 4 * cfg.batch)
    for start in range(0, count, chunk):
        indices = range(start, min(start + chunk, count))
        key = jax.random.fold_in(jax.random.key(cfg.seed), 2**31 + start)
        params, version = state.params, int(state.step)
        yield (
            len(indices),
            arena.play(
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
                cast=None if cast is None else np.broadcast_to(cast, (len(indices), *cast.shape)),
            ),
        )


def evaluate(
    cfg: BaseConfig,
    team: Team,
    arena: Arena,
    state: TrainState,
    memory_config: MemoryConfig | None,
    samplings: Mapping[str, Sampling] | None = None,
) -> dict[str, float]:
    """Held-out tasks, one episode each: ``eval/return`` as the policy samples, ``eval/return_greedy``, the components,
    and ``eval/success``, the accuracy, where the environment pays one.
    """
    samplings = samplings or {"": cfg.sampling, "_greedy": Sampling(temperature=0.0)}
    out: dict[str, float] = {}
    for suffix, sampling in samplings.items():
        totals: dict[str, list[float]] = {}
        count = 0
        for tasks, played in held_out(cfg, team, arena, state, single(), sampling, memory_config):
            count += tasks
            for name, values in played.tree.transitions.rewards.items():
                mean = _episode_mean(played.tree.transitions, values.mean(1))
                totals.setdefault(name, []).append(mean * tasks)
        out |= {f"eval/{name}{suffix}": sum(v) / count for name, v in totals.items()}
        out[f"eval/return{suffix}"] = sum(w * out[f"eval/{name}{suffix}"] for name, w in cfg.reward.items())
        if "accuracy" in totals:
            out[f"eval/success{suffix}"] = out[f"eval/accuracy{suffix}"]
    return out


def by_task(
    cfg: BaseConfig, team: Team, arena: Arena, state: TrainState, cast: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Each component's mean over roles, summed over the episode, of every held-out task [n]; NaN where it is unknown.
    Episodes are sampled as in training; ``cast`` as in `held_out`.
    """
    out: dict[str, list[float]] = {}
    for tasks, played in held_out(cfg, team, arena, state, single(), cfg.sampling, cast=cast):
        moves = played.tree.transitions
        for name, values in moves.rewards.items():
            total, roots = episode_values(moves, values.mean(1))
            row = np.full(tasks, np.nan)
            row[moves.task[roots]] = total[roots]
            out.setdefault(name, []).extend(row.tolist())
    return {name: np.array(values) for name, values in out.items()}


def majority(cfg: BaseConfig, team: Team, arena: Arena, state: TrainState, votes: int) -> dict[str, float]:
    """``eval/accuracy_majority@k``: held-out accuracy when each task's answer is the most frequent of k episodes'.

    An episode's answer is the text of its last completion; ties go to the first episode.
    """
    scores: list[float] = []
    for tasks, played in held_out(cfg, team, arena, state, flat(votes), cfg.sampling):
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


def episodes_of(team: Team, played: Played, credited: Credited, selected: np.ndarray, count: int) -> list[list[dict]]:
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
