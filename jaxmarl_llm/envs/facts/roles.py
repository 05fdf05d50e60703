"""The protocol `pipeline` in names and numbers that its array form and its text form share. Without JAX."""

from __future__ import annotations

import math
from typing import Any

from jaxmarl_llm.envs import checks

ROLES = ("rewriter", "selector", "generator")
COMPONENTS = ("f1", "em", "penalty", "evidence", "format", "turns")
QUERIES = 4  # that run
PENALTIES = (0.5, 1.0, 1.0)  # of each role, for a completion out of form


def check_penalties(path: str, config: Any) -> None:
    """Checks the field ``penalties``. ``path``: the dotted name of ``config``, which is a Config."""
    if not all(0 <= penalty < math.inf for penalty in config.penalties):
        checks.refuse(path, "penalties", "three finite numbers of at least 0", config.penalties)
