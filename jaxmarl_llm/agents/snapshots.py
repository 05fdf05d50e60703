"""Past policies as opponents: a ring of snapshots that may play a seat, never trained on what they play.

The ring is part of the parameters, ``params["past"]``, so that it is saved and resumed with them. The opponent model
of a role is the model ``<model>-past`` of the same architecture (team.with_past). Its parameters are drawn from the
ring for each rollout; which seats of which tasks it plays is the rollout's ``assignment``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmarl_llm.config import at_least, in_range
from jaxmarl_llm.types import Params, PyTree


@dataclass(frozen=True)
class Past:
    """Settings of past policies as opponent models."""

    size: int = 0  # snapshots kept, the newest ones; 0: no past policies
    every: int = 10  # steps of RL between snapshots
    fraction: float = 0.5  # of the tasks: the chance that one seat, any, is played by a snapshot

    ALIASES: ClassVar[dict[str, str]] = {"share": "fraction"}

    def check(self, path: str) -> None:
        at_least(f"{path}.size", self.size, 0)
        at_least(f"{path}.every", self.every, 1)
        in_range(f"{path}.fraction", self.fraction, 0, 1)


def opponent_model(model: str) -> str:
    """Name of the opponent model that plays snapshots of ``model``."""
    return f"{model}-past"


def init(agents: Params, size: int) -> PyTree:
    """An empty ring for ``size`` snapshots of ``agents``."""
    return {"ring": jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), agents), "count": jnp.int32(0)}


def push(past: PyTree, agents: Params) -> PyTree:
    """Store a snapshot of ``agents`` in the ring ``past``, in place of the oldest one when the ring is full."""
    size = jax.tree.leaves(past["ring"])[0].shape[0]
    slot = past["count"] % size
    ring = jax.tree.map(lambda old, new: old.at[slot].set(new), past["ring"], agents)
    return {"ring": ring, "count": past["count"] + 1}


def draw(past: PyTree, agents: Params, key: jax.Array) -> Params:
    """Draw the parameters of a rollout with opponents.

    Args:
        past: ring of snapshots.
        agents: current parameters by model.
        key: PRNG key; it chooses one of the stored snapshots.

    Returns:
        ``agents``, and the snapshot as opponent models. Without a snapshot, the opponents have the current parameters.
    """
    size = jax.tree.leaves(past["ring"])[0].shape[0]
    slot = jax.random.randint(key, (), 0, jnp.clip(past["count"], 1, size))
    pick = lambda old, now: jnp.where(past["count"] > 0, old[slot], now)
    drawn = jax.tree.map(pick, past["ring"], {name: agents[name] for name in past["ring"]})
    return {**agents, **{opponent_model(name): own for name, own in drawn.items()}}


def assignment(key: jax.Array, tasks: int, roles: int, share: float) -> Int[Array, "B A"]:
    """Draw which seats opponent models play: at most one seat of each task.

    Args:
        key: PRNG key.
        tasks: number of tasks, B.
        roles: number of roles, A.
        share: probability that one seat of a task is played by its opponent model.

    Returns:
        1 where the opponent model plays, otherwise 0 [B A].
    """
    whether, which = jax.random.split(key)
    seat = jax.random.randint(which, (tasks,), 0, roles)
    out = jax.random.uniform(whether, (tasks,)) < share
    return (out[:, None] & (seat[:, None] == jnp.arange(roles))).astype(jnp.int32)
