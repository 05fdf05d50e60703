"""The interface of a protocol of `programs`: who acts when, what each role reads and writes, and what it is paid.

A protocol is one ``Protocol`` in a module that has its rules. `programs.array` lists the protocols by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmarl_llm.envs.array_env import ArrayEnv, Samples


class Protocol(NamedTuple):
    """The functions of a protocol. ``config`` has the settings of tasks and of all protocols.

    Attributes:
        roles: Names of the roles, in the order of their first turns.
        make: make(config) -> the environment.
        demonstrations: demonstrations(config, seed, n) -> imperfect samples of each role.
        prompt_length: prompt_length(config) -> tokens of the longest prompt without memory.
    """

    roles: tuple[str, ...]
    make: Callable[[Any], ArrayEnv]
    demonstrations: Callable[[Any, int, int], Samples]
    prompt_length: Callable[[Any], int]
