"""Range checks of the fields of environment Configs: a failure is one ConfigError line that begins with the full key.

Shared arguments: ``config`` is the Config. ``path`` is the dotted name of the Config, such as ``config.env.args``.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

from jaxmarl_llm.config import one_of
from jaxmarl_llm.errors import ConfigError

ARGS = "config.env.args"  # the path of an environment's Config in the configuration of a run
MOST_TASKS = 10**6  # tasks that one Config may ask for: they are all held in memory
MOST_ROUNDS = 1000  # turns or rounds of an episode
MOST_TEXT = 2**16  # tokens or characters of one text
SPLITS = ("train", "test")


def refuse(path: str, name: str, expected: str, got: Any) -> NoReturn:
    """Raises the ConfigError of field ``name``: what was ``expected``, and the value that was ``got``."""
    raise ConfigError(f"{path}.{name}: expected {expected}, got {got!r}")


def in_range(path: str, config: Any, low: float, high: float, *names: str) -> None:
    """Checks that each field in ``names`` lies in [low, high]."""
    for name in names:
        if not low <= getattr(config, name) <= high:
            refuse(path, name, f"{low} to {high}", getattr(config, name))


def at_least(path: str, config: Any, low: float, *names: str) -> None:
    """Checks that each field in ``names`` is a finite number of at least ``low``."""
    for name in names:
        if not low <= getattr(config, name) < math.inf:
            refuse(path, name, f"at least {low}", getattr(config, name))


def finite(path: str, config: Any, *names: str) -> None:
    """Checks that each field in ``names`` is a finite number."""
    for name in names:
        if not math.isfinite(getattr(config, name)):
            refuse(path, name, "a finite number", getattr(config, name))


def probabilities(path: str, config: Any, *names: str) -> None:
    """Checks that each field in ``names`` is a probability."""
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            refuse(path, name, "a probability in [0, 1]", getattr(config, name))


def weights(path: str, config: Any, name: str, kinds: tuple[str, ...]) -> None:
    """Checks that field ``name`` holds one weight for each of ``kinds``: finite, at least 0, and not all 0."""
    values = getattr(config, name)
    fits = len(values) == len(kinds) and all(0 <= value < math.inf for value in values)
    if not fits or not 0 < sum(values) < math.inf:
        refuse(path, name, f"a weight >= 0 for each of {', '.join(kinds)}, not all 0", values)


def tasks_and_seed(path: str, config: Any) -> None:
    """Checks the fields ``seed`` and ``tasks`` of an array environment's Config."""
    at_least(path, config, 0, "seed")
    in_range(path, config, 1, MOST_TASKS, "tasks")


def split_and_count(path: str, config: Any) -> None:
    """Checks the fields ``split`` and ``count`` of a text form's Config."""
    one_of(f"{path}.split", config.split, SPLITS)
    in_range(path, config, 0, MOST_TASKS, "count")
