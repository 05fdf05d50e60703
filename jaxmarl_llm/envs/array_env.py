"""Short texts as rows of byte tokens: what array environments build prompts and tasks from."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmarl_llm.tokenizer import ByteTokenizer

PAD = ByteTokenizer.PAD
HELD_OUT = 1_000_003  # seed offset of evaluation tasks


def encoded(text: str) -> Int[Array, "T"]:
    """The bytes of a text, one token each."""
    return jnp.array(list(text.encode()), jnp.int32)


def join(pieces: Sequence[tuple[Array, Array | int]], size: int) -> tuple[Int[Array, "P"], Int[Array, ""]]:
    """The first ``length`` tokens of each piece (tokens [T], length []) one after the other, padded to P = ``size``;
    and how many they are. What does not fit is dropped, but counted.
    """
    row, end = jnp.full(size, PAD, jnp.int32), jnp.int32(0)
    for tokens, length in pieces:
        here = jnp.arange(tokens.shape[0])
        row = row.at[jnp.where(here < length, end + here, size)].set(tokens, mode="drop")
        end = end + length
    return row, end


def pack(rows: Sequence[Sequence[int]], size: int) -> tuple[Int[np.ndarray, "N T"], Int[np.ndarray, "N"]]:
    """Rows of token ids padded to T = ``size``, and their lengths. Raises ValueError for a longer row."""
    packed = np.full((len(rows), size), PAD, np.int32)
    for row, ids in zip(packed, rows, strict=True):
        row[: len(ids)] = list(ids)
    return packed, np.array([len(ids) for ids in rows], np.int32)


def samples(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], prompt: int, completion: int
) -> dict[str, np.ndarray]:
    """Demonstrations of one role as `arena` takes them: tokens [n P] and completion [n R], padded to P = ``prompt`` and
    R = ``completion``, with length and completion_length [n].
    """
    tokens, length = pack(prompts, prompt)
    said, size = pack(completions, completion)
    return {"tokens": tokens, "length": length, "completion": said, "completion_length": size}
