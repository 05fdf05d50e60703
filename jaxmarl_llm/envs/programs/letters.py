"""Completions of `programs` as operations: how they are read, what they do, and how prompts show them. In JAX."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxmarl_llm.envs.array_env import PAD, UNREADABLE, completion_end, encoded
from jaxmarl_llm.envs.programs.language import LONGEST, OPERATIONS, results
from jaxmarl_llm.envs.programs.tasks import SHOWN
from jaxmarl_llm.envs.prompt_grammar import Piece

ZERO = ord("0")
EXAMPLES = 3 * SHOWN - 1  # tokens of the examples in a prompt


class Letters(NamedTuple):
    """A completion as letters of operations."""

    digits: Int[Array, "4"]  # index of each operation in OPERATIONS, plus one; 0 behind the last one
    size: Int[Array, ""]
    proper: Bool[Array, ""]  # well-formed


def read(tokens: Int[Array, " R"], length: Int[Array, ""]) -> Letters:
    """The completion as operations. ``tokens`` [R] and ``length`` [] are of that completion."""
    tokens = jnp.pad(tokens, (0, LONGEST), constant_values=PAD)
    ended, size = completion_end(tokens, length)
    same = tokens[:, None] == encoded(OPERATIONS)
    known = same.any(-1) | (jnp.arange(len(tokens)) >= size)
    proper = ended & known.all() & (size >= 1) & (size <= LONGEST)
    digits = jnp.where(jnp.arange(LONGEST) < size, jnp.argmax(same, axis=-1)[:LONGEST] + 1, 0)
    return Letters(jnp.where(proper, digits, 0), jnp.where(proper, size, 0), proper)


def examples_row(examples: Int[Array, "3 2"]) -> Piece:
    """The tokens of ``examples`` (input, output) as prompts have them: two digits each, commas between."""
    commas = jnp.full((SHOWN, 1), ord(","), jnp.int32)
    return jnp.concatenate([ZERO + examples, commas], axis=1).reshape(-1), EXAMPLES


def in_order(said: Letters) -> Letters:
    """The operations of ``said`` in the order of the alphabet."""
    digits = jnp.sort(jnp.where(said.digits > 0, said.digits, len(OPERATIONS) + 1))
    return said._replace(digits=jnp.where(digits > len(OPERATIONS), 0, digits))


def outputs(said: Letters, examples: Int[Array, "3 2"]) -> Int[Array, "3"]:
    """The results of ``said``, as a program, at the inputs of ``examples`` (input, output): digits, or -1 for none."""
    row = jnp.sum(said.digits * 9 ** jnp.arange(LONGEST))
    return jnp.asarray(results(), jnp.int32)[row, examples[:, 0]]


def right(said: Letters, examples: Int[Array, "3 2"]) -> Bool[Array, "3"]:
    """Whether ``said``, as a program, does what each of ``examples`` (input, output) shows."""
    return outputs(said, examples) == examples[:, 1]


def shown(said: Letters) -> tuple[Int[Array, "4"], Int[Array, ""]]:
    """Tokens of ``said`` as prompts show them, and how many count: one sign for a malformed completion."""
    letters = jnp.concatenate([jnp.array([PAD]), encoded(OPERATIONS)])[said.digits].astype(jnp.int32)
    malformed = jnp.full(LONGEST, PAD, jnp.int32).at[0].set(UNREADABLE)
    return jnp.where(said.proper, letters, malformed), jnp.where(said.proper, said.size, 1)
