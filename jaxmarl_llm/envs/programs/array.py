"""Programs: a team writes a program of a small stack language from three examples; three hidden ones test it. In JAX.

A task is a function of one digit, shown at three inputs and hidden at three others. The language is that of `language`:
eight operations, at most four in a program. The protocols, and who acts at which turn:

    plan     planner    P05,38,91>         adi     a sketch: the operations that the program needs, in any order
             coder      C05,38,91|adi>     dai     the program; it sees the sketch in the order of the alphabet
    solo     coder      C05,38,91>         dai

An example is two digits, input and output; examples are sorted by input. A completion ends with eos. Sketch and program
are 1 to 4 letters of operations. Any other completion is malformed. A malformed sketch is shown as ``?``, and a
malformed program passes no test. A program need not keep to the sketch.

Rewards, paid at the last turn but for ``invalid``

    tests        share of the hidden examples that the program gets right, to all roles
    operations   number of operations of the program, to the coder; 0 where it is malformed
    excess       number of operations beyond those of the shortest program known, at least 0, to the coder
    invalid      -1 to the role that acts, at a malformed completion

A weight of 0, or none, makes a component a fact that is logged, and that a credit rule may read. No shorter program
than the shortest one known fits the six examples.

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[1 R] are completions, and ``length`` [1] their numbers of tokens. ``seed`` and ``rng`` (NumPy) determine tasks and
demonstrations. ``n`` is the number of samples of a role, and ``held_out`` the side of the split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    PAD,
    UNREADABLE,
    ArrayEnv,
    Observation,
    Samples,
    completion_end,
    encoded,
    task_draws,
    text_samples,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.programs.language import LONGEST, MODULUS, OPERATIONS, code_of, results, shortest_programs
from jaxmarl_llm.envs.prompt_grammar import prompt_row, prompt_text
from jaxmarl_llm.envs.splits import draw_task

COMPONENTS = ("tests", "operations", "excess", "invalid")
ROLES = {"plan": ("planner", "coder"), "solo": ("coder",)}  # in the order of their turns
MARKS = {"planner": "P", "coder": "C"}
SHOWN = HIDDEN = 3  # examples of a task
ZERO = ord("0")
LOOKALIKES = dict(zip("ambgdhin", "magbhdni", strict=True))  # an operation -> the one it is mistaken for
NO_EFFECT = "nn"  # operations that change nothing


@dataclass(frozen=True)
class Config:
    """The settings of tasks, protocol and demonstrations."""

    seed: int = 0  # of the training tasks
    tasks: int = 1024  # training tasks
    protocol: str = "plan"  # who acts when, see above
    lengths: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # weights of tasks whose shortest program has 1 to 4 operations
    # Probabilities of mistakes in demonstrations.
    lookalike_rate: float = 0.5  # one operation of a sketch, or of a program alone, is mistaken for another one
    order_error_rate: float = 0.5  # a program is written backwards
    padding_rate: float = 0.3  # a program of 1 or 2 operations has two more, which change nothing

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        one_of(f"{path}.protocol", self.protocol, tuple(ROLES))
        checks.weights(path, self, "lengths", tuple(f"{k + 1} operations" for k in range(LONGEST)))
        checks.probabilities(path, self, "lookalike_rate", "order_error_rate", "padding_rate")

    @property
    def max_new_tokens(self) -> int:
        """The number of tokens of the longest well-formed completion, eos included."""
        return LONGEST + 1

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the protocol."""
        return ROLES[self.protocol]


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return 1 + (3 * SHOWN - 1) + (1 + LONGEST) * ("planner" in config.roles) + 1


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + config.max_new_tokens


