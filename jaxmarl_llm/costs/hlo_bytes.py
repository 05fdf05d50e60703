"""Bytes that a scheduled instruction of a compiled program reads from and writes to the chip's main memory.

An instruction reads its operands and writes its results. Arrays in other memory spaces, such as VMEM (``S(1)`` in the
layout), do not count. Of these an instruction moves a part only:

- a slice or gather reads what it takes. That holds inside a fusion too, also behind elementwise operations
- an update in place (dynamic-update-slice, scatter) reads and writes the updated part
- an asynchronous copy writes its destination. A prefetch by slices is an asynchronous call of a slice
- an array that a fusion only hands through is neither read nor written
- the parts of an asynchronous collective share their buffers. The part that starts it reads the operand and writes the
  result
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxmarl_llm.costs import hlo_collectives
from jaxmarl_llm.costs.hlo_text import Array, Computation, Instruction, Module, arrays, words

# They name existing arrays or hold no data. What the called computations of some of them move counts there.
FREE = words(
    """parameter tuple get-tuple-element bitcast constant while conditional call after-all partition-id replica-id
    opt-barrier async-start async-update async-done"""
)
VIEWS = ("bitcast", "get-tuple-element", "opt-barrier")
# Inside a fusion these compute the elements that are asked for, each from one element of every operand of its size.
ELEMENTWISE = words(
    """abs add and bitcast-convert broadcast ceil clamp compare convert copy cosine divide exponential floor log
    logistic maximum minimum multiply negate not or power reshape round-nearest-even rsqrt select sign sine sqrt
    subtract tanh transpose xor"""
)
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # number of the operand with the update
SLICES = ("dynamic-slice", "gather", "slice")
BUFFERS = {"AllocateBuffer", "ConcatBitcast", "Sharding"}  # custom calls that name buffers


class Traffic:
    """Bytes that the scheduled instructions of a program move. module: the program."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self._known: dict[tuple[str, str], float] = {}  # (computation, instruction) -> part of the result that is used

    def moved(self, inside: Computation, i: Instruction) -> float:
        """Bytes that a scheduled instruction ``i`` reads and writes. inside: its computation.

        What the computations of loops, branches and calls move is not included.
        """
        if i.op in FREE or i.op.endswith(("-done", "-update")) or hlo_collectives.target(i) in BUFFERS:
            return 0.0
        if i.op == "custom-call" and i.called("called_computations"):
            return 0.0
        total = 0.0
        for k, operand in enumerate(inside.operands(i)):
            held = sum(a.bytes for a in operand.result if a.space == 0)
            if held:
                total += held * self._share(inside, i, k)
        return total + self._written(inside, i)

    def _share(self, inside: Computation, i: Instruction, k: int) -> float:
        """Part of operand ``k`` that instruction ``i`` reads, 0 to 1, if all of its own result is asked for."""
        size, op = _elements(inside.operands(i)[k]), i.op.removesuffix("-start")
        if op in SLICES and k == 0:
            return min(1.0, sum(a.elements for a in _destination(i)) / max(size, 1))
        if op == "dynamic-update-slice" and k == 0:
            return 0.0
        if op == "scatter" and k == 0:
            return min(1.0, _elements(inside.operands(i)[2]) / max(size, 1))
        if op == "fusion":
            inner = self.module.callee(i, "calls")
            if k not in inner.parameters:
                raise i.error(f"computation {inner.name} has no parameter {k}")
            return self._asked(inner, inner.parameters[k])
        return 1.0

    def _asked(self, inside: Computation, i: Instruction) -> float:
        """Part of the result of ``i``, an instruction of a fusion, that the fusion uses."""
        if i.root and i.op != "parameter":
            return 1.0
        key = inside.name, i.name
        if key not in self._known:
            self._known[key] = min(1.0, sum(self._used(inside, i, user, k) for user, k in inside.users[i.name]))
        return self._known[key]

    def _used(self, inside: Computation, i: Instruction, user: Instruction, k: int) -> float:
        """Part of the result of ``i`` that ``user``, whose operand ``k`` it is, uses in a fusion."""
        if user.op == "tuple" and user.root:
            return 0.0 if i.op == "parameter" else 1.0
        if hlo_collectives.target(user) in (hlo_collectives.START, hlo_collectives.DONE):
            return 0.0
        if user.op in hlo_collectives.SENT and hlo_collectives.is_continued(inside, user):
            return 0.0
        if user.op in VIEWS or (user.op in ELEMENTWISE and _elements(user) == _elements(i)):
            return self._asked(inside, user)
        if user.op in UPDATES and k == 0 and not _in_place(inside, user):
            return 1.0
        return self._share(inside, user, k)

    def _written(self, inside: Computation, i: Instruction) -> float:
        """Bytes that a scheduled instruction ``i`` of ``inside`` writes."""
        if i.op == "fusion":
            inner = self.module.callee(i, "calls")
            return sum(self._filled(inner, made, a) for made, a in _results(inner, i))
        return sum(_updated(inside, i, a) for a in _destination(i) if a.space == 0)

    def _filled(self, inner: Computation, made: Instruction, a: Array) -> float:
        """Bytes that a fusion writes for its result ``a``, which instruction ``made`` of its computation computes."""
        while made.op == "bitcast":
            made = inner.operands(made)[0]
        if a.space != 0 or made.op == "parameter" or hlo_collectives.target(made) == hlo_collectives.DONE:
            return 0.0
        if made.op in hlo_collectives.SENT and hlo_collectives.is_continued(inner, made):
            return 0.0
        if made.op == "fusion" and not isinstance(made.type, tuple):
            called = self.module.callee(made, "calls")
            return self._filled(called, called.root, a)
        return _updated(inner, made, a) if made.op in UPDATES and _in_place(inner, made) else a.bytes


