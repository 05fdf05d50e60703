"""The protocol `remember` of facts: a team reads a stream of statements, keeps a memory, and answers from it.

    extractor  Ea1fbdhc2xd3e>         a1fc2xd3e   statements of the prompt that are worth keeping
    extractor  Egkea1ce4ac5d>         a1ce4a
    profiler   Pa1fc2xd3ea1ce4a>      c2xd3ea1c   the entries of the profile, quoted from the store
    retriever  Fc2xd3ea1c|a12>        a1cc2x      the entries that the question needs

`facts.stream` says what a stream is: eight statements, which are current facts, outdated facts and chatter. They are
read in ``pieces``, the same number at each turn. An episode has ``pieces`` + 2 turns: 3, 4 or 6. What the extractor
kept of all pieces is the store, in the order of the stream. The extractor does not read the store. The profiler reads
the store, and the retriever reads the profile and the question.

A completion is a sequence of quotes without separators, and ends with eos. A quote is three characters. It counts where
it is a statement that the prompt shows, and once. The first eight quotes are read. A completion without eos quotes
nothing. The answer is read off by a
rule: it walks the question over the retriever's quotes, in their order.

Recall and overlap compare the quotes of a completion with a gold set. There are g gold statements, of which h are
quoted, and n quotes of any kind. Recall is h / g. Overlap is the intersection over the union, h / (n + g - h). A repeat
counts in n, and so do a part that is no statement of the prompt and the parts of a completion without eos. The gold
sets are

    extractor   all facts of the stream, current and outdated; n counts the quotes of all pieces
    retriever   the facts of the gold path, whether the profile has them or not

The extractor may keep outdated facts, because a later piece may not replace them. The profile is right where it is the
store's facts without those that a later fact of the store replaces, each once, in any order. So an empty store has an
empty profile.

Rewards. A role's own is what only that role is paid.

    answer           1 if the answer is the gold one, to all roles at the last turn
    kept_recall      its own: recall of the store, at the turn of the last piece (extractor)
    kept_overlap     its own: overlap of the store, at the same turn (extractor)
    profile          its own: 1 for a right profile (profiler)
    found_recall     its own: recall of the quotes (retriever)
    found_overlap    its own: overlap of the quotes (retriever)
    format           its own: 1 for a completion in form: different statements of the prompt, and eos
    turns            its own: 1

Shared arguments: ``config`` has the settings of tasks, and ``settings`` those of this protocol. ``key`` is a PRNG key,
and ``state`` the state of an episode. ``tokens`` [1 R] are completions, and ``length`` [1] their numbers of tokens.
``seed`` determines what is drawn. ``n`` is the number of samples of a role, and ``held_out`` the side of the split.
``task`` is a row of `make_tasks`. M is the number of statements of a stream.
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

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    PAD,
    ArrayEnv,
    Observation,
    Samples,
    completion_end,
    encoded,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.facts import exercises, stream, tasks
from jaxmarl_llm.envs.facts.protocol import Protocol
from jaxmarl_llm.envs.facts.stream import STATEMENTS
from jaxmarl_llm.envs.facts.tasks import DIGITS, HOPS, QUESTION, Task, TaskConfig
from jaxmarl_llm.envs.prompt_grammar import BAR, END, prompt_row

ROLES = ("extractor", "profiler", "retriever")
EXTRACTOR, PROFILER, RETRIEVER = range(3)
COMPONENTS = (
    "answer", "kept_recall", "kept_overlap", "profile", "found_recall", "found_overlap", "format", "turns",
)  # fmt: skip
MARKS = "EPF"
PIECES = (1, 2, 4)
SIZE = 3  # characters of a statement
RESPONSE = SIZE * STATEMENTS + 1
NONE = -1  # no statement


@dataclass(frozen=True)
class Settings:
    """The settings of streams and demonstrations."""

    pieces: int = 2  # turns in which the stream is read
    outdated: int = 2  # statements that a later one replaces
    chatter: int = 2  # statements without a fact
    # Probabilities of mistakes in demonstrations.
    miss_rate: float = 0.2  # of each fact, which the extractor does not keep
    chatter_rate: float = 0.3  # of each statement without a fact, which the extractor keeps
    outdated_rate: float = 0.3  # of each replaced fact, which the profiler keeps
    hop_error_rate: float = 0.4  # the retriever does not quote the second fact of the path
    extra_rate: float = 0.3  # the retriever quotes one entry more

    def check(self, path: str) -> None:
        one_of(f"{path}.pieces", self.pieces, PIECES)
        checks.in_range(path, self, 0, STATEMENTS // 2, "outdated")
        # At least the facts of a path are current, and at least one for each outdated fact.
        checks.in_range(path, self, 0, STATEMENTS - self.outdated - max(self.outdated, HOPS), "chatter")
        checks.probabilities(path, self, "miss_rate", "chatter_rate", "outdated_rate", "hop_error_rate", "extra_rate")


def prompt_lengths(settings: Settings) -> tuple[int, int, int]:
    """The numbers of tokens of the longest prompts of the roles."""
    store = 1 + SIZE * STATEMENTS + 1
    return 1 + SIZE * STATEMENTS // settings.pieces + 1, store, store + 1 + QUESTION


def prompt_length(settings: Settings) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return max(prompt_lengths(settings))


@struct.dataclass
class State:
    """An episode so far. Store and profile say of each statement of the stream whether it is in them."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    store: Bool[Array, " M"]
    quotes: Int[Array, ""]  # of the extractor so far, of any kind
    profile: Bool[Array, " M"]
    done: Bool[Array, ""]


