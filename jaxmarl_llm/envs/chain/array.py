"""Chain: teams work out sums and differences of small numbers, modulo ten, under several protocols. All in JAX.

A question is a chain such as 3+4-2. Its answer is one digit, (3 + 4 - 2) mod ``modulus``. ``filler`` puts that many
letters without meaning in front of one of its numbers (3+xk4-2). The protocols, and who acts at which turn:

    solo     solver      S3+4-2>           5
    verify   solver      S3+4-2>           9       at most ``rounds`` attempts; the verifier is skipped after the last
             verifier    V3+4-2|9>         n       y accepts and ends the episode, n (and what is neither) rejects
             solver      S3+4-2|9n>        5       sees its earlier attempts and their verdicts
    refine   generator   G3+4-2>           9       three roles in sequence, each once
             verifier    V3+4-2|9>         n
             refiner     F3+4-2|9n>        5
    meta     meta        M3+4-2>           3+4     a hint: what to do next; with ! at its end, the reply is final
             reasoner    R3+4-2|3+4>       7       sees the question and the hint
             meta        M3+4-2|7>         7-2!    sees the earlier replies; at most ``rounds`` hints
             reasoner    R3+4-2|7-2!>      5       with ``rounds`` 1 every reply is final

A completion ends with eos. An answer is one digit. A verdict is y or n. A hint is 1 to 4 of the characters 0-9 + - !.
Any other completion is malformed and shown as ``?``. A malformed hint is not final, and a malformed verdict does not
accept.

Rewards. The last answer finishes the episode; in ``meta`` only an answer that was final does. Then
    accuracy   ``accuracy`` to all roles at the last turn, if the last answer is right
    format     ``format`` to all roles at the last turn, if no completion of the episode was malformed
    invalid    -``invalid`` to the role that acts, at a malformed completion
    shaping    in ``meta`` with one round: -``shaping`` to the meta-thinker for a hint that is a bare digit (it answers
               instead of planning). +``shaping`` to the reasoner for a well-formed answer

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[1 R] are completions, and ``length`` [1] their numbers of tokens. ``seed`` and ``rng`` (NumPy) determine tasks and
demonstrations. ``n`` is the number of samples of a role, and ``held_out`` the side of the split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

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
    pack,
    task_draws,
    text_samples,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.prompt_grammar import prompt_row, prompt_text
from jaxmarl_llm.envs.splits import draw_task

COMPONENTS = ("accuracy", "format", "invalid", "shaping")
ROLES = {
    "solo": ("solver",),
    "verify": ("solver", "verifier"),
    "refine": ("generator", "verifier", "refiner"),
    "meta": ("meta", "reasoner"),
}
MARKS = {"solver": "S", "verifier": "V", "generator": "G", "refiner": "F", "meta": "M", "reasoner": "R"}
DIGITS, HINT, LETTERS = "0123456789", "0123456789+-!", "ghijkxyz"
LONGEST_HINT = 4
MOST_ATTEMPTS, MOST_LETTERS = 100, 1000  # bounds of the configuration: programs grow with rounds, prompts with letters
YES, FINAL = ord("y"), ord("!")


@dataclass(frozen=True)
class Config:
    """The settings of questions, protocol, rewards and demonstrations."""

    seed: int = 0  # of the training tasks
    tasks: int = 1024  # training tasks
    protocol: str = "verify"  # who acts when, see above
    rounds: int = 2  # attempts in verify, hints in meta
    terms: int = 3  # numbers of a chain
    largest: int = 4  # number of a chain
    modulus: int = 10  # results are modulo this number
    filler: int = 0  # letters without meaning in a question
    accuracy: float = 1.0  # reward of a right last answer
    format: float = 0.1  # reward of an episode without a malformed completion
    invalid: float = 0.1  # a penalty
    shaping: float = 0.0  # ReMA: 0.25
    # Probabilities of mistakes in demonstrations.
    answer_error_rate: float = 0.55  # an answer takes every minus for a plus
    false_accept_rate: float = 0.5  # a verdict on a wrong answer is y
    false_reject_rate: float = 0.3  # a verdict on a right answer is n
    revision_rate: float = 0.0  # a refiner whose verdict is n does not give the same answer again
    plan_error_rate: float = 0.55  # a hint has plus for minus
    hint_end_error_rate: float = 0.3  # a hint is marked as final, or not, when it should be the other way

    ALIASES: ClassVar[dict[str, str]] = {
        "slip": "answer_error_rate",
        "lenient": "false_accept_rate",
        "strict": "false_reject_rate",
        "heed": "revision_rate",
        "misplan": "plan_error_rate",
        "hasty": "hint_end_error_rate",
    }

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        one_of(f"{path}.protocol", self.protocol, tuple(ROLES))
        least = 2 if self.protocol == "verify" else 1
        if not least <= self.rounds <= MOST_ATTEMPTS:
            checks.refuse(path, "rounds", f"{least} to {MOST_ATTEMPTS} with protocol={self.protocol}", self.rounds)
        checks.in_range(path, self, 2, MOST_LETTERS, "terms")
        checks.in_range(path, self, 1, 9, "largest")
        checks.in_range(path, self, 2, 10, "modulus")
        checks.in_range(path, self, 0, MOST_LETTERS, "filler")
        checks.finite(path, self, "accuracy", "format", "invalid", "shaping")
        if self.shaping and (self.protocol != "meta" or self.rounds != 1):
            checks.refuse(path, "shaping", "0, unless protocol=meta and rounds=1", self.shaping)
        checks.probabilities(path, self, *self.ALIASES.values())

    @property
    def max_new_tokens(self) -> int:
        """The number of tokens of the longest well-formed completion, eos included."""
        return 1 + (LONGEST_HINT if self.protocol == "meta" else 1)

    @property
    def attempts(self) -> int:
        """The most answers of an episode."""
        return {"solo": 1, "refine": 2}.get(self.protocol, self.rounds)

    @property
    def max_turns(self) -> int:
        """The most turns of an episode."""
        return {"solo": 1, "verify": 2 * self.rounds - 1, "refine": 3, "meta": 2 * self.rounds}[self.protocol]

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the protocol."""
        return ROLES[self.protocol]

    @property
    def order(self) -> list[int]:
        """The role that acts at each turn, as an index into ``roles``."""
        return [turn if self.protocol == "refine" else turn % 2 for turn in range(self.max_turns)]

    @property
    def open_ended(self) -> bool:
        """Whether the team itself marks the answer that is final."""
        return self.protocol == "meta" and self.rounds > 1


