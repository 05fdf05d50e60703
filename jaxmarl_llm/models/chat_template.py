"""Chat templates under limits: a template is a program of a stranger that runs in this process.

The environment is the one of transformers (jinja2's immutable sandbox with the same functions). The syntax tree of a
template is changed before it is compiled, so that every operation is paid for out of a budget:

- every element of a loop, every call of a macro and every written text;
- every value that an operator, call, filter or subscript makes, by its size. A list counts with all that it holds.

What could make a large value in one operation is checked before it runs: repetition, powers, joining, replacing, and
widths of formats. Filters, functions and methods outside the lists below are refused. A template that is refused or
fails in any way ends in a `ConfigError` of one line.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.json_files import reason
from jaxmarl_llm.models.template_limits import (
    CHEAP,
    COMPARING,
    FILTERS,
    MAX_SOURCE,
    MAX_WORK,
    METHODS,
    Limit,
    bounded,
    check_binop,
    check_filter,
    check_method,
    refuse_length,
    refuse_nodes,
    size,
)


class ChatTemplate:
    """A compiled template.

    Args:
        source: text of the template.
        where: name of the tokenizer, for errors.
    """

    def __init__(self, source: str, where: str) -> None:
        self.where = where
        self._lock = threading.Lock()  # the budget belongs to the environment
        self._env = _Environment()
        if len(source) > MAX_SOURCE:
            raise ConfigError(f"{where}: chat_template: expected at most {MAX_SOURCE} characters, found {len(source)}")
        try:
            self._template = self._env.from_string(source)
        except Exception as error:  # a template is a program: anything may be wrong with it
            raise ConfigError(f"{where}: chat_template cannot be compiled ({reason(error)})") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Render a conversation.

        Args:
            messages: the messages, each with ``role`` and ``content``.
            **arguments: what the template can read besides, as for ``apply_chat_template``.
        """
        values = {"messages": [dict(m) for m in messages], "tools": None, "documents": None, **arguments}
        with self._lock:
            self._env.work = 0
            try:
                return bounded(self._template.render(values))
            except (Exception, RecursionError) as error:  # see above
                roles = ", ".join(str(m["role"]) for m in messages)
                roles = roles if len(roles) <= 80 else f"{roles[:77]}..."
                raise ConfigError(f"{self.where}: its chat template refuses ({roles}): {reason(error)}") from None


class _Environment(ImmutableSandboxedEnvironment):
    """The environment of transformers, with a budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer computes constants outside any budget
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            cache_size=0,
        )
        self.work = 0
        kept = {name: self._paid(name, self.filters[name]) for name in FILTERS}
        own = {
            "_value": self.value,
            "_iterate": self.iterate,
            "_write": self.write,
            "_charge": self.charge,
            "_piece": self.piece,
        }
        self.filters = {**kept, **own, "tojson": self._paid("tojson", _tojson), "_concat": self.joined}
        self.globals = {
            "range": self.globals["range"],
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "dict": _Dict(),
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: datetime.now().strftime(format),
        }

    def charge(self, cost: int) -> str:
        self.work += cost
        if self.work > MAX_WORK:
            raise Limit(f"more than {MAX_WORK} steps")
        return ""

    def value(self, value: Any) -> Any:
        """Pay for a value. Generators become lists, of which every element is paid for."""
        if isinstance(value, Iterator) or type(value).__name__ == "generator":
            value = list(self.iterate(value))
        self.charge(size(value, MAX_WORK - self.work))
        return value

    def iterate(self, values: Any) -> Any:
        if type(values) in (list, tuple, dict, str):
            self.charge(len(values))
            return values
        return self._counted(values)

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.charge(1)
            yield value

    def piece(self, value: Any) -> Any:
        """Pay for a slice. What it holds was paid for before."""
        if isinstance(value, (str, list, tuple)):
            self.charge(1 + len(value))
        return value

    def write(self, value: Any) -> str:
        """Pay for a text that is written."""
        self.value(value)
        text = str(value)
        self.charge(len(text) // 16)
        return bounded(text)

    def joined(self, *values: Any) -> str:
        texts = [self.write(value) for value in values]
        refuse_length(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            self.value([left, right])
        check_binop(operator, left, right)
        return self.value(self.binop_table[operator](left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(__obj, "__name__", "")
        owner = getattr(__obj, "__self__", None)
        if name in ("format", "format_map") and hasattr(__obj, "__wrapped__"):  # the sandbox's own str.format
            owner = __obj.__wrapped__.__self__
        if not isinstance(__obj, jinja2.runtime.Macro):  # the body of a macro pays for itself
            for part in (owner, *args, *kwargs.values()):
                __self.value(part)
        for kind, known in METHODS.items():
            if isinstance(owner, kind):
                if name not in known:
                    raise Limit(f"method {name!r} is not permitted")
                check_method(name, owner, args, kwargs)
                break
        else:
            known_class = __obj in (_Namespace, jinja2.utils.Cycler, jinja2.utils.Joiner)
            if isinstance(owner, (int, float, bytes)) or (isinstance(__obj, type) and not known_class):
                raise Limit(f"{name or 'this function'!r} is not permitted")
        return __self.value(super().call(__context, __obj, *args, **kwargs))

    def _paid(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make the form of a filter that is checked and paid for."""
        passes = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

        @functools.wraps(function)  # keeps the mark that jinja2 passes an argument by
        def paid(*args: Any, **kwargs: Any) -> Any:
            if name in CHEAP:
                self.charge(1)
                return function(*args, **kwargs)
            given = [self.value(a) for a in args[passes:]]
            for value in kwargs.values():
                self.value(value)
            check_filter(name, given, kwargs)
            return self.value(function(*args[:passes], *given, **kwargs))

        return paid

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        refuse_nodes(sum(1 for _ in source.find_all(nodes.Node)))  # before the tree grows
        return super()._generate(_Pay().visit(source), name, filename, defer_init)


class _Pay(jinja2.visitor.NodeTransformer):
    """Change of a syntax tree: every node that makes a value or repeats something is paid for."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        cost = _written(node)
        self.generic_visit(node)
        node.iter = _filter(node.iter, "_iterate")
        node.body.insert(0, _charge(cost))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        cost = _written(node)
        self.generic_visit(node)
        node.body.insert(0, _charge(cost))
        return node

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [x if isinstance(x, nodes.TemplateData) else _filter(x, "_write") for x in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *rest = node.nodes
        return nodes.Filter(first, "_concat", rest, [], None, None, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filter(node.expr, "_value")
        for operand in node.ops:
            operand.expr = _filter(operand.expr, "_value")
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        if node.name in COMPARING:
            node.node = _filter(node.node, "_value")
            node.args = [_filter(x, "_value") for x in node.args]
        return node

    def _valued(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, "_value")

    visit_Dict = visit_List = _valued

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._valued(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return _filter(node, "_piece") if isinstance(node.arg, nodes.Slice) else node


class _Generation(Extension):
    """The tags ``generation`` and ``endgeneration``, which mark the assistant's text and change nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """``dict`` of a template."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` of a template; names that begin with an underscore are refused."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # of jinja2 it holds all values, which may hold each other


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise Limit(f"namespace attribute {name!r} begins with an underscore")


def _raise_exception(message: Any) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _charge(cost: int) -> nodes.ExprStmt:
    return nodes.ExprStmt(_filter(nodes.Const(cost, lineno=1), "_charge"), lineno=1)


def _written(node: nodes.Node) -> int:
    """Return the steps that one repetition of a node costs: one, and the constant text in it."""
    return 1 + sum(len(data.data) for data in node.find_all(nodes.TemplateData)) // 16