def make(config: TaskConfig, settings: Settings) -> ArrayEnv:
    """The environment of the settings."""
    return ArrayEnv(
        name="facts",
        roles=ROLES,
        seats=1,
        max_turns=settings.pieces + 2,
        components=COMPONENTS,
        actors=((EXTRACTOR,),) * settings.pieces + ((PROFILER,), (RETRIEVER,)),
        reset=partial(reset, settings),
        observe=partial(observe, settings),
        step=partial(step, settings),
    )


def reset(settings: Settings, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``."""
    none, zero = jnp.zeros(STATEMENTS, bool), jnp.int32(0)
    return State(jax.tree.map(jnp.int32, dict(task)), zero, none, zero, none, jnp.bool_(False))


def acting(settings: Settings, state: State) -> Int[Array, ""]:
    """The role that acts."""
    return jnp.clip(state.turn - settings.pieces + 1, EXTRACTOR, RETRIEVER)


def shown(settings: Settings, state: State) -> Bool[Array, " M"]:
    """The statements that the prompt of the role that acts shows."""
    piece = jnp.arange(STATEMENTS) // (STATEMENTS // settings.pieces) == state.turn
    return jnp.stack([piece, state.store, state.profile])[acting(settings, state)]


def observe(settings: Settings, state: State) -> Observation:
    """The prompt of the role that acts."""
    role, task = acting(settings, state), state.task
    read = [(text, SIZE * there) for text, there in zip(task["stream"], shown(settings, state), strict=True)]
    asked = (role == RETRIEVER, [(task["question"], task["question_length"])])
    tokens, length = prompt_row(encoded(MARKS)[role], read, [asked], prompt_length(settings))
    return Observation(role[None], tokens[None], length[None], ~state.done[None])


class Quotes(NamedTuple):
    """The quotes of a completion.

    Attributes:
        number: Quotes of any kind; a part of less than three characters at the end is one.
        places: The statements of the first M quotes, as places; NONE for a quote that is no statement of the prompt.
        quoted: Whether each statement is quoted.
        proper: Whether the completion is in form.
    """

    number: Int[Array, ""]
    places: Int[Array, " M"]
    quoted: Bool[Array, " M"]
    proper: Bool[Array, ""]


def read_quotes(
    statements: Int[Array, "M 3"], shown: Bool[Array, " M"], tokens: Int[Array, " R"], length: Int[Array, ""]
) -> Quotes:
    """The quotes of a completion.

    Args:
        statements: The stream.
        shown: The statements that may be quoted.
        tokens: The completion.
        length: Its number of tokens.
    """
    ended, size = completion_end(tokens, length)
    room = SIZE * STATEMENTS
    parts = jnp.pad(tokens[:room], (0, max(0, room - len(tokens))), constant_values=PAD).reshape(STATEMENTS, SIZE)
    whole = ended & (SIZE * (jnp.arange(STATEMENTS) + 1) <= size)
    same = (parts[:, None] == statements).all(-1) & whole[:, None] & shown
    places = jnp.where(same.any(1), jnp.argmax(same, axis=1), NONE)
    number, quoted = -(-size // SIZE), same.any(0)
    return Quotes(number, places, quoted, ended & (quoted.sum() == number))


def overlaps(
    gold: Bool[Array, " M"], quoted: Bool[Array, " M"], number: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Recall, and intersection over union.

    Args:
        gold: The gold statements, at least one.
        quoted: The statements that are quoted.
        number: Quotes of any kind.
    """
    hits, wanted = (gold & quoted).sum(), gold.sum()
    return hits / wanted, hits / (number + wanted - hits)


def latest(task: Mapping[str, Array], store: Bool[Array, " M"]) -> Bool[Array, " M"]:
    """The right profile of a ``store``: its facts without those that a later fact of the store replaces."""
    place, own = jnp.arange(STATEMENTS), store & facts_of(task)
    about = (task["stream"][:, None, :2] == task["stream"][:, :2]).all(-1)  # statement i and j
    return own & ~(about & own & (place > place[:, None])).any(1)


def facts_of(task: Mapping[str, Array]) -> Bool[Array, " M"]:
    """Which statements of the stream are facts, current or outdated."""
    return jnp.isin(task["stream"][:, 1], encoded(DIGITS))


def path_of(task: Mapping[str, Array]) -> Bool[Array, " M"]:
    """Which statements of the stream are facts of the gold path."""
    there, path = task["path"] >= 0, task["facts"][task["path"]]
    return ((task["stream"][:, None] == path).all(-1) & there).any(1)


def read_off(task: Mapping[str, Array], places: Int[Array, " M"]) -> Int[Array, ""]:
    """The answer that follows from a retriever's quotes; NONE where a fact is missing. See `stream.walk`.

    Args:
        task: See above.
        places: The statements of the quotes, as places; NONE for a quote that counts for nothing.
    """
    entity, facts = task["question"][0], task["stream"][places]
    for hop in range(1, HOPS + 1):
        leads = (places >= 0) & (facts[:, 0] == entity) & (facts[:, 1] == task["question"][hop])
        reached = jnp.where(leads.any(), facts[jnp.argmax(leads), 2], NONE)
        entity = jnp.where(hop < task["question_length"], reached, entity)
    return entity


def step(
    settings: Settings, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    role, task = acting(settings, state), state.task
    said = read_quotes(task["stream"], shown(settings, state), tokens[0], length[0])
    extracts, profiles, retrieves = (role == each for each in range(len(ROLES)))
    after = State(
        task=task,
        turn=state.turn + 1,
        store=state.store | (extracts & said.quoted),
        quotes=state.quotes + extracts * said.number,
        profile=state.profile | (profiles & said.quoted),
        done=retrieves,
    )
    own = jnp.arange(len(ROLES)) == role
    kept = overlaps(facts_of(task), after.store, after.quotes)
    found = overlaps(path_of(task), said.quoted, said.number)
    right = said.proper & (said.quoted == latest(task, state.store)).all()
    last = extracts & (state.turn == settings.pieces - 1)
    pay = lambda when, value: own * jnp.where(when, value, 0.0)
    rewards = {
        "answer": to_all(ROLES, retrieves & (read_off(task, said.places) == task["answer"])),
        "kept_recall": pay(last, kept[0]),
        "kept_overlap": pay(last, kept[1]),
        "profile": pay(profiles, 1.0 * right),
        "found_recall": pay(retrieves, found[0]),
        "found_overlap": pay(retrieves, found[1]),
        "format": 1.0 * (own & said.proper),
        "turns": 1.0 * own,
    }
    return unless_finished(state, after, rewards)


def make_tasks(
    config: TaskConfig, settings: Settings, seed: int | None = None, n: int | None = None, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks drawn from ``seed``: the columns of `tasks.rows`, and the stream [n M 3]."""
    rows, rng = tasks.rows(config, seed, n, held_out)
    rows["stream"] = np.zeros((len(rows["answer"]), STATEMENTS, SIZE), np.int32)
    text = lambda ids: bytes(ids.tolist()).decode()
    for i, (facts, path) in enumerate(zip(rows["facts"], rows["path"], strict=True)):
        task = Task(tuple(map(text, facts)), "", tuple(text(facts[place]) for place in path if place >= 0))
        said = stream.draw(rng, task, settings.outdated, settings.chatter)
        rows["stream"][i] = [list(statement.encode()) for statement in said]
    return rows


def demonstrations(config: TaskConfig, settings: Settings, seed: int, n: int) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens, length [n], completion, completion_length [n].

    Prompts and completions are as wide as the longest ones of their role, and of exercises. The three samples of an
    index are of one episode on a training task, and each role reads what the one before it wrote. The extractor's
    sample is one piece of the stream, drawn at random. The share ``config.copying`` of the samples of a role are
    exercises in place of its own.
    """
    rng = np.random.default_rng([seed, 2])
    pairs: list[list[tuple[str, str]]] = []
    for _ in range(n):
        task = tasks.drawn(rng, config)
        said = stream.draw(rng, task, settings.outdated, settings.chatter)
        pieces = np.array(said).reshape(settings.pieces, -1).tolist()
        stores = [stream.kept(rng, settings, piece) for piece in pieces]
        store = [statement for part in stores for statement in part]
        entries = stream.profile(rng, settings, store)
        found = stream.retrieved(rng, settings, task, entries)
        at = rng.integers(settings.pieces)
        shown = "".join(pieces[at]), "".join(store), "".join(entries) + BAR + task.question
        said_by = "".join(stores[at]), "".join(entries), "".join(found)
        whole = [(mark + read + END, text) for mark, read, text in zip(MARKS, shown, said_by, strict=True)]
        pairs.append(exercises.with_exercises(rng, config.copying, task, whole))
    sizes = SIZE * STATEMENTS // settings.pieces + 1, RESPONSE, SIZE * (HOPS + 1) + 1
    return exercises.as_samples(config.copying, ROLES, pairs, prompt_lengths(settings), sizes)


PROTOCOL = Protocol(make, make_tasks, demonstrations, prompt_length, RESPONSE)
