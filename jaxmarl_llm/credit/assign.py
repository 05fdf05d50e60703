"""From rewards on transitions to one advantage per step: return transform, then normaliser, over the whole tree.

Runs before the split by model, so that one agent's advantage may depend on another's steps. Compiled once per bucket of
table sizes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.advantages import (
    GroupStats,
    advantage_alignment,
    first_of_each,
    group_advantage,
    group_ids,
    joint_values,
    own_turns,
    returns_to_go,
    scalarise,
    step_episodes,
    step_returns,
)
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import Tree

Weights = Mapping[str, float | Array] | tuple[tuple[str, float], ...]  # of reward components
GROUPS = ("node", "task", "task_role", "task_role_turn", "role", "batch")


@dataclass(frozen=True)
class Credit:
    """Return and group-relative advantage. See advantages.py for each formula."""

    discount: float = 1.0
    # What is compared: the siblings of a node, a task's steps, those of one role (Dr. MAS) and turn of it, one role's
    # steps of the whole batch (MARSHAL), or all of them
    group: str = "node"
    centre: str = "mean"  # mean, unique (of the distinct values), loo (leave-one-out), max or none
    scale: str = "std"  # std or none
    ddof: int = 0  # 0 population, 1 sample standard deviation
    singleton: str = "zero"  # advantage of a group of one: zero, or raw (its value)
    over: str = "steps"  # what a group's statistics are over: steps, or episodes (the first step of each in the group)
    reduce: str = "mean"  # over the joint actions a completion takes part in: mean or sum
    turn_centre: str = "none"  # of a role's turn rewards over the batch, taken off before they are summed: as centre
    whiten: bool = False  # advantages of the whole batch to mean 0 and std 1 at the end
    coupling: float = 0.0  # beta of advantage_alignment: own past advantages times the others' now; 0: none
    coupling_fade: bool = False  # its factor discount^t
    horizon: str = "end"  # end or turn: a step's return runs to the end of the episode, or until its role's next turn

    def check(self, path: str) -> None:
        choices = {
            "group": GROUPS,
            "horizon": ("end", "turn"),
            "centre": ("mean", "unique", "loo", "max", "none"),
            "turn_centre": ("mean", "unique", "none"),
            "scale": ("std", "none"),
            "singleton": ("zero", "raw"),
            "over": ("steps", "episodes"),
            "reduce": ("mean", "sum"),
            "ddof": (0, 1),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ConfigError(f"{path}.{name}: expected one of {known}, got {getattr(self, name)!r}")
        if not 0 <= self.discount <= 1:
            raise ConfigError(f"{path}.discount: expected in [0, 1], got {self.discount}")
        if not math.isfinite(self.coupling):
            raise ConfigError(f"{path}.coupling: expected a finite number, got {self.coupling}")


class Credited(struct.PyTreeNode):
    returns: Float[Array, "C"]
    advantage: Float[Array, "C"]
    valid: Bool[Array, "C"]  # the step has a return
    group: Int[Array, "C"]
    stats: GroupStats  # over groups
    group_task: Int[Array, "K"]  # task, role, model and turn of each group's first step (0 for an empty group)
    group_role: Int[Array, "K"]
    group_model: Int[Array, "K"]
    group_turn: Int[Array, "K"]


def assign(cfg: Credit, tree: Tree, *, weights: Weights, max_turns: int, num_tasks: int, num_roles: int) -> Credited:
    """Credit every step of the tree. ``weights``: (component, weight) pairs that make the scalar reward; their values
    are data, so that they may change from step to step of a run.
    """
    return _assign(cfg, tree, dict(weights), max_turns=max_turns, num_tasks=num_tasks, num_roles=num_roles)


@functools.partial(jax.jit, static_argnames=("cfg", "max_turns", "num_tasks", "num_roles"))
def _assign(
    cfg: Credit, tree: Tree, weights: Mapping[str, Array], *, max_turns: int, num_tasks: int, num_roles: int
) -> Credited:
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    reward = scalarise(moves.rewards, weights)
    if cfg.turn_centre != "none":
        reward = _centre_turns(cfg.turn_centre, tree, reward, max_turns)
    returns, returned = returns_to_go(
        reward,
        moves.parent,
        moves.turn,
        moves.valid,
        max_turns=max_turns,
        discount=cfg.discount,
        acts=_acts(tree, num_roles) if cfg.horizon == "turn" else None,
    )
    c = steps.node.shape[0]
    role = nodes.role[steps.node]
    value, has = step_returns(moves.steps, role, returns, returned, num_steps=c, reduce=cfg.reduce)
    valid = has & steps.valid
    task, turn = nodes.task[steps.node], nodes.turn[steps.node]
    if cfg.group == "node":
        group, count = steps.node, nodes.role.shape[0]
    elif cfg.group == "batch":
        group, count = jnp.zeros_like(steps.node), 1
    else:
        known = {"task": (task, num_tasks), "role": (role, num_roles), "turn": (turn, max_turns)}
        columns, sizes = zip(*(known[name] for name in cfg.group.split("_")), strict=True)
        group, count = group_ids(*columns, sizes=sizes)
    counted = None
    if cfg.over == "episodes":
        counted = first_of_each(group, step_episodes(moves.steps, moves.parent, num_steps=c), valid=valid)
    advantage, stats = group_advantage(
        value,
        group,
        valid,
        num_groups=count,
        centre=cfg.centre,
        scale=cfg.scale,
        ddof=cfg.ddof,
        singleton=cfg.singleton,
        counted=counted,
    )
    if cfg.coupling:
        joint = joint_values(moves.steps, role, advantage, valid, num_roles=num_roles)
        joint = advantage_alignment(
            joint,
            moves.parent,
            moves.turn,
            returned,
            max_turns=max_turns,
            beta=cfg.coupling,
            discount=cfg.discount,
            fade=cfg.coupling_fade,
        )
        coupled, _ = step_returns(moves.steps, role, joint, returned, num_steps=c)
        advantage = jnp.where(valid, coupled, 0.0)
    if cfg.whiten:
        one = jnp.zeros_like(group)
        advantage, _ = group_advantage(advantage, one, valid, num_groups=1, centre="mean", scale="std")
    first = jax.ops.segment_min(jnp.where(valid, jnp.arange(c), c), group, count)
    of = lambda column: jnp.where(first < c, column[jnp.minimum(first, c - 1)], 0)
    model = nodes.model[steps.node]
    return Credited(value, advantage, valid, group, stats, of(task), of(role), of(model), of(turn))


def _acts(tree: Tree, roles: int) -> Bool[Array, "J A"]:
    """Whether a role takes part in a joint action."""
    seats = tree.transitions.steps
    role = tree.nodes.role[tree.steps.node[jnp.maximum(seats, 0)]]
    return jnp.any((seats >= 0)[..., None] & (role[..., None] == jnp.arange(roles)), axis=1)


def _centre_turns(kind: str, tree: Tree, reward: Float[Array, "J A"], max_turns: int) -> Float[Array, "J A"]:
    """Rewards by own turns, less the role's centre over all its turns of the batch."""
    moves, (j, a) = tree.transitions, reward.shape
    acts = _acts(tree, a) & moves.valid[:, None]
    reward = own_turns(jnp.where(moves.valid[:, None], reward, 0.0), acts, moves.parent, max_turns=max_turns)
    group = jnp.broadcast_to(jnp.arange(a), (j, a)).reshape(-1)
    centred, _ = group_advantage(reward.reshape(-1), group, acts.reshape(-1), num_groups=a, centre=kind, scale="none")
    return centred.reshape(j, a)
