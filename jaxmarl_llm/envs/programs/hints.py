"""Hints of `programs`: changes of one program, the hint that leads to the examples fastest, and how a hint is read.

    +2i    operation i comes in as the second one       -2    the second operation is left out
    =2i    operation i takes the second one's place     ~     the operations are reversed

A hint is possible where it names an operation of the program, or a place for one more. A program has at most four
operations. Neither the only operation can be left out, nor can it be reversed. A malformed program has no operations,
so an operation at the first place is all that is possible.

Shared arguments: ``program`` is a program as text, or "" for a malformed one. ``shown`` are the shown examples as text.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxmarl_llm.envs.array_env import PAD, completion_end, encoded
from jaxmarl_llm.envs.programs.language import LONGEST, OPERATIONS, code_of, programs, results

ADD, CHANGE, DROP, REVERSE = KINDS = "+=-~"
LONGEST_HINT = 3  # characters
PLACES = range(1, LONGEST + 1)
HINTS = (  # in the order in which equally good ones are taken
    REVERSE,
    *(f"{DROP}{place}" for place in PLACES),
    *(f"{CHANGE}{place}{operation}" for place in PLACES for operation in OPERATIONS),
    *(f"{ADD}{place}{operation}" for place in PLACES for operation in OPERATIONS),
)


def followed(program: str, hint: str) -> str | None:
    """``program`` after a hint, None where it is not possible. ``hint``: one of HINTS."""
    if hint == REVERSE:
        return program[::-1] if len(program) > 1 else None
    kind, at, operation = hint[0], int(hint[1]) - 1, hint[2:]
    if kind == ADD:
        fits = at <= len(program) < LONGEST
        return program[:at] + operation + program[at:] if fits else None
    if at >= len(program) or (kind == DROP and len(program) == 1):
        return None
    return program[:at] + operation + program[at + 1 :]


# -- which hint helps --------------------------------------------------------------------------------------------------


class Moves(NamedTuple):
    """All hints on all programs.

    Attributes:
        rows: Program -> its row; the row of "" is 0.
        codes: Rows of the programs in `results` [n].
        after: Row behind each hint [n, hints], n where the hint is not possible.
    """

    rows: dict[str, int]
    codes: np.ndarray
    after: np.ndarray


@functools.cache
def moves() -> Moves:
    """The hints on every program. Programs are in the order of `language.programs`, behind the one of no operations."""
    every = ["", *programs()]
    rows: dict[str | None, int] = {program: row for row, program in enumerate(every)}
    rows[None] = len(every)
    after = np.array([[rows[followed(program, hint)] for hint in HINTS] for program in every], np.int16)
    codes = np.array([code_of(program) for program in every])
    return Moves({program: row for row, program in enumerate(every)}, codes, after)


@functools.lru_cache(maxsize=4096)
def shortest_fits(shown: str) -> tuple[str, ...]:
    """The shortest programs that do what all examples show, in the order of the alphabet; () where none does."""
    pairs = np.array([[int(digit) for digit in example] for example in shown.split(",")])
    known = moves()
    right = (results()[known.codes][:, pairs[:, 0]] == pairs[:, 1]).all(1)
    every = [*known.rows]
    found = [every[row] for row in np.flatnonzero(right)]
    return tuple(program for program in found if len(program) == len(found[0]))


@functools.lru_cache(maxsize=4096)
def _levels(shown: str, most: int) -> np.ndarray:
    """Programs from which ``most`` hints or fewer lead to one of `shortest_fits` [n + 1] bool."""
    known = moves()
    if most == 0:
        mask = np.zeros(len(known.codes) + 1, bool)
        mask[[known.rows[program] for program in shortest_fits(shown)]] = True
        return mask
    nearer = _levels(shown, most - 1)
    return np.append(nearer[known.after].any(1), False) | nearer


def hints_needed(shown: str, program: str) -> int:
    """The smallest number of hints that lead from ``program`` to one of `shortest_fits`."""
    row, needed = moves().rows[program], 0
    while not _levels(shown, needed)[row]:
        needed += 1
    return needed


def best_hint(shown: str, program: str) -> str:
    """The first hint that begins a shortest way to one of `shortest_fits`.

    Raises:
        ValueError: ``program`` is one of them, or the examples have none.
    """
    if not shortest_fits(shown) or not (needed := hints_needed(shown, program)):
        raise ValueError(f"no hint for {program!r} on {shown!r}: it is right, or no program is")
    known = moves()
    helps = _levels(shown, needed - 1)[known.after[known.rows[program]]]
    return HINTS[int(np.argmax(helps))]


# -- hints in JAX ------------------------------------------------------------------------------------------------------


class Hint(NamedTuple):
    """A completion as prompts show it.

    Attributes:
        tokens: Its tokens [3].
        size: How many count.
        proper: Whether it is a hint that is possible.
    """

    tokens: Int[Array, "3"]
    size: Int[Array, ""]
    proper: Bool[Array, ""]


def read_hint(tokens: Int[Array, " R"], length: Int[Array, ""], operations: Int[Array, ""]) -> Hint:
    """A completion as a hint on a program.

    Args:
        tokens: The completion [R].
        length: Its tokens.
        operations: Number of operations of the program, 0 for a malformed one.
    """
    tokens = jnp.pad(tokens, (0, LONGEST_HINT), constant_values=PAD)
    ended, size = completion_end(tokens, length)
    kind, place = tokens[0], tokens[1] - ord("0")
    names = (size == LONGEST_HINT) & (tokens[2] == encoded(OPERATIONS)).any()
    there, several = (place >= 1) & (place <= operations), operations > 1
    possible = (
        ((kind == ord(REVERSE)) & (size == 1) & several)
        | ((kind == ord(DROP)) & (size == 2) & there & several)
        | ((kind == ord(CHANGE)) & names & there)
        | ((kind == ord(ADD)) & names & (place >= 1) & (place <= operations + 1) & (operations < LONGEST))
    )
    return Hint(tokens[:LONGEST_HINT], size, ended & possible)
