"""Snapshots of stateful environments, which make their steps pure.

A decision is sampled several times, so a state has to be stepped several times. A state holds the pickled environment.
Each step loads a copy of its own and pickles it again. The random generators of the environment are part of the
snapshot: the same actions lead to the same outcome, for all siblings of a group.
"""

from __future__ import annotations

import pickle
from typing import Any

from jaxmarl_llm.errors import ConfigError


def freeze(env: Any, name: str) -> bytes:
    """The snapshot of ``env``. Raises ConfigError where it cannot be pickled. ``name``: how the message calls it."""
    try:
        return pickle.dumps(env, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickling runs the environment's own code
        why = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"{name}: its state cannot be pickled ({type(error).__name__}: {why}); every decision is sampled several "
            "times from a saved state, so define __getstate__ without windows, files and lambdas"
        ) from None


def thaw(snapshot: bytes) -> Any:
    """A copy of the environment as it was at its ``snapshot``."""
    return pickle.loads(snapshot)
