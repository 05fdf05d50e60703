"""The interface of a protocol of facts: who acts when, what each role reads and writes, and what it is paid.

A protocol is one module with its settings and one `Protocol`. `facts.array` lists the protocols by name, and the
settings of a protocol are the field of that name in its Config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxmarl_llm.envs.array_env import ArrayEnv, Samples


class Protocol(NamedTuple):
    """The functions of a protocol. ``config`` has the settings of tasks, and ``settings`` those of the protocol.

    Attributes:
        make: make(config, settings) -> the environment.
        make_tasks: make_tasks(config, settings, seed, n, held_out) -> tasks as arrays.
        demonstrations: demonstrations(config, settings, seed, n) -> imperfect samples of each role.
        prompt_length: prompt_length(settings) -> tokens of the longest prompt without memory.
        response: Tokens of the longest well-formed completion, eos included.
    """

    make: Callable[[Any, Any], ArrayEnv]
    make_tasks: Callable[[Any, Any, int | None, int | None, bool], dict[str, np.ndarray]]
    demonstrations: Callable[[Any, Any, int, int], Samples]
    prompt_length: Callable[[Any], int]
    response: int
