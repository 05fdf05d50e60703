"""The protocol `reflect` of programs: a reflector reads a wrong program and gives a hint, and the coder writes again.

    turn  role       prompt                       a good completion
    0     planner    P01,37,99>                   adi    a sketch: the operations that the program needs, in any order
    1     coder      C01,37,99|adi>               ad     the program; it sees the sketch in the order of the alphabet
    2     reflector  R01,37,99|adxxx>             ~      a hint, see `programs.hints`
    3     coder      C01,37,99|adi|adxxx|~>       da     the next program
    4     reflector  R01,37,99|da068>             +3i
    5     coder      C01,37,99|adi|da068|+3i>     dai

A verdict follows the program, one sign for each shown example. The sign is + where it is right, and x where there is no
result. Else the sign is the digit that the program gave. The episode ends once all shown examples are right, or after
the last program. There are at most ``reflections`` hints. So episodes have different numbers of rounds.

Sketch and program are 1 to 4 letters of operations, and end with eos. Any other completion is malformed. A malformed
sketch is shown as ``?``. A malformed program passes no test, has the verdict xxx, and is shown as ``?``. A hint that is
not possible on the program is malformed too, and is shown as ``?``. A coder need not follow a hint.

Rewards, where a role's own is what only the role that acts is paid:

    tests     share of the hidden examples that the last program gets right, to all roles when the episode ends
    first     the same share of the first program, to all roles at its turn
    score     its own: the share of a program, to the coder
    invalid   its own: -1 at a malformed completion
    turns     its own: 1

The scores along an episode say what a sketch, a hint and a program were worth: see `credit.differences`.

Demonstrators follow rules that read the prompt alone. All of them look for the first of the shortest programs that fit
the shown examples (`hints.shortest_fits`). A planner names its operations. A coder orders the sketch so that most shown
examples are right, and later follows the hint. A reflector gives the first hint of a shortest way (`hints.best_hint`).

Shared arguments: ``config`` has the settings of tasks, and in ``config.reflect`` those of this protocol. ``key`` is a
PRNG key, and ``state`` the state of an episode. ``tokens`` [1 R] are completions, and ``length`` [1] their numbers of
tokens. ``seed`` and ``rng`` (NumPy) determine what is drawn, ``n`` is a number of samples, and ``shown`` are the shown
examples as text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    PAD,
    UNREADABLE,
    ArrayEnv,
    Observation,
    Samples,
    encoded,
    text_samples,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.programs import letters, roles
from jaxmarl_llm.envs.programs.hints import (
    ADD,
    CHANGE,
    DROP,
    LONGEST_HINT,
    best_hint,
    followed,
    read_hint,
    shortest_fits,
)
from jaxmarl_llm.envs.programs.language import FAILED, LONGEST, RESPONSE, code_of, results
from jaxmarl_llm.envs.programs.letters import EXAMPLES, ZERO, Letters
from jaxmarl_llm.envs.programs.protocol import Protocol
from jaxmarl_llm.envs.programs.roles import MARKS, MOST_REFLECTIONS
from jaxmarl_llm.envs.programs.roles import REFLECT_COMPONENTS as COMPONENTS
from jaxmarl_llm.envs.programs.tasks import LOOKALIKES, SHOWN, drawn, mistaken, shown_text, sketch_of, written
from jaxmarl_llm.envs.prompt_grammar import Piece, prompt_row, prompt_text

ROLES = roles.ROLES["reflect"]
PLANNER, CODER, REFLECTOR = range(len(ROLES))
RIGHT, NO_RESULT = "+", "x"  # signs of a verdict


@dataclass(frozen=True)
class Settings:
    """The settings of rounds and demonstrations. Other mistakes are those of `tasks.TaskConfig`."""

    reflections: int = MOST_REFLECTIONS  # hints of an episode, at most
    # Probabilities of mistakes in demonstrations.
    hint_error_rate: float = 0.3  # the operation of a hint is mistaken, or the first operation is to be left out
    neglect_rate: float = 0.3  # a coder repeats its program in place of what a hint says

    def check(self, path: str) -> None:
        checks.in_range(path, self, 1, MOST_REFLECTIONS, "reflections")
        checks.probabilities(path, self, "hint_error_rate", "neglect_rate")

    @property
    def order(self) -> tuple[int, ...]:
        """The role that acts at each turn."""
        return tuple(map(ROLES.index, roles.order("reflect", 0, self.reflections)))


def prompt_length(config: Any) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return 1 + EXAMPLES + 1 + LONGEST + 1 + LONGEST + SHOWN + 1 + LONGEST_HINT + 1


class State(struct.PyTreeNode):
    """An episode so far."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    sketch: Letters
    program: Letters  # the last one
    hint: Int[Array, "3"]  # the last one, as prompts show it
    hint_size: Int[Array, ""]
    done: Bool[Array, ""]


