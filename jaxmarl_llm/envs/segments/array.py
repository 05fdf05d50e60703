"""Segments: a reasoner writes the steps of a sum, a segmenter parts the text, a scorer weighs the parts. All in JAX.

Questions and their split are those of `chain`. Each role acts once:

    reasoner   R3+4-2>                 +4=7;xky;-2=5     steps, and filler that contributes nothing to the answer
    segmenter  S3+4-2|A+4=7BxkyC-2=5>  AB                sentences that end a segment, by their labels
    scorer     W3+4-2|A+4=7BxkyC-2=5>  A5B1C4            a weight of 1 to 5 for each segment

A completion ends with eos. `segments.rules` says what sentences, segments and steps are, and when an answer follows. A
sentence of the reasoner ends with ``;``. Prompts show a label in place of it: one for each sentence to the segmenter,
one for each segment to the scorer. A ``;`` within a segment is shown. Other characters than digits, ``+-=;`` and the
letters of filler are shown as ``?``. At most `longest` tokens of a text are read. The last sentence ends a segment
whether it is named or not. A segment without a readable weight has weight 5.

Malformed are

    reasoner   more than `longest` tokens, or a character that is shown as ?
    segmenter  a character that is no label of a sentence, or labels that are not in order
    scorer     anything but one pair of label and weight for each segment, in order

and every completion without eos. Labels and pairs that can be read still count. An empty text has no sentence, so the
completions of the others are well-formed where they are empty.

With ``alone`` the episode ends after the reasoner: the deployed form. The roles are the same, so one team plays both.

Rewards. All are paid at the last turn and to all roles, but for ``malformed``. A weight of 0, or none, makes a
component a fact that is logged.

    accuracy       1 if the text's answer is right
    penalty        importance-weighted length penalty, see `rules.importance_penalty`
    follows        1 if the answer still follows without the segments of weight 2 or less
    left_out       share of the text's tokens in these segments
    length         tokens of the text, its eos not counted
    segments       number of segments
    steps          number of steps, needed or not
    fillers        number of the other sentences
    step_weight    sum of the weights of steps
    filler_weight  sum of the weights of the other sentences
    fillers_kept   number of the other sentences with a weight above 2
    malformed      1 to the role that acts, at a malformed completion

With ``alone`` only ``accuracy``, ``length``, ``steps``, ``fillers`` and ``malformed`` are paid. The others are 0.

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[1 R] are completions, and ``length`` [1] their numbers of tokens. ``seed`` and ``rng`` (NumPy) determine tasks and
demonstrations. ``n`` is the number of samples, and ``held_out`` the side of the split. T is `longest`, and M the
largest number of sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
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
    readable_part,
    task_draws,
    text_samples,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.chain import array as chain
from jaxmarl_llm.envs.prompt_grammar import prompt_row, prompt_text
from jaxmarl_llm.envs.segments import rules
from jaxmarl_llm.envs.segments.rules import EQUALS, LABELS, LEFT_OUT, MOST_WEIGHT, SEPARATOR, STEP, ZERO

ROLES = ("reasoner", "segmenter", "scorer")
REASONER, SEGMENTER, SCORER = range(3)
MARKS = "RSW"
COMPONENTS = (
    "accuracy", "penalty", "follows", "left_out", "length", "segments", "steps", "fillers", "step_weight",
    "filler_weight", "fillers_kept", "malformed",
)  # fmt: skip
READABLE = "0123456789+-=;" + chain.LETTERS


@dataclass(frozen=True)
class Config:
    """The settings of questions and demonstrations."""

    seed: int = 0  # of the training tasks
    tasks: int = 1024  # training tasks
    alone: bool = False  # the episode ends after the reasoner
    terms: int = 3  # numbers of a question; it needs one step less
    largest: int = 9  # number of a question
    modulus: int = 10  # values are modulo this number
    filler: int = 4  # letters of the longest filler sentence of a demonstration
    # Probabilities in demonstrations.
    filler_rate: float = 0.75  # a filler sentence stands before each step, and at the end
    step_error_rate: float = 0.1  # the value of a step takes the other sign
    skip_rate: float = 0.1  # a step that is not the last one is not written
    merge_rate: float = 0.2  # a boundary between sentences is not named
    step_weights: tuple[int, ...] = (2, 3, 4, 5)  # a demonstrated scorer draws from them for a segment with a step
    filler_weights: tuple[int, ...] = (1, 2, 3, 4)  # and from these for any other segment

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        checks.in_range(path, self, 2, 5, "terms")
        checks.in_range(path, self, 1, 9, "largest")
        checks.in_range(path, self, 2, 10, "modulus")
        checks.in_range(path, self, 1, len(chain.LETTERS), "filler")
        checks.probabilities(path, self, "filler_rate", "step_error_rate", "skip_rate", "merge_rate")
        for name in ("step_weights", "filler_weights"):
            weights = getattr(self, name)
            if not weights or not all(1 <= weight <= MOST_WEIGHT for weight in weights):
                checks.refuse(path, name, f"one or several weights of 1 to {MOST_WEIGHT}", weights)

    @property
    def questions(self) -> chain.Config:
        """The settings of the questions, as `chain` has them."""
        return chain.Config(protocol="solo", terms=self.terms, largest=self.largest, modulus=self.modulus)

    @property
    def needed(self) -> int:
        """The number of steps that a question needs."""
        return self.terms - 1

    @property
    def sentences(self) -> int:
        """M: the steps of a question, and a filler sentence before each and at the end."""
        return self.needed + self.terms

    @property
    def longest(self) -> int:
        """T: the number of tokens of the longest demonstrated text, with a separator behind every sentence."""
        return self.needed * (STEP + 1) + self.terms * (self.filler + 1)

    @property
    def max_new_tokens(self) -> int:
        """The number of tokens of the longest well-formed completion, eos included."""
        return max(self.longest, 2 * self.sentences) + 1


def prompt_lengths(config: Config) -> tuple[int, int, int]:
    """The number of tokens of the longest prompt of each role."""
    asked = 2 + chain.question_length(config.questions)
    shown = asked + 1 + config.longest + 1
    return asked, shown, shown


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return max(prompt_lengths(config))


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + config.max_new_tokens


@struct.dataclass
class State:
    """An episode so far."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    text: Int[Array, " T"]  # of the reasoner, as others read it
    size: Int[Array, ""]  # its tokens
    written: Int[Array, ""]  # tokens of the reasoner, also those that are not read
    marked: Bool[Array, " M"]  # the sentence ends a segment
    weight: Int[Array, " M"]  # of each segment
    done: Bool[Array, ""]


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks: keys are not used."""
    turns = 1 if config.alone else len(ROLES)
    return ArrayEnv(
        name="segments",
        roles=ROLES,
        seats=1,
        max_turns=turns,
        components=COMPONENTS,
        actors=((REASONER,), (SEGMENTER,), (SCORER,))[:turns],
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    zero, most = jnp.int32(0), config.sentences
    return State(
        task=jax.tree.map(jnp.int32, dict(task)),
        turn=zero,
        text=jnp.full(config.longest, PAD, jnp.int32),
        size=zero,
        written=zero,
        marked=jnp.zeros(most, bool),
        weight=jnp.full(most, MOST_WEIGHT, jnp.int32),
        done=jnp.bool_(False),
    )


def observe(config: Config, state: State) -> Observation:
    """The prompt of the role that acts."""
    role, room = jnp.minimum(state.turn, SCORER), config.longest + 1
    sentence, number = rules.sentences(state.text, state.size, config.sentences)
    segment, _ = rules.segments(sentence, number, state.marked)
    part = jnp.where(role == SCORER, segment, sentence)
    shown = rules.labelled(state.text, state.size, part, room)
    question = (state.task["question"], chain.question_length(config.questions))
    tokens, length = prompt_row(encoded(MARKS)[role], [question], [(role != REASONER, [shown])], prompt_length(config))
    return Observation(role[None], tokens[None], length[None], ~state.done[None])


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    role, (ended, size) = jnp.minimum(state.turn, SCORER), completion_end(tokens[0], length[0])
    writes, marks = role == REASONER, role == SEGMENTER
    (text,), (shown,) = readable_part(tokens, length, config.longest, _readable)
    sentence, number = rules.sentences(state.text, state.size, config.sentences)
    marked, in_order = rules.read_labels(tokens[0], size, number, config.sentences)
    parts = rules.segments(sentence, number, state.marked)[1]
    weight, complete = rules.read_weights(tokens[0], size, parts, config.sentences)
    clean = (size <= config.longest) & (_readable(tokens[0]) | (jnp.arange(tokens.shape[1]) >= size)).all()
    proper = ended & jnp.where(writes, clean, jnp.where(marks, in_order, complete))
    after = State(
        task=state.task,
        turn=state.turn + 1,
        text=jnp.where(writes, text, state.text),
        size=jnp.where(writes, shown, state.size),
        written=jnp.where(writes, size, state.written),
        marked=jnp.where(marks, marked, state.marked),
        weight=jnp.where(role == SCORER, weight, state.weight),
        done=writes if config.alone else role == SCORER,
    )
    facts = weighed(config, after)
    rewards = {name: to_all(ROLES, jnp.where(after.done, facts[name], 0.0)) for name in COMPONENTS[:-1]}
    own = jnp.arange(len(ROLES)) == role
    return unless_finished(state, after, rewards | {"malformed": 1.0 * (own & ~proper)})


def _readable(tokens: Int[Array, "*b"]) -> Bool[Array, "*b"]:
    """Whether a token of the reasoner is shown to others."""
    return jnp.isin(tokens, encoded(READABLE))


def needed_steps(config: Config, question: Int[Array, " Q"]) -> Int[Array, "K 4"]:
    """The steps that a question needs, as tokens. ``question``: the tokens of a number, then of signs and numbers."""
    signs, numbers = question[1::2], question[::2] - ZERO
    amounts = jnp.where(signs == ord("+"), numbers[1:], -numbers[1:])
    values = (numbers[0] + jnp.cumsum(amounts)) % config.modulus
    return jnp.stack([signs, ZERO + numbers[1:], jnp.full_like(signs, EQUALS), ZERO + values], axis=1)


def weighed(config: Config, state: State) -> dict[str, Float[Array, ""]]:
    """Every reward component but ``malformed``, of a text whose segments and weights are in ``state``."""
    most, text, size = config.sentences, state.text, state.size
    sentence, number = rules.sentences(text, size, most)
    segment, parts = rules.segments(sentence, number, state.marked)
    own = rules.lengths(segment, size, most)
    before = jnp.cumsum(state.marked) - state.marked
    there, steps = jnp.arange(most) < number, rules.steps_in(text, size, sentence, most)
    weight = state.weight[before]  # of each sentence
    kept = there & (weight > LEFT_OUT)
    right = rules.answer(text, size) == ZERO + state.task["answer"]
    follows = rules.follows(text, size, sentence, kept, needed_steps(config, state.task["question"]))
    facts = {
        "accuracy": right,
        "penalty": rules.importance_penalty(own, state.weight),
        "follows": follows,
        "left_out": rules.left_out(own, state.weight),
        "length": state.written,
        "segments": parts,
        "steps": (there & steps).sum(),
        "fillers": (there & ~steps).sum(),
        "step_weight": (weight * (there & steps)).sum(),
        "filler_weight": (weight * (there & ~steps)).sum(),
        "fillers_kept": (kept & ~steps).sum(),
    }
    known = ("accuracy", "length", "steps", "fillers") if config.alone else tuple(facts)
    return {name: jnp.float32(fact if name in known else 0.0) for name, fact in facts.items()}


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``). ``held_out``: the side of the split.

    They are question [n Q], as bytes, and answer [n].
    """
    rng, count = task_draws(config, seed, n, 1, held_out)
    draws = [chain.drawn(rng, config.questions, held_out) for _ in range(count)]
    question, _ = pack([text.encode() for text, _, _ in draws], chain.question_length(config.questions))
    gold = [chain.work_out(numbers, signs, config.modulus) for _, numbers, signs in draws]
    return dict(question=question, answer=np.array(gold, np.int32))


