"""Reading the Python in a completion: extraction, composition of one program, and what of it can be reached.

Nothing here runs the code, and every function has a result for any text. Text that cannot be parsed gives None or is
left as it is: syntax errors, null bytes, lone surrogates, nesting beyond the parser's stack.

Shared arguments: ``source`` and ``code`` are program texts, ``module`` and ``node`` parts of a syntax tree.
"""

from __future__ import annotations

import ast
import copy
import re
import textwrap
import warnings
from typing import Any

MAX_CODE = 1 << 14  # characters of a completion; a longer one is read as empty, because analysis takes 60 µs for each
MAX_DEPTH = 100  # levels of a syntax tree that are analysed; the recursive passes below need a few frames for each

_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.M | re.S)
_START = re.compile(r"(?:async[ \t]+def|def|class|import|from|@|if|try|[A-Za-z_]\w*[ \t]*(?::[^=\n]+)?=(?!=))")
_DEF = re.compile(r"(?:async[ \t]+)?def[ \t]+\w+[ \t]*\(")
# Python reads a longer literal in hexadecimal, but cannot print it. In decimal, it is a syntax error for Python too.
_LONG_LITERAL = re.compile(r"0[xXoObB][0-9a-fA-F_]{3500}")
_STRINGS = re.compile(r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*')
_KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)

Function = ast.FunctionDef
Code = Function | ast.Lambda  # what can be called and looked into


def parse(source: str) -> ast.Module | None:
    """The syntax tree, or None. Warnings about the code are not shown."""
    tree = _parsed(source)
    return tree if isinstance(tree, ast.Module) else None


def fault(source: str) -> str:
    """Reason why the text cannot be parsed, in a few words; '' if it can."""
    error = _parsed(source)
    if isinstance(error, ast.Module):
        return ""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    return f"{type(error).__name__}: {error}"


def _parsed(source: str) -> ast.Module | Exception:
    if _LONG_LITERAL.search(source):
        return ValueError("an integer of more than 3500 digits")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return error


def compiles(source: str) -> bool:
    """Whether the text is a program. A return outside a function parses, but does not compile."""
    if _LONG_LITERAL.search(source):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, "<completion>", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True


def depth(tree: ast.AST) -> int:
    """Levels of ``tree``; iterative, so that any tree can be measured."""
    levels, layer = 0, [tree]
    while layer and levels <= MAX_DEPTH:
        levels += 1
        layer = [child for node in layer for child in ast.iter_child_nodes(node)]
    return levels


def code_of(text: str) -> str:
    """Code in the completion ``text``; '' for a text of more than ``MAX_CODE`` characters.

    That is: the fenced blocks, else everything, else (prose around it) the chunks that look like definitions.
    """
    if len(text) > MAX_CODE:
        return ""
    text = text.replace("\r\n", "\n")
    blocks = [m[1] for m in _FENCE.finditer(text)]
    code = textwrap.dedent("\n".join(blocks) if blocks else text).strip("\n")
    if "```" in code and not blocks:  # a fence on the line of the code
        code = code.replace("```python", "").replace("```", "")
    return code if parse(code) is not None else _chunks(code)


def _chunks(code: str) -> str:
    """The parts that begin like a definition, import or assignment at the margin. A part that cannot be parsed is kept
    only if it is a function's. So a broken function stays a syntax error, and a line of prose does not become one.
    """
    lines = code.split("\n")
    margins = [i for i, line in enumerate(lines) if line[:1].strip()] + [len(lines)]
    kept, at = [], 0
    while at < len(margins) - 1:
        first = margins[at]
        ends = range(at + 1, min(at + 9, len(margins)))
        if not _START.match(lines[first]):
            at += 1
            continue
        end = next((e for e in ends if parse("\n".join(lines[first : margins[e]])) is not None), None)
        if end is not None or _DEF.match(lines[first]):
            kept.append("\n".join(lines[first : margins[end or at + 1]]))
        at = end or at + 1
    return "\n".join(kept)


def bindings(module: ast.Module) -> dict[str, ast.stmt]:
    """Statement that binds each name last, among the statements at the margin."""
    found: dict[str, ast.stmt] = {}
    for node in module.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0]: node for alias in node.names}
        else:
            stored = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, (ast.Store, ast.Del))]
            found |= {n.id: node for n in stored}
    return found


def function(module: ast.Module | None, name: str) -> Function | None:
    """The plain ``def name`` that holds when the module has run; None for a coroutine, class or lambda."""
    node = bindings(module).get(name) if module is not None else None
    return node if isinstance(node, ast.FunctionDef) else None


def defined(code: str, name: str) -> bool:
    """Whether ``code`` defines the function ``name``, with a reachable return of a value.

    Code that cannot be parsed is read as text without strings and comments. So a missing bracket costs the syntax
    reward and not this one.
    """
    module = parse(code)
    if module is not None:
        node = function(module, name)
        return node is not None and returns_value(node)
    outline = _STRINGS.sub("''", code)
    body = re.search(rf"^def[ \t]+{re.escape(name)}[ \t]*\((.*?)(?=^\S|\Z)", outline, re.M | re.S)
    return body is not None and re.search(r"^[ \t]+return[ \t]+\S", body[1], re.M) is not None