def make(config: Any) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks: keys are not used."""
    order = config.reflect.order
    return ArrayEnv(
        name="programs",
        roles=ROLES,
        seats=1,
        max_turns=len(order),
        components=COMPONENTS,
        actors=tuple((role,) for role in order),
        reset=reset,
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    zero, nothing = jnp.int32(0), Letters(jnp.zeros(LONGEST, jnp.int32), jnp.int32(0), jnp.bool_(False))
    hint = jnp.full(LONGEST_HINT, PAD, jnp.int32)
    return State(jax.tree.map(jnp.int32, dict(task)), zero, nothing, nothing, hint, zero, jnp.bool_(False))


def _acting(config: Any, state: State) -> Int[Array, ""]:
    """The role that acts."""
    order = jnp.array(config.reflect.order, jnp.int32)
    return order[jnp.minimum(state.turn, len(order) - 1)]


def observe(config: Any, state: State) -> Observation:
    """The prompt of the role that acts."""
    role, examples = _acting(config, state), state.task["shown"]
    given = letters.outputs(state.program, examples)
    wrong = jnp.where(given == FAILED, ord(NO_RESULT), ZERO + given)
    verdict = jnp.where(given == examples[:, 1], ord(RIGHT), wrong)
    again = state.turn > 1
    entries: list[tuple[Array | int, Sequence[Piece]]] = [
        (role == CODER, [letters.shown(state.sketch)]),
        (again, [letters.shown(state.program), (verdict, SHOWN)]),
        (again & (role == CODER), [(state.hint, state.hint_size)]),
    ]
    mark = encoded("".join(MARKS[name] for name in ROLES))[role]
    tokens, length = prompt_row(mark, [letters.examples_row(examples)], entries, prompt_length(config))
    return Observation(role[None], tokens[None], length[None], ~state.done[None])


def step(
    config: Any, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    role = _acting(config, state)
    codes, reflects = role == CODER, role == REFLECTOR
    said, hint = letters.read(tokens[0], length[0]), read_hint(tokens[0], length[0], state.program.size)
    either = lambda here, new, old: jax.tree.map(lambda a, b: jnp.where(here, a, b), new, old)
    unreadable = jnp.full(LONGEST_HINT, PAD, jnp.int32).at[0].set(UNREADABLE)
    told = jnp.where(hint.proper, hint.tokens, unreadable), jnp.where(hint.proper, hint.size, 1)
    solved = letters.right(said, state.task["shown"]).all()
    score = jnp.where(codes, letters.right(said, state.task["hidden"]).mean(), 0.0)
    over = codes & (solved | (state.turn >= len(config.reflect.order) - 1))
    after = State(
        task=state.task,
        turn=state.turn + 1,
        sketch=either(role == PLANNER, letters.in_order(said), state.sketch),
        program=either(codes, said, state.program),
        hint=jnp.where(reflects, told[0], state.hint),
        hint_size=jnp.where(reflects, told[1], state.hint_size).astype(jnp.int32),
        done=over,
    )
    own = jnp.arange(len(ROLES)) == role
    proper = jnp.where(reflects, hint.proper, said.proper)
    rewards = {
        "tests": to_all(ROLES, jnp.where(over, score, 0.0)),
        "first": to_all(ROLES, jnp.where(state.turn == 1, score, 0.0)),
        "score": own * score,
        "invalid": -1.0 * (own & ~proper),
        "turns": 1.0 * own,
    }
    return unless_finished(state, after, rewards)


# -- demonstrators -----------------------------------------------------------------------------------------------------


def verdict(shown: str, program: str) -> str:
    """The verdict on ``program`` as prompts show it."""
    examples = shown.split(",")
    got = [int(results()[code_of(program), int(example[0])]) for example in examples]
    signs = [NO_RESULT if y == FAILED else str(y) for y in got]
    return "".join(RIGHT if sign == example[1] else sign for sign, example in zip(signs, examples, strict=True))


def solves(shown: str, program: str) -> bool:
    """Whether ``program`` is right on all shown examples."""
    return verdict(shown, program) == RIGHT * SHOWN


def good_sketch(shown: str) -> str:
    """The operations of the first of the shortest programs that fit."""
    return sketch_of(shortest_fits(shown)[0])


def good_program(shown: str, sketch: str) -> str:
    """The order of ``sketch`` that is right on most shown examples; of equal ones the first in the alphabet."""
    orders = sorted({"".join(order) for order in itertools.permutations(sketch)})
    return max(orders, key=lambda program: verdict(shown, program).count(RIGHT))


class Team(NamedTuple):
    """Who plays: a function of a generator, the settings and what the role reads, for each completion.

    Attributes:
        sketch: Of the shown examples.
        program: Of the shown examples and the sketch.
        hint: Of the shown examples and the last program.
        again: Of the last program and the hint.
    """

    sketch: Callable[[np.random.Generator, Any, str], str]
    program: Callable[[np.random.Generator, Any, str, str], str]
    hint: Callable[[np.random.Generator, Any, str, str], str]
    again: Callable[[np.random.Generator, Any, str, str], str]


def _demonstrated_sketch(rng: np.random.Generator, config: Any, shown: str) -> str:
    return sketch_of(mistaken(rng, config, shortest_fits(shown)[0]))


def _demonstrated_program(rng: np.random.Generator, config: Any, shown: str, sketch: str) -> str:
    return written(rng, config, good_program(shown, sketch))


def _demonstrated_hint(rng: np.random.Generator, config: Any, shown: str, program: str) -> str:
    hint = best_hint(shown, program)
    if rng.random() >= config.reflect.hint_error_rate:
        return hint
    if hint[0] in (ADD, CHANGE):
        return hint[:-1] + LOOKALIKES[hint[-1]]
    return DROP + ("2" if hint == DROP + "1" else "1")


def _demonstrated_again(rng: np.random.Generator, config: Any, program: str, hint: str) -> str:
    neglects = rng.random() < config.reflect.neglect_rate
    return program if neglects else followed(program, hint) or program


DEMONSTRATORS = Team(_demonstrated_sketch, _demonstrated_program, _demonstrated_hint, _demonstrated_again)
PERFECT = Team(
    lambda rng, config, shown: good_sketch(shown),
    lambda rng, config, shown, sketch: good_program(shown, sketch),
    lambda rng, config, shown, program: best_hint(shown, program),
    lambda rng, config, program, hint: followed(program, hint) or program,
)


def episode(rng: np.random.Generator, config: Any, shown: str, team: Team) -> list[tuple[int, str, str]]:
    """Role, prompt and completion of each turn. ``team``: who plays; every completion of it is well-formed."""
    said: list[tuple[int, str, str]] = []

    def says(role: int, entries: list[str], completion: str) -> str:
        said.append((role, prompt_text(MARKS[ROLES[role]], shown, entries), completion))
        return completion

    sketch = says(PLANNER, [], team.sketch(rng, config, shown))
    program = says(CODER, [sketch], team.program(rng, config, shown, sketch))
    for _ in range(config.reflect.reflections):
        if solves(shown, program):
            break
        judged = program + verdict(shown, program)
        hint = says(REFLECTOR, [judged], team.hint(rng, config, shown, program))
        program = says(CODER, [sketch, judged, hint], team.again(rng, config, program, hint))
    return said


def demonstrations(config: Any, seed: int, n: int) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    A sample of a role is one turn, drawn from those of the role in an episode of demonstrators on a training task.
    Episodes in which a role does not act have no sample of it. Mistakes are systematic. One operation of a sketch is
    mistaken for another one (``lookalike_rate``). A first program is written backwards (``order_error_rate``), or has
    two operations more that change nothing (``padding_rate``). The operation of a hint is mistaken for another one, or
    a place is to be left out in vain (``hint_error_rate``). A coder repeats its program (``neglect_rate``).
    """
    rng = np.random.default_rng([seed, 2])
    pairs: list[list[tuple[str, str]]] = [[] for _ in ROLES]
    while min(map(len, pairs)) < n:
        turns = episode(rng, config, shown_text(drawn(rng, config)), DEMONSTRATORS)
        for role, own in enumerate(pairs):
            mine = [(asked, reply) for actor, asked, reply in turns if actor == role]
            if mine and len(own) < n:
                own.append(mine[rng.integers(len(mine))])
    size = prompt_length(config)
    return {name: text_samples(own, size, RESPONSE) for name, own in zip(ROLES, pairs, strict=True)}


PROTOCOL = Protocol(ROLES, make, demonstrations, prompt_length)