@struct.dataclass
class State:
    """An episode so far."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    sketch: Int[Array, "4"]  # bytes, PAD behind the last one
    sketch_length: Int[Array, ""]
    done: Bool[Array, ""]


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks: keys are not used."""
    return ArrayEnv(
        name="programs",
        roles=config.roles,
        seats=1,
        max_turns=len(config.roles),
        components=COMPONENTS,
        actors=tuple((role,) for role in range(len(config.roles))),
        reset=reset,
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    none = jnp.full(LONGEST, PAD, jnp.int32)
    return State(jax.tree.map(jnp.int32, task), jnp.int32(0), none, jnp.int32(0), jnp.bool_(False))


def observe(config: Config, state: State) -> Observation:
    """The prompt of the role that acts."""
    role = jnp.minimum(state.turn, len(config.roles) - 1)
    mark = encoded("".join(MARKS[name] for name in config.roles))[role]
    commas = jnp.full((SHOWN, 1), ord(","), jnp.int32)
    examples = jnp.concatenate([ZERO + state.task["shown"], commas], axis=1).reshape(-1)
    sketch = (state.sketch_length > 0, [(state.sketch, state.sketch_length)])
    tokens, length = prompt_row(mark, [(examples, 3 * SHOWN - 1)], [sketch], prompt_length(config))
    return Observation(role[None], tokens[None], length[None], ~state.done[None])


class Letters(NamedTuple):
    """A completion as letters of operations."""

    digits: Int[Array, "4"]  # index of each operation in OPERATIONS, plus one; 0 behind the last one
    size: Int[Array, ""]
    proper: Bool[Array, ""]  # well-formed


def _read(tokens: Int[Array, " R"], length: Int[Array, ""]) -> Letters:
    """The completion as operations."""
    tokens = jnp.pad(tokens, (0, LONGEST), constant_values=PAD)
    ended, size = completion_end(tokens, length)
    same = tokens[:, None] == encoded(OPERATIONS)
    known = same.any(-1) | (jnp.arange(len(tokens)) >= size)
    proper = ended & known.all() & (size >= 1) & (size <= LONGEST)
    digits = jnp.where(jnp.arange(LONGEST) < size, jnp.argmax(same, axis=-1)[:LONGEST] + 1, 0)
    return Letters(jnp.where(proper, digits, 0), jnp.where(proper, size, 0), proper)


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    said = _read(tokens[0], length[0])
    codes = state.turn >= len(config.roles) - 1
    order = jnp.sort(jnp.where(said.digits > 0, said.digits, len(OPERATIONS) + 1))
    letters = jnp.concatenate([encoded(OPERATIONS), jnp.array([PAD], jnp.int32)])[order - 1]
    malformed = jnp.full(LONGEST, PAD, jnp.int32).at[0].set(UNREADABLE)
    after = State(
        task=state.task,
        turn=state.turn + 1,
        sketch=jnp.where(said.proper, letters, malformed),
        sketch_length=jnp.where(said.proper, said.size, 1),
        done=codes,
    )
    return unless_finished(state, after, _rewards(config, state, said, codes))


def _rewards(config: Config, state: State, said: Letters, codes: Bool[Array, ""]) -> dict[str, Float[Array, " A"]]:
    """The rewards of a turn in which ``said`` was read; ``codes``: it is the program."""
    row = jnp.sum(said.digits * 9 ** jnp.arange(LONGEST))
    inputs, wanted = state.task["hidden"][:, 0], state.task["hidden"][:, 1]
    right = jnp.asarray(results(), jnp.int32)[row, inputs] == wanted
    own = jnp.arange(len(config.roles)) == jnp.minimum(state.turn, len(config.roles) - 1)
    used = jnp.where(codes & said.proper, said.size, 0)
    beyond = jnp.maximum(used - state.task["shortest"], 0)
    return {
        "tests": to_all(config.roles, jnp.where(codes, right.mean(), 0.0)),
        "operations": jnp.float32(own * used),
        "excess": jnp.float32(own * beyond),
        "invalid": jnp.float32(-1.0 * (own & ~said.proper)),
    }


class Draw(NamedTuple):
    """A task: its examples [n 2] (input, output), and the shortest program that fits them."""

    shown: np.ndarray
    hidden: np.ndarray
    program: str


def draw(rng: np.random.Generator, config: Config) -> Draw:
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


def drawn(rng: np.random.Generator, config: Config, held_out: bool = False) -> Draw:
    """Draw a task from one side of the split: the shown examples decide the side. Arguments are those of `draw`."""
    return draw_task(lambda: draw(rng, config), shown_text, held_out)


def shown_text(task: Draw) -> str:
    """The shown examples of ``task`` as prompts have them."""
    return ",".join(f"{x}{y}" for x, y in task.shown.tolist())


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
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


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    Mistakes are systematic. With probability ``lookalike_rate`` one operation of the shortest program is mistaken for
    another one (`LOOKALIKES`). A planner names the operations, in the order of the alphabet. A coder keeps to the
    sketch that it sees. With probability ``order_error_rate`` it writes the program backwards. With ``padding_rate`` it
    adds `NO_EFFECT` where there is room. ``context`` is not used.
    """
    out = {}
    for index, role in enumerate(config.roles):
        rng = np.random.default_rng([seed, 2, index])
        pairs = [_demonstration(rng, config, role) for _ in range(n)]
        out[role] = text_samples(pairs, prompt_length(config), config.max_new_tokens)
    return out


def _demonstration(rng: np.random.Generator, config: Config, role: str) -> tuple[str, str]:
    """A prompt and completion of ``role``."""
    task = drawn(rng, config)
    program = task.program
    if rng.random() < config.lookalike_rate:
        at = rng.integers(len(program))
        program = program[:at] + LOOKALIKES[program[at]] + program[at + 1 :]
    sketch = "".join(sorted(program))
    if role == "planner":
        return prompt_text("P", shown_text(task)), sketch
    if rng.random() < config.order_error_rate:
        program = program[::-1]
    if rng.random() < config.padding_rate and len(program) + len(NO_EFFECT) <= LONGEST:
        program += NO_EFFECT
    return prompt_text("C", shown_text(task), [sketch] * ("planner" in config.roles)), program
