"""Defer: a chooser takes the answer of one of two peers, has an answer created, or defers to an expert. All in JAX.

    turn  role     prompt    a good completion
    0     chooser  C4*72>    1, 2: the answer of that peer; c: create; d: defer
    1     creator  A4*72>    5: an answer, behind c
    1     creator  A4*72>    the expert's answer in place of the creator's, behind d

A question has three digits and one operation before one of them. The operation is its type: + - * or /. Its answer is a
digit, which a table of ``table_seed`` gives for the type and the digit behind the operation. In each type all ten
digits are answers. No prompt shows the table.

Two peers have answered before the chooser is asked. Their answers are not shown: an answer that both give would tell
more than the type does. A peer is right with a probability that depends on the type (``peer_1``, ``peer_2``). So is the
expert (``expert``). A wrong expert names another digit, each with the same chance. With probability ``silent`` the
expert does not answer.

With ``planted`` the creator is a function too, right with probability ``creator``. The only role is then the chooser,
and the choice ends the episode. Otherwise the creator is a role. It answers behind c, and behind d the expert answers
in its place (`Observation.expert`).

With ``asked`` the expert is outside of this program: a function, or a chat endpoint. It gets the text of the question,
and answers with one digit. It is asked where the chooser deferred, and nowhere else. An expert that fails, is late, or
answers something else gives no answer (`envs.array_experts`). ``expert`` and ``silent`` are then not read.

A completion is a single token. The chooser's completion that is no choice, and any answer that is not right, earn no
accuracy. What the expert leaves unanswered has an unknown reward: NaN.

Rewards

    accuracy   1 if the answer is right, at the last turn
    create     1 at a choice to create
    defer      1 at a choice to defer
    malformed  1 at a completion of the chooser that is no choice

A recipe weighs create and defer as costs. Each of the four names of types below has four values, in the order + - * /.

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[1 R] are completions, and ``length`` [1] their numbers of tokens. ``seed`` and ``rng`` (NumPy) determine tasks and
demonstrations. ``n`` is the number of samples, and ``held_out`` the side of the split.
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

from jaxmarl_llm.envs import checks, outside_experts
from jaxmarl_llm.envs.array_env import (
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
from jaxmarl_llm.envs.array_experts import HostExpert
from jaxmarl_llm.envs.prompt_grammar import prompt_row, prompt_text
from jaxmarl_llm.envs.splits import draw_task

ROLES = ("chooser", "creator")
MARKS = "CA"  # of the prompts of the roles
CHOICES = ("1", "2", "c", "d")
PEERS, CREATE, DEFER = 2, 2, 3  # the first choices, and the numbers of the others
TYPES = "+-*/"
DIGITS = 3  # of a question
SIZE = DIGITS + 1  # characters of a question
COMPONENTS = ("accuracy", "create", "defer", "malformed")
ZERO = ord("0")
RESPONSE = 1  # R: one letter or digit
Shares = tuple[float, float, float, float]
INSTRUCTIONS = "You answer questions. Answer with one digit, and nothing else."  # to an endpoint


@dataclass(frozen=True)
class Endpoint(outside_experts.Endpoint):
    """An expert behind a chat endpoint: a function of the question."""

    def __call__(self, question: str) -> str:
        return self.chat(INSTRUCTIONS, question)


@dataclass(frozen=True)
class Config:
    """The settings of questions, of those who answer, and of demonstrations."""

    seed: int = 0  # of the training tasks
    table_seed: int = 0  # of the answers
    tasks: int = 1024  # training tasks
    planted: bool = True  # the creator is a function; False: a role
    # Probability of a right answer, for each type.
    peer_1: Shares = (0.95, 0.3, 0.2, 0.2)  # of the first peer
    peer_2: Shares = (0.3, 0.95, 0.3, 0.2)  # of the second peer
    creator: Shares = (0.6, 0.6, 0.9, 0.2)  # of the creator, with ``planted``
    expert: Shares = (1.0, 1.0, 1.0, 1.0)  # of the expert, where it answers
    silent: float = 0.0  # probability that the expert does not answer
    taught: Shares = (1.0, 1.0, 1.0, 0.0)  # of an answer in demonstrations of the creator to be right; else any digit
    asked: str = ""  # expert outside: module:function, or an endpoint's base URL; "": the planted one
    expert_model: str = ""  # model that the endpoint is asked for
    expert_key_env: str = "OPENAI_API_KEY"  # the environment variable with the endpoint's key
    expert_timeout: float = 10.0  # seconds for one attempt
    expert_retries: int = 1  # attempts after a failed one

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        checks.at_least(path, self, 0, "table_seed")
        checks.probabilities(path, self, "silent")
        for name in ("peer_1", "peer_2", "creator", "expert", "taught"):
            if not all(0 <= share <= 1 for share in getattr(self, name)):
                checks.refuse(path, name, "four probabilities in [0, 1]", getattr(self, name))
        outside_experts.check_limits(path, self.expert_timeout, self.expert_retries)
        if self.asked and self.planted:
            checks.refuse(path, "planted", "false with an expert outside (asked)", self.planted)
        if self.asked:
            self.expert_outside(path)

    def expert_outside(self, path: str = checks.ARGS) -> outside_experts.Expert:
        """The expert that ``asked`` names. ``path``: the name of this Config in error messages."""
        return outside_experts.resolve(
            self.asked,
            endpoint=Endpoint,
            path=path,
            field="asked",
            model=self.expert_model,
            key_env=self.expert_key_env,
            timeout=self.expert_timeout,
            retries=self.expert_retries,
        )


def table(config: Config) -> np.ndarray:
    """The answers [4 10]: of each type and digit, a permutation of the digits in each row."""
    rng = np.random.default_rng([config.table_seed, 3])
    return np.stack([rng.permutation(10) for _ in TYPES])


def answer(config: Config, question: str) -> int:
    """The answer of a question. ``question``: its text, such as 4*72."""
    at = next(i for i, letter in enumerate(question) if letter in TYPES)
    return int(table(config)[TYPES.index(question[at]), int(question[at + 1])])


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return 1 + SIZE + 1


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + RESPONSE + 1


class State(struct.PyTreeNode):
    """An episode so far.

    Attributes:
        task: one row of `make_tasks`
        turn: number of the turn
        right: whether each choice leads to a right answer [4], as it was drawn; of create with ``planted`` alone
        told: the digit that the expert names
        silent: the expert does not answer
        deferred: the expert answers in this turn
        done: the episode is over
    """

    task: dict[str, Int[Array, "..."]]
    turn: Int[Array, ""]
    right: Bool[Array, " 4"]
    told: Int[Array, ""]
    silent: Bool[Array, ""]
    deferred: Bool[Array, ""]
    done: Bool[Array, ""]


def roles(config: Config) -> tuple[str, ...]:
    """The roles of an environment: without the creator where it is a function."""
    return ROLES[:1] if config.planted else ROLES


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. The key of `reset` decides who is right."""
    turns, told = len(roles(config)), None
    if config.asked:
        told = HostExpert(config.expert_outside(), RESPONSE, lambda text: text in tuple("0123456789"), "one digit")
    return ArrayEnv(
        name="defer",
        roles=roles(config),
        seats=1,
        max_turns=turns,
        components=COMPONENTS,
        actors=((0,), (1,))[:turns],
        reset=partial(reset, config),
        observe=partial(observe, config, told),
        step=partial(step, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    own = jax.tree.map(jnp.int32, dict(task))
    luck, other, voice = (jax.random.fold_in(key, stream) for stream in range(3))
    chance = jnp.array([config.peer_1, config.peer_2, config.creator, config.expert])[:, own["type"]]
    right = jax.random.uniform(luck, (len(CHOICES),)) < chance
    wrong = (own["answer"] + jax.random.randint(other, (), 1, 10)) % 10
    told = jnp.where(right[DEFER], own["answer"], wrong)
    silent = jax.random.uniform(voice) < config.silent
    return State(own, jnp.int32(0), right, told, silent, jnp.bool_(False), jnp.bool_(False))


def observe(config: Config, told: HostExpert | None, state: State) -> Observation:
    """The prompt of the chooser, or that of the creator with the expert's answer where the chooser deferred.

    ``told``: the expert outside; None: the planted one.
    """
    role = jnp.minimum(state.turn, len(MARKS) - 1) * (not config.planted)
    tokens, length = prompt_row(encoded(MARKS)[role], [(state.task["question"], SIZE)], [], prompt_length(config))
    seen = Observation(role[None].astype(jnp.int32), tokens[None], length[None], ~state.done[None])
    if config.planted:
        return seen
    said, words = (ZERO + state.told)[None], jnp.where(state.silent, 0, 1)
    if told is not None:
        said, words = told(state.task["question"], jnp.int32(SIZE), state.deferred & ~state.done)
    return seen.replace(expert=said[None], expert_length=jnp.where(state.deferred, words, -1)[None])


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a choice or an answer, the rewards of the turn, and whether the episode has finished."""
    said = jnp.where((completion_end(tokens[0], length[0])[1] == 1) & (length[0] > 0), tokens[0, 0], -1)
    is_choice = encoded("".join(CHOICES)) == said  # [4]
    chosen, first = jnp.argmax(is_choice), state.turn == 0
    some = is_choice.any()
    creates, defers = first & some & (chosen == CREATE), first & some & (chosen == DEFER)
    goes_on = (creates | defers) & (not config.planted)
    correct = jnp.where(first, some & state.right[chosen] & ~goes_on, said == ZERO + state.task["answer"])
    unanswered = defers & state.silent if config.planted else ~first & state.deferred & (length[0] == 0)
    amounts: dict[str, Array] = {
        "accuracy": jnp.where(unanswered, jnp.nan, 1.0 * correct),
        "create": 1.0 * creates,
        "defer": 1.0 * defers,
        "malformed": 1.0 * (first & ~some),
    }
    after = state.replace(turn=state.turn + 1, deferred=defers & goes_on, done=~goes_on)
    return unless_finished(state, after, {c: to_all(roles(config), amounts[c]) for c in COMPONENTS})


def question(rng: np.random.Generator, of: int) -> str:
    """A random question of type ``of``."""
    digits, at = "".join(map(str, rng.integers(10, size=DIGITS))), rng.integers(DIGITS)
    return digits[:at] + TYPES[of] + digits[at:]


def drawn(rng: np.random.Generator, held_out: bool = False) -> tuple[int, str]:
    """Draw the type of a question and the question from one side of the split. All types are equally likely."""
    of = int(rng.integers(len(TYPES)))
    return of, draw_task(lambda: question(rng, of), str, held_out)


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``). ``held_out``: the side of the split.

    They are type [n], question [n 4] as bytes, and answer [n].
    """
    rng, count = task_draws(config, seed, n, 1, held_out)
    types, questions = zip(*(drawn(rng, held_out) for _ in range(count)), strict=True)
    return dict(
        type=np.array(types, np.int32),
        question=np.array([list(q.encode()) for q in questions], np.int32),
        answer=np.array([answer(config, q) for q in questions], np.int32),
    )


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    The chooser makes any choice, each with the same chance. The creator's answer is right with the probability
    ``taught`` of the type, and any digit otherwise. ``context`` is not used.
    """
    rng = np.random.default_rng([seed, 2])
    chosen, answered = [], []
    for _ in range(n):
        of, asked = drawn(rng)
        chosen.append((prompt_text(MARKS[0], asked), CHOICES[rng.integers(len(CHOICES))]))
        digit = answer(config, asked) if rng.random() < config.taught[of] else rng.integers(10)
        answered.append((prompt_text(MARKS[1], asked), str(digit)))
    pairs = dict(zip(roles(config), (chosen, answered)))
    return {role: text_samples(some, prompt_length(config), RESPONSE) for role, some in pairs.items()}