def question_length(config: Config) -> int:
    """The number of tokens of a question."""
    return 2 * config.terms - 1 + config.filler


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    heard = 3 * (config.attempts - 1)
    if config.protocol == "meta":
        heard = max(2 * (config.rounds - 1), 1 + LONGEST_HINT)
    return 1 + question_length(config) + heard + 1


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + config.max_new_tokens


@struct.dataclass
class State:
    """An episode so far, with A = ``attempts``."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    answers: Int[Array, " A"]  # bytes, PAD where there is none yet
    verdicts: Int[Array, " A"]
    hint: Int[Array, "4"]  # the last one
    hint_length: Int[Array, ""]
    final: Bool[Array, ""]  # whether the last hint was marked as final
    proper: Bool[Array, ""]  # no malformed completion yet
    done: Bool[Array, ""]


class Move(NamedTuple):
    """A completion as the rules read it."""

    role: Int[Array, ""]
    answers: Bool[Array, ""]  # the role's task at this turn: an answer, a verdict or a hint
    judges: Bool[Array, ""]
    plans: Bool[Array, ""]
    proper: Bool[Array, ""]  # well-formed
    byte: Int[Array, ""]  # the answer or verdict, UNREADABLE where it is malformed
    hint: Int[Array, "4"]
    hint_length: Int[Array, ""]
    marked: Bool[Array, ""]  # a hint with the final mark
    bare: Bool[Array, ""]  # a hint that is one digit


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks: keys are not used."""
    return ArrayEnv(
        name="chain",
        roles=config.roles,
        seats=1,
        max_turns=config.max_turns,
        components=COMPONENTS,
        actors=tuple((role,) for role in config.order),
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    zero, no, none = jnp.int32(0), jnp.bool_(False), jnp.full(config.attempts, PAD, jnp.int32)
    hint = jnp.full(LONGEST_HINT, PAD, jnp.int32)
    return State(jax.tree.map(jnp.int32, task), zero, none, none, hint, zero, no, ~no, no)


def _acting(config: Config, state: State) -> Int[Array, ""]:
    """The role that acts, as an index into ``config.roles``."""
    return jnp.array(config.order, jnp.int32)[jnp.minimum(state.turn, config.max_turns - 1)]


def _is_role(config: Config, role: Int[Array, ""], name: str) -> Bool[Array, ""]:
    """Whether ``role`` is the one called ``name``; False where the protocol has no such role."""
    return jnp.array([other == name for other in config.roles])[role]


def observe(config: Config, state: State) -> Observation:
    """The prompt of the role that acts."""
    role, attempts = _acting(config, state), config.attempts
    entries: list = []
    if config.protocol == "meta":
        for i in range(attempts - 1):
            entries.append(((role == 0) & (state.answers[i] != PAD), [(state.answers[i : i + 1], 1)]))
        entries.append((role == 1, [(state.hint, state.hint_length)]))
    elif config.protocol in ("verify", "refine"):
        judges, now = _is_role(config, role, "verifier"), jnp.minimum(state.turn // 2, attempts - 1)
        for i in range(attempts):  # the verifier sees the answer it judges, the others all that was judged
            judged = state.verdicts[i] != PAD
            pieces = [(state.answers[i : i + 1], 1), (state.verdicts[i : i + 1], judged.astype(jnp.int32))]
            entries.append((jnp.where(judges, i == now, judged), pieces))
    mark = encoded("".join(MARKS[name] for name in config.roles))[role]
    question = (state.task["question"], state.task["question_length"])
    tokens, length = prompt_row(mark, [question], entries, prompt_length(config))
    return Observation(role[None], tokens[None], length[None], ~state.done[None])


def _read(config: Config, role: Int[Array, ""], tokens: Int[Array, " R"], length: Int[Array, ""]) -> Move:
    """The completion of ``role`` as a move."""
    tokens = jnp.pad(tokens, (0, LONGEST_HINT), constant_values=PAD)
    here = jnp.arange(len(tokens))
    ended, size = completion_end(tokens, length)
    judges, plans = _is_role(config, role, "verifier"), _is_role(config, role, "meta")
    digit = jnp.isin(tokens[0], encoded(DIGITS[: config.modulus]))
    verdict = jnp.isin(tokens[0], encoded("yn"))
    in_hint = (jnp.isin(tokens, encoded(HINT)) | (here >= size)).all() & (size >= 1) & (size <= LONGEST_HINT)
    one = ended & (size == 1)
    proper = jnp.where(plans, ended & in_hint, one & jnp.where(judges, verdict, digit))
    malformed = jnp.full(LONGEST_HINT, PAD, jnp.int32).at[0].set(UNREADABLE)
    return Move(
        role=role,
        answers=~judges & ~plans,
        judges=judges,
        plans=plans,
        proper=proper,
        byte=jnp.where(proper, tokens[0], UNREADABLE),
        hint=jnp.where(proper, jnp.where(here < size, tokens, PAD)[:LONGEST_HINT], malformed),
        hint_length=jnp.where(proper, size, 1),
        marked=proper & (tokens[jnp.maximum(size - 1, 0)] == FINAL),
        bare=plans & proper & (size == 1) & digit,
    )


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    move = _read(config, _acting(config, state), tokens[0], length[0])
    attempt = state.turn // 2
    at = jnp.arange(config.attempts) == attempt
    answers = jnp.where(at & move.answers, move.byte, state.answers)
    final = jnp.where(move.plans, move.marked, state.final)
    finished = move.answers & final if config.open_ended else jnp.bool_(True)
    over = state.turn >= config.max_turns - 1
    if config.protocol == "verify":
        over |= move.judges & (move.byte == YES)  # a malformed verdict does not accept
    elif config.open_ended:
        over |= finished
    after = State(
        task=state.task,
        turn=state.turn + 1,
        answers=answers,
        verdicts=jnp.where(at & move.judges, move.byte, state.verdicts),
        hint=jnp.where(move.plans, move.hint, state.hint),
        hint_length=jnp.where(move.plans, move.hint_length, state.hint_length),
        final=final,
        proper=state.proper & move.proper,
        done=over,
    )
    right = answers[jnp.minimum(attempt, config.attempts - 1)] == ord("0") + state.task["answer"]
    return unless_finished(state, after, _rewards(config, move, over & finished, right, after.proper))


def _rewards(
    config: Config, move: Move, ends: Bool[Array, ""], right: Bool[Array, ""], clean: Bool[Array, ""]
) -> dict[str, Float[Array, " A"]]:
    """The rewards of a turn.

    ends: whether the turn finishes the episode with an answer that counts
    right: whether the last answer is right
    clean: whether no completion of the episode was malformed
    """
    own = jnp.arange(len(config.roles)) == move.role
    shaped = jnp.where(move.plans, -1.0 * move.bare, 1.0 * (move.answers & move.proper))
    return {
        "accuracy": to_all(config.roles, config.accuracy * (ends & right)),
        "format": to_all(config.roles, config.format * (ends & clean)),
        "invalid": jnp.float32(-config.invalid * (own & ~move.proper)),
        "shaping": jnp.float32(config.shaping * shaped * own),
    }


def work_out(numbers: list[int], signs: str, modulus: int) -> int:
    """The value of ``numbers[0] signs[0] numbers[1] ...`` modulo ``modulus``."""
    return (numbers[0] + sum(n if s == "+" else -n for s, n in zip(signs, numbers[1:], strict=True))) % modulus


def draw(rng: np.random.Generator, config: Config) -> tuple[str, list[int], str]:
    """A random question, its numbers and its signs."""
    numbers = rng.integers(config.largest + 1, size=config.terms).tolist()
    signs = "".join("+-"[i] for i in rng.integers(2, size=config.terms - 1))
    parts = [f"{sign}{number}" for sign, number in zip(("", *signs), numbers, strict=True)]
    where = rng.integers(config.terms) if config.filler else 0
    noise = "".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=config.filler))
    parts[where] = parts[where][:-1] + noise + parts[where][-1]
    return "".join(parts), numbers, signs


