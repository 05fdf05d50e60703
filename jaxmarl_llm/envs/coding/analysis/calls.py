"""Expressions that need care in the abstract execution of `code_flow`: calls, comprehensions, ``and`` and ``or``. Calls
are of the target, of the program's own functions, or of everything else.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from jaxmarl_llm.envs.coding.analysis.syntax import Code
from jaxmarl_llm.envs.coding.analysis.values import (  # fmt: skip
    DERIVED,
    ELEM,
    NONE,
    OTHER,
    STATES,
    Alternatives,
    Kind,
    Outcome,
    State,
    Value,
    dump,
    loaded,
    place,
)

# A conversion is no work of its own: the caller could not tell whether it changed anything.
CASTS = frozenset({"bool", "int", "float", "str", "list", "tuple", "dict", "copy", "deepcopy", "iter"})
ADDING = frozenset({"append", "add", "extend", "update", "appendleft"})
CHANGING = ADDING | {
    "sort", "reverse", "remove", "pop", "popleft", "clear", "discard", "popitem", "insert", "setdefault",
}  # fmt: skip


class Expressions:
    """The part of the walker that looks at them."""

    functions: dict[str, ast.FunctionDef]
    sites: set[tuple[int, int]]
    repeated: bool
    loops: int  # around the present place
    arms: int  # of branches inside the innermost loop
    value: Callable[[ast.expr, State], Alternatives]
    values: Callable[[Sequence[ast.expr], State], list[tuple[list[Value], State]]]
    run: Callable[[Code, State, Sequence[Value]], set[Outcome]]
    bind: Callable[[ast.expr | None, Value, State], State]

    def call(self, node: ast.Call, state: State) -> Alternatives:
        arguments = [*node.args, *(k.value for k in node.keywords)]
        out: Alternatives = []
        if isinstance(node.func, ast.Attribute):
            return self.method(node, node.func, arguments, state)
        for callee, before in self.value(node.func, state):
            for given, after in self.values(arguments, before):
                if callee.target:
                    self.sites.add(place(node))
                    self.repeated = self.repeated or self.loops > 0
                    what = Value(Kind.AUX, ";".join(map(dump, arguments)))
                    # called with its own value: a composition
                    got = DERIVED if any(v.tainted for v in given) else what
                    out.append((got, after._replace(called=min(2, after.called + 1))))
                elif callee.code is not None:
                    out += self.inline(callee.code, after, given)
                else:
                    name = node.func.id if isinstance(node.func, ast.Name) else ""
                    out += self.unknown(name, callee, given, after, node)
        return out

    def inline(self, code: Code, state: State, given: Sequence[Value]) -> Alternatives:
        # A function at the margin does not see its caller's names; one inside sees them, and they do no harm.
        inner = state if code not in self.functions.values() else state._replace(env=())
        return [
            (Value(o.kind, o.text), state._replace(called=o.called, decided=o.decided))
            for o in sorted(self.run(code, inner, given))
        ]

    def unknown(self, name: str, callee: Value, given: Sequence[Value], state: State, node: ast.Call) -> Alternatives:
        """A builtin or something imported. Functions among its arguments are taken to be called, with anything."""
        if name in CASTS and not given:
            return [(Value(Kind.EMPTY, name), state)]
        if name in CASTS and len(given) == 1 and given[0].kind in (Kind.AUX, Kind.TRIVIAL, Kind.EMPTY, Kind.ELEM):
            return [(given[0], state)]
        if name == "set" and not given:
            return [(Value(Kind.EMPTY, name), state)]
        tainted = callee.tainted or any(v.tainted for v in given)
        called, decided = state.called, state.decided
        for value in given:
            through = value.target
            if value.target:
                self.sites.add(place(node))
            elif value.code is not None:
                self.loops += 1
                found = self.run(value.code, state._replace(called=0), [OTHER] * 8)
                self.loops -= 1
                through = any(o.called and (o.kind >= Kind.ELEM or o.decided) for o in found)
            if through:
                self.repeated, called, tainted = True, 2, True
                decided = decided or name == "filter"
        if name == "filter" and called and not any(v.tainted for v in given):
            return [(OTHER, state._replace(called=called, decided=decided))]  # it chooses, its value is gone
        return [(DERIVED if tainted else OTHER, state._replace(called=called, decided=decided))]

    def method(self, node: ast.Call, func: ast.Attribute, arguments: list[ast.expr], state: State) -> Alternatives:
        out: Alternatives = []
        for (owner, *given), after in self.values([func.value, *arguments], state):
            if func.attr == "copy" and not given:
                out.append((owner, after))
                continue
            ((result, after),) = self.unknown("", owner, given, after, node)
            if isinstance(func.value, ast.Name) and func.attr in CHANGING:
                after = after.bind(func.value.id, self.changed(owner, func.attr, given))
                result = DERIVED if owner.tainted and func.attr not in ADDING else NONE
            out.append((result, after))
        return out

    def changed(self, owner: Value, method: str, given: Sequence[Value]) -> Value:
        """What a list is after ``owner.method(*given)``: a copy of the target's value if it gets all its items."""
        if method in ADDING and len(given) == 1 and not self.arms:
            whole = method in ("extend", "update") and given[0].kind == Kind.AUX and owner.kind == Kind.EMPTY
            item = method in ("append", "add", "appendleft") and given[0].kind == Kind.ELEM
            if whole or (item and owner.kind in (Kind.EMPTY, Kind.AUX)):
                return Value(Kind.AUX)
        return DERIVED if owner.tainted or any(v.tainted for v in given) else OTHER

    def choice(self, node: ast.BoolOp, state: State) -> Alternatives:
        """``a or b``, ``a and b``: one of them. Two values of the target, or ``aux(x) and p(x)``, make a new one."""
        out: Alternatives = []
        open_: list[tuple[list[Value], State]] = [([], state)]
        for i, operand in enumerate(node.values):
            later = []
            for have, s in open_:
                for value, after in self.value(operand, s):
                    tainted = [v for v in have if v.tainted]
                    mixed = tainted and (value.tainted or (isinstance(node.op, ast.And) and value.kind == Kind.OTHER))
                    choice = DERIVED if mixed else value
                    passed = after._replace(decided=after.decided or bool(tainted))
                    out.append((choice, passed if i else after))
                    later.append(([*have, value], passed))
            open_ = later[:STATES]
        return out

    def comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, state: State
    ) -> Alternatives:
        """Iterables, conditions and elements in one pass; the element's own names end with it."""
        env, tainted, iterables = state.env, False, []
        for i, generator in enumerate(node.generators):
            self.loops += i > 0  # the first iterable is evaluated once
            value, state = self.value(generator.iter, state)[0]
            self.loops += i == 0
            iterables.append(value)
            item = ELEM if value.kind == Kind.AUX else DERIVED if value.tainted else OTHER
            state = self.bind(generator.target, item, state)
            for test in generator.ifs:
                value, state = self.value(test, state)[0]
                state = state._replace(decided=state.decided or value.tainted)
        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        for element in elements:
            found = self.value(element, state)
            tainted = tainted or any(value.tainted for value, _ in found)
            state = found[0][1]._replace(
                called=max(s.called for _, s in found), decided=any(s.decided for _, s in found)
            )
        self.loops -= len(node.generators)
        state = state._replace(env=env)
        first = node.generators[0]
        copies = (
            isinstance(node, (ast.ListComp, ast.GeneratorExp)) and len(iterables) == 1 and not first.ifs
            and dump(loaded(first.target)) == dump(node.elt)
        )  # fmt: skip
        if copies:
            return [(iterables[0], state)]
        return [(DERIVED if tainted or any(v.tainted for v in iterables) else OTHER, state)]
