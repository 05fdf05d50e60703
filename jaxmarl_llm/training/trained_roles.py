"""The setting ``trained_roles``: some roles learn in RL, and the models of the others stay as after stage 0."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax.numpy as jnp

from jaxmarl_llm.config import one_of
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.training.algorithm import TrainableRoles


def check_trained_roles(path: str, chosen: Sequence[str], roles: Sequence[str], sharing: str) -> None:
    """Refuse a choice of roles that cannot learn alone.

    Args:
        path: Key of the configuration, for messages.
        chosen: Names of the roles that learn.
        roles: Names of all roles.
        sharing: ``team.parameter_sharing``.

    Raises:
        ConfigError: No role, an unknown one, or not all of them where one model plays all roles.
    """
    if not chosen:
        raise ConfigError(f"{path}.trained_roles: expected one or several of {', '.join(roles)}, got none")
    for role in chosen:
        one_of(f"{path}.trained_roles", role, roles)
    if {*chosen} != {*roles} and sharing == "shared":
        raise ConfigError(
            f"{path}.trained_roles: expected {', '.join(roles)} with {path}.team.parameter_sharing='shared': one "
            "model plays all roles"
        )


def only(chosen: Collection[str], roles: Sequence[str]) -> TrainableRoles | None:
    """RL step -> which roles learn at it [A]: ``chosen`` at every step. None where all of them learn.

    Args:
        chosen: Names of the roles that learn.
        roles: Names of the roles of the environment, in its order.
    """
    if {*chosen} >= {*roles}:
        return None
    learns = jnp.array([name in chosen for name in roles])

    def at(rl_step: Any, /) -> Any:
        return learns

    return at
