"""Tasks of `programs`: functions of one digit by examples, and the planted mistakes of demonstrators.

A task is a function, shown at three inputs and hidden at three others. Examples are sorted by input. No shorter program
than the shortest one known fits the six examples.

Shared arguments: ``config`` has the settings. ``seed`` and ``rng`` (NumPy) determine what is drawn. ``n`` is a number
of tasks, and ``held_out`` the side of the split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import task_draws
from jaxmarl_llm.envs.programs.language import LONGEST, MODULUS, code_of, results, shortest_programs
from jaxmarl_llm.envs.splits import draw_task

SHOWN = HIDDEN = 3  # examples of a task
LOOKALIKES = dict(zip("ambgdhin", "magbhdni", strict=True))  # an operation -> the one it is mistaken for
NO_EFFECT = "nn"  # operations that change nothing


@dataclass(frozen=True)
class TaskConfig:
    """The settings of tasks, and of the mistakes that all protocols have."""

    seed: int = 0  # of the training tasks
    tasks: int = 1024  # training tasks
    lengths: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # weights of tasks whose shortest program has 1 to 4 operations
    # Probabilities of mistakes in demonstrations.
    lookalike_rate: float = 0.5  # one operation of a sketch, or of a program alone, is mistaken for another one
    order_error_rate: float = 0.5  # a program is written backwards
    padding_rate: float = 0.3  # a program of 1 or 2 operations has two more, which change nothing

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        checks.weights(path, self, "lengths", tuple(f"{k + 1} operations" for k in range(LONGEST)))
        checks.probabilities(path, self, "lookalike_rate", "order_error_rate", "padding_rate")


class Draw(NamedTuple):
    """A task: its examples [n 2] (input, output), and the shortest program that fits them."""

    shown: np.ndarray
    hidden: np.ndarray
    program: str


def draw(rng: np.random.Generator, config: TaskConfig) -> Draw:
    """Draw a length, a function of that length and six inputs, until no shorter program fits the six examples."""
    known, table = shortest_programs(), results()
    limits = np.cumsum(config.lengths)
    while True:
        size = int(np.searchsorted(limits, rng.random() * limits[-1], side="right"))
        program = known.programs[size][rng.integers(len(known.programs[size]))]
        inputs = rng.permutation(MODULUS)[: SHOWN + HIDDEN].reshape(2, -1)  # shown, hidden
        inputs.sort(axis=1)
        outputs = table[code_of(program)][inputs]
        if not (known.shorter[size][:, inputs] == outputs).all((1, 2)).any():
            shown, hidden = np.stack([inputs, outputs], axis=-1).astype(np.int32)
            return Draw(shown, hidden, program)


def drawn(rng: np.random.Generator, config: TaskConfig, held_out: bool = False) -> Draw:
    """Draw a task from one side of the split: the shown examples decide the side. Arguments are those of `draw`."""
    return draw_task(lambda: draw(rng, config), shown_text, held_out)


def shown_text(task: Draw) -> str:
    """The shown examples of ``task`` as prompts have them."""
    return ",".join(f"{x}{y}" for x, y in task.shown.tolist())


def make_tasks(
    config: TaskConfig, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``).

    They are shown and hidden [n 3 2], and shortest [n]. ``shortest`` counts the operations of the shortest program.
    ``held_out`` is the side of the split.
    """
    rng, count = task_draws(config, seed, n, 1, held_out)
    draws = [drawn(rng, config, held_out) for _ in range(count)]
    return {
        "shown": np.stack([d.shown for d in draws]),
        "hidden": np.stack([d.hidden for d in draws]),
        "shortest": np.array([len(d.program) for d in draws], np.int32),
    }


def mistaken(rng: np.random.Generator, config: TaskConfig, program: str) -> str:
    """``program``, or with probability ``lookalike_rate`` one with a mistaken operation."""
    if rng.random() < config.lookalike_rate:
        at = rng.integers(len(program))
        return program[:at] + LOOKALIKES[program[at]] + program[at + 1 :]
    return program


def sketch_of(program: str) -> str:
    """The operations of ``program`` in the order of the alphabet."""
    return "".join(sorted(program))


def written(rng: np.random.Generator, config: TaskConfig, program: str) -> str:
    """``program`` as a coder writes it: backwards, or with operations that change nothing."""
    if rng.random() < config.order_error_rate:
        program = program[::-1]
    if rng.random() < config.padding_rate and len(program) + len(NO_EFFECT) <= LONGEST:
        program += NO_EFFECT
    return program
