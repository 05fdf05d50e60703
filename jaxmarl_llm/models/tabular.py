"""Tabular policy: a table of logits with one row for each known prompt and one column for each possible move.

It is for games that are small enough to enumerate, where the expectation of every estimate can be computed exactly. It
is a `Policy` like any other, so sampling, scoring, credit and the learner are those of language models. A completion is
one token, the move: roles have ``max_new_tokens=1``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.kernels.head.head import NEG
from jaxmarl_llm.types import Params, Policy


@dataclass(frozen=True)
class Config:
    """Prompts and moves of a table."""

    prompts: tuple[tuple[int, ...], ...]  # token ids of each known prompt: the rows of the table
    moves: tuple[int, ...]  # token ids of the moves: the columns; every other token has probability 0
    vocab_size: int

    def __post_init__(self):
        for name, entries in (("prompts", self.prompts), ("moves", self.moves)):
            if not entries or len(set(entries)) != len(entries):
                raise ConfigError(f"tabular: {name}: expected one or more, all different, got {len(entries)}")
        if not 0 <= min(self.moves) <= max(self.moves) < self.vocab_size:
            raise ConfigError(f"tabular: moves: expected ids below vocab_size={self.vocab_size}, got {self.moves}")


@functools.cache
def make_policy(cfg: Config) -> Policy:
    """Make the `Policy` of a table ``{"params": {"logits": [prompts, moves]}}``.

    The hidden state of a prompt is its row.
    A prompt that is not in the table has NaN logits, and so has a second token, so that neither goes unnoticed. Raises
    ValueError when completions of more than one token are scored.

    Args:
        cfg: prompts, moves and vocabulary.
    """
    size = max(map(len, cfg.prompts))
    table = np.full((len(cfg.prompts), size), -1, np.int32)
    for row, ids in zip(table, cfg.prompts, strict=True):
        row[: len(ids)] = ids
    moves = np.array(cfg.moves)

    def init(key: jax.Array) -> Params:
        return {"logits": jax.random.normal(key, (len(cfg.prompts), len(cfg.moves)))}

    def rows(variables: Params, tokens: Int[Array, "N P"], length: Int[Array, " N"]) -> Float[Array, "N D"]:
        short = max(0, size - tokens.shape[1])
        shown = jnp.where(jnp.arange(tokens.shape[1]) < length[:, None], tokens, -1)
        shown = jnp.pad(shown, ((0, 0), (0, short)), constant_values=-1)
        here = jnp.pad(table, ((0, 0), (0, shown.shape[1] - size)), constant_values=-1)
        same = (shown[:, None] == here).all(-1)
        row = variables["params"]["logits"][jnp.argmax(same, axis=1)]
        return jnp.where(same.any(1)[:, None], row, jnp.nan)

    def prefill(variables: Params, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, tuple]:
        return rows(variables, tokens, length), ()

    def decode(
        variables: Params, tokens: Sequence[jax.Array], prefix: Any, length: Any, suffix: Sequence[tuple], t: jax.Array
    ) -> tuple[tuple[jax.Array, ...], Sequence[tuple]]:
        return tuple(jnp.full((*x.shape, len(moves)), jnp.nan) for x in tokens), suffix

    def hidden(variables: Params, tokens: jax.Array, length: jax.Array, completions: jax.Array) -> jax.Array:
        if completions.shape[-1] != 1:
            raise ValueError(f"a tabular policy samples one token, not {completions.shape[-1]}")
        row = rows(variables, tokens, length)
        return jnp.broadcast_to(row[:, None, None], (*completions.shape, len(moves)))

    def unembed(variables: Params, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        # -inf would make 0 * inf of entropies; exp of this is 0 as well.
        none = jnp.full((*hidden.shape[:-1], cfg.vocab_size), NEG)
        return none.at[..., moves].set(hidden)

    def embed(variables: Params, tokens: jax.Array) -> jax.Array:
        return jax.nn.one_hot(tokens, cfg.vocab_size)

    keep: Any = lambda variables: variables
    return Policy(cfg, init, prefill, decode, lambda prefix, group, response: (), hidden, unembed, embed, keep)