def drawn(rng: np.random.Generator, config: Config, held_out: bool = False) -> tuple[str, list[int], str]:
    """Draw a question from one side of the split. Arguments and results are those of `draw`.

    Numbers and signs make a question itself, filler does not.
    """
    return draw_task(lambda: draw(rng, config), lambda task: f"{task[1]}{task[2]}", held_out)


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``): question [n Q], question_length [n],
    answer [n]. ``held_out``: the side of the split.
    """
    rng, count = task_draws(config, seed, n, 1, held_out)
    draws = [drawn(rng, config, held_out) for _ in range(count)]
    question, length = pack([q.encode() for q, _, _ in draws], question_length(config))
    gold = [work_out(numbers, signs, config.modulus) for _, numbers, signs in draws]
    return dict(question=question, question_length=length, answer=np.array(gold, np.int32))


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    Mistakes are systematic. With probability ``answer_error_rate`` an answer takes every minus for a plus, whatever
    came before. A refiner keeps an answer that was accepted. It changes a rejected one with probability
    ``revision_rate``. Verdicts follow ``false_accept_rate`` and ``false_reject_rate``; hints follow ``plan_error_rate``
    and ``hint_end_error_rate``. Prompts are those of episodes of such demonstrators, at turns drawn evenly from those
    at which the role may act. ``context`` is not used.
    """
    out = {}
    for index, role in enumerate(config.roles):
        rng = np.random.default_rng([seed, 2, index])
        show = _DEMONSTRATIONS.get(role, partial(_demonstration, role=role))
        out[role] = text_samples((show(rng, config) for _ in range(n)), prompt_length(config), config.max_new_tokens)
    return out


