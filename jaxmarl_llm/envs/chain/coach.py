"""Chain with a coach: one role writes the question, another answers it. All in JAX.

    turn  role     prompt    a good completion
    0     coach    Q>        3+4-2      a question: ``terms`` numbers up to ``largest`` (here 3 up to 4), + or - between
    1     player   S3+4-2>   5          the answer, one digit: the value modulo ``modulus``

A held-out task has its question already: the coach's seat is empty, and the player answers.

A question belongs to one of three sides by its content: training, validation and test. Test questions are those of
`chain`. A quarter of the other questions is for validation. A completion of the coach is malformed if it is not a
question of this form. It is reserved if the question is not on the training side. Nobody answers either of these, and
the episode ends. So no training task is a held-out one, whatever the coach writes.

Rewards are facts, for credit rules to read

    accuracy    1 to both roles if the answer is right
    answer      to the player: the digit of the answer, or -1 for a malformed answer
    malformed   to the coach: 1 for a malformed question
    reserved    to the coach: 1 for a question of validation or test

Parts of the held-out tasks: ``validation`` and ``test``, half of the tasks each.

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[1 R] are completions, and ``length`` [1] their numbers of tokens. ``seed`` and ``rng`` (NumPy) determine tasks and
demonstrations. ``n`` is the number of samples of a role, and ``held_out`` the side of the split.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    PAD,
    ArrayEnv,
    Observation,
    Samples,
    completion_end,
    encoded,
    pack,
    task_draws,
    text_samples,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.chain.array import DIGITS, work_out
from jaxmarl_llm.envs.prompt_grammar import prompt_row, prompt_text
from jaxmarl_llm.envs.splits import is_held_out

ROLES = ("coach", "player")
COMPONENTS = ("accuracy", "answer", "malformed", "reserved")
TRAINING, VALIDATION, TEST = range(3)  # sides of the split
MOST_QUESTIONS = 2**15  # all of them are enumerated


@dataclass(frozen=True)
class Config:
    """The settings of questions and demonstrations."""

    seed: int = 0  # of the held-out tasks
    tasks: int = 1024  # training tasks: all alike, without a question
    terms: int = 6  # numbers of a question
    largest: int = 1  # number of a question
    modulus: int = 10  # results are modulo this number
    # Probabilities in demonstrations.
    guess_rate: float = 0.3  # an answer to a question with a minus is a random digit
    minus_rate: float = 0.05  # a sign of the coach's question is a minus

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        checks.in_range(path, self, 2, 8, "terms")
        checks.in_range(path, self, 1, 9, "largest")
        checks.in_range(path, self, 2, 10, "modulus")
        checks.probabilities(path, self, "guess_rate", "minus_rate")
        if count_questions(self) > MOST_QUESTIONS:
            checks.refuse(path, "terms", f"at most {MOST_QUESTIONS} questions with largest={self.largest}", self.terms)
        if set(range(3)) - set(sides(self.terms, self.largest).tolist()):
            checks.refuse(path, "terms", "settings with a question on each side of the split", self.terms)

    @property
    def max_new_tokens(self) -> int:
        """The number of tokens of the longest well-formed completion, eos included."""
        return question_length(self) + 1


class Question(NamedTuple):
    """A question as its parts."""

    numbers: tuple[int, ...]
    signs: str

    @property
    def text(self) -> str:
        """The question as the coach writes it."""
        return str(self.numbers[0]) + "".join(f"{s}{n}" for s, n in zip(self.signs, self.numbers[1:], strict=True))


def question_length(config: Config) -> int:
    """The number of tokens of a question."""
    return 2 * config.terms - 1


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return question_length(config) + 2


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + config.max_new_tokens


def count_questions(config: Config) -> int:
    """The number of different questions."""
    return (config.largest + 1) ** config.terms * 2 ** (config.terms - 1)


@functools.cache
def questions(terms: int, largest: int) -> tuple[Question, ...]:
    """All questions, in the order of `position`. ``terms``, ``largest``: as in `Config`."""
    numbers = itertools.product(range(largest + 1), repeat=terms)
    return tuple(Question(n, "".join(s)) for n in numbers for s in itertools.product("+-", repeat=terms - 1))


@functools.cache
def sides(terms: int, largest: int) -> np.ndarray:
    """The side of each of `questions` [N]: `TRAINING`, `VALIDATION` or `TEST`. Arguments as there."""
    return np.array([side(q) for q in questions(terms, largest)], np.int32)


def side(question: Question) -> int:
    """The side of a question, by a hash of its numbers and signs."""
    content = f"{list(question.numbers)}{question.signs}"  # as `chain` has it
    if is_held_out(content):
        return TEST
    return VALIDATION if is_held_out(f"validation {content}") else TRAINING


@struct.dataclass
class State:
    """An episode so far."""

    question: Int[Array, " Q"]  # tokens, all PAD where there is none yet
    given: Bool[Array, ""]  # the task has the question
    turn: Int[Array, ""]
    done: Bool[Array, ""]


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the held-out tasks: keys are not used."""
    return ArrayEnv(
        name="chain_coach",
        roles=ROLES,
        seats=1,
        max_turns=2,
        components=COMPONENTS,
        actors=((0,), (1,)),
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    question = jnp.asarray(task["question"], jnp.int32)
    return State(question, question[0] != PAD, jnp.int32(0), jnp.bool_(False))


def observe(config: Config, state: State) -> Observation:
    """The prompt of the role that acts; the coach's seat is empty where the task has a question."""
    answers = state.turn > 0
    mark = encoded("QS")[answers.astype(jnp.int32)]
    shown = jnp.where(answers, question_length(config), 0)
    tokens, length = prompt_row(mark, [(state.question, shown)], [], prompt_length(config))
    active = ~state.done & (answers | ~state.given)
    return Observation(answers.astype(jnp.int32)[None], tokens[None], length[None], active[None])


def _parts(question: Int[Array, " Q"]) -> tuple[Int[Array, " T"], Bool[Array, " T-1"]]:
    """Numbers and minus signs of a question. They mean nothing where it is malformed."""
    return question[::2] - ord("0"), question[1::2] == ord("-")


def is_question(config: Config, question: Int[Array, " Q"]) -> Bool[Array, ""]:
    """Whether tokens are a question of ``config``: a number, then signs and numbers in turn."""
    numbers, _ = _parts(question)
    good = (numbers >= 0) & (numbers <= config.largest)
    return good.all() & jnp.isin(question[1::2], encoded("+-")).all()


def position(config: Config, question: Int[Array, " Q"]) -> Int[Array, ""]:
    """The position of a question among `questions`; 0 where it is malformed."""
    numbers, minus = _parts(question)
    at = jnp.int32(0)
    for number in numbers:
        at = at * (config.largest + 1) + number
    for sign in minus:
        at = at * 2 + sign
    return jnp.where(is_question(config, question), at, 0)


def answer_of(config: Config, question: Int[Array, " Q"]) -> Int[Array, ""]:
    """The right answer to a question."""
    numbers, minus = _parts(question)
    return (numbers[0] + jnp.where(minus, -numbers[1:], numbers[1:]).sum()) % config.modulus


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    size = question_length(config)
    row = jnp.pad(tokens[0], (0, size), constant_values=PAD)
    ended, count = completion_end(row, length[0])
    answers, writes = state.turn > 0, (state.turn == 0) & ~state.given
    written = row[:size]
    legal = ended & (count == size) & is_question(config, written)
    ours = jnp.asarray(sides(config.terms, config.largest))[position(config, written)] == TRAINING
    digit = jnp.where(ended & (count == 1) & jnp.isin(row[0], encoded(DIGITS[: config.modulus])), row[0] - ord("0"), -1)
    after = State(
        question=jnp.where(writes & legal, written, state.question),
        given=state.given,
        turn=state.turn + 1,
        done=answers | (writes & ~(legal & ours)),
    )
    coach, player = (jnp.arange(2) == role for role in range(2))
    right = answers & (digit == answer_of(config, state.question))
    rewards = {
        "accuracy": to_all(ROLES, right),
        "answer": jnp.float32(digit * (player & answers)),
        "malformed": jnp.float32(coach & writes & ~legal),
        "reserved": jnp.float32(coach & writes & legal & ~ours),
    }
    return unless_finished(state, after, rewards)


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``): question [n Q], and side [n].

    Training tasks have no question. Held-out tasks are drawn from ``seed`` (or ``config.seed``): one of validation,
    then one of test, and so on.
    """
    rng, count = task_draws(config, seed, n, 1, held_out)
    which = np.full(count, TRAINING, np.int32)
    texts = [""] * count
    if held_out:
        which = np.where(np.arange(count) % 2, TEST, VALIDATION).astype(np.int32)
        every, of = questions(config.terms, config.largest), sides(config.terms, config.largest)
        rows = {one: np.flatnonzero(of == one) for one in (VALIDATION, TEST)}
        texts = [every[rng.choice(rows[one])].text for one in which.tolist()]
    return {"question": pack([text.encode() for text in texts], question_length(config))[0], "side": which}


def parts(config: Config, tasks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parts of the held-out tasks [n]: questions of validation and of test."""
    return {"validation": tasks["side"] == VALIDATION, "test": tasks["side"] == TEST}


