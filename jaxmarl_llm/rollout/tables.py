"""Checks of the results of host environments, and the tables of `types` from the rows of a host rollout.

A reward that could not be computed is invalid, never 0. Its reason is one line for the log.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmarl_llm.envs.trials import is_flag
from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.rollout.env_pool import Failure
from jaxmarl_llm.types import POLICY, Counts, Nodes, Retrieval, Steps, Team, Transitions, Tree

LARGEST = float(np.finfo(np.float32).max)  # reward that the tables can hold


class NodeRow(NamedTuple):
    """One decision point: a row of `types.Nodes`."""

    prompt_ids: Sequence[int]
    role: int
    model: int
    task: int
    turn: int
    parent: int


class StepRow(NamedTuple):
    """One completion: a row of `types.Steps`."""

    node: int
    ids: Sequence[int]
    logprobs: np.ndarray  # of the ids
    truncated: bool
    source: int


class TransitionRow(NamedTuple):
    """One joint action: a row of `types.Transitions`."""

    steps: Sequence[int]  # one of each seat
    parent: int
    task: int
    turn: int
    rewards: np.ndarray  # [components A]
    done: bool
    valid: bool


@dataclass
class Rows:
    """The rows of a rollout in their order. ``retrievals``: one for each turn, of its nodes; empty without memory."""

    nodes: list[NodeRow] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    transitions: list[TransitionRow] = field(default_factory=list)
    retrievals: list[Retrieval] = field(default_factory=list)


class Costs(NamedTuple):
    """Fields of `types.Counts` that the rows do not show."""

    prompt_tokens: int
    env_calls: int
    launches: int


def checked(result: Any) -> Any:
    """``result`` of the environment's step, or a Failure when it is not (state, rewards by role, done)."""
    if isinstance(result, Failure):
        return result
    well = isinstance(result, tuple) and len(result) == 3 and isinstance(result[1], Mapping) and is_flag(result[2])
    if not well or not all(isinstance(by_component, Mapping) for by_component in result[1].values()):
        return Failure("raised", f"step returned {reprlib.repr(result)}, expected (state, rewards by role, done)")
    return result


def replace_rewards(result: tuple, verdict: Any) -> Any:
    """A `checked` ``result`` with the rewards of ``verdict``, what the local verifier returned; or a Failure.

    A component that the verifier gives replaces that of the step. The others stay, as in array rollouts.
    """
    judged = verdict if isinstance(verdict, Failure) else checked((result[0], verdict, result[2]))
    if isinstance(judged, Failure):
        return judged
    merged = {role: {**result[1].get(role, {}), **verdict.get(role, {})} for role in {**result[1], **verdict}}
    return result[0], merged, result[2]


def reward_row(result: Any, team: Team, components: tuple[str, ...]) -> tuple[np.ndarray, str | None]:
    """Rewards of a `checked` result, and the reason why they are invalid.

    Args:
        result: result of the environment's step.
        team: roles, in the order of the table.
        components: reward components that the environment declares, in the order of the table.

    Returns:
        Rewards [components A], 0 where none is given, and the reason, or None for valid rewards.
    """
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


def make_tables(team: Team, components: tuple[str, ...], rows: Rows, version: int, costs: Costs) -> Tree:
    """Tables (NumPy arrays) of one rollout. N, C, J and P are padded to buckets; R is the largest limit of tokens.

    Args:
        team: roles and models.
        components: reward components of the environment.
        rows: rows of the rollout.
        version: optimizer steps of the parameters that sampled.
        costs: counts that the rows do not show.
    """
    nodes, steps = _nodes(rows), _steps(rows.steps, max(role.max_new_tokens for role in team.roles), version)
    transitions = _transitions(rows.transitions, components, len(team.roles))
    per_node = np.bincount(np.array([row.node for row in rows.steps], np.int64), minlength=1)
    counts = {
        "sequences": len(rows.steps),
        "branch_sequences": int((per_node * (per_node > 1)).sum()),
        "completion_tokens": sum(len(row.ids) for row in rows.steps),
        "invalid": sum(not row.valid for row in rows.transitions),
        **costs._asdict(),
    }
    return Tree(nodes, steps, transitions, Counts(**{name: np.array(n, np.int32) for name, n in counts.items()}))


