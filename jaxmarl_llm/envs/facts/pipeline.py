"""The protocol `pipeline` of facts: a rewriter asks, a selector keeps documents, a generator answers. Each acts once.

    rewriter   Qa12>                     a1,*2     queries, see `facts.search`
    selector   Sd3ea1cc2xf1d|a12>        a1c,c2x   documents that it keeps, as quotes in any order
    generator  Ga1cc2x|a12>              x         the answer

A completion ends with eos. The documents are facts that the queries return, and ``distractors`` others, in the order of
the task. At most ``documents`` - ``distractors`` returned facts are shown, and queries run in their order. Which others
are shown is drawn for each task. Queries that return nothing lead to no documents. The generator reads the documents
that the selector kept, in the order of its quotes, ``kept`` of them at most.

An answer is compared character by character, as F1 compares words. The gold answer is one character. So F1 is 2 / (1 +
number of characters) where the answer contains it, and 0 elsewhere. The answer x earns 1, and the answer xd 2/3.

Out of form are

    rewriter   more than four queries, more than 11 characters, or a malformed query. The first four queries still run
    selector   a part between commas that is no document, or a repeated quote. The quotes that are documents are kept
               once
    generator  more than ``answer_length`` characters

and every completion without eos. A selector without eos keeps nothing. A selector that writes nothing, and a generator
that answers nothing, are in form.

Rewards. A role's own is what only the role that acts is paid.

    f1         of the answer, to all roles at the last turn
    em         1 if the answer is the gold one alone, to all roles at the last turn
    penalty    its own: the role's penalty for a completion out of form
    evidence   its own: share of the gold path's facts among the documents (rewriter) or the kept ones (selector)
    format     its own: 1 for a completion in form
    turns      its own: 1

Shared arguments: ``config`` has the settings of tasks, and ``settings`` those of this protocol. ``key`` is a PRNG key,
and ``state`` the state of an episode. ``tokens`` [1 R] are completions, and ``length`` [1] their numbers of tokens.
``seed`` and ``rng`` (NumPy) determine what is drawn. ``n`` is the number of samples of a role, and ``held_out`` the
side of the split. F is the number of facts, D that of documents, and K that of kept ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    ArrayEnv,
    Observation,
    Samples,
    completion_end,
    encoded,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.facts import exercises, tasks
from jaxmarl_llm.envs.facts.protocol import Protocol
from jaxmarl_llm.envs.facts.roles import COMPONENTS, PENALTIES, QUERIES, ROLES, check_penalties
from jaxmarl_llm.envs.facts.search import COMMA, last_entity, look_up, read_queries, search, split
from jaxmarl_llm.envs.facts.tasks import FACTS, QUESTION, Task, TaskConfig
from jaxmarl_llm.envs.prompt_grammar import BAR, END, Piece, prompt_row

REWRITER, SELECTOR, GENERATOR = range(3)
MARKS = "QSG"
LONGEST = 3 * QUERIES - 1  # characters of four queries
RESPONSE = LONGEST + 1
QUOTES = (LONGEST + 1) // 4  # that a completion of this length may have
NONE = -1  # no document


@dataclass(frozen=True)
class Settings:
    """The settings of documents, penalties and demonstrations."""

    documents: int = 6  # facts that the selector reads, at most
    distractors: int = 2  # of them that no query returned
    kept: int = 2  # facts that the generator reads, at most
    answer_length: int = 2  # characters of an answer that is not too long
    penalties: tuple[float, float, float] = PENALTIES  # of each role, for a completion out of form
    # Probabilities of mistakes in demonstrations.
    hop_error_rate: float = 0.4  # the second query of a question with two hops is missing
    broad_rate: float = 0.2  # the first query is the entity alone
    flood_rate: float = 0.1  # there are five queries
    selection_error_rate: float = 0.2  # quotes are drawn at random
    repeat_rate: float = 0.05  # a quote is repeated
    answer_error_rate: float = 0.3  # the answer is another entity of the kept facts
    long_rate: float = 0.05  # the answer has one character too many

    def check(self, path: str) -> None:
        checks.in_range(path, self, 1, FACTS, "documents")
        checks.in_range(path, self, 0, self.documents - 1, "distractors")
        checks.in_range(path, self, 1, min(QUOTES, self.documents), "kept")
        checks.in_range(path, self, 1, LONGEST - 1, "answer_length")
        check_penalties(path, self)
        checks.probabilities(path, self, "hop_error_rate", "broad_rate", "flood_rate", "selection_error_rate")
        checks.probabilities(path, self, "repeat_rate", "answer_error_rate", "long_rate")


def prompt_lengths(settings: Settings) -> tuple[int, int, int]:
    """The number of tokens of the longest prompt of each role."""
    asked = 1 + QUESTION + 1
    return asked, asked + 3 * settings.documents + 1, asked + 3 * settings.kept + 1


def prompt_length(settings: Settings) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return max(prompt_lengths(settings))


@struct.dataclass
class State:
    """An episode so far. Documents and kept facts are places in the list of facts, or NONE."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    documents: Int[Array, " D"]
    kept: Int[Array, " K"]
    done: Bool[Array, ""]


