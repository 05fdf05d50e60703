"""Analysis of a compiled program (HLO): FLOPs, bytes of memory and bytes of collectives of one chip, loops included.

``compiled.cost_analysis()`` counts the body of a loop once and does not count collectives. So this module reads the
text of the optimised program. It counts every computation as often as it is called, and a loop as often as the constant
of its condition says. It counts:

- FLOPs of matrix products (``dot``, and ``convolution``, their form on TPU): 2 for each multiply-add
- bytes read from or written to the chip's memory: operands and results of every scheduled instruction. Arrays in
  on-chip memory (``S(1)`` in the layout) do not count. If a fusion only slices an operand, the slices count
- bytes that a chip sends for each kind of collective, by the ring algorithm on its n participants. These are (n-1)/n of
  the result (all-gather) or of the operand (reduce-scatter, all-to-all). An all-reduce sends twice that, a
  collective-permute all of it
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8, "c64": 8}
SIZES |= {"bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s8": 1, "u8": 1}
# Instructions that move no data; they name existing arrays.
FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional", "call", "iota"}
FREE |= {"after-all", "partition-id", "replica-id", "opt-barrier", "async-update"}

HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
ASSIGN = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^{}]*\})?")
CALLS = re.compile(r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=")
NAMES = re.compile(r"%([\w.\-]+)")


class Array(NamedTuple):
    """Type of an array. on_chip: whether it is in on-chip memory."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool

    @property
    def bytes(self) -> float:
        """Size in bytes."""
        return SIZES.get(self.dtype, 1 if self.dtype.startswith("f8") else 0) * math.prod(self.dims)


class Instruction(NamedTuple):
    """One instruction of a computation.

    root: whether it is the result of the computation. result: its arrays. op: opcode. operands: names of instructions.
    text: operands and attributes, unparsed.
    """

    name: str
    root: bool
    result: tuple[Array, ...]
    op: str
    operands: tuple[str, ...]
    text: str

    def attribute(self, name: str) -> tuple[int, ...]:
        """Integers of the attribute ``name={...}``; empty without it."""
        found = re.search(rf"\b{name}={{([\d,]*)}}", self.text)
        return tuple(int(x) for x in found.group(1).split(",") if x) if found else ()


class Computation(NamedTuple):
    """Instructions of one computation, by name."""

    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """Instruction whose result is that of the computation."""
        return next(i for i in self.instructions.values() if i.root)


class Counts(NamedTuple):
    """Counts of one chip. collectives: kind -> bytes that the chip sends."""

    flops: float
    bytes: float
    collectives: dict[str, float]

    @property
    def sent(self) -> float:
        """Bytes sent in all collectives."""
        return sum(self.collectives.values())


def arrays(text: str) -> tuple[Array, ...]:
    """Arrays of the type in the HLO ``text``. A tuple gives its arrays in order."""
    return tuple(
        Array(dtype, tuple(int(d) for d in dims.split(",") if d), "S(1)" in layout or "S(2)" in layout)
        for dtype, dims, layout in ARRAY.findall(text)
    )


def _closing(text: str, start: int) -> int:
    """Index after the bracket that closes the bracket at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "({") - (text[i] in ")}")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced brackets: {text[start : start + 80]!r}")


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Computations by name, and the name of the entry computation, from the ``text`` of a compiled program."""
    found: dict[str, Computation] = {}
    entry, now = "", None
    for line in text.splitlines():
        if now is None:
            if header := HEADER.match(line):
                now = found.setdefault(header.group(2), Computation({})).instructions
                entry = header.group(2) if header.group(1) else entry
        elif line.startswith("}"):
            now = None
        elif match := ASSIGN.match(line):
            root, name, rest = match.groups()
            split = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
            kind, rest = rest[:split], rest[split:].lstrip()
            op, paren = rest[: rest.index("(")], rest.index("(")
            end = _closing(rest, paren)
            operands = tuple(NAMES.findall(rest[paren:end]))
            now[name] = Instruction(name, bool(root), arrays(kind), op, operands, rest[paren:].split(", metadata=")[0])
    if not entry:
        raise ValueError("no entry computation: this is not the text of a compiled program")
    return found, entry