# -- demonstrations ----------------------------------------------------------------------------------------------------


def needed_texts(config: Config, numbers: Sequence[int], signs: str) -> list[str]:
    """The steps that a question needs, as texts. ``numbers`` and ``signs``: of the question."""
    values = [chain.work_out([*numbers[: k + 2]], signs[: k + 1], config.modulus) for k in range(len(signs))]
    return [f"{sign}{n}={value}" for sign, n, value in zip(signs, numbers[1:], values, strict=True)]


def demonstrated_text(rng: np.random.Generator, config: Config, numbers: Sequence[int], signs: str) -> list[str]:
    """Sentences for a question, with filler and the mistakes of ``config``. ``numbers`` and ``signs``: of it.

    A step goes on from the value of the one before it, also where that is wrong or not written.
    """
    value, written = numbers[0], []
    for k, (sign, number) in enumerate(zip(signs, numbers[1:], strict=True)):
        written += _demonstrated_filler(rng, config)
        errs = rng.random() < config.step_error_rate
        value = (value + (number if (sign == "+") != errs else -number)) % config.modulus
        skipped = rng.random() < config.skip_rate and k < len(signs) - 1
        written += [] if skipped else [f"{sign}{number}={value}"]
    return written + _demonstrated_filler(rng, config)


def _demonstrated_filler(rng: np.random.Generator, config: Config) -> list[str]:
    """A filler sentence with probability ``config.filler_rate``."""
    if rng.random() >= config.filler_rate:
        return []
    letters = rng.integers(len(chain.LETTERS), size=rng.integers(1, config.filler + 1))
    return ["".join(chain.LETTERS[i] for i in letters)]