def make(config: TaskConfig, settings: Settings) -> ArrayEnv:
    """The environment of the settings."""
    return ArrayEnv(
        name="facts",
        roles=ROLES,
        seats=1,
        max_turns=len(ROLES),
        components=COMPONENTS,
        actors=((REWRITER,), (SELECTOR,), (GENERATOR,)),
        reset=partial(reset, settings),
        observe=partial(observe, settings),
        step=partial(step, settings),
    )


def reset(settings: Settings, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    none = lambda size: jnp.full(size, NONE, jnp.int32)
    row = jax.tree.map(jnp.int32, dict(task))
    return State(row, jnp.int32(0), none(settings.documents), none(settings.kept), jnp.bool_(False))


def observe(settings: Settings, state: State) -> Observation:
    """The prompt of the role that acts."""
    role = jnp.minimum(state.turn, GENERATOR)
    asked: Piece = (state.task["question"], state.task["question_length"])
    selects, answers = role == SELECTOR, role == GENERATOR
    read: list[Piece] = [(asked[0], asked[1] * (role == REWRITER))]
    for shown, places in ((selects, state.documents), (answers, state.kept)):
        read += [(state.task["facts"][place], 3 * (shown & (place >= 0))) for place in places]
    tokens, length = prompt_row(encoded(MARKS)[role], read, [(selects | answers, [asked])], prompt_length(settings))
    return Observation(role[None], tokens[None], length[None], ~state.done[None])


class Move(NamedTuple):
    """Result of a role's completion.

    Attributes:
        places: Facts that the next role reads, as places; NONE behind them.
        proper: Whether the completion is in form.
    """

    places: Int[Array, " S"]
    proper: Bool[Array, ""]


def step(
    settings: Settings, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    said, (ended, size) = tokens[0], completion_end(tokens[0], length[0])
    role, task = jnp.minimum(state.turn, GENERATOR), state.task
    asked = ask(settings, task, said, ended, size)
    chosen = select(settings, task, state.documents, said, ended, size)
    f1, em = score(task["answer"], said, ended, size)
    brief = ended & (size <= settings.answer_length)
    after = State(
        task=task,
        turn=state.turn + 1,
        documents=jnp.where(role == REWRITER, asked.places, state.documents),
        kept=jnp.where(role == SELECTOR, chosen.places, state.kept),
        done=role == GENERATOR,
    )
    proper = jnp.stack([asked.proper, chosen.proper, brief])[role]
    found = [evidence(task["path"], after.documents), evidence(task["path"], after.kept), jnp.zeros(())]
    own = jnp.arange(len(ROLES)) == role
    rewards = {
        "f1": to_all(ROLES, jnp.where(after.done, f1, 0.0)),
        "em": to_all(ROLES, 1.0 * (after.done & em)),
        "penalty": jnp.where(own & ~proper, -jnp.array(settings.penalties), 0.0),
        "evidence": own * jnp.stack(found),
        "format": 1.0 * (own & proper),
        "turns": 1.0 * own,
    }
    return unless_finished(state, after, rewards)


def ask(settings: Settings, task: Mapping[str, Array], tokens: Array, ended: Array, size: Array) -> Move:
    """The documents of a rewriter's completion.

    Args:
        settings: Numbers of documents and distractors.
        task: A row of `make_tasks`.
        tokens: The completion [R].
        ended: Whether it has an eos [].
        size: Its number of tokens without eos [].
    """
    queries = read_queries(tokens, size, QUERIES)
    returned, shown, last = jnp.zeros(FACTS, bool), jnp.zeros(FACTS, bool), jnp.int32(-1)
    for i in range(QUERIES):
        results = queries.proper[i] & search(task["facts"], queries.text[i], queries.size[i], last)
        last, new = last_entity(task["facts"], results), results & ~returned
        shown |= new & (returned.sum() + jnp.cumsum(new) <= settings.documents - settings.distractors)
        returned |= new
    other = ~returned[task["noise"]] & returned.any()
    noise = jnp.where(other & (jnp.cumsum(other) <= settings.distractors), task["noise"], FACTS)
    shown = shown.at[noise].set(True, mode="drop")
    proper = ended & (size <= LONGEST) & (queries.number <= QUERIES) & queries.clean
    return Move(jnp.nonzero(shown, size=settings.documents, fill_value=NONE)[0].astype(jnp.int32), proper)


def select(
    settings: Settings, task: Mapping[str, Array], documents: Int[Array, " D"], tokens: Array, ended: Array, size: Array
) -> Move:
    """The facts that a selector's completion keeps.

    Args:
        settings: The number of facts that are kept at most.
        task: A row of `make_tasks`.
        documents: Places of the documents.
        tokens: The completion [R].
        ended: Whether it has an eos [].
        size: Its number of tokens without eos [].
    """
    quotes, here = split(tokens, size, len(documents), 3), jnp.arange(len(documents))
    same = (quotes.text[:, None] == task["facts"][documents]).all(-1) & (documents >= 0)
    known = ended & (quotes.size == 3) & same.any(1)
    place = jnp.where(known, documents[jnp.argmax(same, axis=1)], NONE)
    first = known & ~((place == place[:, None]) & (here < here[:, None])).any(1)
    at = jnp.where(first, jnp.cumsum(first) - 1, settings.kept)
    places = jnp.full(settings.kept, NONE, jnp.int32).at[at].set(place, mode="drop")
    all_first = (quotes.number <= len(here)) & (first | (here >= quotes.number)).all()
    return Move(places, ended & ((size == 0) | all_first))


def score(answer: Array, tokens: Array, ended: Array, size: Array) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """F1 of a generator's completion, and whether the completion is exactly the gold answer.

    Args:
        answer: The gold answer, one byte.
        tokens: The completion [R].
        ended: Whether it has an eos [].
        size: Its number of tokens without eos [].
    """
    right = ((tokens == answer) & (jnp.arange(len(tokens)) < size)).any()
    return 2.0 * right / (1 + size), ended & (size == 1) & right


def evidence(path: Int[Array, "2"], places: Int[Array, " S"]) -> Float[Array, ""]:
    """The share of the facts of the gold ``path`` that are among ``places``."""
    hops = path >= 0
    return (hops & (path[:, None] == places).any(1)).sum() / hops.sum()


def make_tasks(
    config: TaskConfig, settings: Settings, seed: int | None = None, n: int | None = None, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks drawn from ``seed``: the columns of `tasks.rows`, and noise [n 12].

    Noise has the places of facts in the order in which they become distractors.
    """
    out, rng = tasks.rows(config, seed, n, held_out)
    noise = rng.permuted(np.tile(np.arange(FACTS), (len(out["answer"]), 1)), axis=1)
    return out | {"noise": noise.astype(np.int32)}


# -- demonstrations ----------------------------------------------------------------------------------------------------


def retrieved(settings: Settings, facts: Sequence[str], noise: Sequence[int], queries: Sequence[str]) -> list[str]:
    """The documents of ``queries``, as texts. ``facts``: of the task. ``noise``: as in `make_tasks`."""
    found = list(dict.fromkeys(fact for results in look_up(facts, queries[:QUERIES]) for fact in results))
    others = [facts[i] for i in noise if found and facts[i] not in found][: settings.distractors]
    shown = {*found[: settings.documents - settings.distractors], *others}
    return [fact for fact in facts if fact in shown]


def good_queries(task: Task) -> list[str]:
    """The queries that walk the gold path of ``task``."""
    return [task.question[:2], *("*" + relation for relation in task.question[2:])]


def good_quotes(task: Task, documents: Sequence[str]) -> list[str]:
    """The ``documents`` that are on the gold path of ``task``, in the order of the path."""
    return [fact for fact in task.path if fact in documents]


def good_answer(task: Task, kept: Sequence[str]) -> str:
    """The answer to ``task`` where it is among the ``kept`` facts; else the end of the last one, or nothing."""
    return task.answer if task.path[-1] in kept else "".join(kept[-1:])[2:]


def other_entities(kept: Sequence[str], answer: str) -> list[str]:
    """The entities of the ``kept`` facts, in alphabetical order and without ``answer``."""
    return sorted({letter for fact in kept for letter in fact[::2]} - {answer})


def demonstrated_queries(rng: np.random.Generator, settings: Settings, task: Task) -> list[str]:
    """Queries for ``task`` with the mistakes of ``settings``."""
    queries = good_queries(task)
    if rng.random() < settings.hop_error_rate:
        queries = queries[:1]
    if rng.random() < settings.broad_rate:
        queries[0] = queries[0][0]
    if rng.random() < settings.flood_rate:
        queries += [task.facts[rng.integers(FACTS)][0] for _ in range(QUERIES + 1 - len(queries))]
    return queries


def demonstrated_quotes(
    rng: np.random.Generator, settings: Settings, task: Task, documents: Sequence[str]
) -> list[str]:
    """Quotes for ``task`` with the mistakes of ``settings``. ``documents``: what the selector reads."""
    quotes = good_quotes(task, documents)
    if documents and rng.random() < settings.selection_error_rate:
        quotes = [documents[i] for i in rng.permutation(len(documents))[: max(1, len(quotes))]]
    return [*quotes, *quotes[-1:]] if rng.random() < settings.repeat_rate else quotes


def demonstrated_answer(rng: np.random.Generator, settings: Settings, task: Task, kept: Sequence[str]) -> str:
    """An answer to ``task`` with the mistakes of ``settings``. ``kept``: the facts that the generator reads."""
    answer = good_answer(task, kept)
    others = other_entities(kept, answer)
    if others and rng.random() < settings.answer_error_rate:
        answer = others[rng.integers(len(others))]
    if answer and rng.random() < settings.long_rate:
        more = [letter for letter in [*others, *tasks.LETTERS] if letter != answer]
        answer += "".join(more[: settings.answer_length])
    return answer


def demonstrations(config: TaskConfig, settings: Settings, seed: int, n: int) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens, length [n], completion, completion_length [n].

    Prompts and completions are as wide as the longest ones of their role, and of exercises. They are whole episodes of
    demonstrators on training tasks: each role reads what the one before it wrote. The share ``config.copying`` of the
    samples of a role are exercises in place of its own.
    """
    rng = np.random.default_rng([seed, 2])
    pairs: list[list[tuple[str, str]]] = []
    for _ in range(n):
        task, noise = tasks.drawn(rng, config), rng.permutation(FACTS).tolist()
        queries = demonstrated_queries(rng, settings, task)
        documents = retrieved(settings, task.facts, noise, queries)
        quotes = demonstrated_quotes(rng, settings, task, documents)
        kept = list(dict.fromkeys(quotes))[: settings.kept]
        answer = demonstrated_answer(rng, settings, task, kept)
        said = [
            (MARKS[REWRITER] + task.question + END, COMMA.join(queries)),
            (MARKS[SELECTOR] + "".join(documents) + BAR + task.question + END, COMMA.join(quotes)),
            (MARKS[GENERATOR] + "".join(kept) + BAR + task.question + END, answer),
        ]
        pairs.append(exercises.with_exercises(rng, config.copying, task, said))
    sizes = RESPONSE, RESPONSE, settings.answer_length + 2  # of completions: five queries, three quotes, an answer
    return exercises.as_samples(config.copying, ROLES, pairs, prompt_lengths(settings), sizes)


PROTOCOL = Protocol(make, make_tasks, demonstrations, prompt_length, RESPONSE)
