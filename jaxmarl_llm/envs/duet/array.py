"""Duet: two writers, one topic, a reward on how their strings fit together. MAGRPO's writing task in small, in JAX.

    role      prompt   a good completion (each ends with eos)
    concise   1fad>    fad
    detailed  2fad>    fadbce

A topic is three different letters of a to h. The reward of the pair is that of the TLDR task with letters for words
(`writing_rewards`): levels, each counted only if those before it were reached, the same for both writers:

    form      0.5 if both strings ended with eos, hold letters a to h alone, c1 2 to 4 and c2 4 to 9 of them
    ratio     length of c2 over that of c1: 1 on [1.6, 3.2], linear on [1.1, 1.6) and (3.2, 5]
    unique    distinct letters of c2 over those of c1: 0.5 from 2 on, linear on [1.3, 2)
    topic     the share of the topic's letters that both strings have

At most 3.0; with ``bar`` a pair below it earns nothing. Nobody sees what the other writes in the same turn;
``protocol`` says who sees what and when:

    together    both at once (MAGRPO; untrained, the naive concatenation)
    sequential  concise first, then detailed reads it               2fad|fad>
    discussion  both at once, then both again, having read both     1fad|own|other>; the second strings count
    solo        one writer, both strings in one completion          Sfad>   fad|fadbce
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs.arrays import encoded, join, samples
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.tokenizer import ByteTokenizer
from jaxmarl_llm.types import ArrayEnv, Observation

PAD, EOS = ByteTokenizer.PAD, ByteTokenizer.EOS
COMPONENTS = ("form", "ratio", "unique", "topic")
MOST = 3.0  # what the components of a perfect pair add up to
LETTERS, TOPIC = "abcdefgh", 3
PROTOCOLS = ("together", "sequential", "discussion", "solo")
LIMITS = ((2, 4), (4, 9))  # letters of c1 and c2
BAR = ord("|")


@dataclass(frozen=True)
class Config:
    seed: int = 0  # of the training tasks
    tasks: int = 1024
    protocol: str = "together"
    response: int = 10  # R of one string; a solo writer has twice that and the bar
    bar: float = 0.0  # a pair whose components add up to less earns nothing: the rarer, the harder to find by chance
    own: float = 0.5  # demonstrators: the chance that a letter is of the topic rather than any

    def __post_init__(self):
        one_of("duet: protocol", self.protocol, PROTOCOLS)
        if self.response <= LIMITS[1][1]:
            raise ConfigError(f"duet: response: expected at least {LIMITS[1][1] + 1} tokens, got {self.response}")
        if not 0 <= self.own <= 1 or self.tasks < 1 or not 0 <= self.bar <= MOST:
            raise ConfigError(f"duet: expected own in [0, 1], tasks >= 1 and bar in [0, {MOST:g}]")

    @property
    def max_new(self) -> int:
        return 2 * self.response if self.protocol == "solo" else self.response


def prompt_length(config: Config) -> int:
    heard = {"sequential": 1, "discussion": 2}.get(config.protocol, 0)
    return 1 + TOPIC + heard * config.response + 1


def entry_length(config: Config) -> int:
    """The longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + config.max_new + 1


@struct.dataclass
class State:
    topic: Int[Array, "3"]
    said: Int[Array, "2 R"]  # the strings written last, padded
    size: Int[Array, "2"]  # their lengths without eos
    turn: Int[Array, ""]
    done: Bool[Array, ""]


def score(
    topic: Int[Array, "3"], said: Int[Array, "2 R"], size: Int[Array, "2"], ended: Bool[Array, "2"]
) -> dict[str, Float[Array, ""]]:
    """The components of a pair of strings; ``size`` without eos."""
    here = jnp.arange(said.shape[1]) < size[:, None]
    letters = encoded(LETTERS)
    proper = jnp.all(jnp.isin(said, letters) | ~here, axis=1)
    low, high = (jnp.array(x) for x in zip(*LIMITS, strict=True))
    form = jnp.all(ended & proper & (low <= size) & (size <= high))
    has = jnp.any((said[:, :, None] == letters) & here[:, :, None], axis=1)  # [2, letters]
    distinct = has.sum(1)
    ratio = lambda x: x[1] / jnp.maximum(x[0], 1)
    q, u = ratio(size), ratio(distinct)
    fits = jnp.clip(jnp.minimum((q - 1.1) / 0.5, 1.0 - (q - 3.2) / 1.8), 0.0, 1.0)
    reached = form & (q >= 1.1) & (q <= 5.0)
    rich = 0.5 * jnp.clip((u - 1.3) / 0.7, 0.0, 1.0)
    both = jnp.all(jnp.any((said[:, :, None] == topic) & here[:, :, None], axis=1), axis=0)  # [3]
    values = (0.5 * form, fits * form, rich * reached, both.mean() * (reached & (u >= 1.3)))
    return {name: jnp.float32(v) for name, v in zip(COMPONENTS, values, strict=True)}