def joined(written: Sequence[str], ends: Sequence[bool]) -> list[str]:
    """The segments of sentences. ``written``: the sentences. ``ends``: whether each one ends a segment."""
    parts, part = [], []
    for sentence, end in zip(written, ends, strict=True):
        part.append(sentence)
        if end:
            parts.append(chr(SEPARATOR).join(part))
            part = []
    return parts + ([chr(SEPARATOR).join(part)] if part else [])


def _demonstrated_weight(rng: np.random.Generator, config: Config, part: str) -> int:
    """A weight for a segment."""
    options = config.step_weights if chr(EQUALS) in part else config.filler_weights
    return options[rng.integers(len(options))]


def demonstrated_episode(
    rng: np.random.Generator, config: Config, question: str, numbers: Sequence[int], signs: str
) -> Iterator[tuple[str, str]]:
    """Prompt and completion of each role, in the order of turns. ``question``, ``numbers``, ``signs``: of the task."""
    written = demonstrated_text(rng, config, numbers, signs)
    ends = [rng.random() >= config.merge_rate for _ in written[:-1]] + [False] * bool(written)
    parts = joined(written, ends)
    weights = [_demonstrated_weight(rng, config, part) for part in parts]
    show = lambda mark, of: prompt_text(mark, question, ["".join(map("".join, zip(LABELS, of, strict=False)))])
    yield prompt_text(MARKS[REASONER], question), chr(SEPARATOR).join(written)
    yield show(MARKS[SEGMENTER], written), "".join(label for label, end in zip(LABELS, ends, strict=False) if end)
    yield show(MARKS[SCORER], parts), "".join(f"{label}{w}" for label, w in zip(LABELS, weights, strict=False))


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens, length [n], completion, completion_length [n].

    They are whole episodes on training tasks: each role reads what the one before it wrote. Prompts and completions are
    as wide as the longest ones of their role. The settings say which mistakes they have. A demonstrated segmenter
    never names the last sentence. ``context`` is not used.
    """
    rng = np.random.default_rng([seed, 2])
    episodes = [demonstrated_episode(rng, config, *chain.drawn(rng, config.questions)) for _ in range(n)]
    sizes = config.longest + 1, config.sentences + 1, 2 * config.sentences + 1  # of completions
    of_role = zip(ROLES, zip(*episodes, strict=True), prompt_lengths(config), sizes, strict=True)
    return {role: text_samples(pairs, width, size) for role, pairs, width, size in of_role}