def trips(found: dict[str, Computation], loop: Instruction) -> tuple[int, bool]:
    """Upper bound of a loop's iterations, and whether the loop always runs that often.

    found: all computations. loop: a ``while`` instruction. The bound is the constant of ``i < constant`` in the loop's
    condition. Loops count from 0, as scans and bounded while loops do. Raises ValueError without such a bound.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text):
        return int(known.group(1)), True
    condition = found[_called(loop, "condition")[0]]
    bounds: dict[str, int] = {}  # name of a comparison -> its constant

    def read(inside: Computation, given: dict[str, int]) -> bool:
        """Record the comparisons of a computation; return whether its root is one of them."""
        values = dict(given)
        for i in inside.instructions.values():
            if i.op == "constant" and (number := re.match(r"\((-?\d+)\)", i.text)):
                values[i.name] = int(number.group(1))
            elif i.op == "compare" and "direction=LT" in i.text and i.operands[1] in values:
                bounds[i.name] = values[i.operands[1]]
            elif i.op in ("copy", "bitcast", "convert") and i.operands[0] in values:
                values[i.name] = values[i.operands[0]]
            elif i.op == "fusion":
                inner = found[_called(i, "calls")[0]]
                names = {j.text: j.name for j in inner.instructions.values() if j.op == "parameter"}
                pairs = ((names.get(f"({k})"), values.get(o)) for k, o in enumerate(i.operands))
                if read(inner, {n: v for n, v in pairs if n is not None and v is not None}):
                    bounds[i.name] = next(v for n, v in bounds.items() if n == inner.root.name)
        return inside.root.name in bounds

    exact = read(condition, {})
    if not bounds:
        raise ValueError(f"loop {loop.name}: its condition does not compare with a constant")
    return (bounds[condition.root.name] if exact else min(bounds.values())), exact


def _called(instruction: Instruction, name: str) -> list[str]:
    """Names of the computations in the attribute ``name`` of an instruction."""
    match = re.search(rf"\b{name}=(\{{[^}}]*\}}|%[\w.\-]+)", instruction.text)
    return NAMES.findall(match.group(1)) if match else []


def _calls(found: dict[str, Computation], i: Instruction, early: int | None) -> Iterator[tuple[str, int, bool]]:
    """Computations that ``i`` calls, each as (name, times, whether its instructions are scheduled and not fused).

    early: iterations of a loop that may end before its bound; None counts the bound.
    """
    if i.op == "while":
        most, exact = trips(found, i)
        for name in _called(i, "body"):
            yield name, most if exact or early is None else early, True
    elif i.op == "conditional":  # counts all branches, an upper bound
        for kind in ("branch_computations", "true_computation", "false_computation"):
            for name in _called(i, kind):
                yield name, 1, True
    elif i.op in ("fusion", "call", "async-start"):
        for name in _called(i, "calls") + _called(i, "to_apply"):
            yield name, 1, i.op == "call"


def product_flops(i: Instruction, inside: Computation) -> float:
    """FLOPs of a ``dot`` or a ``convolution``, grouped or not: 2 * elements of the result * contracted size.

    i: the instruction. inside: its computation.
    """
    shape = lambda name: inside.instructions[name].result[0].dims
    result = math.prod(i.result[0].dims)
    if i.op == "dot":
        left = shape(i.operands[0])
        return 2 * result * math.prod(left[d] for d in i.attribute("lhs_contracting_dims"))
    labels = re.search(r"dim_labels=\w+_(\w+)->", i.text)
    kernel = shape(i.operands[1])
    assert labels is not None
    # Each output element needs one product for each kernel element of its output feature. Batch dimensions become
    # spatial dimensions whose padded or strided window covers one element; such a window size is not contracted.
    out_feature = kernel[labels.group(1).index("o")]
    size = re.search(r"window=\{([^}]*)\}", i.text)
    taps = math.prod(kernel) / max(out_feature, 1)
    if size and (spatial := re.search(r"size=([\dx]+)", size.group(1))):
        sizes = [int(s) for s in spatial.group(1).split("x")]
        pads = re.search(r"pad=([\d_x\-]+)", size.group(1))
        strides = re.search(r"(?:lhs_dilate|stride)=([\dx]+)", size.group(1))
        for k, s in enumerate(sizes):
            pad = pads.group(1).split("x")[k].split("_") if pads else ("0", "0")
            stride = int(strides.group(1).split("x")[k]) if strides else 1
            if s > 1 and (int(pad[0]) == s - 1 or stride in (s, s - 1)):
                taps /= s
    return 2 * result * taps


def _group(i: Instruction, devices: int) -> int:
    """Number of participants of a collective. ``devices``: the number where the instruction has no groups."""
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", i.text):
        return int(match.group(1))
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", i.text):
        return len(match.group(1).split(","))
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] *\{([^}]*)\}", i.text):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match.group(2)))
    if "source_target_pairs" in i.text or "replica_groups={}" in i.text or "replica_groups" not in i.text:
        return devices
    raise ValueError(f"replica groups of a form that is not known: {i.text[:300]}")


def collective(i: Instruction, inside: Computation, devices: int) -> tuple[str, float] | None:
    """Kind of a collective and the bytes a chip sends. None for other instructions, and for the end of a started one.

    i: the instruction. inside: its computation. devices: participants where the instruction has no groups.
    """
    kind = i.op.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    given = sum(a.bytes for name in i.operands if name in inside.instructions for a in inside.instructions[name].result)
    n = _group(i, devices)
    share = (n - 1) / n
    if kind == "all-gather":
        return kind, share * n * given
    return kind, {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share) * given


def _read(found: dict[str, Computation], i: Instruction, k: int, a: Array) -> float:
    """Bytes of operand ``k`` that a scheduled instruction reads. If a fusion only slices the operand, the slices."""
    if i.op in ("dynamic-slice", "slice", "gather") and k == 0:
        return min(a.bytes, sum(r.bytes for r in i.result))
    if i.op == "dynamic-update-slice" and k == 0:
        return 0.0
    if i.op != "fusion":
        return a.bytes
    inner = found[_called(i, "calls")[0]].instructions
    names = [j.name for j in inner.values() if j.op == "parameter" and j.text.startswith(f"({k})")]
    users = [j for j in inner.values() if names and names[0] in j.operands]
    if not users or any(names[0] in j.operands[1:] for j in users):
        return a.bytes
    total = 0.0
    for j in users:
        if j.op in ("dynamic-slice", "slice", "gather"):
            total += sum(r.bytes for r in j.result)
        elif j.op == "fusion":
            total += _read(found, j, 0, a)
        elif j.op != "dynamic-update-slice":
            return a.bytes
    return min(a.bytes, total)


def _written(found: dict[str, Computation], i: Instruction) -> float:
    """Bytes that a scheduled instruction writes to memory. An update in place writes only the update."""
    out = sum(r.bytes for r in i.result if not r.on_chip)
    inside, j = None, i
    if i.op == "fusion":
        inside = found[_called(i, "calls")[0]].instructions
        j = found[_called(i, "calls")[0]].root
    if j.op != "dynamic-update-slice" or inside is None:
        return out
    update = inside.get(j.operands[1])
    return min(out, sum(r.bytes for r in update.result)) if update else out


def count(text: str, devices: int, early: int | None = None) -> Counts:
    """Counts of one chip for a compiled program.

    text: ``as_text()`` of the program. devices: participants where a collective has no groups. early: iterations of
    loops that may end before their bound, such as generation; None counts the bound. Raises ValueError for a loop
    without a bound.
    """
    found, entry = parse(text)
    sent: defaultdict[str, float] = defaultdict(float)
    totals = [0.0, 0.0]

    def walk(name: str, times: float, scheduled: bool) -> None:
        inside = found[name]
        for i in inside.instructions.values():
            if i.op in ("dot", "convolution"):
                totals[0] += times * product_flops(i, inside)
            if moved := collective(i, inside, devices):
                sent[moved[0]] += times * moved[1]
            if scheduled and i.op not in FREE and not i.op.endswith("-done"):
                held = [inside.instructions[o].result for o in i.operands if o in inside.instructions]
                reads = [(k, a) for k, group in enumerate(held) for a in group if not a.on_chip]
                totals[1] += times * sum(_read(found, i, k, a) for k, a in reads)
                # The result of an asynchronous start names its operand again. Only the filled array is written.
                written = sum(r.bytes for r in i.result[1:2] if not r.on_chip)
                totals[1] += times * (written if i.op.endswith("-start") else _written(found, i))
            for called, repeat, steps in _calls(found, i, early):
                walk(called, times * repeat, scheduled and steps)

    walk(entry, 1, True)
    return Counts(totals[0], totals[1], dict(sorted(sent.items())))
