"""What the completions of the meta-roles of `debate` say: a reflection on one edge, or an edit of one.

Shared arguments: ``graph`` [S S] are weights, from row to column. ``tokens`` [R] and ``length`` [] are of one
completion.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmarl_llm.envs.array_env import PAD, UNREADABLE, completion_end, encoded

ZERO = ord("0")
MOST_WEIGHT = 9
REFLECTION, EDIT = 3, 4  # tokens that memory has of each
KEPT = "k..."


def read_reflection(
    graph: Int[Array, "S S"], tokens: Int[Array, " R"], length: Int[Array, ""]
) -> tuple[Int[Array, "3"], Bool[Array, ""]]:
    """A completion as memory shows it, and whether it is a reflection on an edge of ``graph``."""
    text, size = _text(tokens, length, REFLECTION)
    _, _, _, weight = _edge(graph, text[1], text[2])
    clear = (size == REFLECTION) & ((text[0] == ord("+")) | (text[0] == ord("-"))) & (weight > 0)
    return jnp.where(clear, text, UNREADABLE), clear


class Edit(NamedTuple):
    """A completion as an edit.

    Attributes:
        graph: the graph after it
        shown: the edit as memory shows it
        possible: whether it is an edit at all
        keeps: whether it says to keep the graph
    """

    graph: Int[Array, "S S"]
    shown: Int[Array, "4"]
    possible: Bool[Array, ""]
    keeps: Bool[Array, ""]


def read_edit(graph: Int[Array, "S S"], tokens: Int[Array, " R"], length: Int[Array, ""]) -> Edit:
    """The edit of one completion on ``graph``."""
    text, size = _text(tokens, length, EDIT)
    there, start, to, weight = _edge(graph, text[1], text[2])
    new = text[3] - ZERO
    fits = (size == EDIT) & there & (new >= 1) & (new <= MOST_WEIGHT)
    adds = fits & (text[0] == ord("a")) & (weight == 0)
    reweights = fits & (text[0] == ord("w")) & (weight > 0) & (new != weight)
    drops = (size == EDIT - 1) & (text[0] == ord("d")) & there & (weight > 0)
    keeps = (size == 1) & (text[0] == ord("k"))
    sets = adds | reweights
    after = jnp.where(sets, new, jnp.where(drops, 0, weight))
    changed = graph.at[start, to].set(jnp.where(sets | drops, after, graph[start, to]))
    possible = sets | drops | keeps
    dropped = text.at[3].set(ord("."))
    shown = jnp.where(sets, text, jnp.where(drops, dropped, jnp.where(keeps, encoded(KEPT), UNREADABLE)))
    return Edit(changed, shown, possible, keeps)


def _text(tokens: Int[Array, " R"], length: Int[Array, ""], most: int) -> tuple[Int[Array, " T"], Int[Array, ""]]:
    """The first T = ``most`` tokens of a completion, and its size without eos; -1 without eos."""
    ended, size = completion_end(tokens, length)
    text = jnp.pad(tokens, (0, most), constant_values=PAD)[:most]
    return text, jnp.where(ended, size, -1)


def _edge(graph: Int[Array, "S S"], first: Array, second: Array) -> tuple[Array, Array, Array, Array]:
    """Whether two digits name two different speakers, the places of both, and the weight between them, else 0."""
    speakers = len(graph)
    start, to = first - ZERO - 1, second - ZERO - 1
    there = (start >= 0) & (start < speakers) & (to >= 0) & (to < speakers) & (start != to)
    start, to = jnp.clip(start, 0, speakers - 1), jnp.clip(to, 0, speakers - 1)
    return there, start, to, jnp.where(there, graph[start, to], 0)