def returns_value(node: Function) -> bool:
    """Whether the function itself has a reachable ``return`` of something other than None."""
    try:
        nodes = own_nodes(prune(node) if depth(node) <= MAX_DEPTH else node)
    except RecursionError:  # the caller's own stack is deep
        nodes = own_nodes(node)
    return any(isinstance(n, ast.Return) and n.value is not None and not _is_none(n.value) for n in nodes)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def own_nodes(node: ast.AST) -> list[ast.AST]:
    """Nodes of a function without those of the functions, lambdas and classes inside it."""
    out, todo = [], list(ast.iter_child_nodes(node))
    while todo:
        child = todo.pop()
        out.append(child)
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            todo += ast.iter_child_nodes(child)
    return out


def combine(prelude: str, *codes: str) -> str:
    """One program: the ``prelude``, then the definitions of each of ``codes``. Later ones replace earlier ones.

    Only imports, functions, classes and assignments at the margin are taken: no example calls or printing. Unparseable
    code is taken as it is.
    """
    return "\n\n".join(part for part in (prelude.strip("\n"), *map(_definitions, codes)) if part) + "\n"


def _definitions(code: str) -> str:
    module = parse(code)
    if module is None:
        return code
    lines, kept, written = code.split("\n"), [], 0
    for node in module.body:
        if not isinstance(node, _KEPT) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"):
            continue
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        first, last = max(first - 1, written), node.end_lineno or node.lineno
        kept += lines[first:last]
        written = last
    return "\n".join(kept)


# -- what can be reached -----------------------------------------------------------------------------------------------


def truth(node: ast.expr) -> bool | None:
    """The truth of a condition that is the same in every run, else None."""
    if isinstance(node, ast.Constant):
        return bool(node.value)
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return bool(node.elts)
    if isinstance(node, ast.Dict):
        return bool(node.keys)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = truth(node.operand)
        return None if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        known = [truth(v) for v in node.values]
        stop = isinstance(node.op, ast.Or)
        return stop if stop in known else (None if None in known else not stop)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = node.left, node.comparators[0]
        if isinstance(left, ast.Constant) and isinstance(right, ast.Constant):
            return _compare(node.ops[0], left.value, right.value)
    return None


def _compare(op: ast.cmpop, a: Any, b: Any) -> bool | None:
    try:
        match op:
            case ast.Eq() | ast.Is():
                return bool(a == b)
            case ast.NotEq() | ast.IsNot():
                return bool(a != b)
            case ast.Lt():
                return bool(a < b)
            case ast.LtE():
                return bool(a <= b)
            case ast.Gt():
                return bool(a > b)
            case ast.GtE():
                return bool(a >= b)
    except TypeError:
        return None
    return None


def ends(block: list[ast.stmt]) -> bool:
    """Whether control never reaches what follows the statements ``block``."""
    if not block:
        return False
    last = block[-1]
    if isinstance(last, ast.If):
        return ends(last.body) and ends(last.orelse)
    if isinstance(last, ast.While) and truth(last.test) is True:
        return not any(isinstance(n, ast.Break) for n in ast.walk(last))
    return isinstance(last, (ast.Return, ast.Raise, ast.Break, ast.Continue))


class _Pruner(ast.NodeTransformer):
    """Leaves out unreachable and empty statements, and folds what is the same in every run. Blocks may become empty."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("body", "orelse", "finalbody"):
            if isinstance(block := getattr(node, name, None), list):
                setattr(node, name, self.block(block))
        return super().generic_visit(node)

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        for node in statements:
            taken = [node]
            if isinstance(node, ast.If) and (known := truth(node.test)) is not None:
                taken = self.block(node.body if known else node.orelse)
            elif (isinstance(node, ast.While) and truth(node.test) is False) or (
                isinstance(node, ast.For) and _nothing(node.iter)
            ):
                taken = self.block(node.orelse)
            elif _does_nothing(node):
                taken = []
            out += taken
            if ends(out):
                break
        return out

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        known = truth(node.test)
        return self.generic_visit(node) if known is None else self.visit(node.body if known else node.orelse)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        stop, values = isinstance(node.op, ast.Or), []
        for value in node.values:
            known = truth(value)
            if known is not None and known != stop and value is not node.values[-1]:
                continue  # passes the question on
            values.append(value)
            if known is not None and known == stop:
                break
        node.values = values
        return self.generic_visit(node) if len(values) > 1 else self.visit(values[0])

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        sides = (node.left, node.right)
        if isinstance(node.op, ast.Mult) and any(isinstance(s, ast.Constant) and s.value == 0 for s in sides):
            return ast.copy_location(ast.Constant(0), node)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        at = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if isinstance(node.value, (ast.Tuple, ast.List)) and isinstance(at, int) and at < len(node.value.elts):
            return node.value.elts[at]
        return node


def _does_nothing(node: ast.stmt) -> bool:
    """``pass``, a docstring, ``x = x``."""
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
        return all(isinstance(t, ast.Name) and t.id == node.value.id for t in node.targets)
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _nothing(node: ast.expr) -> bool:
    """An iterable without items."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        return len(node.args) == 1 and truth(node.args[0]) is False
    return truth(node) is False


def prune(node: Function) -> Function:
    """A copy of the function without its unreachable parts."""
    return _Pruner().visit(copy.deepcopy(node))