def _drawn(rng: np.random.Generator, config: Config, minus_rate: float) -> Question:
    """A random question of the training side, whose signs are a minus with probability ``minus_rate``."""
    while True:
        numbers = tuple(rng.integers(config.largest + 1, size=config.terms).tolist())
        signs = "".join("+-"[int(minus)] for minus in rng.random(config.terms - 1) < minus_rate)
        if side(question := Question(numbers, signs)) == TRAINING:
            return question


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    The coach's questions have a minus with probability ``minus_rate`` for each sign. The player's have as many minuses
    as pluses. An answer to a question without a minus is right. Another one is a random digit below ``modulus`` with
    probability ``guess_rate``, and else it is right. All questions are of the training side. ``context`` is not used.
    """
    size = prompt_length(config), config.max_new_tokens
    coach, player = (np.random.default_rng([seed, 2, role]) for role in range(2))
    written = (("Q>", _drawn(coach, config, config.minus_rate).text) for _ in range(n))
    return {"coach": text_samples(written, *size), "player": text_samples(_answers(player, config, n), *size)}


def _answers(rng: np.random.Generator, config: Config, n: int) -> Iterator[tuple[str, str]]:
    """Pairs of a prompt of the player and an answer, some of which are guessed."""
    for _ in range(n):
        question = _drawn(rng, config, 0.5)
        answer = work_out(list(question.numbers), question.signs, config.modulus)
        if "-" in question.signs and rng.random() < config.guess_rate:
            answer = int(rng.integers(config.modulus))
        yield prompt_text("S", question.text), str(answer)