def _nodes(rows: Rows) -> Nodes:
    nodes, size = rows.nodes, bucket(len(rows.nodes), 16)
    task = _column([row.task for row in nodes], size)
    return Nodes(
        tokens=_matrix([row.prompt_ids for row in nodes], size, bucket(_longest(row.prompt_ids for row in nodes), 32)),
        length=_column([len(row.prompt_ids) for row in nodes], size),
        role=_column([row.role for row in nodes], size),
        model=_column([row.model for row in nodes], size),
        task=task,
        turn=_column([row.turn for row in nodes], size),
        parent=_column([row.parent for row in nodes], size, fill=-1),
        retrieved=_retrieved(rows.retrievals, size),
        valid=np.arange(size) < len(nodes),
    )


def _steps(steps: Sequence[StepRow], response: int, version: int) -> Steps:
    """``response``: R."""
    size = bucket(len(steps), 16)
    length = _column([len(row.ids) for row in steps], size)
    return Steps(
        node=_column([row.node for row in steps], size),
        tokens=_matrix([row.ids for row in steps], size, response),
        length=length,
        loss_mask=np.arange(response) < length[:, None],
        logprobs=_matrix([row.logprobs for row in steps], size, response, fill=0.0, dtype=np.float32),
        truncated=_column([row.truncated for row in steps], size, fill=False, dtype=bool),
        source=_column([row.source for row in steps], size, fill=POLICY),
        version=np.full((size,), version, np.int32),
        valid=np.arange(size) < len(steps),
    )


def _transitions(transitions: Sequence[TransitionRow], components: tuple[str, ...], roles: int) -> Transitions:
    """``roles``: A."""
    size = bucket(len(transitions), 16)
    rewards = np.zeros((size, len(components), roles), np.float32)
    for k, row in enumerate(transitions):
        rewards[k] = row.rewards
    return Transitions(
        steps=_matrix([row.steps for row in transitions], size, _longest(row.steps for row in transitions), fill=-1),
        parent=_column([row.parent for row in transitions], size, fill=-1),
        task=_column([row.task for row in transitions], size),
        turn=_column([row.turn for row in transitions], size),
        rewards=dict(zip(components, np.moveaxis(rewards, 1, 0))),
        done=_column([row.done for row in transitions], size, fill=False, dtype=bool),
        played=np.arange(size) < len(transitions),
        valid=_column([row.valid for row in transitions], size, fill=False, dtype=bool),
    )


def _retrieved(retrievals: Sequence[Retrieval], size: int) -> Retrieval:
    """The retrievals of all turns as one of ``size`` rows."""
    if not retrievals:
        return jax.tree.map(np.asarray, Retrieval.empty(size))
    joined = jax.tree.map(lambda *x: np.concatenate([np.asarray(a) for a in x]), *retrievals)
    return jax.tree.map(lambda x: np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)]), joined)


def _longest(rows: Iterable[Sequence[Any]]) -> int:
    return max(map(len, rows), default=1)


def _column(values: Sequence[Any], size: int, *, fill: Any = 0, dtype: Any = np.int32) -> np.ndarray:
    """``values`` and then ``fill`` [size]."""
    out = np.full((size,), fill, dtype)
    out[: len(values)] = values
    return out


def _matrix(
    rows: Sequence[Sequence[Any] | np.ndarray], size: int, width: int, *, fill: Any = 0, dtype: Any = np.int32
) -> np.ndarray:
    """``rows`` of any length, then ``fill`` [size width]."""
    out = np.full((size, width), fill, dtype)
    for k, row in enumerate(rows):
        out[k, : len(row)] = row
    return out
