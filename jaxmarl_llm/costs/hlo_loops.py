"""How often the loops of a compiled program run.

A loop counts from a constant to a constant with a constant step: that is what scans and bounded while loops come to.
The three constants may be outside of the loop, inside of fusions, and in what an outer loop hands through. So a name
is resolved in a `Frame`, which knows the instruction that called the computation.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxmarl_llm.costs.hlo_text import Computation, Instruction, Module

SAME = ("bitcast", "convert", "copy", "copy-done", "copy-start", "opt-barrier", "reshape")
KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Frame(NamedTuple):
    """A computation that runs. call: the instruction that called it, in ``above``; None for the entry."""

    inside: Computation
    call: Instruction | None = None
    above: Frame | None = None


class Trips(NamedTuple):
    """Iterations of a loop. most: upper bound. exact: whether the loop always runs that often."""

    most: int
    exact: bool


def resolve(module: Module, frame: Frame, name: str) -> tuple[Frame, Instruction]:
    """Origin of the value of instruction ``name``, through copies, tuples, fusions and calls.

    A value that loops hand through unchanged comes from before the loop. module: the program. frame: of the
    instruction.
    """
    i = frame.inside.instructions[name]
    if i.op in SAME:
        return resolve(module, frame, i.operands[0])
    if i.op in ("fusion", "call"):
        inner = Frame(module.callee(i, "calls", "to_apply"), i, frame)
        return resolve(module, inner, inner.inside.root.name)
    if i.op == "parameter" and frame.call and frame.above and frame.call.op in ("fusion", "call"):
        return resolve(module, frame.above, frame.call.operands[i.index])
    if i.op == "get-tuple-element":
        return _element(module, frame, i) or (frame, i)
    return frame, i


def _element(module: Module, frame: Frame, i: Instruction) -> tuple[Frame, Instruction] | None:
    """Origin of the element that a get-tuple-element ``i`` takes; None for a variable of a loop."""
    where, source = resolve(module, frame, i.operands[0])
    if source.op == "tuple":
        return resolve(module, where, source.operands[i.index])
    if source.op == "parameter" and where.call and where.above and where.call.op == "while":
        loop, outer = where.call, where.above
    elif source.op == "while":
        loop, outer = source, where
    else:
        return None
    return start_of(module, outer, loop, i.index) if _unchanged(module, loop, i.index) else None


def start_of(module: Module, frame: Frame, loop: Instruction, k: int) -> tuple[Frame, Instruction] | None:
    """Origin of element ``k`` of the state of ``loop`` before the loop. None if that is not known.

    module: the program. frame: of the loop.
    """
    where, state = resolve(module, frame, loop.operands[0])
    return resolve(module, where, state.operands[k]) if state.op == "tuple" else None


def _unchanged(module: Module, loop: Instruction, k: int) -> bool:
    """Whether the body of ``loop`` hands element ``k`` of its state through."""
    body = module.callee(loop, "body")
    if body.root.op != "tuple":
        return body.root.op == "parameter"
    i = body.instructions[body.root.operands[k]]
    while i.op in SAME:
        i = body.instructions[i.operands[0]]
    return i.op == "get-tuple-element" and i.index == k and body.instructions[i.operands[0]].op == "parameter"


def trips(module: Module, frame: Frame, loop: Instruction) -> Trips:
    """Iterations of ``loop``, a ``while`` instruction. Raises HloError without a constant bound.

    module: the program. frame: of the loop.
    """
    if known := KNOWN.search(loop.attributes.get("backend_config", "")):
        return Trips(int(known.group(1)), True)
    condition = Frame(module.callee(loop, "condition"), loop, frame)
    found = [
        (_bound(module, frame, loop, at, i) if i.op == "compare" else None)
        for at, i in _conjuncts(module, condition, condition.inside.root.name)
    ]
    bounds = [bound for bound in found if bound is not None]
    if not bounds:
        raise loop.error(f"the condition of loop {loop.name} does not compare a counter with a constant")
    return Trips(min(bounds), len(found) == 1)


def _conjuncts(module: Module, frame: Frame, name: str) -> list[tuple[Frame, Instruction]]:
    """Instructions whose conjunction is the value of ``name``."""
    where, i = resolve(module, frame, name)
    if i.op != "and":
        return [(where, i)]
    return [part for operand in i.operands for part in _conjuncts(module, where, operand)]


def _bound(module: Module, frame: Frame, loop: Instruction, at: Frame, compare: Instruction) -> int | None:
    """Iterations until ``compare`` of the condition, in frame ``at``, is false. None if it compares something else."""
    left, right = (resolve(module, at, name) for name in compare.operands)
    direction = compare.attributes["direction"]
    if direction == "GT":
        left, right, direction = right, left, "LT"
    counter, limit = left[1], constant(right[1])
    if direction != "LT" or limit is None or not _is_state(left, loop):
        return None
    first = start_of(module, frame, loop, counter.index)
    start, step = None if first is None else constant(first[1]), _step(module, frame, loop, counter.index)
    if start is None or step is None or step <= 0:
        raise loop.error(f"loop {loop.name} does not count from a constant by a constant step")
    return max(0, -((start - limit) // step))


def _is_state(found: tuple[Frame, Instruction], loop: Instruction) -> bool:
    """Whether a resolved value is an element of the state of ``loop``."""
    frame, i = found
    return (
        i.op == "get-tuple-element"
        and frame.call is loop
        and frame.inside.instructions[i.operands[0]].op == ("parameter")
    )


def _step(module: Module, frame: Frame, loop: Instruction, k: int) -> int | None:
    """Constant that the body of ``loop`` adds to element ``k`` of its state."""
    body = Frame(module.callee(loop, "body"), loop, frame)
    if body.inside.root.op != "tuple":
        return None
    at, i = resolve(module, body, body.inside.root.operands[k])
    if i.op != "add":
        return None
    parts = [resolve(module, at, name) for name in i.operands]
    steps = [step for _, part in parts if (step := constant(part)) is not None]
    counters = [part for at, part in parts if _is_state((at, part), loop) and part.index == k]
    return steps[0] if len(steps) == len(counters) == 1 else None


def constant(i: Instruction) -> int | None:
    """Integer of a scalar constant ``i``; None for other instructions."""
    return int(i.given) if i.op == "constant" and re.fullmatch(r"-?\d+", i.given) else None
