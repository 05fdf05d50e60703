"""Consult: a doctor asks a patient for symptoms, one a turn, and names a diagnosis before the turns end. All in JAX.

    turn  prompt     a good completion (each ends with eos)
    0     D4>        c: a question, one of the symptoms a to j
    1     D3c>       f
    2     D2cp>      a
    3     D1cpA>     Y: a diagnosis, one of S to Z; it ends the episode

The digit is the number of turns that are left, this turn included. At turn 0 it is the budget of the episode, drawn
from ``budgets``. Each letter behind it is an answer of the patient. About symptom c it is c for yes, C for no, and m
for unknown; k to t are unknown answers about a to j. A completion that is neither a question nor a diagnosis is
malformed. It takes a turn and is shown as ?. The patient is scripted, and its answer to a question is always the same.

A table of 8 diagnoses and 10 symptoms is drawn from ``table_seed``, so that tables differ between seeds. Diagnoses form
four pairs: the two of a pair differ in two symptoms, others in at least three. Of each answer yes or no, a share
``noise`` is wrong. Two of the symptoms are vague: with probability ``unknown`` the patient cannot tell. No prompt shows
the table: a doctor has to learn it.

Rewards, at the turn that earns them:
    valid      1 for a question that is answered yes or no for the first time
    unknown    -1 for a question that is answered unknown for the first time
    repeated   -2 for a question that was asked before
    malformed  -2 for any other completion that is no diagnosis
    exhausted  -5 at the last turn, if it is no diagnosis
    diagnosis  5 for the right one. A wrong one earns 4 minus the number of the other wrong diagnoses that agree with as
               many answers, or more, and at least 0
    accuracy   1 for the right diagnosis. This is for evaluation; a recipe need not pay it
    turns      1 at every turn, alike

Ties count against the doctor in ``diagnosis``. Otherwise a doctor who asked nothing would earn 5 for any name.

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[1 R] are completions, and ``length`` [1] their numbers of tokens. ``seed`` and ``rng`` (NumPy) determine tasks and
demonstrations. ``n`` is the number of samples, and ``held_out`` the side of the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

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
    completion_end,
    encoded,
    task_draws,
    text_samples,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.prompt_grammar import prompt_row, prompt_text
from jaxmarl_llm.envs.splits import draw_task

ROLES = ("doctor",)
SYMPTOMS, DIAGNOSES = "abcdefghij", "STUVWXYZ"
NO, YES, UNKNOWN = range(3)  # answers
ANSWERS = ("ABCDEFGHIJ", SYMPTOMS, "klmnopqrst")  # how prompts show them, one letter for each symptom
TURN_LIMIT = 8  # turns of the longest episode
COMPONENTS = ("valid", "unknown", "repeated", "malformed", "exhausted", "diagnosis", "accuracy", "turns")
RIGHT = 5.0  # reward of the right diagnosis
PAIR_DISTANCE, LEAST_DISTANCE = 2, 3  # symptoms in which the two diagnoses of a pair differ, and others at least
VAGUE = 2  # symptoms that a patient may be unable to tell
RESPONSE = 2  # R: a letter and eos


@dataclass(frozen=True)
class Config:
    """The settings of patients, budgets and demonstrations."""

    seed: int = 0  # of the training tasks
    table_seed: int | None = None  # of the table; None: ``seed``
    tasks: int = 1024  # training tasks
    budgets: tuple[int, ...] = (2, 6)  # least and largest number of turns, the diagnosis included; one number: fixed
    noise: float = 0.05  # probability that an answer yes or no is wrong
    unknown: float = 0.7  # probability that a vague symptom is answered unknown
    # Probabilities of mistakes in demonstrations.
    repeat_rate: float = 0.15  # a question was asked before
    misdiagnosis_rate: float = 0.3  # a diagnosis is any other than the best one
    overrun_rate: float = 0.1  # a question at the last turn
    hasty_rate: float = 0.05  # a diagnosis before the last turn

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        if self.table_seed is not None:
            checks.at_least(path, self, 0, "table_seed")
        ordered = len(self.budgets) in (1, 2) and self.budgets[0] <= self.budgets[-1]
        if not ordered or not all(1 <= turns <= TURN_LIMIT for turns in self.budgets):
            checks.refuse(path, "budgets", f"one or two numbers of turns in order, 1 to {TURN_LIMIT}", self.budgets)
        rates = ("noise", "unknown", "repeat_rate", "misdiagnosis_rate", "overrun_rate", "hasty_rate")
        checks.probabilities(path, self, *rates)

    @property
    def turns(self) -> int:
        """The most turns of an episode."""
        return self.budgets[-1]


class Table(NamedTuple):
    """Properties of the patients of a seed. ``symptoms`` [8 10]: of each diagnosis, 0 or 1. ``vague`` [10]: bool."""

    symptoms: np.ndarray
    vague: np.ndarray


def table(config: Config) -> Table:
    """The table of an environment."""
    rng = np.random.default_rng([config.seed if config.table_seed is None else config.table_seed, 3])
    rows, columns = len(DIAGNOSES), len(SYMPTOMS)
    paired = np.arange(rows) ^ 1
    while True:
        vague = np.isin(np.arange(columns), rng.permutation(columns)[:VAGUE])
        symptoms = np.repeat(rng.integers(2, size=(rows // 2, columns)), 2, axis=0)
        for row in range(1, rows, 2):
            symptoms[row, rng.permutation(columns)[:PAIR_DISTANCE]] ^= 1
        apart = symptoms[:, None] != symptoms[None]
        others = ~np.eye(rows, dtype=bool) & (np.arange(rows)[:, None] != paired[None])
        clear = (symptoms != symptoms[paired])[:, ~vague].any(1)  # some question tells the two of a pair apart
        if (apart.sum(-1)[others] >= LEAST_DISTANCE).all() and clear.all():
            return Table(symptoms.astype(np.int32), vague)


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return 2 + config.turns


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + RESPONSE


@struct.dataclass
class State:
    """An episode so far, with T = ``turns``."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    asked: Int[Array, " T"]  # bytes of the questions, PAD where there is none yet
    heard: Int[Array, " T"]  # bytes of the answers
    done: Bool[Array, ""]


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks: keys are not used."""
    return ArrayEnv(
        name="consult",
        roles=ROLES,
        seats=1,
        max_turns=config.turns,
        components=COMPONENTS,
        actors=((0,),) * config.turns,
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    none = jnp.full(config.turns, PAD, jnp.int32)
    return State(jax.tree.map(jnp.int32, dict(task)), jnp.int32(0), none, none, jnp.bool_(False))


def observe(config: Config, state: State) -> Observation:
    """The prompt of the doctor."""
    left = jnp.maximum(state.task["budget"] - state.turn, 0)
    heard = state.heard[: config.turns - 1], jnp.minimum(state.turn, config.turns - 1)
    tokens, length = prompt_row("D", [((ord("0") + left)[None], 1), heard], [], prompt_length(config))
    return Observation(jnp.zeros(1, jnp.int32), tokens[None], length[None], ~state.done[None])


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    task, byte = state.task, tokens[0, 0]
    ended, size = completion_end(tokens[0], length[0])
    one = ended & (size == 1)
    asks, names = one & jnp.isin(byte, encoded(SYMPTOMS)), one & jnp.isin(byte, encoded(DIAGNOSES))
    symptom = jnp.clip(byte - ord("a"), 0, len(SYMPTOMS) - 1)
    answer = task["answers"][symptom]
    repeated = asks & (state.asked == byte).any()
    new, known = asks & ~repeated, answer != UNKNOWN
    over = names | (state.turn + 1 >= task["budget"])
    named = jnp.clip(byte - ord(DIAGNOSES[0]), 0, len(DIAGNOSES) - 1)
    amounts: dict[str, Array | float] = {
        "valid": 1.0 * (new & known),
        "unknown": -1.0 * (new & ~known),
        "repeated": -2.0 * repeated,
        "malformed": -2.0 * ~(asks | names),
        "exhausted": -5.0 * (over & ~names),
        "diagnosis": names * diagnosis_reward(task, state.asked, named),
        "accuracy": 1.0 * (names & (named == task["diagnosis"])),
        "turns": 1.0,
    }
    here, shown = jnp.arange(config.turns) == state.turn, jnp.stack([encoded(letters) for letters in ANSWERS])
    after = State(
        task=task,
        turn=state.turn + 1,
        asked=jnp.where(here, jnp.where(asks, byte, UNREADABLE), state.asked),
        heard=jnp.where(here, jnp.where(asks, shown[answer, symptom], UNREADABLE), state.heard),
        done=over,
    )
    return unless_finished(state, after, {name: to_all(ROLES, amounts[name]) for name in COMPONENTS})


def diagnosis_reward(task: Mapping[str, Array], asked: Int[Array, " T"], named: Int[Array, ""]) -> Float[Array, ""]:
    """The reward of a diagnosis by its rank, 0 to 5; see the top of this file.

    Args:
        task: one row of `make_tasks`
        asked: bytes of the questions so far [T]
        named: the diagnosis, an index
    """
    answers, here = task["answers"], jnp.arange(len(DIAGNOSES))
    known = (encoded(SYMPTOMS)[:, None] == asked).any(1) & (answers != UNKNOWN)
    agrees = ((task["table"] == answers) & known).sum(1)
    ahead = (agrees >= agrees[named]) & (here != named) & (here != task["diagnosis"])
    return jnp.where(named == task["diagnosis"], RIGHT, jnp.maximum(RIGHT - 1 - ahead.sum(), 0.0))


def patient(rng: np.random.Generator, config: Config, of: Table, diagnosis: int) -> np.ndarray:
    """The answers [10] of a random patient with ``diagnosis``, by the table ``of`` the environment."""
    wrong = rng.random(len(SYMPTOMS)) < config.noise
    untold = of.vague & (rng.random(len(SYMPTOMS)) < config.unknown)
    return np.where(untold, UNKNOWN, of.symptoms[diagnosis] ^ wrong).astype(np.int32)


def drawn(rng: np.random.Generator, config: Config, of: Table, held_out: bool = False) -> tuple[int, np.ndarray, int]:
    """Draw the diagnosis, answers [10] and budget of a patient from one side of the split.

    The answers make a task itself, whatever the budget. ``of``: the table of the environment. Every diagnosis is
    equally likely on both sides.
    """
    diagnosis = int(rng.integers(len(DIAGNOSES)))
    answers = draw_task(lambda: patient(rng, config, of, diagnosis), answer_text, held_out)
    return diagnosis, answers, int(rng.integers(config.budgets[0], config.budgets[-1] + 1))


def answer_text(answers: np.ndarray) -> str:
    """The answers [10] of a patient as text, one letter for each symptom."""
    return "".join(ANSWERS[answer][s] for s, answer in enumerate(answers))


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``). ``held_out``: the side of the split.

    diagnosis [n], answers [n 10], budget [n], and table [n 8 10], which is the same for all.
    """
    rng, count = task_draws(config, seed, n, 1, held_out)
    of = table(config)
    diagnosis, answers, budget = zip(*(drawn(rng, config, of, held_out) for _ in range(count)), strict=True)
    return dict(
        diagnosis=np.array(diagnosis, np.int32),
        answers=np.stack(answers),
        budget=np.array(budget, np.int32),
        table=np.broadcast_to(of.symptoms, (count, *of.symptoms.shape)).copy(),
    )


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    They are the turns of consultations of training patients, one after the other. The demonstrator knows the table, and
    asks in random order. It names one of the diagnoses that agree with most answers. Its mistakes have the
    probabilities ``repeat_rate``, ``misdiagnosis_rate``, ``overrun_rate`` and ``hasty_rate``. ``context`` is not used.
    """
    rng, of = np.random.default_rng([seed, 2]), table(config)
    pairs: list[tuple[str, str]] = []
    while len(pairs) < n:
        pairs += consultation(rng, config, of, drawn(rng, config, of))
    return {ROLES[0]: text_samples(pairs[:n], prompt_length(config), RESPONSE)}


def consultation(
    rng: np.random.Generator, config: Config, of: Table, who: tuple[int, np.ndarray, int]
) -> Iterator[tuple[str, str]]:
    """The prompts and completions of one demonstrated consultation.

    ``of``: the table of the environment. ``who``: a patient as `drawn` returns it.
    """
    _, answers, budget = who
    asked: list[int] = []
    for left in range(budget, 0, -1):
        told = "".join(ANSWERS[answers[s]][s] for s in asked)
        names = rng.random() >= config.overrun_rate if left == 1 else rng.random() < config.hasty_rate
        move = _diagnosed(rng, config, of, answers, asked) if names else _question(rng, config, asked)
        yield prompt_text("D", f"{left}{told}"), move
        if names:
            return
        asked.append(SYMPTOMS.index(move))


def _question(rng: np.random.Generator, config: Config, asked: list[int]) -> str:
    """A demonstrator's question after ``asked``: a random new one, or by mistake an old one."""
    new = [s for s in range(len(SYMPTOMS)) if s not in asked]
    repeats = bool(asked) and rng.random() < config.repeat_rate
    options = asked if repeats else new
    return SYMPTOMS[options[rng.integers(len(options))]]


def _diagnosed(rng: np.random.Generator, config: Config, of: Table, answers: np.ndarray, asked: list[int]) -> str:
    """A demonstrator's diagnosis: one that agrees with most of the ``answers`` to ``asked``, or by mistake another."""
    known = [s for s in set(asked) if answers[s] != UNKNOWN]
    agrees = (of.symptoms[:, known] == answers[known]).sum(1)
    best = np.flatnonzero(agrees == agrees.max())
    named = int(best[rng.integers(len(best))])
    if rng.random() < config.misdiagnosis_rate:
        named = int((named + rng.integers(1, len(DIAGNOSES))) % len(DIAGNOSES))
    return DIAGNOSES[named]
