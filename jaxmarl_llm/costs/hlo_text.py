"""Text of a compiled program (optimised HLO) as instructions, types with layouts, and computations.

An instruction may span several lines, because attributes of Pallas kernels contain line ends. So brackets and quotes
decide where an instruction ends. A line of an unknown form raises `HloError` with its number; no line is skipped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

SIZES = {"pred": 1.0, "token": 0.0, "opaque": 0.0, "bf16": 2.0, "c64": 8.0, "c128": 16.0}
SIZES |= {f"{kind}{bits}": bits / 8 for kind in "su" for bits in (1, 2, 4, 8, 16, 32, 64)}
SIZES |= {f"f{bits}": bits / 8 for bits in (16, 32, 64)}
SIZES |= {"f4e2m1fn": 0.5, "f8e8m0fnu": 1.0, "f8e3m4": 1.0, "f8e4m3": 1.0, "f8e4m3b11fnuz": 1.0, "f8e4m3fn": 1.0}
SIZES |= {"f8e4m3fnuz": 1.0, "f8e5m2": 1.0, "f8e5m2fnuz": 1.0}

HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
ASSIGN = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", re.DOTALL)
OPCODE = re.compile(r"\s*([\w\-]+)\(")
# Lines outside of computations: the head of the module and the tables of source lines.
OUTSIDE = re.compile(r"HloModule |FileNames$|FunctionNames$|FileLocations$|StackFrames$|\d+ [\"{]|$")
BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]', re.DOTALL)
COMMA = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]', re.DOTALL)
TYPE = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^{}]*)\})?|[()]")
COMMENT = re.compile(r"/\*.*?\*/")
SPACE = re.compile(r"S\((\d+)\)")
NAME = re.compile(r"%([\w.\-]+)")


def words(text: str) -> frozenset[str]:
    """Words of ``text``: a long set of opcodes."""
    return frozenset(text.split())


class HloError(ValueError):
    """A part of a program that cannot be parsed or has no rule."""

    def __init__(self, line: int, why: str, text: str = "") -> None:
        """Name a line. line: its number from 1. why: what is wrong. text: the line."""
        shown = f": {text.strip()[:160]}" if text else ""
        super().__init__(f"line {line} of the compiled program: {why}{shown}")


@dataclasses.dataclass(frozen=True)
class Array:
    """Type of an array. space: memory space of its layout; 0 is the chip's main memory, 1 is VMEM."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        """Size in bytes."""
        return SIZES[self.dtype] * self.elements


Type = Array | tuple["Type", ...]  # type: ignore[misc]  # mypy has no recursive alias of this form


