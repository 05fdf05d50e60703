"""The trace of an actor that searches facts one query after the other, and then answers. All in JAX.

    a1:a1c>*2:c2x>=x      two searches and the answer x
    ?:>ab:>?              a malformed segment, a query that returns nothing, and no answer

A segment is one completion. It is a query, see `facts.search`, or an answer: = and a letter. Any other completion is
malformed, and so is every completion without eos. A malformed segment is a search that returns nothing, and is shown as
one ?. A search has evidence where it returns a fact of the gold path.

Shared arguments: ``task`` is a row of `tasks.rows`, and ``trace`` the trace so far. S is the number of searches that a
trace has room for, F the number of facts.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import ascii_lowercase
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs.array_env import PAD, UNREADABLE, completion_end, encoded, join
from jaxmarl_llm.envs.facts.search import RESULTS, last_entity, read_queries, search
from jaxmarl_llm.envs.prompt_grammar import END, Piece

FOUND = ":"  # between a query and what it returned
ANSWER = "="  # before an answer
SEGMENT = 2  # characters of the longest segment
SEARCH = SEGMENT + 1 + 3 * RESULTS + 1  # characters of the longest search in a prompt
NONE = -1  # no fact, no entity, no answer


class Trace(struct.PyTreeNode):
    """The searches of an actor so far, what they found, and the answer."""

    number: Int[Array, ""]  # of searches
    text: Int[Array, "S 2"]  # bytes of the queries, as prompts show them
    size: Int[Array, " S"]  # their numbers of characters
    places: Int[Array, "S 3"]  # facts that they returned, as places; NONE behind them
    evidence: Bool[Array, " S"]  # whether they returned a fact of the gold path
    last: Int[Array, ""]  # byte of the entity that * stands for in the next query, or NONE
    answer: Int[Array, ""]  # byte of the answer; NONE before the end, UNREADABLE where the trace ended without one


class Segment(NamedTuple):
    """A completion of an actor.

    Attributes:
        text: Bytes of the query, PAD behind it.
        size: Its number of characters.
        query: Whether the completion is a well-formed query.
        letter: Byte of the answer.
        answers: Whether the completion is a well-formed answer.
    """

    text: Int[Array, "2"]
    size: Int[Array, ""]
    query: Bool[Array, ""]
    letter: Int[Array, ""]
    answers: Bool[Array, ""]


def empty(searches: int) -> Trace:
    """The trace before the first search. ``searches``: S."""
    none = lambda *shape: jnp.full(shape, NONE, jnp.int32)
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
    no_text = jnp.full((searches, SEGMENT), PAD, jnp.int32)
    unseen = jnp.zeros(searches, bool)
    return Trace(zeros(), no_text, zeros(searches), none(searches, RESULTS), unseen, none(), none())


def read_segment(tokens: Int[Array, " R"], length: Int[Array, ""]) -> Segment:
    """The segment that a completion is.

    Args:
        tokens: The completion.
        length: Its number of tokens.
    """
    ended, size = completion_end(tokens, length)
    asked, letter = read_queries(tokens, size, 1), tokens[min(1, len(tokens) - 1)]
    query = ended & asked.proper[0] & (asked.number == 1)
    text = jnp.where(jnp.arange(SEGMENT) < size, asked.text[0], PAD)
    answers = ended & (size == 2) & (tokens[0] == ord(ANSWER)) & jnp.isin(letter, encoded(ascii_lowercase))
    return Segment(text, asked.size[0], query, letter, answers)


def searched(task: Mapping[str, Array], trace: Trace, segment: Segment) -> Trace:
    """The trace after one more search. ``segment``: a query; any other one returns nothing.

    A trace without room is returned with a higher number alone.
    """
    results = segment.query & search(task["facts"], segment.text, segment.size, trace.last)
    places = jnp.nonzero(results, size=RESULTS, fill_value=NONE)[0].astype(jnp.int32)
    unreadable = jnp.array([UNREADABLE, PAD])
    at = trace.number
    return trace.replace(
        number=at + 1,
        text=trace.text.at[at].set(jnp.where(segment.query, segment.text, unreadable), mode="drop"),
        size=trace.size.at[at].set(jnp.where(segment.query, segment.size, 1), mode="drop"),
        places=trace.places.at[at].set(places, mode="drop"),
        evidence=trace.evidence.at[at].set(has_evidence(task, results), mode="drop"),
        last=last_entity(task["facts"], results),
    )


def has_evidence(task: Mapping[str, Array], results: Bool[Array, " F"]) -> Bool[Array, ""]:
    """Whether a fact of the gold path is among the ``results`` of a search."""
    path = task["path"]
    return ((path >= 0) & results[jnp.maximum(path, 0)]).any()


def answered(trace: Trace, segment: Segment) -> Trace:
    """The trace with the answer of ``segment``, or without an answer where the segment is none."""
    return trace.replace(answer=jnp.where(segment.answers, segment.letter, UNREADABLE))


def density(trace: Trace) -> Float[Array, ""]:
    """The share of searches with evidence; 0 without searches."""
    return trace.evidence.sum() / jnp.maximum(trace.number, 1)


def first_miss(trace: Trace) -> Int[Array, ""]:
    """The first search without evidence, counted from 1; 0 where all have it."""
    missed = _there(trace) & ~trace.evidence
    return jnp.where(missed.any(), jnp.argmax(missed) + 1, 0)


def _there(trace: Trace) -> Bool[Array, " S"]:
    return jnp.arange(len(trace.size)) < trace.number


def search_pieces(task: Mapping[str, Array], trace: Trace, shown: Array | bool = True) -> list[Piece]:
    """The searches of a trace as pieces of a prompt, one for each. ``shown``: whether they are there."""

    def row(text: Array, size: Array, places: Array) -> Piece:
        facts = [(task["facts"][place], 3 * (place >= 0)) for place in places]
        return join([(text, size), (encoded(FOUND), 1), *facts, (encoded(END), 1)], SEARCH)

    rows, lengths = jax.vmap(row)(trace.text, trace.size, trace.places)
    return list(zip(rows, lengths * (shown & _there(trace)), strict=True))


def answer_pieces(trace: Trace, shown: Array | bool = True) -> list[Piece]:
    """The answer of a trace as pieces of a prompt. ``shown``: whether it is there."""
    there = shown & (trace.answer >= 0)
    return [(encoded(ANSWER), 1 * (there & (trace.answer != UNREADABLE))), (trace.answer[None], 1 * there)]
