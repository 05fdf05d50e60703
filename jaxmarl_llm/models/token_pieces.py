"""What each token of a completion adds to its text, for readers of recorded rollouts that have no tokenizer.

A character of several bytes may be cut across tokens. It belongs to the token that completes it. The pieces of all
tokens, joined, are the decoded text.
"""

from __future__ import annotations

import codecs
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

WINDOW = 64  # most tokens that wait for the end of a character
UNREADABLE = "\ufffd"  # what a decoder writes for bytes that are no character


class Decoding(Protocol):
    """The part of a tokenizer that `pieces` needs."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text."""

    def token_bytes(self, token: int) -> bytes | None:
        """Bytes of UTF-8 that a token adds; empty: none; None: they depend on its neighbours."""

    def token_name(self, token: int) -> str:
        """Name of a token that adds no text."""


class Pieces(NamedTuple):
    """Lengths of the pieces of a text, and names of tokens without a readable piece.

    Attributes:
        chars: Characters of the text that each token adds; empty where the pieces are not known.
        names: A name for each token that adds nothing or `UNREADABLE` alone, in the order of the tokens. Bytes of a
            character that a later token completes are written as ``\\xe2\\x82``.
    """

    chars: tuple[int, ...]
    names: tuple[str, ...]


def pieces(tokenizer: Decoding, ids: Sequence[int]) -> Pieces:
    """Cut the decoded text of a completion at the ends of its tokens.

    Args:
        tokenizer: Tokenizer of the model that sampled the completion.
        ids: Token ids of the completion [R].
    """
    text, raw = tokenizer.decode(ids), [tokenizer.token_bytes(token) for token in ids]
    found = _by_bytes([part for part in raw if part is not None]) if None not in raw else None
    if found is None or "".join(found) != text:
        found = _by_windows(tokenizer.decode, ids)
    if found is None or "".join(found) != text:
        return Pieces((), ())
    names = []
    for token, part, piece in zip(ids, raw, found, strict=True):
        if not piece.strip(UNREADABLE):
            names.append("".join(f"\\x{byte:02x}" for byte in part) if part else tokenizer.token_name(token))
    return Pieces(tuple(map(len, found)), tuple(names))


def byte_level(token: str) -> bytes:
    """Bytes of a token of a byte-level BPE; its own UTF-8 where a character is not of that alphabet.

    Args:
        token: The token as the vocabulary writes it.
    """
    alphabet = _alphabet()
    return bytes(alphabet[c] for c in token) if all(c in alphabet for c in token) else token.encode()


@functools.cache
def _alphabet() -> dict[str, int]:
    """Character -> byte: printable characters of Latin-1 are themselves, other bytes follow from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


def _by_bytes(raw: Sequence[bytes]) -> list[str]:
    """The piece of each token from the bytes of each token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    out = [decoder.decode(part) for part in raw]
    last = max((k for k, part in enumerate(raw) if part), default=-1)
    if last >= 0:
        out[last] += decoder.decode(b"", True)  # the text ends within a character
    return out


def _by_windows(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str] | None:
    """The piece of each token from decoded runs of tokens; None where a run is too long."""
    out: list[str] = []
    start = read = 0  # the run begins at ``start``; the pieces before ``read`` are known
    before = now = ""
    for k in range(len(ids)):
        if k - start >= WINDOW:
            return None
        now = decode(ids[start : k + 1])
        if now.endswith(UNREADABLE) or len(now) <= len(before):
            out.append("")
        else:
            out.append(now[len(before) :])
            start, read = read, k + 1
            before = now = decode(ids[start:read])
    if out:
        out[-1] += now[len(before) :]
    return out
