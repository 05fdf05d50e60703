"""Programs: a team writes a program of a small stack language from three examples; three hidden ones test it. In JAX.

A task is a function of one digit, shown at three inputs and hidden at three others. The language is that of `language`:
eight operations, at most four in a program. The protocols, and who acts at which turn:

    plan     planner    P05,38,91>         adi     a sketch: the operations that the program needs, in any order
             coder      C05,38,91|adi>     dai     the program; it sees the sketch in the order of the alphabet
    solo     coder      C05,38,91>         dai
    refine   coder      C05,38,91>         ai      as often as ``attempts`` says; each turn is a whole attempt
             coder      C05,38,91|ai--->   dai     the last program, and a sign for each example: + right, - wrong

An example is two digits, input and output; examples are sorted by input. A completion ends with eos. Sketch and program
are 1 to 4 letters of operations. Any other completion is malformed. A malformed sketch is shown as ``?``, and a
malformed program passes no test. A program need not keep to the sketch. With ``refine`` a malformed program is shown as
``?``, with a wrong sign for each example. The episode does not end before its last attempt. So an attempt may go on
from any earlier one (`rollout.plans.grow`).

Rewards, paid for every program; ``invalid`` for every completion

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

from jaxmarl_llm.config import at_least, one_of
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    PAD,
    UNREADABLE,
    ArrayEnv,
    Observation,
    Samples,
    completion_end,
    encoded,
    join,
    task_draws,
    text_samples,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.programs.language import LONGEST, MODULUS, OPERATIONS, code_of, results, shortest_programs
from jaxmarl_llm.envs.prompt_grammar import prompt_row, prompt_text
from jaxmarl_llm.envs.splits import draw_task

COMPONENTS = ("tests", "operations", "excess", "invalid")
ROLES = {"plan": ("planner", "coder"), "solo": ("coder",), "refine": ("coder",)}  # in the order of their turns
MARKS = {"planner": "P", "coder": "C"}
SHOWN = HIDDEN = 3  # examples of a task
ZERO = ord("0")
LOOKALIKES = dict(zip("ambgdhin", "magbhdni", strict=True))  # an operation -> the one it is mistaken for
NO_EFFECT = "nn"  # operations that change nothing
RIGHT, WRONG = "+", "-"  # signs of shown examples, behind the last program of protocol refine


@dataclass(frozen=True)
class Config:
    """The settings of tasks, protocol and demonstrations."""

    seed: int = 0  # of the training tasks
    tasks: int = 1024  # training tasks
    protocol: str = "plan"  # who acts when, see above
    attempts: int = 8  # programs of an episode, with protocol refine
    lengths: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # weights of tasks whose shortest program has 1 to 4 operations
    # Probabilities of mistakes in demonstrations.
    lookalike_rate: float = 0.5  # one operation of a sketch, or of a program alone, is mistaken for another one
    order_error_rate: float = 0.5  # a program is written backwards
    padding_rate: float = 0.3  # a program of 1 or 2 operations has two more, which change nothing

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        one_of(f"{path}.protocol", self.protocol, tuple(ROLES))
        at_least(f"{path}.attempts", self.attempts, 1)
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

    @property
    def refines(self) -> bool:
        """Whether each turn is a whole attempt."""
        return self.protocol == "refine"

    @property
    def turns(self) -> int:
        """The number of turns of an episode."""
        return self.attempts if self.refines else len(self.roles)

    @property
    def shown_length(self) -> int:
        """The number of tokens that a prompt shows of the turn before."""
        return LONGEST + SHOWN * self.refines


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return 1 + (3 * SHOWN - 1) + (1 + config.shown_length) * (config.turns > 1) + 1


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + config.max_new_tokens


@struct.dataclass
class State:
    """An episode so far."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    before: Int[Array, " T"]  # what the prompt shows of the turn before: a sketch, or a program and signs; then PAD
    before_length: Int[Array, ""]
    done: Bool[Array, ""]


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks: keys are not used."""
    return ArrayEnv(
        name="programs",
        roles=config.roles,
        seats=1,
        max_turns=config.turns,
        components=COMPONENTS,
        actors=tuple((min(turn, len(config.roles) - 1),) for turn in range(config.turns)),
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    none = jnp.full(config.shown_length, PAD, jnp.int32)
    return State(jax.tree.map(jnp.int32, task), jnp.int32(0), none, jnp.int32(0), jnp.bool_(False))


def observe(config: Config, state: State) -> Observation:
    """The prompt of the role that acts."""
    role = jnp.minimum(state.turn, len(config.roles) - 1)
    mark = encoded("".join(MARKS[name] for name in config.roles))[role]
    commas = jnp.full((SHOWN, 1), ord(","), jnp.int32)
    examples = jnp.concatenate([ZERO + state.task["shown"], commas], axis=1).reshape(-1)
    before = (state.before_length > 0, [(state.before, state.before_length)])
    tokens, length = prompt_row(mark, [(examples, 3 * SHOWN - 1)], [before], prompt_length(config))
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
    before, size = _shown(config, state, said)
    after = State(
        task=state.task,
        turn=state.turn + 1,
        before=before,
        before_length=size,
        done=state.turn >= config.turns - 1,
    )
    return unless_finished(state, after, _rewards(config, state, said, codes))


def _shown(config: Config, state: State, said: Letters) -> tuple[Int[Array, " T"], Int[Array, ""]]:
    """What the next prompt shows of a turn in which ``said`` was read, and how many tokens that is."""
    digits = said.digits
    if not config.refines:  # the operations of a sketch, in the order of the alphabet
        digits = jnp.sort(jnp.where(digits > 0, digits, len(OPERATIONS) + 1))
    letters = jnp.concatenate([jnp.array([PAD]), encoded(OPERATIONS), jnp.array([PAD])])[digits].astype(jnp.int32)
    malformed = jnp.full(LONGEST, PAD, jnp.int32).at[0].set(UNREADABLE)
    program = jnp.where(said.proper, letters, malformed), jnp.where(said.proper, said.size, 1)
    signs = jnp.where(_right(said, state.task["shown"]), ord(RIGHT), ord(WRONG)), SHOWN
    return join([program, signs] if config.refines else [program], config.shown_length)


def _right(said: Letters, examples: Int[Array, "3 2"]) -> Bool[Array, "3"]:
    """Whether ``said``, as a program, does what each of ``examples`` (input, output) shows."""
    row = jnp.sum(said.digits * 9 ** jnp.arange(LONGEST))
    return jnp.asarray(results(), jnp.int32)[row, examples[:, 0]] == examples[:, 1]


def _rewards(config: Config, state: State, said: Letters, codes: Bool[Array, ""]) -> dict[str, Float[Array, " A"]]:
    """The rewards of a turn in which ``said`` was read; ``codes``: it is the program."""
    right = _right(said, state.task["hidden"])
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
    adds `NO_EFFECT` where there is room. With protocol refine half of the prompts show a program with such mistakes.
    Where it is right on all shown examples, the reply repeats it. Elsewhere the reply is another program, whose
    mistakes are drawn anew. ``context`` is not used.
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
    if role == "planner":
        return prompt_text("P", shown_text(task)), _sketch(_mistaken(rng, config, task.program))
    meant = _mistaken(rng, config, task.program)
    sketch = [_sketch(meant)] * ("planner" in config.roles)
    program = _written(rng, config, meant)
    if config.refines and rng.random() < 0.5:
        entry, right = program + _signs(program, task.shown), _signs(program, task.shown) == RIGHT * SHOWN
        reply = program if right else _written(rng, config, _mistaken(rng, config, task.program))
        return prompt_text("C", shown_text(task), [entry]), reply
    return prompt_text("C", shown_text(task), sketch), program


def _mistaken(rng: np.random.Generator, config: Config, program: str) -> str:
    """``program``, or with probability ``lookalike_rate`` one with a mistaken operation."""
    if rng.random() < config.lookalike_rate:
        at = rng.integers(len(program))
        return program[:at] + LOOKALIKES[program[at]] + program[at + 1 :]
    return program


def _sketch(program: str) -> str:
    return "".join(sorted(program))


def _written(rng: np.random.Generator, config: Config, program: str) -> str:
    """``program`` as a coder writes it: backwards, or with operations that change nothing."""
    if rng.random() < config.order_error_rate:
        program = program[::-1]
    if rng.random() < config.padding_rate and len(program) + len(NO_EFFECT) <= LONGEST:
        program += NO_EFFECT
    return program


def _signs(program: str, examples: np.ndarray) -> str:
    """A sign for each of ``examples`` [n 2] (input, output)."""
    right = results()[code_of(program), examples[:, 0]] == examples[:, 1]
    return "".join(RIGHT if yes else WRONG for yes in right)
