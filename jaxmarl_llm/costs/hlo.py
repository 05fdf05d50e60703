"""What one chip does in a compiled program: FLOPs, bytes of memory and bytes of collectives, loops multiplied out.

``compiled.cost_analysis()`` counts the body of a loop once, however often it runs, and says nothing of collectives.
This reads the optimised program's text instead: every computation is counted as often as it is called, a ``while`` as
often as its condition's constant says. What is counted:

- FLOPs of matrix products (``dot``, and ``convolution``, which they become on TPU): 2 per multiply-add
- bytes that leave or enter the chip's memory: operands and results of every scheduled instruction, those in the on-chip
  memory (``S(1)`` in the layout) not counted; of an operand of a fusion that is only sliced, the slices
- bytes that a chip sends for each kind of collective by the ring algorithm on its n participants: (n-1)/n of the result
  (all-gather), of the operand (reduce-scatter, all-to-all), twice that (all-reduce), all of it (collective-permute)
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
# Instructions that move nothing: names for what is there already.
FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional", "call", "iota"}
FREE |= {"after-all", "partition-id", "replica-id", "opt-barrier", "async-update"}

HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
ASSIGN = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^{}]*\})?")
CALLS = re.compile(r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=")
NAMES = re.compile(r"%([\w.\-]+)")


class Array(NamedTuple):
    dtype: str
    dims: tuple[int, ...]
    on_chip: bool

    @property
    def bytes(self) -> float:
        return SIZES.get(self.dtype, 1 if self.dtype.startswith("f8") else 0) * math.prod(self.dims)


class Instruction(NamedTuple):
    name: str
    root: bool
    result: tuple[Array, ...]
    op: str
    operands: tuple[str, ...]
    text: str  # operands and attributes, for what is read on demand

    def attribute(self, name: str) -> tuple[int, ...]:
        found = re.search(rf"\b{name}={{([\d,]*)}}", self.text)
        return tuple(int(x) for x in found.group(1).split(",") if x) if found else ()


class Computation(NamedTuple):
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.root)


class Counts(NamedTuple):
    flops: float
    bytes: float
    collectives: dict[str, float]  # kind -> bytes a chip sends

    @property
    def sent(self) -> float:
        return sum(self.collectives.values())


def arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, a tuple's in order."""
    return tuple(
        Array(dtype, tuple(int(d) for d in dims.split(",") if d), "S(1)" in layout or "S(2)" in layout)
        for dtype, dims, layout in ARRAY.findall(text)
    )


def _closing(text: str, start: int) -> int:
    """Index behind the bracket that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "({") - (text[i] in ")}")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced brackets: {text[start : start + 80]!r}")


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Computations by name, and the entry's name."""
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
    """How often a loop runs at most, from ``i < constant`` in its condition, and whether it always runs as often.

    Loops count from 0, as scans and bounded while loops do. Raises ValueError when there is no such bound.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text):
        return int(known.group(1)), True
    condition = found[_called(loop, "condition")[0]]
    bounds: dict[str, int] = {}  # name of a comparison -> its constant

    def read(inside: Computation, given: dict[str, int]) -> bool:
        """Note the comparisons; whether the root is one."""
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
    match = re.search(rf"\b{name}=(\{{[^}}]*\}}|%[\w.\-]+)", instruction.text)
    return NAMES.findall(match.group(1)) if match else []


def _calls(found: dict[str, Computation], i: Instruction, early: int | None) -> Iterator[tuple[str, int, bool]]:
    """(computation, times, whether its instructions are scheduled, not fused) of what ``i`` calls."""
    if i.op == "while":
        most, exact = trips(found, i)
        for name in _called(i, "body"):
            yield name, most if exact or early is None else early, True
    elif i.op == "conditional":  # all branches: the most it may be
        for kind in ("branch_computations", "true_computation", "false_computation"):
            for name in _called(i, kind):
                yield name, 1, True
    elif i.op in ("fusion", "call", "async-start"):
        for name in _called(i, "calls") + _called(i, "to_apply"):
            yield name, 1, i.op == "call"


def product_flops(i: Instruction, inside: Computation) -> float:
    """2 * result * contracted, of a ``dot`` or of a ``convolution`` (grouped ones too)."""
    shape = lambda name: inside.instructions[name].result[0].dims
    result = math.prod(i.result[0].dims)
    if i.op == "dot":
        left = shape(i.operands[0])
        return 2 * result * math.prod(left[d] for d in i.attribute("lhs_contracting_dims"))
    labels = re.search(r"dim_labels=\w+_(\w+)->", i.text)
    kernel = shape(i.operands[1])
    assert labels is not None
    # Each output takes one product for each kernel element that belongs to its output feature. Batch dimensions become
    # spatial ones whose padded or strided window meets one element each; then the window's size is not contracted.
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
    """Participants of a collective."""
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
    """Kind and bytes sent; None when ``i`` is none, or the end of one whose start is counted."""
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
    """Bytes of operand ``k`` that a scheduled instruction reads: its slices, where a fusion only slices it."""
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
    """Bytes of memory that a scheduled instruction writes: the update alone, where it updates in place."""
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
    """One chip's share of the program whose ``as_text()`` is given. ``devices``: participants where a collective has no
    groups. ``early``: how often loops run that may end before their bound (generation ends when every sample has);
    None: to the bound. Raises ValueError for a loop without one.
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
                # An asynchronous start names its operand again in its result; what it fills is written once.
                written = sum(r.bytes for r in i.result[1:2] if not r.on_chip)
                totals[1] += times * (written if i.op.endswith("-start") else _written(found, i))
            for called, repeat, steps in _calls(found, i, early):
                walk(called, times * repeat, scheduled and steps)

    walk(entry, 1, True)
    return Counts(totals[0], totals[1], dict(sorted(sent.items())))
