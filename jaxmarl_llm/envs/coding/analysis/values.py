"""Kinds of values, states and outcomes of the abstract execution in `code_flow`, and how operators combine kinds.

Shared arguments: ``node`` is an expression of the program, and ``found`` are alternatives (value, state).
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxmarl_llm.envs.coding.analysis.syntax import Code

STATES = 48  # kept apart at one place


class Kind(enum.IntEnum):
    """Kinds of values, in the order of how much they depend on the target."""

    EMPTY = 0
    TRIVIAL = 1
    OTHER = 2
    ELEM = 3
    AUX = 4
    DERIVED = 5


class Value(NamedTuple):
    """A value of the abstract execution."""

    kind: Kind
    text: str = ""  # tells trivial values apart, and the target's by what it is called with
    code: Code | None = None  # a function of the program
    target: bool = False  # the function itself, not yet called

    @property
    def tainted(self) -> bool:
        return self.kind >= Kind.ELEM


OTHER, DERIVED, ELEM = Value(Kind.OTHER), Value(Kind.DERIVED), Value(Kind.ELEM)
NONE = Value(Kind.TRIVIAL, "Constant(value=None)")


class Outcome(NamedTuple):
    """The result of one path."""

    kind: Kind
    text: str
    called: int  # calls of the target on this path, two at most
    decided: bool  # its value decided a branch on this path


class State(NamedTuple):
    """Bindings and calls on one path."""

    env: tuple[tuple[str, Value], ...] = ()
    called: int = 0
    decided: bool = False

    def bind(self, name: str, value: Value) -> State:
        return self._replace(env=tuple(sorted({**dict(self.env), name: value}.items(), key=lambda item: item[0])))


@dataclass(frozen=True)
class Flow:
    """Result of the analysis: outcomes and calls of the target."""

    outcomes: frozenset[Outcome]  # of every path found
    sites: int  # places where the target is called
    repeated: bool  # some of them in a loop, a comprehension or handed to map, sorted, ...
    ignored: int  # places whose value is thrown away

    @property
    def called(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.called]

    @property
    def used(self) -> bool:
        """Does the target's value reach a return, or decide one?"""
        return any(o.kind >= Kind.ELEM or o.decided for o in self.called)

    @property
    def wrapper(self) -> bool:
        """Is the value returned unchanged wherever the target is called, constants and arguments as guards aside?
        To choose between the values of different calls by what they are is more than that.
        """
        kinds = {o.kind for o in self.called}
        if not kinds or kinds & {Kind.OTHER, Kind.ELEM, Kind.DERIVED}:
            return False
        if len({o.text for o in self.called if o.kind == Kind.AUX and o.decided and o.called > 1}) > 1:
            return False
        texts = {o.text for o in self.called}
        return Kind.AUX in kinds or len(texts) < 2 or texts <= {"Constant(value=True)", "Constant(value=False)"}


class TooComplex(Exception):
    """The code is beyond analysis."""


Alternatives = list[tuple[Value, State]]


def combined(node: ast.BinOp, left: Value, right: Value) -> Value:
    """Value of a binary operation on ``left`` and ``right``. Adding nothing, or multiplying by one, leaves a value."""
    if isinstance(node.op, ast.Add) and left.kind == Kind.EMPTY:
        return right
    if isinstance(node.op, (ast.Add, ast.Sub)) and right.kind == Kind.EMPTY:
        return left
    for value, side in ((left, node.right), (right, node.left)):
        if isinstance(node.op, ast.Mult) and isinstance(side, ast.Constant) and side.value == 1:
            return value
    if isinstance(node.op, ast.Sub) and dump(node.left) == dump(node.right):
        return OTHER  # x - x
    return made(node, [left, right])


def made(node: ast.expr, parts: Sequence[Value]) -> Value:
    """Value of an expression that is made of ``parts``."""
    if any(p.tainted for p in parts):
        return DERIVED
    if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
        if not parts:
            return Value(Kind.EMPTY, dump(node))
        if all(p.kind <= Kind.TRIVIAL for p in parts):
            return Value(Kind.TRIVIAL, dump(node))
    constants = [c for c in ast.iter_child_nodes(node) if isinstance(c, ast.expr)]
    if constants and all(isinstance(c, ast.Constant) for c in constants):
        return Value(Kind.TRIVIAL, dump(node))
    return OTHER


def loaded(target: ast.expr) -> ast.expr:
    """A target as an expression that reads it."""
    match target:
        case ast.Name():
            return ast.copy_location(ast.Name(target.id, ast.Load()), target)
        case ast.Tuple():
            return ast.copy_location(ast.Tuple([loaded(e) for e in target.elts], ast.Load()), target)
    return target


def dump(node: ast.AST | Sequence[ast.AST]) -> str:
    """Text of a syntax tree, or of several."""
    return ast.dump(node) if isinstance(node, ast.AST) else ";".join(ast.dump(n) for n in node)


def place(node: ast.expr) -> tuple[int, int]:
    """Line and column of an expression."""
    return node.lineno, node.col_offset


def few(states: Iterable[State]) -> list[State]:
    """The first `STATES` different ``states``."""
    return list(dict.fromkeys(states))[:STATES]


def distinct(found: Alternatives) -> Alternatives:
    """The first `STATES` different alternatives."""
    return list(dict.fromkeys(found))[:STATES]
