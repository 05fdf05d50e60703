"""The search of facts, as a function of arrays and as a function of texts.

A query has one or two of the characters a-z, 0-9 and *. Any other query is malformed. A query returns the first three
facts that begin with it, in the order of the task; a malformed one returns none. A * at the beginning of a query stands
for the entity with which the first result of the query before it ends. Where that query returned nothing, or where
there is none, a query with * returns nothing. So the queries a1 and *2 walk the path of the question a12.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase, digits
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmarl_llm.envs.array_env import encoded

LAST = "*"  # the last entity found
ALPHABET = ascii_lowercase + digits + LAST
RESULTS = 3  # facts that a query returns, at most
COMMA = ","  # between queries


class Queries(NamedTuple):
    """The queries of a completion, Q of them at most.

    Attributes:
        text: The first two characters of each query.
        size: Number of characters of each query.
        proper: Whether each query is there and well-formed.
        number: Number of queries of the completion, which may be above Q.
        clean: Whether every query of the completion is well-formed.
    """

    text: Int[Array, "Q 2"]
    size: Int[Array, " Q"]
    proper: Bool[Array, " Q"]
    number: Int[Array, ""]
    clean: Bool[Array, ""]


class Texts(NamedTuple):
    """The parts of a completion between commas, Q of them at most.

    Attributes:
        text: The first T characters of each part.
        size: Number of characters of each part; 0 for parts that are not there.
        number: Number of parts of the completion, which may be above Q.
        part: The part to which each token belongs, -1 for none.
    """

    text: Int[Array, "Q T"]
    size: Int[Array, " Q"]
    number: Int[Array, ""]
    part: Int[Array, " R"]


def split(tokens: Int[Array, " R"], size: Int[Array, ""], most: int, width: int) -> Texts:
    """The parts of a completion between commas. An empty completion is one empty part.

    Args:
        tokens: The completion.
        size: Its number of tokens without eos.
        most: Q, the parts that are read; those behind them are counted alone.
        width: T, the characters that are read of a part.
    """
    here = jnp.arange(len(tokens))
    inside, comma = here < size, tokens == ord(COMMA)
    part = jnp.where(inside & ~comma, jnp.cumsum(comma & inside), -1)
    member = part == jnp.arange(most)[:, None]
    first = jnp.argmax(member, axis=1)
    text = tokens[jnp.minimum(first[:, None] + jnp.arange(width), len(tokens) - 1)]
    return Texts(text, member.sum(1), (comma & inside).sum() + 1, part)


def read_queries(tokens: Int[Array, " R"], size: Int[Array, ""], most: int) -> Queries:
    """The queries of a completion: its parts between commas. An empty completion is one empty query.

    Args:
        tokens: The completion.
        size: Its number of tokens without eos.
        most: Q, the queries that are read; those behind them are counted alone.
    """
    found = split(tokens, size, most, 2)
    member = found.part == jnp.arange(len(tokens) + 1)[:, None]  # by query; there are at most R commas
    sizes = member.sum(1)
    fits = (~member | jnp.isin(tokens, encoded(ALPHABET))).all(1) & (sizes >= 1) & (sizes <= 2)
    there = jnp.arange(len(sizes)) < found.number
    return Queries(found.text, found.size, (fits & there)[:most], found.number, (fits | ~there).all())


def search(
    facts: Int[Array, "F 3"], text: Int[Array, "2"], size: Int[Array, ""], last: Int[Array, ""]
) -> Bool[Array, " F"]:
    """Which facts one well-formed query returns.

    Args:
        facts: Facts as bytes.
        text: The query; its second character counts only where ``size`` is 2.
        size: Number of characters of the query.
        last: The entity that * stands for; -1 for none.
    """
    first = jnp.where(text[0] == ord(LAST), last, text[0])
    begins = (facts[:, 0] == first) & ((size < 2) | (facts[:, 1] == text[1]))
    return begins & (jnp.cumsum(begins) <= RESULTS)


def last_entity(facts: Int[Array, "F 3"], results: Bool[Array, " F"]) -> Int[Array, ""]:
    """The entity with which the first of the ``results`` of a query ends; -1 without any. ``facts``: as in `search`."""
    return jnp.where(results.any(), facts[jnp.argmax(results), 2], -1)


def look_up(facts: Sequence[str], queries: Sequence[str]) -> list[list[str]]:
    """The results of each query, as texts: the same rules as in `search`.

    Args:
        facts: Facts of a task.
        queries: Queries that run one after the other.
    """
    out: list[list[str]] = []
    for query in queries:
        last = out[-1][0][2] if out and out[-1] else ""
        proper = 1 <= len(query) <= 2 and set(query) <= set(ALPHABET)
        begin = last + query[1:] if query[:1] == LAST else query
        known = proper and not (query[:1] == LAST and not last)
        out.append([fact for fact in facts if known and fact.startswith(begin)][:RESULTS])
    return out
