"""What a chat template may do and how large its values may be: the checks of `models.chat_template`.

Every check raises `Limit` before the operation runs, where the result could be too large.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

MAX_SOURCE = 100_000  # characters of a template; the longest published ones have 20,000
MAX_NODES = 20_000  # nodes of its syntax tree: compiling them takes two seconds and 100 MB; Qwen3's has 354
MAX_TEXT = 2**18  # characters of one text, and of the result
MAX_WORK = 500_000  # steps and values of one rendering, some two seconds at most; published templates need 25 a turn
MAX_BITS = 512  # of an integer
MAX_WIDTH = 1000  # of padding, of indentation, and of a number in a format
# Filters of jinja2. The others are of no use in a template, or their cost is not bounded by the size of their result.
FILTERS = (
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby",
    "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum", "title", "tojson", "trim",
    "unique", "upper", "indent", "wordcount", "truncate", "center", "format",
)  # fmt: skip
CHEAP = frozenset(["attr", "count", "d", "default", "first", "length", "safe"])  # their cost is that of one step
COMPARING = frozenset(["in", "eq", "==", "equalto", "ne", "!=", "sameas", "gt", "ge", "lt", "le", "<", "<=", ">", ">="])
METHODS = {
    str: frozenset([
        "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii",
        "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
        "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
        "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
        "center", "ljust", "rjust", "zfill",
    ]),
    dict: frozenset(["copy", "get", "items", "keys", "values", "fromkeys"]),
    list: frozenset(["copy", "count", "index"]),
    tuple: frozenset(["count", "index"]),
}  # fmt: skip


class Limit(jinja2.TemplateError):
    """A limit of this module was met."""


def size(value: Any, limit: int) -> int:
    """Return the steps that a value costs. A shared part counts as often as it occurs.

    Args:
        value: a value of a template: text, number, list, dictionary or another object.
        limit: the count stops above this number of steps.

    Raises:
        Limit: a text in the value is too long, or an integer too large.
    """
    total, queue = 0, [value]
    while queue and total <= limit:
        value = queue.pop()
        kind = type(value)
        total += 1
        if isinstance(value, str):
            refuse_length(len(value))
            total += len(value) // 16
        elif kind is int and value.bit_length() > MAX_BITS:
            raise Limit(f"an integer of more than {MAX_BITS} bits")
        elif isinstance(value, (list, tuple)):
            queue += value[: limit + 1]
        elif isinstance(value, dict):
            queue += [*value.keys(), *value.values()][: limit + 1]
        elif isinstance(value, (range, type({}.keys()), type({}.values()), type({}.items()))):
            total += len(value)
    return total


def refuse_length(length: int) -> None:
    """Raise `Limit` for a text or list of ``length`` characters or items, if these are more than `MAX_TEXT`."""
    if length > MAX_TEXT:
        raise Limit(f"a text or list of more than {MAX_TEXT} characters")


def bounded(text: str) -> str:
    """Return ``text``. Raises `Limit` if it has more than `MAX_TEXT` characters."""
    refuse_length(len(text))
    return text


def refuse_nodes(count: int) -> None:
    """Raise `Limit` for a syntax tree of ``count`` nodes, if these are more than `MAX_NODES`."""
    if count > MAX_NODES:
        raise Limit(f"more than {MAX_NODES} nodes")


def check_binop(operator: str, left: Any, right: Any) -> None:
    """Refuse a long text or list, or a large integer, of ``left operator right``.

    Args:
        operator: ``+``, ``*``, ``**`` or ``%``. The others cannot make a large value.
        left: first operand.
        right: second operand.
    """
    whole = lambda x: isinstance(x, int)
    if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
        refuse_length(len(left) + len(right))
    elif operator == "*" and whole(left) and whole(right):
        refuse_bits(left.bit_length() + right.bit_length())
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, (str, list, tuple, bytes)) and whole(times):
                refuse_length(len(many) * max(times, 0))
    elif operator == "**" and whole(left) and whole(right):
        refuse_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, (str, bytes)):
        check_format(left, right)


def refuse_bits(bits: int) -> None:
    """Raise `Limit` for an integer of ``bits`` bits, if these are more than `MAX_BITS`."""
    if bits > MAX_BITS:
        raise Limit(f"an integer of more than {MAX_BITS} bits")


def check_format(form: Any, *values: Any) -> None:
    """Refuse a format that could make a long text: large numbers in it, widths that are arguments, many long values.

    Args:
        form: the format, for ``%`` or for ``str.format``. A value that is no text is refused.
        values: what is formatted.
    """
    form = form if isinstance(form, str) else "*"
    widths = [int(n[:9]) for n in re.findall(r"\d+", form)]
    if "*" in form or re.search(r"\{[^}]*\{", form.replace("{{", "")) or max(widths, default=0) > MAX_WIDTH:
        raise Limit(f"a width above {MAX_WIDTH} in a format")
    longest = max([len(str(v)) for v in values], default=0) + MAX_WIDTH
    refuse_length(len(form) + (form.count("%") + form.count("{")) * longest)


def check_method(name: str, text: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a call of a method that could make a long text.

    Args:
        name: name of the method. Methods that pad, format, replace or join are checked.
        text: the object whose method is called, a text for these methods.
        args: positional arguments of the call.
        kwargs: arguments of the call by name.
    """
    if name in ("center", "ljust", "rjust", "zfill"):
        refuse_width(args[0] if args else None)
    elif name == "format":
        check_format(text, *args, *kwargs.values())
    elif name == "replace" and isinstance(text, str) and len(args) >= 2:
        check_replace(text, args[0], args[1])
    elif name == "join" and args:
        check_join(text, args[0])