def arrays(of: Type) -> tuple[Array, ...]:
    """Arrays of the type ``of``, tuples flattened."""
    if isinstance(of, Array):
        return (of,)
    return tuple(a for part in of for a in arrays(part))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    name: without %. root: whether it is the result of the computation. type: of its result. op: opcode. operands: names
    of instructions. given: text between the brackets behind the opcode. attributes: name -> text. line: its number in
    the program. text: its line.
    """

    name: str
    root: bool
    type: Type
    op: str
    operands: tuple[str, ...]
    given: str
    attributes: dict[str, str]
    line: int
    text: str

    @property
    def result(self) -> tuple[Array, ...]:
        """Arrays of the result, tuples flattened."""
        return arrays(self.type)

    @property
    def index(self) -> int:
        """Number of a parameter, or of the element that a get-tuple-element takes."""
        return int(self.given if self.op == "parameter" else self.attributes["index"])

    def integers(self, name: str) -> tuple[int, ...]:
        """Integers of the attribute ``name={...}``; empty without it."""
        return tuple(int(x) for x in re.findall(r"-?\d+", self.attributes.get(name, "")))

    def called(self, *names: str) -> list[str]:
        """Names of the computations in the attributes ``names``, in order."""
        return [found for name in names for found in NAME.findall(self.attributes.get(name, ""))]

    def error(self, why: str) -> HloError:
        """Error at this instruction. why: what is wrong."""
        return HloError(self.line, why, self.text)


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions of one computation. name: without %. instructions: by name, in order. line: of its head."""

    name: str
    instructions: dict[str, Instruction]
    line: int

    @functools.cached_property
    def root(self) -> Instruction:
        """Instruction whose result is that of the computation."""
        found = [i for i in self.instructions.values() if i.root]
        if len(found) != 1:
            raise HloError(self.line, f"computation {self.name} has {len(found)} roots, expected one")
        return found[0]

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        return {i.index: i for i in self.instructions.values() if i.op == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """Uses of each instruction: its users, each with the number of the operand."""
        found: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for i in self.instructions.values():
            for k, name in enumerate(i.operands):
                if name not in found:
                    raise i.error(f"operand {name} is not in computation {self.name}")
                found[name].append((i, k))
        return found

    def operands(self, i: Instruction) -> list[Instruction]:
        """Operands of an instruction ``i`` of this computation."""
        missing = [name for name in i.operands if name not in self.instructions]
        if missing:
            raise i.error(f"operand {missing[0]} is not in computation {self.name}")
        return [self.instructions[name] for name in i.operands]


class Module(NamedTuple):
    """Program. computations: by name. entry: the computation that runs."""

    computations: dict[str, Computation]
    entry: Computation

    def callee(self, i: Instruction, *names: str) -> Computation:
        """The one computation in the attributes ``names`` of an instruction ``i``."""
        found = i.called(*names)
        if len(found) != 1 or found[0] not in self.computations:
            raise i.error(f"expected one known computation in {' or '.join(names)}, found {found}")
        return self.computations[found[0]]


def parse(text: str) -> Module:
    """Program of ``text``, what ``as_text()`` of a compiled program gives. Raises HloError."""
    found: dict[str, Computation] = {}
    entry: Computation | None = None
    now: Computation | None = None
    for line, words in _logical(text):
        if now is None:
            if header := HEADER.match(words):
                now = found[header.group(2)] = Computation(header.group(2), {}, line)
                entry = now if header.group(1) else entry
            elif not OUTSIDE.match(words):
                raise HloError(line, "expected the head of a computation", words)
        elif words.startswith("}"):
            now = None
        elif words.strip():
            i = parse_instruction(words, line)
            now.instructions[i.name] = i
    if now is not None:
        raise HloError(now.line, f"computation {now.name} does not end")
    if entry is None:
        raise HloError(1, "no entry computation: this is not the text of a compiled program")
    return Module(found, entry)


def _logical(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, those of one instruction joined."""
    held, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not held and not line.startswith(" "):
            yield number, line.rstrip()
            continue
        start = start if held else number
        held = f"{held}\n{line}" if held else line
        if _depth(held) == 0:
            yield start, held
            held = ""
    if held:
        raise HloError(start, "brackets or quotes are not closed", held)


def _depth(text: str) -> int:
    """Open brackets of a text; 1 or more also where a string is not closed."""
    found = [x for x in BRACKET.findall(text) if len(x) == 1]
    open_string = '"' in BRACKET.sub("", text)
    return sum(1 if x in "({[" else -1 for x in found) + open_string


def _closing(text: str, line: int) -> int:
    """Index after the bracket that closes the one at the start of ``text``."""
    depth = 0
    for found in BRACKET.finditer(text):
        if len(found.group()) == 1:
            depth += 1 if found.group() in "({[" else -1
            if depth == 0:
                return found.end()
    raise HloError(line, "brackets are not closed", text)


def parse_instruction(text: str, line: int) -> Instruction:
    """Instruction in ``text``. line: its number. Raises HloError."""
    match = ASSIGN.fullmatch(text)
    if match is None:
        raise HloError(line, "expected an instruction", text)
    root, name, rest = match.groups()
    split = _closing(rest, line) if rest.startswith("(") else rest.find(" ")
    opcode = OPCODE.match(rest, split)
    if split < 0 or opcode is None:
        raise HloError(line, "expected a type, an opcode and operands", text)
    of, rest = parse_type(rest[:split], line), rest[opcode.end() - 1 :]
    end = _closing(rest, line)
    given = rest[1 : end - 1]
    operands = () if opcode.group(1) == "constant" else tuple(NAME.findall(given))
    attributes = dict(_attributes(rest[end:], line))
    return Instruction(name, bool(root), of, opcode.group(1), operands, given, attributes, line, text)


def parse_type(text: str, line: int) -> Type:
    """Type in ``text``. line: its number. Raises HloError for an unknown dtype or a dimension that is no number."""
    stack: list[list[Type]] = [[]]
    for found in TYPE.finditer(text):
        if found.group() == "(":
            stack.append([])
        elif found.group() == ")":
            closed = stack.pop()
            stack[-1].append(tuple(closed))
        else:
            stack[-1].append(_array(found, line))
    unknown = COMMENT.sub("", TYPE.sub("", text)).strip(" ,")
    if unknown or len(stack) != 1 or len(stack[0]) != 1:
        raise HloError(line, "expected a type", text)
    return stack[0][0]


def _array(found: re.Match[str], line: int) -> Array:
    """Array of a match of TYPE. line: its number."""
    dtype, dims, layout = found.groups()
    if dtype not in SIZES or not re.fullmatch(r"[\d,]*", dims):
        raise HloError(line, f"type {dtype}[{dims}] has no rule")
    space = SPACE.search(layout or "")
    return Array(dtype, tuple(int(d) for d in dims.split(",") if d), int(space.group(1)) if space else 0)


def _attributes(text: str, line: int) -> Iterator[tuple[str, str]]:
    """Attributes ``, name=value`` of an instruction, by commas outside of brackets and quotes."""
    starts, depth = [], 0
    for found in COMMA.finditer(text):
        if found.group() == ",":
            if depth == 0:
                starts.append(found.start())
        elif len(found.group()) == 1:
            depth += 1 if found.group() in "({[" else -1
    if text[: starts[0] if starts else None].strip():
        raise HloError(line, "expected attributes behind the operands", text)
    for start, end in zip(starts, [*starts[1:], len(text)]):
        name, equals, value = text[start + 1 : end].strip().partition("=")
        if not equals:
            raise HloError(line, "expected name=value", text[start:end])
        yield name, value
