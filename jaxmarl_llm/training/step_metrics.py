"""Metrics of one training step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxmarl_llm.credit.assign import Credited
from jaxmarl_llm.rollout.env_runner import EnvRunner, RolloutResult
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.types import EXPERT, Array, Team, Tree


def diagnose(
    cfg: BaseConfig,
    team: Team,
    env_runner: EnvRunner,
    played: RolloutResult,
    credited: Credited,
    selected: Array,
    updated: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    """Metrics of one step, with the names of `telemetry.keys`.

    Args:
        cfg: Configuration of the run.
        team: Roles and models.
        env_runner: Runner of the environment.
        played: Rollout of the step.
        credited: Advantages of the rollout.
        selected: Groups that are trained [K].
        updated: Metrics of the update, by model.
    """
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
    out |= variance_shares(moves.rewards, cfg.reward, moves.valid & moves.played)
    if "accuracy" in moves.rewards:
        out["success"] = out["reward/accuracy"] if ended.any() else float("nan")
    invalid, tried = count_invalid(played)
    out["count/invalid_share"] = invalid / max(1, tried)
    asked, silent = count_experts(tree)
    if asked:
        out |= {"count/expert_asked": float(asked), "count/expert_silent": float(silent)}
        out["unanswered"] = float(silent == asked)
    if played.records is not None:
        out["count/unplayed"] = float(played.records.unplayed)
        out["count/cut_prompts"] = float(sum(played.records.cut_prompts.values()))
        out["count/cut_tokens"] = float(played.records.cut_tokens)
    for index, role in enumerate(team.roles):
        mine = credited.valid & (nodes.role[steps.node] == index)
        if mine.any():
            own = _agent_metrics(tree, credited, selected, index, mine, updated.get(role.model))
            out |= {f"agent/{role.name}/{key}": value for key, value in own.items()}
    turns = np.unique(nodes.turn[steps.node][credited.valid])
    for turn in range(env_runner.env.max_turns):
        if turn in turns:
            own = _group_metrics(credited, selected, credited.group_turn == turn)
            out |= {f"node/{turn}/{key}": value for key, value in own.items()}
    out |= played.watched
    out["bad"] = float(any(not m["ok"] for m in updated.values()))
    out["logprob_diff"] = max((m["logprob_diff"] for m in updated.values()), default=0.0)
    return out


# Metric of an update -> its name among the metrics of an agent.
OF_UPDATES = {
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "clip_fraction": "clip_fraction",
    "ref_kl": "kl",
    "logprob_diff": "logprob_diff",
    "nll": "nll",
    "ratio": "ratio",
    "importance_weight": "importance_weight",
    "tis_clipped": "tis_clipped",
    "imitation": "imitation",
}


def _agent_metrics(
    tree: Tree, credited: Credited, selected: Array, role: int, mine: Array, updated: Mapping[str, float] | None
) -> dict[str, float]:
    """Metrics of the agent with the index ``role``. ``mine``: its valid completions [C]. ``updated``: of its model."""
    steps = tree.steps
    out = {
        "reward": float(credited.returns[mine].mean()),
        "length": float(steps.length[mine].mean()),
        "truncated": float(steps.truncated[mine].mean()),
        **_group_metrics(credited, selected, credited.group_role == role),
        "updated": float(updated is not None),
    }
    return out | {to: updated[k] for k, to in OF_UPDATES.items() if updated is not None and k in updated}


def _group_metrics(credited: Credited, selected: Array, groups: Array) -> dict[str, float]:
    """Metrics of those ``groups`` [K] that have at least two members; none where there is no such group."""
    stats = credited.stats
    groups = groups & (stats.count >= 2)
    if not groups.any():
        return {}
    return {
        "variance": float(stats.variance[groups].mean()),
        "zero_variance": float((stats.high == stats.low)[groups].mean()),
        "selected": float(selected[groups].mean()),
    }


def variance_shares(rewards: Mapping[str, Array], weights: Mapping[str, float], known: Array) -> dict[str, float]:
    """Share of the variance of the weighted reward that each paid component brings.

    Args:
        rewards: Component -> rewards by joint action and role [J A].
        weights: Component -> its weight in the sum.
        known: Joint actions with a valid reward [J].

    Returns:
        ``reward_variance/<component>``: covariance with the sum, over the variance of the sum. The shares add up to 1.
        Empty with fewer than two paid components, and where the sum does not vary.
    """
    parts = {
        name: weights[name] * np.asarray(values)[known].ravel() for name, values in rewards.items() if name in weights
    }
    if len(parts) < 2 or not known.any():
        return {}
    total = np.sum(list(parts.values()), axis=0, dtype=np.float64)
    if not (variance := total.var()) > 0:
        return {}
    centred = total - total.mean()
    return {f"reward_variance/{name}": float((part * centred).mean() / variance) for name, part in parts.items()}


def count_invalid(played: RolloutResult) -> tuple[int, int]:
    """Joint actions of ``played`` without a valid reward, and all joint actions.

    A task without a first prompt counts as one joint action.
    """
    moves, unplayed = played.tree.transitions, played.records.unplayed if played.records is not None else 0
    tried = int(moves.played.sum())
    return tried - int(moves.valid[moves.played].sum()) + unplayed, tried + unplayed


def count_experts(tree: Tree) -> tuple[int, int]:
    """Completions that experts were asked for, and those that they did not give.

    Args:
        tree: The rollout.
    """
    asked = np.asarray((tree.steps.source == EXPERT) & tree.nodes.valid[tree.steps.node])
    return int(asked.sum()), int((asked & (tree.steps.length == 0)).sum())


def _episode_mean(moves: Any, values: Array) -> float:
    """Mean over tasks of the sum of ``values`` along an episode, siblings averaged: the root value without discount.
    NaN when none is known.
    """
    total, roots = episode_values(moves, values)
    return float(total[roots].mean()) if roots.any() else float("nan")


def episode_values(moves: Any, values: Array) -> tuple[np.ndarray, np.ndarray]:
    """Sum of values from each transition on, siblings averaged.

    As in `returns.returns_to_go`, a transition is invalid when none of its continuations is valid.

    Args:
        moves: Transitions of a rollout, J rows.
        values: Value of each transition [J].

    Returns:
        Sums [J], and which transitions are valid roots [J].
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