def check_filter(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse the use of a filter that could make a long text or a large number.

    Args:
        name: name of the filter.
        args: the value that is filtered, then the positional arguments.
        kwargs: arguments of the filter by name.
    """
    numbers = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, int)]
    if name in ("center", "indent", "tojson", "round", "truncate"):
        for number in numbers:
            refuse_width(number)
        for text in (*args[1:], *kwargs.values()):
            if isinstance(text, str):
                refuse_width(len(text))
    if name == "indent" and args and isinstance(args[0], str):
        refuse_length(len(args[0]) + (args[0].count("\n") + 1) * MAX_WIDTH * bool(numbers or len(args) > 1))
    elif name == "tojson" and args and (numbers or kwargs):
        refuse_length(size(args[0], MAX_TEXT) * 100)
    elif name == "format" and args:
        check_format(args[0], *args[1:], *kwargs.values())
    elif name == "replace" and len(args) >= 3:
        check_replace(str(args[0]), args[1], args[2])
    elif name == "join" and args:
        check_join(str(kwargs.get("d", args[1] if len(args) > 1 else "")), args[0])


def refuse_width(width: Any) -> None:
    """Raise `Limit` unless ``width`` is an integer from -`MAX_WIDTH` to `MAX_WIDTH`."""
    if not isinstance(width, int) or abs(width) > MAX_WIDTH:
        raise Limit(f"a width that is not an integer up to {MAX_WIDTH}")


def check_replace(text: str, old: Any, new: Any) -> None:
    """Refuse a replacement whose result would be longer than `MAX_TEXT` characters.

    Args:
        text: where parts are replaced.
        old: the part that is replaced, everywhere.
        new: what takes its place.
    """
    times = text.count(str(old))
    refuse_length(len(text) + times * max(0, len(str(new)) - len(str(old))))


def check_join(separator: str, values: Any) -> None:
    """Refuse a join whose separators alone would be longer than `MAX_TEXT` characters.

    Args:
        separator: text between two values.
        values: what is joined. A value without a length, such as a generator, is not checked here.
    """
    if isinstance(values, (list, tuple, dict, str, range)):
        refuse_length(len(separator) * len(values))
