"""Past policies as opponents: a ring of snapshots that may play a seat, never trained on what they play.

The ring is part of the parameters, ``params["past"]``, so that it is saved and resumed with them. A role's understudy
is the model ``<model>-past`` of the same architecture (team.with_past). Its parameters are drawn from the ring for each
rollout; which seats of which tasks it plays is the rollout's ``cast``.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import Params, PyTree


@dataclass(frozen=True)
class Past:
    size: int = 0  # snapshots kept, the newest ones; 0: no past policies
    every: int = 10  # steps of RL between snapshots
    share: float = 0.5  # of the tasks: the chance that one seat, any, is played by a snapshot

    def check(self, path: str) -> None:
        if self.size < 0 or self.every < 1 or not 0 <= self.share <= 1:
            raise ConfigError(f"{path}: expected size >= 0, every >= 1 and share in [0, 1]")


def understudy(model: str) -> str:
    return f"{model}-past"


def init(agents: Params, size: int) -> PyTree:
    """An empty ring for ``size`` snapshots of ``agents``."""
    return {"ring": jax.tree.map(lambda x: jnp.zeros((size, *x.shape), x.dtype), agents), "count": jnp.int32(0)}


def push(past: PyTree, agents: Params) -> PyTree:
    """With a snapshot of ``agents``, in place of the oldest one when the ring is full."""
    size = jax.tree.leaves(past["ring"])[0].shape[0]
    slot = past["count"] % size
    ring = jax.tree.map(lambda old, new: old.at[slot].set(new), past["ring"], agents)
    return {"ring": ring, "count": past["count"] + 1}


def draw(past: PyTree, agents: Params, key: jax.Array) -> Params:
    """``agents``, and as understudies one snapshot, any of those kept; the current policies while there is none."""
    size = jax.tree.leaves(past["ring"])[0].shape[0]
    slot = jax.random.randint(key, (), 0, jnp.clip(past["count"], 1, size))
    pick = lambda old, now: jnp.where(past["count"] > 0, old[slot], now)
    drawn = jax.tree.map(pick, past["ring"], {name: agents[name] for name in past["ring"]})
    return {**agents, **{understudy(name): own for name, own in drawn.items()}}


def cast(key: jax.Array, tasks: int, roles: int, share: float) -> Int[Array, "B A"]:
    """Who plays what: 1 where the understudy does. At most one seat of a task."""
    whether, which = jax.random.split(key)
    seat = jax.random.randint(which, (tasks,), 0, roles)
    out = jax.random.uniform(whether, (tasks,)) < share
    return (out[:, None] & (seat[:, None] == jnp.arange(roles))).astype(jnp.int32)
