"""Rules of `segments`: sentences, segments, the length penalty, whether the answer follows, and what completions say.

A sentence ends with ``;``, which belongs to it. The last sentence may lack it. A text has at most M sentences: what is
behind the M-th one belongs to it. A segment is one or several whole sentences in a row. A step is a sentence with the
character ``=``. All other sentences are filler.

The answer of a text is the character behind its last ``=``.

A segment is left out where its weight is `LEFT_OUT` or less. The answer still follows when the steps that are kept are
the needed ones: each once, in order, and right. A needed step has the next sign and number of the question, ``=``, and
the value so far, such as +4=7. So a text that skips a step, or has a wrong one, leads to no answer, whatever is kept.

Shared arguments: ``text`` [T] are the tokens of a text, of which the first ``size`` [] count. ``part`` [T] is the
number of the sentence or of the segment of each token, from 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs.array_env import PAD, encoded

SEPARATOR, EQUALS, ZERO = ord(";"), ord("="), ord("0")
LABELS = "ABCDEFGHIJ"  # of sentences and of segments, in prompts
LEFT_OUT = 2  # largest weight of a segment that is left out
MOST_WEIGHT = 5
STEP = 4  # characters of a step


def sentences(text: Int[Array, " T"], size: Int[Array, ""], most: int) -> tuple[Int[Array, " T"], Int[Array, ""]]:
    """The sentence of each token, and the number of sentences. ``most``: M. Tokens that do not count are in no use."""
    ends = (text == SEPARATOR) & (jnp.arange(len(text)) < size)
    part = jnp.minimum(jnp.cumsum(ends) - ends, most - 1)
    return part, jnp.where(size > 0, part[jnp.maximum(size - 1, 0)] + 1, 0)


def segments(
    part: Int[Array, " T"], number: Int[Array, ""], marked: Bool[Array, " M"]
) -> tuple[Int[Array, " T"], Int[Array, ""]]:
    """The segment of each token, and the number of segments.

    Args:
        part: The sentence of each token.
        number: Number of sentences.
        marked: Whether a segment ends with each sentence. The last sentence ends one in any case.
    """
    before = jnp.cumsum(marked) - marked
    return before[part], jnp.where(number > 0, before[jnp.maximum(number - 1, 0)] + 1, 0)


def lengths(part: Int[Array, " T"], size: Int[Array, ""], most: int) -> Int[Array, " M"]:
    """Number of tokens of each sentence or segment. ``most``: M."""
    return jax.ops.segment_sum((jnp.arange(len(part)) < size).astype(jnp.int32), part, most)


def importance_penalty(length: Int[Array, " M"], weight: Int[Array, " M"]) -> Float[Array, ""]:
    """Penalty of a text in [0, .8]: sum of |s| (1 - w/5) over segments, divided by the sum of |s|; 0 without tokens.

    Args:
        length: |s|, tokens of each segment; 0 where there is none.
        weight: w of each segment, 1 to 5.
    """
    return jnp.sum(length * (1 - weight / MOST_WEIGHT)) / jnp.maximum(length.sum(), 1)


def left_out(length: Int[Array, " M"], weight: Int[Array, " M"]) -> Float[Array, ""]:
    """Share of a text's tokens in segments that are left out; 0 without tokens.

    Arguments are those of `importance_penalty`.
    """
    return jnp.sum(length * (weight <= LEFT_OUT)) / jnp.maximum(length.sum(), 1)


def answer(text: Int[Array, " T"], size: Int[Array, ""]) -> Int[Array, ""]:
    """The answer of a text as a token; PAD where it has none."""
    equals = (text == EQUALS) & (jnp.arange(len(text)) < size)
    behind = len(text) - jnp.argmax(equals[::-1])  # place behind the last one
    there = equals.any() & (behind < size)
    return jnp.where(there, text[jnp.minimum(behind, len(text) - 1)], PAD)


def steps_in(text: Int[Array, " T"], size: Int[Array, ""], part: Int[Array, " T"], most: int) -> Bool[Array, " M"]:
    """Whether each sentence is a step. ``part``: sentences. ``most``: M."""
    equals = (text == EQUALS) & (jnp.arange(len(text)) < size)
    return jax.ops.segment_max(equals.astype(jnp.int32), part, most) > 0


def follows(
    text: Int[Array, " T"],
    size: Int[Array, ""],
    part: Int[Array, " T"],
    kept: Bool[Array, " M"],
    needed: Int[Array, "K 4"],
) -> Bool[Array, ""]:
    """Whether the answer follows from the kept sentences, see the top of this file.

    Args:
        text: The text.
        size: Its number of tokens.
        part: The sentence of each token.
        kept: Whether each sentence is kept.
        needed: The K needed steps, as tokens.
    """
    most = len(kept)
    own = lengths(part, size, most)
    start = jnp.cumsum(own) - own
    here = jnp.arange(len(text))
    ended = jax.ops.segment_max(((text == SEPARATOR) & (here < size)).astype(jnp.int32), part, most) > 0
    rows = jnp.pad(text, (0, STEP))[start[:, None] + jnp.arange(STEP)]  # first characters of each sentence [M 4]
    whole = own - ended == STEP  # one separator at most: more are in the last sentence, which then is longer
    step = steps_in(text, size, part, most)

    def read(state: tuple[Array, Array], sentence: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], None]:
        done, clean = state
        row, fits, counts = sentence
        right = fits & (row == needed[jnp.minimum(done, len(needed) - 1)]).all() & (done < len(needed))
        return (done + (counts & right), clean & (~counts | right)), None

    (done, clean), _ = jax.lax.scan(read, (jnp.int32(0), jnp.bool_(True)), (rows, whole, kept & step))
    return clean & (done == len(needed))


def labelled(
    text: Int[Array, " T"], size: Int[Array, ""], part: Int[Array, " T"], room: int
) -> tuple[Int[Array, " P"], Int[Array, ""]]:
    """The text with a label before each part, and its number of tokens. A separator at the end of a part is dropped.

    Args:
        text: The text.
        size: Its number of tokens.
        part: The sentence or the segment of each token.
        room: P, at least T + 1. No part lacks a token, so there is at most one label for each separator and one more.
    """
    here = jnp.arange(len(text))
    counts = here < size
    first = counts & ((here == 0) | (part != jnp.roll(part, 1)))
    last = (here == size - 1) | (part != jnp.roll(part, -1))
    shown = counts & ~(last & (text == SEPARATOR))
    at = jnp.cumsum(first) + jnp.cumsum(shown) - 1  # place of each shown token
    row = jnp.full(room, PAD, jnp.int32)
    row = row.at[jnp.where(shown, at, room)].set(text, mode="drop")
    row = row.at[jnp.where(first, at - shown, room)].set(encoded(LABELS)[part], mode="drop")
    return row, (first.sum() + shown.sum()).astype(jnp.int32)


def read_labels(
    tokens: Int[Array, " R"], size: Int[Array, ""], number: Int[Array, ""], most: int
) -> tuple[Bool[Array, " M"], Bool[Array, ""]]:
    """The sentences that a segmenter names, and whether the completion names sentences in order and nothing else.

    Args:
        tokens: The completion.
        size: Its number of tokens without eos.
        number: Number of sentences.
        most: M.
    """
    inside, named = jnp.arange(len(tokens)) < size, tokens - ord(LABELS[0])
    known = inside & (named >= 0) & (named < number)
    marked = jnp.zeros(most, bool).at[jnp.where(known, named, most)].set(True, mode="drop")
    rising = (named[1:] > named[:-1]) | ~inside[1:]
    return marked, (known | ~inside).all() & rising.all()


def read_weights(
    tokens: Int[Array, " R"], size: Int[Array, ""], number: Int[Array, ""], most: int
) -> tuple[Int[Array, " M"], Bool[Array, ""]]:
    """The weight of each segment, and whether the completion is one pair of label and weight for each in order.

    Args:
        tokens: The completion. The s-th pair is read where it has the label of the s-th segment.
        size: Its number of tokens without eos.
        number: Number of segments.
        most: M.
    """
    padded = jnp.pad(tokens, (0, 2 * most), constant_values=PAD)[: 2 * most]
    here = jnp.arange(most)
    label, weight = padded[::2] == encoded(LABELS)[:most], padded[1::2] - ZERO
    read = label & (weight >= 1) & (weight <= MOST_WEIGHT) & (here < number) & (2 * here + 1 < size)
    return jnp.where(read, weight, MOST_WEIGHT), (size == 2 * number) & (read | (here >= number)).all()
