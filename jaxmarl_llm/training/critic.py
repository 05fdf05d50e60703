"""Critics: a value head on a language model's last prompt token, the prompts that it values, and its targets.

The critic of a role is the model named in ``Team.critics``. It is the policy itself with a head on its backbone, or a
separate copy of the backbone. Or it is one copy for the team, which reads the prompts of all seats of a state (CTDE). A
head is trained by the same update as a policy. Where it shares the backbone, it is trained on the same micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jaxmarl_llm.distributed.sharding import to_host
from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.training.learner import Batch, Learner, NodeTargets
from jaxmarl_llm.types import Array, Model, Params, Team, Tree


class CriticInputs(NamedTuple):
    """The M prompts that one critic values."""

    tokens: Int[Array, "M P"]
    length: Int[Array, " M"]
    of_node: Int[Array, " N"]  # the prompt of each node of the tree, -1 for none


def critic_inputs(team: Team, tree: Tree, critic: int) -> CriticInputs:
    """Prompts that a critic values.

    A critic of an agent reads each node's own prompt. A joint critic reads one prompt for each state: the prompts of
    all its seats in the order of the roles, each after ``[role]``.

    Args:
        team: Roles, models and critics.
        tree: The rollout, NumPy arrays.
        critic: Index of the critic in ``Team.models``.
    """
    nodes = jax.tree.map(np.asarray, tree.nodes)
    name = team.models[critic].name
    mine = nodes.valid & np.isin(nodes.role, [i for i, c in enumerate(team.critics) if c == name])
    of_node = np.full(len(nodes.role), -1)
    rows = np.flatnonzero(mine)
    if not team.joint_critic:
        of_node[rows] = np.arange(len(rows))
        return CriticInputs(nodes.tokens[rows], nodes.length[rows], of_node)
    encode = team.models[critic].tokenizer.encode
    marks = [encode(f"[{role.name}]") for role in team.roles]
    states: dict[tuple[int, int], list[int]] = {}
    for n in rows[np.argsort(nodes.role[rows], kind="stable")]:
        states.setdefault((int(nodes.task[n]), int(nodes.parent[n])), []).append(n)
    ids = []
    for m, seats in enumerate(states.values()):
        of_node[seats] = m
        ids.append([t for n in seats for t in (*marks[nodes.role[n]], *nodes.tokens[n, : nodes.length[n]].tolist())])
    tokens = np.zeros((len(ids), max(map(len, ids), default=1)), np.int32)
    for row, prompt in zip(tokens, ids):
        row[: len(prompt)] = prompt
    return CriticInputs(tokens, np.array([len(prompt) for prompt in ids], np.int32), of_node)


def _chunks(inputs: CriticInputs, micro_tokens: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The prompts as padded chunks (rows, tokens, lengths) of few shapes, of at most ``micro_tokens`` tokens each."""
    order = np.argsort(inputs.length, kind="stable")
    width = lambda rows: bucket(int(inputs.length[rows].max()), 16)
    out = []
    while len(order):
        size = 1
        while size < len(order) and 2 * size * width(order[: 2 * size]) <= micro_tokens:
            size *= 2
        part, order = order[:size], order[size:]
        p = width(part)
        tokens, length = np.zeros((size, p), np.int32), np.ones(size, np.int32)
        cut = min(p, inputs.tokens.shape[1])
        tokens[: len(part), :cut], length[: len(part)] = inputs.tokens[part, :cut], inputs.length[part]
        out.append((part, tokens, length))
    return out


def estimate(learner: Learner, model: Model, params: Params, inputs: CriticInputs, *, micro_tokens: int) -> np.ndarray:
    """Value of each prompt [M] by a critic.

    Args:
        learner: Compiled functions of the critic.
        model: The critic.
        params: Parameters of the team.
        inputs: M prompts.
        micro_tokens: Prompt tokens of one launch.
    """
    own = params["agents"][model.name]
    shared = None if model.base is None else params["shared"][model.base]
    out = np.zeros(len(inputs.length), np.float32)
    for part, tokens, length in _chunks(inputs, micro_tokens):
        out[part] = to_host(learner.value(own, shared, tokens, length))[: len(part)]
    return out


def critic_batches(inputs: CriticInputs, values: NodeTargets, *, micro_tokens: int) -> list[Batch]:
    """Batches without completions, which train a critic that is not a policy.

    Args:
        inputs: M prompts.
        values: Targets of the prompts.
        micro_tokens: Prompt tokens of one batch.
    """
    out = []
    for part, tokens, length in _chunks(inputs, micro_tokens):
        none = np.zeros((len(length), 1, 1), np.float32)
        targets = _rows(values, part, len(length))
        out.append(Batch(tokens, length, none.astype(np.int32), none, none, none, values=targets))
    return out


def stacks_of_rows(count: int, most: int) -> list[np.ndarray]:
    """Row numbers in parts of ``most`` rows or fewer: stacks [K rows] of parts of one length, two stacks at most.

    Args:
        count: Number of rows.
        most: Rows of one part; a part has one row at least.
    """
    fewest = -(-count // max(1, most))
    even = (n for n in range(fewest, 2 * fewest) if count % n == 0)  # one number of rows: one loop
    parts = np.array_split(np.arange(count), next(even, fewest))
    sizes = sorted({len(part) for part in parts}, reverse=True)
    return [np.stack([part for part in parts if len(part) == rows]) for rows in sizes]


def _rows(values: NodeTargets, part: np.ndarray, size: int) -> NodeTargets:
    """The rows ``part`` of ``values`` and zeros, ``size`` rows in all."""
    return jax.tree.map(lambda x: np.concatenate([x[part], np.zeros(size - len(part), np.float32)]), values)
