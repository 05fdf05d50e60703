"""Value estimates: a head on a language model's last prompt token, what it reads, and where its targets come from.

The critic of a role is the model named in ``Team.critics``: the policy itself with a head on its backbone, an own copy
of the backbone, or one copy for the team that reads the prompts of all seats of a state (CTDE). A head is trained by
the same update as a policy, on the same micro-batches where it shares the backbone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.advantages import step_returns
from jaxmarl_llm.generate import bucket
from jaxmarl_llm.sharding import to_host
from jaxmarl_llm.train import Batch, Learner, NodeTargets
from jaxmarl_llm.types import Model, Params, Team, Tree


class Reading(NamedTuple):
    """What one critic reads: prompts [M P], and which of them belongs to each node of the tree [N] (-1: none)."""

    tokens: np.ndarray
    length: np.ndarray
    of_node: np.ndarray


def reading(team: Team, tree: Tree, critic: int) -> Reading:
    """The prompts that the model ``critic`` (an index into Team.models) values.

    Per agent: each node's own prompt. Shared by several roles with prompts of their own (a joint critic): for each
    state, the prompts of all its seats in the order of the roles, each behind ``[role]``.
    """
    nodes = tree.nodes
    name = team.models[critic].name
    mine = nodes.valid & np.isin(nodes.role, [i for i, c in enumerate(team.critics) if c == name])
    of_node = np.full(len(nodes.role), -1)
    rows = np.flatnonzero(mine)
    if not team.joint_critic:
        of_node[rows] = np.arange(len(rows))
        return Reading(nodes.tokens[rows], nodes.length[rows], of_node)
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
    for row, said in zip(tokens, ids):
        row[: len(said)] = said
    return Reading(tokens, np.array([len(said) for said in ids], np.int32), of_node)


def _chunks(read: Reading, micro_tokens: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rows of ``read`` as padded pieces (row ids, tokens, lengths) of few shapes, at most ``micro_tokens`` each."""
    order = np.argsort(read.length, kind="stable")
    out = []
    while len(order):
        width = lambda part: bucket(int(read.length[part].max()), 16)
        size = 1
        while size < len(order) and 2 * size * width(order[: 2 * size]) <= micro_tokens:
            size *= 2
        part, order = order[:size], order[size:]
        p = width(part)
        tokens, length = np.zeros((size, p), np.int32), np.ones(size, np.int32)
        cut = min(p, read.tokens.shape[1])
        tokens[: len(part), :cut], length[: len(part)] = read.tokens[part, :cut], read.length[part]
        out.append((part, tokens, length))
    return out


def estimate(learner: Learner, model: Model, params: Params, read: Reading, *, micro_tokens: int) -> np.ndarray:
    """The critic's value of each prompt it reads [M]."""
    own = params["agents"][model.name]
    shared = None if model.base is None else params["shared"][model.base]
    out = np.zeros(len(read.length), np.float32)
    for part, tokens, length in _chunks(read, micro_tokens):
        out[part] = to_host(learner.value(own, shared, tokens, length))[: len(part)]
    return out


def critic_batches(read: Reading, values: NodeTargets, *, micro_tokens: int) -> list[Batch]:
    """Batches that train a critic of its own on what it reads: ``values`` of the M prompts, no completions."""
    out = []
    for part, tokens, length in _chunks(read, micro_tokens):
        size = len(length)
        pad = lambda x, part=part, size=size: np.concatenate([x[part], np.zeros(size - len(part), np.float32)])
        none = np.zeros((size, 1, 1), np.float32)
        part_values = jax.tree.map(pad, values)
        out.append(Batch(tokens, length, none.astype(np.int32), none, none, none, values=part_values))
    return out


def node_targets(tree: Tree, targets: np.ndarray, valid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Target of each node [N], the mean over the joint actions its completions are part of, and whether there is one.

    ``targets`` [J A], ``valid`` [J].
    """
    role = tree.nodes.role[tree.steps.node]
    steps = tree.transitions.steps
    value, has = to_host(
        step_returns(steps, jnp.asarray(role), jnp.asarray(targets), jnp.asarray(valid), num_steps=len(role))
    )
    n = len(tree.nodes.role)
    total = np.bincount(tree.steps.node[has], value[has], n)
    count = np.bincount(tree.steps.node[has], minlength=n)
    return (total / np.maximum(count, 1)).astype(np.float32), (count > 0) & tree.nodes.valid


def state_values(tree: Tree, value: np.ndarray, num_roles: int) -> tuple[np.ndarray, np.ndarray]:
    """Values [J A] of the states where transitions were taken, by role, from values of nodes [N]; and which roles
    acted there [J A]: the others have no prompt, hence no value of their own.
    """
    steps = tree.transitions.steps
    values, acts = np.zeros((len(steps), num_roles), np.float32), np.zeros((len(steps), num_roles), bool)
    for w in range(steps.shape[1]):
        j = np.flatnonzero(steps[:, w] >= 0)
        node = tree.steps.node[steps[j, w]]
        role = tree.nodes.role[node]
        values[j, role], acts[j, role] = value[node], True
    return values, acts