def _elements(i: Instruction) -> int:
    return sum(a.elements for a in i.result)


def _in_place(inside: Computation, i: Instruction) -> bool:
    """Whether an update ``i`` in a fusion writes into a parameter: its result is one of the fusion's."""
    source, top = inside.operands(i)[0], i
    while source.op in VIEWS:
        source = inside.operands(source)[0]
    while not top.root:
        users = [user for user, _ in inside.users[top.name]]
        if len(users) != 1 or users[0].op not in ("bitcast", "tuple"):
            return False
        top = users[0]
    return source.op == "parameter" and top.op in ("bitcast", "tuple", i.op)


def _destination(i: Instruction) -> tuple[Array, ...]:
    """Arrays that an instruction fills. The result of an asynchronous start also names its operand and its flags."""
    if not i.op.endswith("-start") or i.op == "all-reduce-start":
        return i.result
    if not isinstance(i.type, tuple) or len(i.type) < 2:
        raise i.error("the result of an asynchronous start has no rule")
    return arrays(i.type[0 if i.op == "copy-start" else 1])


def _results(inner: Computation, i: Instruction) -> Iterator[tuple[Instruction, Array]]:
    """Instructions of a fusion ``i`` that make its results, each with the array that is written."""
    root = inner.root
    made = inner.operands(root) if root.op == "tuple" else [root]
    if hlo_collectives.target(root) == hlo_collectives.START:
        collective = inner.operands(root)[0]  # the result: operands, which are handed through, then what is gathered
        first, size = len(collective.operands), len(collective.result)
        yield from ((collective, a) for a in i.result[first : first + size])
    elif len(made) == len(i.result):
        yield from zip(made, i.result)
    elif len(made) == 1:
        yield from ((root, a) for a in i.result)
    else:
        raise i.error("results of a fusion of this form have no rule")


def _updated(inside: Computation, i: Instruction, a: Array) -> float:
    """Bytes of result ``a`` of instruction ``i`` that are written: of an update in place, those of the update."""
    update = UPDATES.get(i.op)
    return a.bytes if update is None else min(a.bytes, sum(x.bytes for x in inside.operands(i)[update].result))
