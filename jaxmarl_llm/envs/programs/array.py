"""Programs: a team writes a program of a small stack language from three examples; three hidden ones test it. In JAX.

Tasks are those of `programs.tasks`: a function of one digit, shown at three inputs and hidden at three others. The
language is that of `programs.language`: eight operations, at most four in a program. The protocols:

    plan      a planner writes the operations that the program needs, and a coder the program, see `programs.attempts`
    solo      one coder alone, see `programs.attempts`
    refine    a coder writes ``attempts`` programs, each after the signs of the last one, see `programs.attempts`
    reflect   planner and coder, then reflector and coder in turn, see `programs.reflect`

An example is two digits, input and output; examples are sorted by input. Each protocol says what it pays. A weight of
0, or none, makes a component a fact that is logged, and that a credit rule may read.

Shared argument: ``config`` has the settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs.array_env import ArrayEnv, Samples
from jaxmarl_llm.envs.programs import attempts, reflect, tasks
from jaxmarl_llm.envs.programs.language import RESPONSE
from jaxmarl_llm.envs.programs.protocol import Protocol

PROTOCOLS: dict[str, Protocol] = {**attempts.PROTOCOLS, "reflect": reflect.PROTOCOL}


@dataclass(frozen=True)
class Config(attempts.Config):
    """The settings of tasks, the protocol, and what `plan`, `solo`, `refine` and `reflect` need."""

    reflect: reflect.Settings = field(default_factory=reflect.Settings)

    def check(self, path: str) -> None:
        super().check(path)
        one_of(f"{path}.protocol", self.protocol, tuple(PROTOCOLS))
        self.reflect.check(f"{path}.reflect")


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks: keys are not used."""
    return PROTOCOLS[config.protocol].make(config)


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``): the columns of `tasks.make_tasks`.

    ``held_out`` is the side of the split.
    """
    return tasks.make_tasks(config, seed, n, held_out=held_out)


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """``n`` imperfect samples of each role, drawn from ``seed``; the protocol says which mistakes they have.

    ``context`` is not used.
    """
    return PROTOCOLS[config.protocol].demonstrations(config, seed, n)


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return PROTOCOLS[config.protocol].prompt_length(config)


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + RESPONSE
