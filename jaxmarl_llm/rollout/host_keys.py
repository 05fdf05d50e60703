"""Random keys of host rollouts: those of the states, of what the environment draws, and the seeds it receives."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.rollout.host_states import LiveState
from jaxmarl_llm.rollout.keys import CHILD, ENV, RESET, fold
from jaxmarl_llm.rollout.launches import pad


def seed_of(data: np.ndarray) -> int:
    """The integer seed that a host environment receives: the 64 bits of its key.

    Args:
        data: Key data [2].
    """
    return int(data[0]) << 32 | int(data[1])


def action_keys(states: Sequence[LiveState], groups: Sequence[int]) -> tuple[dict[int, np.ndarray], ...]:
    """Key data of the joint actions of every state: of the environment's step, and of the state it leads to.

    States with equally many joint actions are computed at once.

    Args:
        states: The states.
        groups: Number of joint actions of each, G.

    Returns:
        For the step and for the state it leads to, key data [G 2] by state.
    """
    stores: tuple[dict[int, np.ndarray], ...] = ({}, {})
    for group in sorted(set(groups)):
        these = [i for i, number in enumerate(groups) if number == group]
        size = bucket(len(these), 4)
        data, earlier = (
            pad(np.stack(x), size) for x in zip(*((states[i].key, np.int32(states[i].earlier)) for i in these))
        )
        for store, rows in zip(stores, branch_keys(data, earlier, group=group)):
            store.update(zip(these, np.asarray(rows)))
    return stores


@functools.partial(jax.jit, static_argnames=("group",))
def branch_keys(
    data: jax.Array | np.ndarray, earlier: jax.Array | np.ndarray, *, group: int
) -> tuple[jax.Array, jax.Array]:
    """Key data [N G 2] of the environment's step of each joint action and of the state it leads to.

    Args:
        data: Key data of the states [N 2].
        earlier: Joint actions played from each state before [N].
        group: Joint actions of each state, G.
    """
    keys = jnp.repeat(jax.random.wrap_key_data(jnp.asarray(data))[:, None], group, 1)
    order = jnp.asarray(earlier)[:, None] + jnp.arange(group)
    return jax.random.key_data(fold(keys, ENV, order)), jax.random.key_data(fold(keys, CHILD, order))


@jax.jit
def root_keys(key: jax.Array, tasks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Key data [B 2] of the first state of each task and of its reset.

    Args:
        key: Key of the rollout.
        tasks: Numbers of the tasks [B].
    """
    roots = fold(jnp.broadcast_to(key, tasks.shape), tasks)
    return jax.random.key_data(roots), jax.random.key_data(fold(roots, RESET))
