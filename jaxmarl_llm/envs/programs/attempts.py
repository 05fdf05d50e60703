"""The protocols `plan`, `solo` and `refine` of programs: each turn is a sketch or a program, without reflection.

    plan     planner    P05,38,91>         adi     a sketch: the operations that the program needs, in any order
             coder      C05,38,91|adi>     dai     the program; it sees the sketch in the order of the alphabet
    solo     coder      C05,38,91>         dai
    refine   coder      C05,38,91>         ai      as often as ``attempts`` says; each turn is a whole attempt
             coder      C05,38,91|ai--->   dai     the last program, and a sign for each example: + right, - wrong

Sketch and program are 1 to 4 letters of operations, and end with eos. Any other completion is malformed. A malformed
sketch is shown as ``?``, and a malformed program passes no test. A program need not keep to the sketch. With ``refine``
a malformed program is shown as ``?``, with a wrong sign for each example. The episode does not end before its last
attempt. So an attempt may go on from any earlier one (`rollout.plans.grow`).

Rewards, paid for every program; ``invalid`` for every completion

    tests        share of the hidden examples that the program gets right, to all roles
    operations   number of operations of the program, to the coder; 0 where it is malformed
    excess       number of operations beyond those of the shortest program known, at least 0, to the coder
    invalid      -1 to the role that acts, at a malformed completion

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[1 R] are completions, and ``length`` [1] their numbers of tokens. ``seed`` and ``rng`` (NumPy) determine
demonstrations. ``n`` is the number of samples of a role.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.config import at_least
from jaxmarl_llm.envs.array_env import (
    PAD,
    ArrayEnv,
    Observation,
    Samples,
    encoded,
    join,
    text_samples,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.programs import letters, roles
from jaxmarl_llm.envs.programs.language import LONGEST, RESPONSE, code_of, results
from jaxmarl_llm.envs.programs.letters import EXAMPLES, Letters
from jaxmarl_llm.envs.programs.protocol import Protocol
from jaxmarl_llm.envs.programs.roles import MARKS
from jaxmarl_llm.envs.programs.tasks import SHOWN, TaskConfig, drawn, mistaken, shown_text, sketch_of, written
from jaxmarl_llm.envs.prompt_grammar import prompt_row, prompt_text

COMPONENTS = ("tests", "operations", "excess", "invalid")
ROLES = {name: roles.ROLES[name] for name in ("plan", "solo", "refine")}
RIGHT, WRONG = "+", "-"  # signs of shown examples, behind the last program of protocol refine


@dataclass(frozen=True)
class Config(TaskConfig):
    """The settings of tasks, and who acts when."""

    protocol: str = "plan"  # who acts when, see `programs.array`
    attempts: int = 8  # programs of an episode, with protocol refine

    def check(self, path: str) -> None:
        super().check(path)
        at_least(f"{path}.attempts", self.attempts, 1)

    @property
    def acting(self) -> tuple[str, ...]:
        """The roles of the protocol."""
        return ROLES[self.protocol]

    @property
    def refines(self) -> bool:
        """Whether each turn is a whole attempt."""
        return self.protocol == "refine"

    @property
    def turns(self) -> int:
        """The number of turns of an episode."""
        return len(roles.order(self.protocol, self.attempts, 0))

    @property
    def shown_length(self) -> int:
        """The number of tokens that a prompt shows of the turn before."""
        return LONGEST + SHOWN * self.refines


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return 1 + EXAMPLES + (1 + config.shown_length) * (config.turns > 1) + 1


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
        roles=config.acting,
        seats=1,
        max_turns=config.turns,
        components=COMPONENTS,
        actors=tuple((min(turn, len(config.acting) - 1),) for turn in range(config.turns)),
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
    role = jnp.minimum(state.turn, len(config.acting) - 1)
    mark = encoded("".join(MARKS[name] for name in config.acting))[role]
    examples = letters.examples_row(state.task["shown"])
    before = (state.before_length > 0, [(state.before, state.before_length)])
    tokens, length = prompt_row(mark, [examples], [before], prompt_length(config))
    return Observation(role[None], tokens[None], length[None], ~state.done[None])


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    said = letters.read(tokens[0], length[0])
    codes = state.turn >= len(config.acting) - 1
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
    if not config.refines:  # the operations of a sketch
        return join([letters.shown(letters.in_order(said))], config.shown_length)
    signs = jnp.where(letters.right(said, state.task["shown"]), ord(RIGHT), ord(WRONG)), SHOWN
    return join([letters.shown(said), signs], config.shown_length)


def _rewards(config: Config, state: State, said: Letters, codes: Bool[Array, ""]) -> dict[str, Float[Array, " A"]]:
    """The rewards of a turn in which ``said`` was read; ``codes``: it is the program."""
    right = letters.right(said, state.task["hidden"])
    own = jnp.arange(len(config.acting)) == jnp.minimum(state.turn, len(config.acting) - 1)
    used = jnp.where(codes & said.proper, said.size, 0)
    beyond = jnp.maximum(used - state.task["shortest"], 0)
    return {
        "tests": to_all(config.acting, jnp.where(codes, right.mean(), 0.0)),
        "operations": jnp.float32(own * used),
        "excess": jnp.float32(own * beyond),
        "invalid": jnp.float32(-1.0 * (own & ~said.proper)),
    }


def demonstrations(config: Config, seed: int, n: int) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    Mistakes are systematic. With probability ``lookalike_rate`` one operation of the shortest program is mistaken for
    another one (`LOOKALIKES`). A planner names the operations, in the order of the alphabet. A coder keeps to the
    sketch that it sees. With probability ``order_error_rate`` it writes the program backwards. With ``padding_rate`` it
    adds `NO_EFFECT` where there is room. With protocol refine half of the prompts show a program with such mistakes.
    Where it is right on all shown examples, the reply repeats it. Elsewhere the reply is another program, whose
    mistakes are drawn anew.
    """
    out = {}
    for index, role in enumerate(config.acting):
        rng = np.random.default_rng([seed, 2, index])
        pairs = [_demonstration(rng, config, role) for _ in range(n)]
        out[role] = text_samples(pairs, prompt_length(config), RESPONSE)
    return out


def _demonstration(rng: np.random.Generator, config: Config, role: str) -> tuple[str, str]:
    """A prompt and completion of ``role``."""
    task = drawn(rng, config)
    if role == "planner":
        return prompt_text("P", shown_text(task)), sketch_of(mistaken(rng, config, task.program))
    meant = mistaken(rng, config, task.program)
    sketch = [sketch_of(meant)] * ("planner" in config.acting)
    program = written(rng, config, meant)
    if config.refines and rng.random() < 0.5:
        entry, right = program + _signs(program, task.shown), _signs(program, task.shown) == RIGHT * SHOWN
        reply = program if right else written(rng, config, mistaken(rng, config, task.program))
        return prompt_text("C", shown_text(task), [entry]), reply
    return prompt_text("C", shown_text(task), sketch), program


def _signs(program: str, examples: np.ndarray) -> str:
    """A sign for each of ``examples`` [n 2] (input, output)."""
    right = results()[code_of(program), examples[:, 0]] == examples[:, 1]
    return "".join(RIGHT if yes else WRONG for yes in right)


PROTOCOLS = {name: Protocol(players, make, demonstrations, prompt_length) for name, players in ROLES.items()}