def _demonstrated_answer(rng: np.random.Generator, config: Config, numbers: list[int], signs: str) -> int:
    """An answer that is wrong with probability ``config.answer_error_rate``."""
    slips = rng.random() < config.answer_error_rate
    return work_out(numbers, "+" * len(signs) if slips else signs, config.modulus)


def _demonstrated_verdict(rng: np.random.Generator, config: Config, right: bool) -> str:
    """A verdict on an answer that is ``right`` or not, with the mistakes of ``config``."""
    draw = rng.random()
    return "yn"[int(draw < config.false_reject_rate)] if right else "ny"[int(draw < config.false_accept_rate)]


def _demonstration(rng: np.random.Generator, config: Config, role: str) -> tuple[str, str]:
    """A prompt and completion of ``role`` in solo, verify or refine."""
    question, numbers, signs = drawn(rng, config)
    gold = work_out(numbers, signs, config.modulus)
    judged = rng.integers(config.rounds) if role == "solver" and config.protocol == "verify" else 0
    told = []
    for _ in range(1 if role == "refiner" else judged):
        answer = _demonstrated_answer(rng, config, numbers, signs)
        verdict = "n" if role == "solver" else _demonstrated_verdict(rng, config, answer == gold)
        told.append(f"{answer}{verdict}")
    answer = _demonstrated_answer(rng, config, numbers, signs)
    if role == "verifier":
        return prompt_text("V", question, [str(answer)]), _demonstrated_verdict(rng, config, answer == gold)
    if role == "refiner":
        before, other = int(told[0][0]), {gold, work_out(numbers, "+" * len(signs), config.modulus)}
        if told[0][1] == "y":
            answer = before
        elif rng.random() < config.revision_rate and other != {before}:
            (answer,) = other - {before}
    return prompt_text(MARKS[role], question, told), str(answer)