def make(config: Config) -> ArrayEnv:
    """Nothing is random but the tasks: keys are not used."""
    protocol, R, P = config.protocol, config.response, prompt_length(config)
    solo, pair = protocol == "solo", protocol in ("together", "discussion")
    roles = ("solo",) if solo else ("concise", "detailed")
    seats, turns = (2 if pair else 1), (2 if protocol in ("sequential", "discussion") else 1)
    actors = (tuple(range(len(roles))),) * turns if protocol != "sequential" else ((0,), (1,))

    def reset(key: jax.Array, task: dict) -> State:
        said, size = jnp.full((2, R), PAD, jnp.int32), jnp.zeros(2, jnp.int32)
        return State(jnp.asarray(task["topic"], jnp.int32), said, size, jnp.int32(0), jnp.bool_(False))

    def shown(state: State, seat: int) -> tuple[jax.Array, jax.Array]:
        late = (state.turn > 0).astype(jnp.int32)
        mark = "S" if solo else "12"[seat]
        heard: list = []
        if protocol == "discussion":
            heard = [(encoded("|"), late), (state.said[seat], state.size[seat])]
            heard += [(encoded("|"), late), (state.said[1 - seat], state.size[1 - seat])]
        elif protocol == "sequential" and seat == 1:
            heard = [(encoded("|"), late), (state.said[0], state.size[0])]
        return join([(encoded(mark), 1), (state.topic, TOPIC), *heard, (encoded(">"), 1)], P)

    def observe(state: State) -> Observation:
        rows = [shown(state, seat) for seat in range(len(roles))]
        tokens, length = jnp.stack([r[0] for r in rows]), jnp.stack([r[1] for r in rows])
        role = jnp.arange(len(roles), dtype=jnp.int32)
        if protocol == "sequential":
            pick = jnp.minimum(state.turn, 1)[None]
            role, tokens, length = role[pick], tokens[pick], length[pick]
        return Observation(role, tokens, length, jnp.full(seats, ~state.done))

    def step(key: jax.Array, state: State, tokens: Int[Array, "W R"], length: Int[Array, "W"]):
        here = jnp.arange(tokens.shape[1])
        stops = (tokens == EOS) & (here < length[:, None])
        ended = stops.any(1)
        size = jnp.where(ended, jnp.argmax(stops, axis=1), length).astype(jnp.int32)
        if solo:  # cut at the first bar; without one there is no second string
            bar = (tokens[0] == BAR) & (here < size[0])
            cut = jnp.where(bar.any(), jnp.argmax(bar), size[0]).astype(jnp.int32)
            second = jnp.roll(tokens[0], -(cut + 1))
            said, size = jnp.stack([tokens[0], second]), jnp.stack([cut, jnp.maximum(size[0] - cut - 1, 0)])
            ended = jnp.stack([bar.any(), ended[0]])
        elif protocol == "sequential":
            first = state.turn == 0
            ended = jnp.stack([first & ended[0] | ~first, ended[0]])
            said = jnp.stack([jnp.where(first, tokens[0, :R], state.said[0]), tokens[0, :R]])
            size = jnp.stack([jnp.where(first, size[0], state.size[0]), size[0]])
        else:
            said = tokens
        kept = jnp.where(jnp.arange(R) < size[:, None], said[:, :R], PAD)
        if protocol == "sequential":  # a first string that did not end keeps no valid length
            size = size.at[0].set(jnp.where((state.turn == 0) & ~ended[0], R, size[0]))
        over = state.turn + 1 >= turns
        earned = score(state.topic, said, size, ended)
        after = State(state.topic, kept, jnp.minimum(size, R), state.turn + 1, state.done | over)
        after = jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, after)
        pays = over & ~state.done & (sum(earned.values()) >= config.bar)
        return after, {c: jnp.full(len(roles), jnp.where(pays, v, 0.0)) for c, v in earned.items()}, after.done

    return ArrayEnv("duet", roles, seats, turns, COMPONENTS, actors, reset, observe, step)


def make_tasks(config: Config, seed: int | None = None, n: int | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([config.seed if seed is None else seed, 1])
    letters = np.array([*LETTERS.encode()], np.int32)
    return {"topic": np.stack([rng.permutation(letters)[:TOPIC] for _ in range(config.tasks if n is None else n)])}


def _write(rng: np.random.Generator, config: Config, topic: str, second: bool) -> str:
    """What a demonstrator writes: a string of a random length, its letters of the topic or any."""
    size = rng.integers(2, 9) if second else rng.integers(1, 6)
    pick = lambda options: options[rng.integers(len(options))]
    return "".join(pick(topic if rng.random() < config.own else LETTERS) for _ in range(size))


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Writers who know letters and topics, and nothing of each other: role -> tokens, length, completion, its length.

    Lengths are 1 to 5 and 2 to 8 letters, drawn apart. All protocols are shown writing of the same quality.
    """
    out, tasks = {}, make_tasks(config, seed + 1, n)
    topics = [bytes(row.tolist()).decode() for row in tasks["topic"]]
    roles = ("solo",) if config.protocol == "solo" else ("concise", "detailed")
    for seat, role in enumerate(roles):
        rng, prompts, completions = np.random.default_rng([seed, 2, seat]), [], []
        for topic in topics:
            said = [_write(rng, config, topic, second) for second in (False, True)]
            late = config.protocol == "discussion" and rng.random() < 0.5
            if config.protocol == "solo":
                asked, reply = f"S{topic}>", "|".join(said)
            elif config.protocol == "sequential" and seat == 1:
                asked, reply = f"2{topic}|{said[0]}>", said[1]
            elif late:
                asked = f"{1 + seat}{topic}|{said[seat]}|{said[1 - seat]}>"
                reply = _write(rng, config, topic, bool(seat))
            else:
                asked, reply = f"{1 + seat}{topic}>", said[seat]
            prompts.append([*asked.encode()])
            completions.append([*reply.encode(), EOS])
        out[role] = samples(prompts, completions, prompt_length(config), config.max_new)
    return out
