"""Duet: two writers, one topic, a reward on how their strings fit together. A small writing task after MAGRPO, in JAX.

    role      prompt   a good completion (each ends with eos)
    concise   1fad>    fad
    detailed  2fad>    fadbce

A topic is three different letters of a to h. The reward of the pair is that of the TLDR task with letters for words
(`writing.rewards`). It has levels, each counted only if those before it were reached, and is the same for both writers:

    form      0.5 if both strings ended with eos, hold letters a to h alone, c1 2 to 4 and c2 4 to 9 of them
    ratio     length of c2 over that of c1: 1 on [1.6, 3.2], linear on [1.1, 1.6) and (3.2, 5]
    unique    distinct letters of c2 over those of c1: 0.5 from 2 on, linear on [1.3, 2)
    topic     the share of the topic's letters that both strings have

The sum is at most 3.0; with ``bar`` a pair below it earns nothing. Nobody sees what the other writes in the same turn.
``protocol`` sets who sees what, and when:

    together    both at once (MAGRPO; untrained, the naive concatenation)
    sequential  concise first, then detailed reads it               2fad|fad>
    discussion  both at once, then both again, having read both     1fad|own|other>; the second strings count
    solo        one writer, both strings in one completion          Sfad>   fad|fadbce

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[W R] are completions, and ``length`` [W] their numbers of tokens. ``seed`` determines tasks and demonstrations, and
``n`` is the number of samples of a role.
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

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    PAD,
    ArrayEnv,
    Observation,
    Samples,
    all_seats,
    completion_end,
    encoded,
    task_draws,
    text_samples,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.prompt_grammar import BAR, prompt_row, prompt_text
from jaxmarl_llm.envs.splits import draw_task

COMPONENTS = ("form", "ratio", "unique", "topic")
MOST = 3.0  # what the components of a perfect pair add up to
LETTERS, TOPIC = "abcdefgh", 3
PROTOCOLS = ("together", "sequential", "discussion", "solo")
LIMITS = ((2, 4), (4, 9))  # letters of c1 and c2


@dataclass(frozen=True)
class Config:
    """The settings of protocol, reward and demonstrations."""

    seed: int = 0  # of the training tasks
    tasks: int = 1024  # training tasks
    protocol: str = "together"  # together, sequential, discussion or solo
    response: int = 10  # R of one string; a solo writer has twice that and the bar
    bar: float = 0.0  # a pair whose components add up to less earns nothing: the higher, the rarer by chance
    own: float = 0.5  # demonstrators: the probability that a letter is of the topic rather than any

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        one_of(f"{path}.protocol", self.protocol, PROTOCOLS)
        checks.in_range(path, self, LIMITS[1][1] + 1, checks.MOST_TEXT, "response")
        checks.in_range(path, self, 0, MOST, "bar")
        checks.probabilities(path, self, "own")

    @property
    def max_new_tokens(self) -> int:
        """The number of tokens of the longest completion, eos included."""
        return 2 * self.response if self.protocol == "solo" else self.response

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of the protocol."""
        return ("solo",) if self.protocol == "solo" else ("concise", "detailed")

    @property
    def turns(self) -> int:
        """The number of turns of an episode."""
        return 2 if self.protocol in ("sequential", "discussion") else 1


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    heard = {"sequential": 1, "discussion": 2}.get(config.protocol, 0)
    return 1 + TOPIC + heard * config.response + 1


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion, sep."""
    return prompt_length(config) + config.max_new_tokens + 1


@struct.dataclass
class State:
    """An episode so far."""

    topic: Int[Array, "3"]
    strings: Int[Array, "2 R"]  # the strings written last, padded
    size: Int[Array, "2"]  # their lengths without eos
    turn: Int[Array, ""]
    done: Bool[Array, ""]


def score(
    topic: Int[Array, "3"], strings: Int[Array, "2 R"], size: Int[Array, "2"], ended: Bool[Array, "2"]
) -> dict[str, Float[Array, ""]]:
    """Components of a pair of strings.

    Args:
        topic: letters of the topic [3]
        strings: both strings [2 R]
        size: lengths without eos [2]
        ended: whether each string ended with eos [2]
    """
    here = jnp.arange(strings.shape[1]) < size[:, None]
    letters = encoded(LETTERS)
    proper = jnp.all(jnp.isin(strings, letters) | ~here, axis=1)
    low, high = (jnp.array(x) for x in zip(*LIMITS, strict=True))
    form = jnp.all(ended & proper & (low <= size) & (size <= high))
    has = jnp.any((strings[:, :, None] == letters) & here[:, :, None], axis=1)  # [2, letters]
    distinct = has.sum(1)
    ratio = lambda x: x[1] / jnp.maximum(x[0], 1)
    q, u = ratio(size), ratio(distinct)
    fits = jnp.clip(jnp.minimum((q - 1.1) / 0.5, 1.0 - (q - 3.2) / 1.8), 0.0, 1.0)
    reached = form & (q >= 1.1) & (q <= 5.0)
    rich = 0.5 * jnp.clip((u - 1.3) / 0.7, 0.0, 1.0)
    both = jnp.all(jnp.any((strings[:, :, None] == topic) & here[:, :, None], axis=1), axis=0)  # [3]
    values = (0.5 * form, fits * form, rich * reached, both.mean() * (reached & (u >= 1.3)))
    return {name: jnp.float32(v) for name, v in zip(COMPONENTS, values, strict=True)}


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks: keys are not used."""
    roles, turns = config.roles, config.turns
    return ArrayEnv(
        name="duet",
        roles=roles,
        seats=2 if config.protocol in ("together", "discussion") else 1,
        max_turns=turns,
        components=COMPONENTS,
        actors=((0,), (1,)) if config.protocol == "sequential" else (tuple(range(len(roles))),) * turns,
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    strings, size = jnp.full((2, config.response), PAD, jnp.int32), jnp.zeros(2, jnp.int32)
    return State(jnp.asarray(task["topic"], jnp.int32), strings, size, jnp.int32(0), jnp.bool_(False))


def _prompt(config: Config, state: State, seat: int) -> tuple[Int[Array, " P"], Int[Array, ""]]:
    """The prompt of the writer in ``seat``, padded, and its length."""
    late = state.turn > 0
    read = {"discussion": (seat, 1 - seat), "sequential": (0,) * seat}.get(config.protocol, ())
    entries = [(late, [(state.strings[who], state.size[who])]) for who in read]
    mark = "S" if config.protocol == "solo" else "12"[seat]
    return prompt_row(mark, [(state.topic, TOPIC)], entries, prompt_length(config))


def observe(config: Config, state: State) -> Observation:
    """The prompts of the writers that act."""
    seen = all_seats((_prompt(config, state, seat) for seat in range(len(config.roles))), ~state.done)
    if config.protocol == "sequential":
        acting = jnp.minimum(state.turn, 1)[None]
        return jax.tree.map(lambda x: x[acting], seen)
    return seen


def _pair(
    config: Config, state: State, tokens: Int[Array, "W R"], length: Int[Array, " W"]
) -> tuple[Int[Array, "2 R"], Int[Array, "2"], Bool[Array, "2"]]:
    """The two strings after a turn, their lengths without eos, and whether each ended."""
    ended, size = completion_end(tokens, length)
    if config.protocol == "solo":  # cut at the first bar; without one there is no second string
        bar = (tokens[0] == ord(BAR)) & (jnp.arange(tokens.shape[1]) < size[0])
        cut = jnp.where(bar.any(), jnp.argmax(bar), size[0]).astype(jnp.int32)
        strings = jnp.stack([tokens[0], jnp.roll(tokens[0], -(cut + 1))])
        size = jnp.stack([cut, jnp.maximum(size[0] - cut - 1, 0)])
        return strings, size, jnp.stack([bar.any(), ended[0]])
    if config.protocol == "sequential":
        first, own = state.turn == 0, tokens[0, : config.response]
        strings = jnp.stack([jnp.where(first, own, state.strings[0]), own])
        size = jnp.stack([jnp.where(first, size[0], state.size[0]), size[0]])
        return strings, size, jnp.stack([first & ended[0] | ~first, ended[0]])
    return tokens, size, ended


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "W R"], length: Int[Array, " W"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a turn, its rewards, and whether the episode has finished."""
    R = config.response
    strings, size, ended = _pair(config, state, tokens, length)
    kept = jnp.where(jnp.arange(R) < size[:, None], strings[:, :R], PAD)
    if config.protocol == "sequential":  # a first string that did not end keeps no valid length
        size = size.at[0].set(jnp.where((state.turn == 0) & ~ended[0], R, size[0]))
    over = state.turn + 1 >= config.turns
    earned = score(state.topic, strings, size, ended)
    after = State(state.topic, kept, jnp.minimum(size, R), state.turn + 1, over)
    pays = over & (sum(earned.values()) >= config.bar)
    rewards = {name: to_all(config.roles, jnp.where(pays, value, 0.0)) for name, value in earned.items()}
    return unless_finished(state, after, rewards)


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``): topic [n 3].

    ``held_out``: the side of the split. The letters make a topic itself, in whichever order.
    """
    rng, count = task_draws(config, seed, n, 1, held_out)
    letters = np.array([*LETTERS.encode()], np.int32)
    one = lambda: draw_task(lambda: rng.permutation(letters)[:TOPIC], lambda t: np.sort(t).tobytes(), held_out)
    return {"topic": np.stack([one() for _ in range(count)])}


def _string(rng: np.random.Generator, config: Config, topic: str, second: bool) -> str:
    """A demonstrator's string of random length: each letter is of the ``topic`` or any.

    second: whether it is the detailed writer's string
    """
    size = rng.integers(2, 9) if second else rng.integers(1, 6)
    pick = lambda options: options[rng.integers(len(options))]
    return "".join(pick(topic if rng.random() < config.own else LETTERS) for _ in range(size))


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Samples of writers who know letters and topics, and nothing of each other.

    Returns role -> tokens, length, completion and completion_length. Lengths are 1 to 5 and 2 to 8 letters, drawn
    independently. The quality of the writing is the same under all protocols. ``context`` is not used.
    """
    topics = [bytes(row.tolist()).decode() for row in make_tasks(config, seed + 1, n)["topic"]]
    out = {}
    for seat, role in enumerate(config.roles):
        rng = np.random.default_rng([seed, 2, seat])
        pairs = (_demonstration(rng, config, topic, seat) for topic in topics)
        out[role] = text_samples(pairs, prompt_length(config), config.max_new_tokens)
    return out


def _demonstration(rng: np.random.Generator, config: Config, topic: str, seat: int) -> tuple[str, str]:
    """A prompt and completion of the writer in ``seat``."""
    strings = [_string(rng, config, topic, second) for second in (False, True)]
    late = config.protocol == "discussion" and rng.random() < 0.5
    if config.protocol == "solo":
        return prompt_text("S", topic), BAR.join(strings)
    mark = str(1 + seat)
    if config.protocol == "sequential" and seat == 1:
        return prompt_text(mark, topic, [strings[0]]), strings[1]
    if late:
        asked = prompt_text(mark, topic, [strings[seat], strings[1 - seat]])
        return asked, _string(rng, config, topic, bool(seat))
    return prompt_text(mark, topic), strings[seat]