def _demonstrated_hint(
    rng: np.random.Generator, config: Config, numbers: list[int], signs: str, done: list[int]
) -> str:
    """The hint after the replies ``done``: the next step of the chain, its sign and mark perhaps wrong."""
    at = min(len(done), len(signs) - 1)
    sign = "+" if rng.random() < config.plan_error_rate else signs[at]
    last = (at == len(signs) - 1) != (rng.random() < config.hint_end_error_rate)
    return f"{done[-1] if done else numbers[0]}{sign}{numbers[at + 1]}{'!' * last}"


def _demonstrated_replies(rng: np.random.Generator, config: Config, numbers: list[int], signs: str) -> list[int]:
    """Replies to a random number of hints, slips included."""
    done: list[int] = []
    for _ in range(rng.integers(config.rounds)):
        done.append(_demonstrated_reply(rng, config, _demonstrated_hint(rng, config, numbers, signs, done)))
    return done


def _demonstrated_reply(rng: np.random.Generator, config: Config, hint: str) -> int:
    """The reply to a hint: the value of its one step, slips included."""
    return _demonstrated_answer(rng, config, [int(hint[0]), int(hint[2])], hint[1])


def _meta_demonstration(rng: np.random.Generator, config: Config) -> tuple[str, str]:
    """A prompt and completion of the meta-thinker."""
    question, numbers, signs = drawn(rng, config)
    done = _demonstrated_replies(rng, config, numbers, signs)
    return prompt_text("M", question, [*map(str, done)]), _demonstrated_hint(rng, config, numbers, signs, done)


def _reasoner_demonstration(rng: np.random.Generator, config: Config) -> tuple[str, str]:
    """A prompt and completion of the reasoner."""
    question, numbers, signs = drawn(rng, config)
    done = _demonstrated_replies(rng, config, numbers, signs)
    hint = _demonstrated_hint(rng, config, numbers, signs, done)
    one = config.rounds == 1  # then the only reply is the answer
    answer = _demonstrated_answer(rng, config, numbers, signs) if one else _demonstrated_reply(rng, config, hint)
    return prompt_text("R", question, [hint]), str(answer)


_DEMONSTRATIONS = {"meta": _meta_demonstration, "reasoner": _reasoner_demonstration}
