"""Random keys of a rollout: folded along the path through the tree, never split by batch position."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

# Streams folded into a state's key. Roles and samples are folded below PLAY, numbers of expansions below CHOOSE.
ENV, PLAY, CHILD, RESET, CHOOSE = range(5)


def fold(key: jax.Array, *data: Any) -> jax.Array:
    """Fold each of ``data`` into ``key`` in turn, along a path. ``key`` and data may be arrays of equal shape."""
    for d in data:
        d = jnp.broadcast_to(jnp.asarray(d, jnp.uint32), key.shape)
        flat = jax.vmap(jax.random.fold_in)(key.reshape(-1), d.reshape(-1))
        key = flat.reshape(key.shape)
    return key


# Purposes of a run's random streams, folded into the key of its seed. No two purposes share a stream.
INIT, STEPS, TASKS, DEMONSTRATIONS, EVALUATION = range(5)
# Streams of a step's key beside its rollout's, which folds in task numbers.
OPPONENTS, STEP_SELECTION, EXTRA_PLAYS, REPLAY, IMITATION = range(2**30, 2**30 + 5)


def stream(seed: jax.Array | int, purpose: int) -> jax.Array:
    """Key of one random stream of a run.

    Args:
        seed: Seed of the run; may be traced.
        purpose: INIT, STEPS, TASKS, DEMONSTRATIONS or EVALUATION.
    """
    return jax.random.fold_in(jax.random.key(seed), purpose)
