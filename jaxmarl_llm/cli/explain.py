"""Explanations of configuration keys, read from the source of the configuration classes.

A key is explained by the comment behind its field, by the comment lines above it, or by the section ``Attributes`` of
its class. A field that is a group of keys may be explained by the docstring of its class. A recipe that sets another
default inherits the explanation.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from io import StringIO
from typing import Any, NamedTuple

ATTRIBUTE = re.compile(r"^    (\w+): (.*(?:\n      .*)*)", re.MULTILINE)


class Key(NamedTuple):
    """A configuration key.

    path: dotted, as ``config.team.lora_rank``
    value: of the configuration, or the default
    text: explanation; empty where the source has none
    group: whether the key is a group of other keys
    """

    path: str
    value: Any
    text: str
    group: bool


def keys(cfg: Any, path: str = "config") -> Iterator[Key]:
    """Every key of the dataclass ``cfg``, in the order of its fields. A group stands before its keys.

    path: dotted name of ``cfg``.
    """
    hints = typing.get_type_hints(type(cfg))
    for field in dataclasses.fields(cfg):
        if not field.init:
            continue
        value, name = getattr(cfg, field.name), f"{path}.{field.name}"
        group = dataclasses.is_dataclass(value)
        text = field_text(type(cfg), field.name)
        if group and not text:
            text = _first_sentence(type(value))
        yield Key(name, value, text, group)
        if group:
            yield from keys(value, name)
        else:
            yield from _keys_of_items(hints[field.name], name)


def _keys_of_items(hint: Any, path: str) -> Iterator[Key]:
    """Keys of the config class that the items of a dictionary have: ``config.team.overrides.NAME.path``."""
    for member in typing.get_args(hint):
        if dataclasses.is_dataclass(member) and isinstance(member, type):
            for key in keys(member(), f"{path}.NAME"):
                yield key._replace(value=None)


def field_text(cls: type, name: str) -> str:
    """Explanation of the field ``name`` of a dataclass, empty where the source has none.

    cls: the dataclass. Where the class has no explanation, that of the nearest base class is taken.
    """
    for base in cls.__mro__:
        if dataclasses.is_dataclass(base) and (text := _texts(base).get(name)):
            return text
    return ""


def table(cfg: Any, prefix: str = "config", width: int = 110) -> str:
    """All keys of ``cfg`` with value and explanation, for ``--help``.

    prefix: dotted name of ``cfg``. width: characters of a line of an explanation, at most.
    """
    lines = []
    for key in keys(cfg, prefix):
        shown = key.path if key.group or (key.value is None and ".NAME." in key.path) else f"{key.path}={key.value!r}"
        lines.append(f"  --{shown}")
        lines += textwrap.wrap(key.text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


@functools.cache
def _texts(cls: type) -> dict[str, str]:
    """Field -> explanation, of the fields that the body of a class itself defines."""
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class without a file
        return {}
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    found = _attributes(inspect.getdoc(cls) or "") if "__doc__" in vars(cls) else {}
    behind, alone = _comments(source)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            above: list[str] = []
            line = item.lineno - 1
            while line in alone:
                above.insert(0, alone[line])
                line -= 1
            own = [text for row, text in sorted(behind.items()) if item.lineno <= row <= (item.end_lineno or row)]
            if text := " ".join([*above, *own]):
                found[item.target.id] = text
    return found


def _comments(source: str) -> tuple[dict[int, str], dict[int, str]]:
    """Line -> comment: those behind code, and those on a line of their own."""
    behind: dict[int, str] = {}
    alone: dict[int, str] = {}
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if not text.startswith(("noqa", "type:")):
                (behind if token.line[: token.start[1]].strip() else alone)[token.start[0]] = text
    return behind, alone


def _attributes(docstring: str) -> dict[str, str]:
    """Name -> text of the section ``Attributes`` of a docstring."""
    _, _, section = docstring.partition("Attributes:\n")
    return {name: " ".join(text.split()) for name, text in ATTRIBUTE.findall(section)}


def _first_sentence(cls: type) -> str:
    text = " ".join((inspect.getdoc(cls) or "").split())
    return "" if text.startswith(f"{cls.__name__}(") else text.partition(". ")[0].rstrip(".")
