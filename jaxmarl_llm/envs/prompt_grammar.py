"""The grammar of prompts that several array environments share: a mark, a subject, entries behind bars, and an end.

    S3+4-2|9n|7n>     mark S, subject 3+4-2, entries 9n and 7n

The three functions are the three directions of that one grammar. They give a row of tokens in JAX (`prompt_row`), a
text (`prompt_text`), and the parts of a text (`prompt_parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxmarl_llm.envs.array_env import encoded, join

BAR, END = "|", ">"
Piece = tuple[Array, Array | int]  # tokens [T], and how many of them count


class Parts(NamedTuple):
    """The parts of a prompt. ``mark`` is one character; ``entries`` come in the order of the prompt."""

    mark: str
    subject: str
    entries: tuple[str, ...]


def prompt_row(
    mark: Array | str,
    subject: Sequence[Piece],
    entries: Sequence[tuple[Array | int, Sequence[Piece]]],
    size: int,
    bar: str = BAR,
) -> tuple[Int[Array, " P"], Int[Array, ""]]:
    """The tokens of a prompt, padded to P = ``size``, and its length.

    mark: one character, or its token []
    subject: the pieces of the subject
    entries: (shown, pieces) of each entry; an entry whose ``shown`` is 0 or False is left out together with its bar
    bar: the character before each entry
    """
    head = encoded(mark) if isinstance(mark, str) else mark[None]
    pieces: list[Piece] = [(head, 1), *subject]
    for shown, parts in entries:
        shown = jnp.asarray(shown).astype(jnp.int32)
        pieces += [(encoded(bar), shown), *((tokens, shown * length) for tokens, length in parts)]
    return join([*pieces, (encoded(END), 1)], size)


def prompt_text(mark: str, subject: str, entries: Sequence[str] = (), bar: str = BAR) -> str:
    """The text of a prompt.

    ``mark``: first character. ``subject``: text of the task. ``entries``: parts behind the subject. ``bar``: the
    character before each entry.
    """
    return "".join([mark, subject, *(bar + entry for entry in entries), END])


def prompt_parts(text: str, bar: str = BAR) -> Parts:
    """The parts of the prompt ``text``: the inverse of `prompt_text`. With an empty ``bar`` there are no entries."""
    body = text[1:].removesuffix(END)
    subject, *entries = body.split(bar) if bar else [body]
    return Parts(text[:1], subject, tuple(entries))
