"""Where does the value of a called function go? Abstract execution of Python over kinds of values, for rewards.

``flow(module, entry, target)`` follows every path of ``entry`` (loops 0, 1 and 2 times, own functions inlined). For
each return it notes what kind of value it is, whether ``target`` was called on the way, and whether its value decided a
branch. Kinds, from least to most:

    EMPTY    [] {} "" 0             TRIVIAL  constants and parameters, under any name
    OTHER    computed without the target's value
    ELEM     an item of the target's value             DERIVED  computed with it
    AUX      the target's value itself: aliased, cast, copied item by item, or passed through functions that do so

It is an approximation by intent. Code that is written to fool it can do so (a comparison that is always true, say).
Padding, renaming, dead code, comments and ignored results do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from jaxmarl_llm.envs.coding.analysis.calls import Expressions
from jaxmarl_llm.envs.coding.analysis.syntax import (
    MAX_DEPTH,
    Code,
    Function,
    bindings,
    depth,
    ends,
    function,
    own_nodes,
    prune,
)
from jaxmarl_llm.envs.coding.analysis.values import (
    DERIVED,
    ELEM,
    NONE,
    OTHER,
    STATES,
    Alternatives,
    Flow,
    Kind,
    Outcome,
    State,
    TooComplex,
    Value,
    combined,
    distinct,
    dump,
    few,
    loaded,
    made,
    place,
)

BUDGET, CALLS = 30_000, 5  # evaluations in all; depth of inlining


def flow(module: ast.Module, entry: str, target: str) -> Flow | None:
    """Follow the paths of the function ``entry`` of ``module``, and record what becomes of the values of ``target``.

    Returns None if ``entry`` is no plain function or beyond analysis. A module that binds ``target`` calls its own.
    """
    node = function(module, entry)
    if node is None or depth(node) > MAX_DEPTH:
        return None
    known = {k: v for k, v in bindings(module).items() if isinstance(v, ast.FunctionDef)}
    walker = _Walker(known, "" if target in bindings(module) else target)
    try:
        outcomes = walker.run(node, State(), [])
    except (TooComplex, RecursionError):
        return None
    return Flow(frozenset(outcomes), len(walker.sites), walker.repeated, len(walker.ignored))


class _Walker(Expressions):
    def __init__(self, functions: dict[str, ast.FunctionDef], target: str):
        self.functions, self.target = functions, target
        self.sites: set[tuple[int, int]] = set()
        self.ignored: set[tuple[int, int]] = set()
        self.repeated = False
        self.loops = self.arms = self.spent = 0
        self.pruned: dict[int, Function] = {}
        self.stack: list[Code] = []
        self.outcomes: set[Outcome] = set()
        self.exits: list[list[State]] = []  # states that leave each loop or go on with it
        self.loaded: list[set[str]] = []  # names read in each function on the stack

    # -- functions -----------------------------------------------------------------------------------------------------

    def run(self, node: Code, state: State, arguments: Sequence[Value]) -> set[Outcome]:
        """All outcomes of a function or lambda, called from ``state`` with these arguments."""
        if len(self.stack) >= CALLS or node in self.stack:
            return {Outcome(Kind.OTHER, "", state.called, state.decided)}
        args = node.args
        names = [a.arg for a in (*args.posonlyargs, *args.args)]
        rest = [a.arg for a in (*args.kwonlyargs, args.vararg, args.kwarg) if a is not None]
        for i, name in enumerate((*names, *rest)):
            given = arguments[i] if i < min(len(arguments), len(names)) else None
            state = state.bind(name, given or Value(Kind.TRIVIAL, name))
        if isinstance(node, ast.Lambda):
            self.stack.append(node)
            found = {Outcome(v.kind, v.text, s.called, s.decided) for v, s in self.value(node.body, state)}
            self.stack.pop()
            return found
        if id(node) not in self.pruned:
            self.pruned[id(node)] = prune(node)
        body, own = self.pruned[id(node)], own_nodes(self.pruned[id(node)])
        stored = {n.id for n in own if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del))}
        if self.target in stored and self.target not in dict(state.env):
            state = state.bind(self.target, OTHER)  # local to the function wherever it is bound
        saved = self.outcomes, self.loops, self.arms, self.exits
        self.outcomes, self.arms, self.exits = set(), 0, []
        self.stack.append(node)
        self.loaded.append({n.id for n in ast.walk(body) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)})
        for left in self.block(body.body, [state]):
            self.leave(NONE, left)
        found = self.outcomes
        if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in own):
            found = {o._replace(kind=Kind.DERIVED) if o.kind >= Kind.ELEM else o for o in found}
        self.loaded.pop()
        self.stack.pop()
        self.outcomes, self.loops, self.arms, self.exits = saved
        return found

    def leave(self, value: Value, state: State) -> None:
        self.outcomes.add(Outcome(value.kind, value.text, state.called, state.decided))

    # -- statements ----------------------------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt], states: Iterable[State]) -> list[State]:
        now = list(states)
        for i, node in enumerate(statements):
            now = few(after for state in now for after in self.statement(node, state, statements[i + 1 :]))
        return now

    def statement(self, node: ast.stmt, state: State, rest: Sequence[ast.stmt]) -> list[State]:
        match node:
            case ast.Return():
                for value, after in self.value(node.value, state) if node.value else [(NONE, state)]:
                    self.leave(value, after)
                return []
            case ast.Expr():
                if isinstance(node.value, ast.Call) and self.is_target(node.value.func, state):
                    self.ignored.add(place(node.value))
                return [after for _, after in self.value(node.value, state)]
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                return self.assign(node, state)
            case ast.If():
                return self.branch(node, state, rest)
            case ast.For() | ast.AsyncFor() | ast.While():
                return self.loop(node, state)
            case ast.Try() | ast.TryStar():
                return self.attempt(node, state)
            case ast.With() | ast.AsyncWith():
                states = [state]
                for item in node.items:
                    states = [a for s in states for _, a in self.value(item.context_expr, s)]
                    states = [self.bind(item.optional_vars, OTHER, s) for s in states]
                return self.block(node.body, states)
            case ast.Match():
                out = []
                for value, after in self.value(node.subject, state):
                    after = after._replace(decided=after.decided or value.tainted)
                    out += [after, *(s for c in node.cases for s in self.block(c.body, [after]))]
                return few(out)
            case ast.FunctionDef():
                return [state.bind(node.name, Value(Kind.TRIVIAL, node.name, node))]
            case ast.ClassDef() | ast.AsyncFunctionDef():
                return [state.bind(node.name, OTHER)]
            case ast.Raise():
                return []
            case ast.Break() | ast.Continue():
                if self.exits:
                    self.exits[-1].append(state)
                return []
            case ast.Assert():
                return [after for _, after in self.value(node.test, state)]
        return [state]

    def bind(self, target: ast.expr | None, value: Value, state: State) -> State:
        match target:
            case ast.Name():
                return state.bind(target.id, value)
            case ast.Tuple() | ast.List():
                part = ELEM if value.kind == Kind.AUX else DERIVED if value.tainted else OTHER
                for item in target.elts:
                    state = self.bind(item.value if isinstance(item, ast.Starred) else item, part, state)
            case ast.Subscript() | ast.Attribute():
                if isinstance(target.value, ast.Name):
                    name = target.value.id
                    old = dict(state.env).get(name, OTHER)
                    return state.bind(name, DERIVED if old.tainted or value.tainted else OTHER)
        return state

    def assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, state: State) -> list[State]:
        if node.value is None:
            return [state]
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id not in self.loaded[-1]:
            if isinstance(node.value, ast.Call) and self.is_target(node.value.func, state):
                self.ignored.add(place(node.value))
            return [after for _, after in self.value(node.value, state)]
        if isinstance(node, ast.AugAssign):
            left = ast.copy_location(ast.BinOp(loaded(node.target), node.op, node.value), node)
            return [self.bind(node.target, value, after) for value, after in self.value(left, state)]
        pair = (targets[0], node.value)
        if isinstance(pair[0], ast.Tuple) and isinstance(pair[1], ast.Tuple) and len(pair[0].elts) == len(pair[1].elts):
            out = []
            for values, after in self.values(pair[1].elts, state):
                for one, value in zip(pair[0].elts, values):
                    after = self.bind(one, value, after)
                out.append(after)
            return out
        out = []
        for value, after in self.value(node.value, state):
            for target in targets:
                after = self.bind(target, value, after)
            out.append(after)
        return out

    def branch(self, node: ast.If, state: State, rest: Sequence[ast.stmt]) -> list[State]:
        same = dump(node.body) == dump(node.orelse)
        if not node.orelse and ends(node.body):
            same = dump(node.body) == dump(rest)
        out = []
        self.arms += 1
        for value, after in self.value(node.test, state):
            if value.tainted and not same:
                after = after._replace(decided=True)
            out += self.block(node.body, [after]) + self.block(node.orelse, [after])
        self.arms -= 1
        return few(out)

    def loop(self, node: ast.For | ast.AsyncFor | ast.While, state: State) -> list[State]:
        head = node.test if isinstance(node, ast.While) else node.iter
        arms, self.arms = self.arms, 0
        now, done, forever = [state], [], isinstance(node, ast.While) and isinstance(head, ast.Constant)
        self.exits.append([])
        if isinstance(node, ast.While):
            self.loops += 1
        for turn in range(3):
            entered = []
            for s in now:
                for value, after in self.value(head, s):
                    if value.tainted and node.body:
                        after = after._replace(decided=after.decided or value.kind != Kind.AUX or not turn)
                    if not forever:
                        done.append(after)
                    if not isinstance(node, ast.While):
                        item = ELEM if value.kind == Kind.AUX else DERIVED if value.tainted else OTHER
                        after = self.bind(node.target, item, after)
                    entered.append(after)
            if turn == 2:
                break
            self.loops += not isinstance(node, ast.While)
            now = self.block(node.body, few(entered))
            self.loops -= not isinstance(node, ast.While)
        if isinstance(node, ast.While):
            self.loops -= 1
        done += self.exits.pop()
        self.arms = arms
        return self.block(node.orelse, few(done)) if node.orelse else few(done)

    def attempt(self, node: ast.Try | ast.TryStar, state: State) -> list[State]:
        before = len(self.sites)
        after = self.block(node.body, [state])
        inside = any(isinstance(n, ast.Call) and self.is_target(n.func, state) for b in node.body for n in ast.walk(b))
        inside = inside or len(self.sites) > before
        failed = state._replace(called=max(state.called, int(inside)), decided=state.decided or inside)
        out = self.block(node.orelse, after)
        for handler in node.handlers:
            out += self.block(handler.body, [failed.bind(handler.name, OTHER) if handler.name else failed])
        return self.block(node.finalbody, few(out))

    # -- expressions ---------------------------------------------------------------------------------------------------

    def is_target(self, node: ast.expr, state: State) -> bool:
        if not isinstance(node, ast.Name):
            return False
        bound = dict(state.env).get(node.id)
        return bound.target if bound is not None else node.id == self.target

    def values(self, nodes: Sequence[ast.expr], state: State) -> list[tuple[list[Value], State]]:
        out: list[tuple[list[Value], State]] = [([], state)]
        for node in nodes:
            out = [([*have, value], after) for have, s in out for value, after in self.value(node, s)][:STATES]
        return out

    def value(self, node: ast.expr, state: State) -> Alternatives:
        self.spent += 1
        if self.spent > BUDGET:
            raise TooComplex
        return distinct(self.expression(node, state))

    def expression(self, node: ast.expr, state: State) -> Alternatives:
        match node:
            case ast.Constant():
                empty = node.value is not None and not isinstance(node.value, bool) and not node.value
                return [(Value(Kind.EMPTY if empty else Kind.TRIVIAL, dump(node)), state)]
            case ast.Name():
                return [(self.name(node, state), state)]
            case ast.Lambda():
                return [(Value(Kind.TRIVIAL, "lambda", node), state)]
            case ast.NamedExpr():
                return [(v, s.bind(node.target.id, v)) for v, s in self.value(node.value, state)]
            case ast.IfExp():
                same = dump(node.body) == dump(node.orelse)
                out: Alternatives = []
                for value, after in self.value(node.test, state):
                    if value.tainted and not same:
                        after = after._replace(decided=True)
                    out += self.value(node.body, after) + self.value(node.orelse, after)
                return out
            case ast.BoolOp():
                return self.choice(node, state)
            case ast.Call():
                return self.call(node, state)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self.comprehension(node, state)
            case ast.UnaryOp(op=ast.Not(), operand=ast.UnaryOp(op=ast.Not(), operand=inner)):
                return self.value(inner, state)
            case ast.Starred() | ast.Await():
                return self.value(node.value, state)
            case ast.Yield() | ast.YieldFrom():
                found = self.value(node.value, state) if node.value else [(NONE, state)]
                for value, after in found:
                    self.leave(value, after)
                return [(OTHER, after) for _, after in found]
            case ast.Subscript(slice=ast.Slice(lower=None, upper=None, step=None)):
                return self.value(node.value, state)  # a copy
            case ast.BinOp():
                return [(combined(node, *v), s) for v, s in self.values([node.left, node.right], state)]
        parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return [(made(node, got), after) for got, after in self.values(parts, state)]

    def name(self, node: ast.Name, state: State) -> Value:
        bound = dict(state.env).get(node.id)
        if bound is not None:
            return bound
        if node.id == self.target:
            return Value(Kind.TRIVIAL, node.id, target=True)
        if node.id in self.functions:
            return Value(Kind.TRIVIAL, node.id, self.functions[node.id])
        return OTHER
