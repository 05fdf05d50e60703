"""From what host environments return, and the rows a host rollout collects, to the tables of `types`.

What could not be computed is invalid, never 0; the reason is one line for the log.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxmarl_llm.generate import bucket
from jaxmarl_llm.types import POLICY, Counts, Nodes, Retrieval, Steps, Team, Transitions, Tree
from jaxmarl_llm.workers import Failure

LARGEST = float(np.finfo(np.float32).max)  # a reward


def checked(result: Any) -> Any:
    """What step returned, or a Failure when that is no (state, rewards, done)."""
    if isinstance(result, Failure):
        return result
    well = isinstance(result, tuple) and len(result) == 3 and isinstance(result[1], Mapping)
    if not well or not all(isinstance(by_component, Mapping) for by_component in result[1].values()):
        return Failure("raised", f"step returned {reprlib.repr(result)}, expected (state, rewards by role, done)")
    return result


def replace_rewards(result: tuple, verdict: Any) -> Any:
    """A `checked` result with the verifier's rewards, or a Failure. Components that the verifier gives stand for those
    of the step, as in array rollouts.
    """
    judged = verdict if isinstance(verdict, Failure) else checked((result[0], verdict, result[2]))
    if isinstance(judged, Failure):
        return judged
    merged = {role: {**result[1].get(role, {}), **verdict.get(role, {})} for role in {**result[1], **verdict}}
    return result[0], merged, result[2]


def reward_row(result: Any, team: Team, components: tuple[str, ...]) -> tuple[np.ndarray, str | None]:
    """Rewards [components, A] of a `checked` result, 0 where none is given; and why they are invalid, or None."""
    table = np.zeros((len(components), len(team.roles)), np.float32)
    if isinstance(result, Failure):
        return table, f"environment {result.kind}: {result.message}"
    roles = [r.name for r in team.roles]
    for role, by_component in result[1].items():
        if role not in roles:
            return table, f"reward of unknown role {role!r} (the roles are {', '.join(roles)})"
        for component, value in by_component.items():
            if component not in components:
                return table, f"unknown reward component {component!r} (declared: {', '.join(components)})"
            number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if not number or not abs(value) <= LARGEST:  # NaN compares false
                return table, f"reward {component!r} of role {role!r} is {reprlib.repr(value)}"
            table[components.index(component), roles.index(role)] = value
    return table, None


def make_tables(
    team: Team,
    components: tuple[str, ...],
    nodes: list[dict],
    steps: list[dict],
    moves: list[dict],
    found: list[Retrieval],
    version: int,
    sent: int,
    calls: int,
    launches: int,
) -> Tree:
    """The rows of one rollout as numpy tables; N, C, J, P are padded to buckets, R is the longest ``max_new``.

    Keys of a row: ``nodes`` ids, role, model, task, turn, parent; ``steps`` node, ids, logprobs, truncated; ``moves``
    steps (one a seat), parent, task, turn, rewards [components, A], done, valid. ``found``: a Retrieval for each turn,
    all nodes in order, or nothing without memory. ``sent``, ``calls``, ``launches``: what the tables do not show, as in
    `types.Counts` (prompt_tokens, env_calls, launches).
    """
    n, c, j = (bucket(len(rows), 16) for rows in (nodes, steps, moves))
    p = bucket(max((len(x["ids"]) for x in nodes), default=1), 32)
    r = max(role.max_new for role in team.roles)
    w = max((len(x["steps"]) for x in moves), default=1)

    def column(rows: list[dict], name: str, size: int, fill: Any = 0, dtype: Any = np.int32) -> np.ndarray:
        out = np.full((size,), fill, dtype)
        out[: len(rows)] = [x[name] for x in rows]
        return out

    def matrix(rows: list[dict], name: str, shape: tuple[int, int], fill: Any = 0, dtype: Any = np.int32) -> np.ndarray:
        out = np.full(shape, fill, dtype)
        for k, x in enumerate(rows):
            out[k, : len(x[name])] = x[name]
        return out

    def lengths(rows: list[dict], size: int) -> np.ndarray:
        out = np.zeros((size,), np.int32)
        out[: len(rows)] = [len(x["ids"]) for x in rows]
        return out

    if found:
        joined = jax.tree.map(lambda *x: np.concatenate([np.asarray(a) for a in x]), *found)
        retrieved = jax.tree.map(lambda a: np.concatenate([a, np.zeros((n - len(a), *a.shape[1:]), a.dtype)]), joined)
    else:
        retrieved = jax.tree.map(np.asarray, Retrieval.empty(n))
    parent, task = column(nodes, "parent", n, -1), column(nodes, "task", n)
    length, prompt_length = lengths(steps, c), lengths(nodes, n)
    node = column(steps, "node", c)
    per_node = np.bincount(node[: len(steps)], minlength=n)
    rewards = np.zeros((j, len(components), len(team.roles)), np.float32)
    for k, x in enumerate(moves):
        rewards[k] = x["rewards"]
    valid = column(moves, "valid", j, False, bool)
    span = np.arange
    return Tree(
        Nodes(
            tokens=matrix(nodes, "ids", (n, p)),
            length=prompt_length,
            role=column(nodes, "role", n),
            model=column(nodes, "model", n),
            task=task,
            turn=column(nodes, "turn", n),
            parent=parent,
            crn=task,
            retrieved=retrieved,
            valid=span(n) < len(nodes),
        ),
        Steps(
            node=node,
            tokens=matrix(steps, "ids", (c, r)),
            length=length,
            loss_mask=span(r) < length[:, None],
            logprobs=matrix(steps, "logprobs", (c, r), 0.0, np.float32),
            truncated=column(steps, "truncated", c, False, bool),
            source=column(steps, "source", c, POLICY),
            version=np.full((c,), version, np.int32),
            valid=span(c) < len(steps),
        ),
        Transitions(
            steps=matrix(moves, "steps", (j, w), -1),
            parent=column(moves, "parent", j, -1),
            task=column(moves, "task", j),
            turn=column(moves, "turn", j),
            rewards=dict(zip(components, np.moveaxis(rewards, 1, 0))),
            done=column(moves, "done", j, False, bool),
            played=span(j) < len(moves),
            valid=valid,
        ),
        Counts(
            sequences=np.int32(len(steps)),
            branch_sequences=np.int32((per_node * (per_node > 1)).sum()),
            prompt_tokens=np.int32(sent),
            completion_tokens=np.int32(length.sum()),
            env_calls=np.int32(calls),
            invalid=np.int32(len(moves) - valid.sum()),
            launches=np.int32(launches),
        ),
    )
