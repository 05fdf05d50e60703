"""The stack language of `programs`: eight operations of one letter, on integers modulo ten.

A program has 1 to 4 operations. The stack holds the input first, and the result is its top at the end.

    d  duplicate the top                  a  add the two on top
    n  negate the top                     b  subtract the top from the one below it
    i  increase the top by one            m  multiply the two on top
    h  halve the top, rounded down        g  keep the greater of the two on top

An operation that finds too few integers ends the program without a result. All 4,680 programs are worked out once.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import numpy as np

OPERATIONS = "abdghimn"
LONGEST = 4  # operations of a program
RESPONSE = LONGEST + 1  # R: tokens of the longest well-formed completion, eos included
MODULUS = 10
FAILED = -1  # in place of a result
Stack = tuple[int, ...] | None  # None: the program has failed


def operate(operation: str, stack: Stack) -> Stack:
    """The stack after one operation, None where the program fails.

    Args:
        operation: One of `OPERATIONS`.
        stack: The stack before, its top last.
    """
    needed = 2 if operation in "abgm" else 1
    if stack is None or len(stack) < needed:
        return None
    *below, top = stack
    if operation == "d":
        return (*stack, top)
    if operation in "nih":
        return (*below, {"n": -top, "i": top + 1, "h": top // 2}[operation] % MODULUS)
    *below, under = below
    return (*below, {"a": under + top, "b": under - top, "m": under * top, "g": max(under, top)}[operation] % MODULUS)


def code_of(program: str) -> int:
    """The row of ``program`` in `results`: its digits in base 9, the first operation first; 0 ends a program."""
    digits = [OPERATIONS.index(operation) + 1 for operation in program]
    return sum(digit * 9**place for place, digit in enumerate(digits))


def programs() -> list[str]:
    """All programs, the shorter ones first, and equally long ones in the order of the alphabet."""
    sizes = range(1, LONGEST + 1)
    return ["".join(letters) for size in sizes for letters in itertools.product(OPERATIONS, repeat=size)]


@functools.cache
def results() -> np.ndarray:
    """Result of every program on every input, int8 [9^4, 10]: `FAILED` without one, and in rows of no program."""
    table = np.full((9**LONGEST, MODULUS), FAILED, np.int8)
    level: dict[str, list[Stack]] = {"": [(x,) for x in range(MODULUS)]}
    for _ in range(LONGEST):
        level = {p + o: [operate(o, s) for s in stacks] for p, stacks in level.items() for o in OPERATIONS}
        for program, stacks in level.items():
            table[code_of(program)] = [FAILED if s is None else s[-1] for s in stacks]
    table.flags.writeable = False
    return table


class Shortest(NamedTuple):
    """Functions by the length of their shortest program.

    Attributes:
        programs: ``programs[k]`` are the programs of k + 1 operations, one for each function that no shorter program
            computes: the first in the order of the alphabet.
        shorter: ``shorter[k]`` are the results of all functions of programs of at most k operations [n, 10].
    """

    programs: tuple[tuple[str, ...], ...]
    shorter: tuple[np.ndarray, ...]


@functools.cache
def shortest_programs() -> Shortest:
    """The functions that programs compute, each by its first shortest program."""
    table, known = results(), dict[tuple[int, ...], str]()
    programs, shorter = [], []
    for size in range(1, LONGEST + 1):
        shorter.append(np.array([*known], np.int8).reshape(-1, MODULUS))
        new: dict[tuple[int, ...], str] = {}
        for letters in itertools.product(OPERATIONS, repeat=size):
            program = "".join(letters)
            function = tuple(table[code_of(program)].tolist())
            if function[0] != FAILED and function not in known:
                new.setdefault(function, program)
        programs.append(tuple(new.values()))
        known |= new
    return Shortest(tuple(programs), tuple(shorter))
