"""Analysis of a compiled program (HLO): FLOPs, bytes of memory and bytes of collectives of one chip, loops included.

``compiled.cost_analysis()`` counts the body of a loop once and does not count collectives. So this module reads the
text of the optimised program. It counts every computation as often as it is called, and a loop as often as its
constants say (`hlo_loops`), the loop's condition once more. It counts:

- FLOPs of matrix products (``dot``, and ``convolution``, their form on TPU): 2 for each multiply-add. Those of a kernel
  (Pallas) are what its author estimated, or what a table of closed forms says (`costs.kernel_flops`)
- bytes read from or written to the chip's memory (`hlo_bytes`)
- bytes that a chip sends for each kind of collective (`hlo_collectives`)

An instruction without a rule, and a line that cannot be parsed, raise `HloError`, which names the line.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxmarl_llm.costs import hlo_bytes, hlo_collectives
from jaxmarl_llm.costs.hlo_loops import Frame, trips
from jaxmarl_llm.costs.hlo_text import Array, Computation, HloError, Instruction, Module, parse, words

VERSION = 2  # of the rules: records of another version are not comparable

# Instructions without matrix products. They move data when they are scheduled, see `hlo_bytes`.
PLAIN = words(
    """abs add after-all and atan2 bitcast bitcast-convert broadcast cbrt ceil clamp clz compare complex concatenate
    constant convert copy cosine divide dynamic-reshape dynamic-slice dynamic-update-slice erf exponential
    exponential-minus-one floor gather get-tuple-element imag iota is-finite log log-plus-one logistic map maximum
    minimum multiply negate not opt-barrier or pad parameter partition-id popcnt power real reduce reduce-precision
    reduce-window remainder replica-id reshape reverse rng rng-bit-generator rng-get-and-update-state
    round-nearest-afz round-nearest-even rsqrt scatter select select-and-scatter shift-left shift-right-arithmetic
    shift-right-logical sign sine slice sort sqrt subtract tan tanh topk transpose tuple xor"""
)
# Custom calls that are neither kernels nor matrix products: they name buffers, check indices, or mark collectives.
MARKS = hlo_bytes.BUFFERS | {"AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked", "ZeroCrop"}
MARKS |= {hlo_collectives.START, hlo_collectives.DONE}
KERNEL = "tpu_custom_call"
ESTIMATE = re.compile(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)')


class Kernel(NamedTuple):
    """Call of a Pallas kernel. name: as given to ``pallas_call``. operands, results: their arrays, in order."""

    name: str
    operands: tuple[Array, ...]
    results: tuple[Array, ...]


KernelFlops = Mapping[str, Callable[[Kernel], float]]


class Counts(NamedTuple):
    """Counts of one chip. collectives: kind -> bytes that the chip sends."""

    flops: float = 0.0
    bytes: float = 0.0
    collectives: Mapping[str, float] = {}

    @property
    def sent(self) -> float:
        """Bytes sent in all collectives."""
        return sum(self.collectives.values())

    def merge(self, other: Counts, of: Callable[[float, float], float]) -> Counts:
        """Each count of this and of ``other``, put together by ``of``."""
        kinds = sorted({*self.collectives, *other.collectives})
        get = lambda c, kind: c.collectives.get(kind, 0.0)
        sent = {kind: of(get(self, kind), get(other, kind)) for kind in kinds}
        return Counts(of(self.flops, other.flops), of(self.bytes, other.bytes), sent)

    def times(self, n: float) -> Counts:
        """Counts of ``n`` runs."""
        return Counts(n * self.flops, n * self.bytes, {kind: n * v for kind, v in self.collectives.items()})


def count(text: str, devices: int, early: int | None = None, kernels: KernelFlops | None = None) -> Counts:
    """Counts of one chip for a compiled program.

    text: ``as_text()`` of the program. devices: participants where a collective has no groups. early: iterations of
    loops that may end before their bound, such as generation; None counts the bound. kernels: FLOPs of Pallas kernels
    by name, for those without an estimate. Raises HloError for what has no rule, such as a loop without a bound.
    """
    module = parse(text)
    counter = _Counter(module, devices, early, kernels or {})
    total = counter.run(Frame(module.entry), scheduled=True)
    counter.check_chains()
    return total


class _Counter:
    """State of one `count`. started, continued: asynchronous collectives by `hlo_collectives.chain`."""

    def __init__(self, module: Module, devices: int, early: int | None, kernels: KernelFlops) -> None:
        self.module, self.devices, self.early, self.kernels = module, devices, early, kernels
        self.traffic = hlo_bytes.Traffic(module)
        self.started: set[tuple[str, ...]] = set()
        self.continued: dict[tuple[str, ...], Instruction] = {}

    def run(self, frame: Frame, scheduled: bool) -> Counts:
        """Counts of a computation. scheduled: its instructions move data one by one, they are not fused."""
        total = Counts()
        for i in frame.inside.instructions.values():
            for part in self.instruction(frame, i, scheduled):
                total = total.merge(part, float.__add__)
        return total

    def instruction(self, frame: Frame, i: Instruction, scheduled: bool) -> Iterable[Counts]:
        """Counts of an instruction, those of the computations that it calls included."""
        if scheduled:
            yield Counts(bytes=float(self.traffic.moved(frame.inside, i)))
        enter = lambda name, scheduled: self.run(Frame(self.module.computations[name], i, frame), scheduled)
        called = i.called("calls", "to_apply", "called_computations")
        base = i.op.removesuffix("-start").removesuffix("-update").removesuffix("-done")
        if base in hlo_collectives.SENT:
            yield self.collective(frame.inside, i, scheduled)
        elif i.op in ("dot", "convolution"):
            yield Counts(flops=float(product_flops(i, frame.inside)))
        elif i.op == "while":
            n = self.iterations(frame, i)
            yield enter(self.module.callee(i, "body").name, scheduled).times(n)
            yield enter(self.module.callee(i, "condition").name, scheduled).times(n + 1)
        elif i.op == "conditional":
            yield self.branches(i, enter, scheduled)
        elif i.op in ("fusion", "call", "async-start") or (i.op == "custom-call" and called):
            if not called:
                raise i.error(f"{i.op} without a computation")
            for name in called:
                yield enter(name, scheduled and i.op != "fusion")
        elif i.op == "custom-call":
            yield Counts(flops=self.custom_flops(frame.inside, i))
        elif base not in PLAIN and base != "async":
            raise i.error(f"opcode {i.op} has no rule")

    def collective(self, inside: Computation, i: Instruction, scheduled: bool) -> Counts:
        """What a chip sends in a collective; nothing at the end of one, or where another fusion started it."""
        if i.op.endswith(("-done", "-update")):
            return Counts()
        if not scheduled and hlo_collectives.is_continued(inside, i):
            self.continued.setdefault(hlo_collectives.chain(i), i)
            return Counts()
        self.started.add(hlo_collectives.chain(i))
        found = hlo_collectives.sent(inside, i, self.devices, fused=not scheduled)
        assert found is not None
        return Counts(collectives=dict([found]))

    def check_chains(self) -> None:
        """Raise HloError for an asynchronous collective whose start was not found: nothing has counted it."""
        for key, i in self.continued.items():
            if key not in self.started:
                raise i.error(f"no fusion starts the asynchronous collective {i.name}")

    def iterations(self, frame: Frame, loop: Instruction) -> int:
        """Iterations of a loop that are counted."""
        found = trips(self.module, frame, loop)
        return found.most if found.exact or self.early is None else min(self.early, found.most)

    def branches(self, i: Instruction, enter: Callable[[str, bool], Counts], scheduled: bool) -> Counts:
        """Of the branches of a conditional the largest of each count: an upper bound."""
        names = i.called("branch_computations", "true_computation", "false_computation")
        if not names:
            raise i.error("a conditional without branches has no rule")
        return functools.reduce(lambda a, b: a.merge(b, max), (enter(name, scheduled) for name in names))

    def custom_flops(self, inside: Computation, i: Instruction) -> float:
        """FLOPs of a custom call: of a kernel by its estimate or the table, of a mark none."""
        target = hlo_collectives.target(i)
        if target in MARKS:
            return 0.0
        if target != KERNEL:
            raise i.error(f"custom call {target!r} has no rule")
        if found := ESTIMATE.search(i.attributes.get("backend_config", "")):
            return float(found.group(1))
        name = kernel_name(i)
        if name not in self.kernels:
            raise i.error(f"kernel {name!r} has neither an estimate of its FLOPs nor a closed form")
        given = tuple(a for operand in inside.operands(i) for a in operand.result)
        return float(self.kernels[name](Kernel(name, given, i.result)))


def kernel_name(i: Instruction) -> str:
    """Name of a Pallas kernel: the scope of ``op_name`` before pallas_call, without ``jvp(...)`` and the like.

    Without such a scope, the name of the instruction ``i``.
    """
    found = re.search(r'op_name="(?:[^"]*[/(])?([^"/()]+)\)*/pallas_call', i.attributes.get("metadata", ""))
    return found.group(1) if found else re.sub(r"[.\d]+$", "", i.name)


# ---- products -------------------------------------------------------------------------------------------------------


def product_flops(i: Instruction, inside: Computation) -> int:
    """FLOPs of a ``dot`` or a ``convolution`` ``i``: 2 for each multiply-add. inside: its computation."""
    left, right = (x.result[0].dims for x in inside.operands(i))
    if i.op == "dot":
        return 2 * i.result[0].elements * math.prod(left[d] for d in i.integers("lhs_contracting_dims"))
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", i.attributes.get("dim_labels", ""))
    if labels is None:
        raise i.error("a convolution without dim_labels has no rule")
    lhs, rhs, out = labels.groups()
    pairs = 1
    windows = _windows(i, [right[rhs.index(d)] for d in sorted(rhs) if d.isdigit()])
    for d, window in enumerate(windows):
        pairs *= _pairs(left[lhs.index(str(d))], i.result[0].dims[out.index(str(d))], *window)
    of = lambda name: int(i.attributes.get(name, "1"))
    rows = left[lhs.index("b")] // of("batch_group_count")
    features = left[lhs.index("f")] // of("feature_group_count")
    return 2 * rows * features * right[rhs.index("o")] * pairs


def _windows(i: Instruction, sizes: list[int]) -> list[tuple[int, int, int, int, int]]:
    """Of each spatial dimension of a convolution: size, stride, padding before, dilation of operand and of kernel."""
    given = dict(part.split("=") for part in i.attributes.get("window", "{}").strip("{}").split())
    unknown = given.keys() - {"size", "stride", "pad", "lhs_dilate", "rhs_dilate", "rhs_reversal"}
    if unknown:
        raise i.error(f"window of a convolution: {', '.join(sorted(unknown))} has no rule")
    each = lambda name, default: given[name].split("x") if name in given else [default] * len(sizes)
    columns = [each("size", "1"), each("stride", "1"), [p.split("_")[0] for p in each("pad", "0_0")]]
    columns += [each("lhs_dilate", "1"), each("rhs_dilate", "1")]
    if [int(s) for s in columns[0]] != sizes:
        raise i.error(f"window of a convolution: sizes {columns[0]} differ from those of the kernel, {sizes}")
    return [tuple(int(column[d]) for column in columns) for d in range(len(sizes))]  # type: ignore[misc]  # 5 columns


@functools.lru_cache
def _pairs(given: int, out: int, size: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """Pairs of an output position and a kernel position that meet an element, in one spatial dimension.

    Padding and the gaps of a dilated operand are not computed. libtpu writes the batch dimension of a product as a
    spatial dimension in which each output position meets one element.
    """
    at = np.arange(out)[:, None] * stride - pad + np.arange(size)[None] * rhs_dilate
    return int(((at % lhs_dilate == 0) & (at >= 0) & (at < given * lhs_dilate)).sum())


__all__ = ["VERSION", "Counts", "HloError", "Kernel", "KernelFlops", "count", "kernel_name", "parse", "product_flops"]
