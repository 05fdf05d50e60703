"""Configs are frozen dataclasses; this file turns them into plain dictionaries and back, and says what is wrong.

A config class is a (possibly nested) frozen dataclass whose fields are ``int``, ``float``, ``str``, ``bool``,
``X | None``, ``Literal[...]``, ``tuple[T, ...]``, ``dict[str, T]`` or another config class. The annotations are the
schema: there is no second list of keys to keep in step. A class may define ``check(self, path)``, which raises
``ConfigError`` for values that are well typed but out of range; ``path`` is the dotted name to put in front.

Free of JAX: a mistyped key is reported before any device is touched.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import hashlib
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

from jaxmarl_llm.text import ConfigError

T = TypeVar("T")
INT_LIMIT = 2**63  # what JAX and the checkpoint can hold

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 60


def to_dict(cfg: Any) -> Any:
    """Plain nested dictionaries of a config: no dataclasses, lists as tuples. Also normalises a mapping."""
    if dataclasses.is_dataclass(cfg) and not isinstance(cfg, type):
        return {f.name: to_dict(getattr(cfg, f.name)) for f in dataclasses.fields(cfg) if f.init}
    if isinstance(cfg, Mapping):
        return {key: to_dict(value) for key, value in cfg.items()}
    if isinstance(cfg, (tuple, list)):
        return tuple(to_dict(value) for value in cfg)
    return cfg


def from_dict(cls: type[T], mapping: Any, prefix: str = "config") -> T:
    """Build ``cls`` from nested mappings, by its annotations; raises ``ConfigError`` that names the key.

    Absent keys take their defaults. An int is accepted for a float, a bool never for a number. Of a union of config
    classes the first that accepts the keys is built, so give such classes a ``Literal`` field that tells them apart.
    """
    if isinstance(mapping, cls):
        mapping = to_dict(mapping)
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{prefix}: expected {_describe(cls)}, got {_show(mapping)}")
    hints = _hints(typing.cast(Any, cls))
    for key in mapping:
        if key not in hints:
            raise ConfigError(_unknown_key(prefix, key, hints))
    values = {}
    for field in _fields(cls):
        if field.name in mapping:
            values[field.name] = _convert(hints[field.name], mapping[field.name], f"{prefix}.{field.name}")
        elif _required(field):
            raise ConfigError(f"{prefix}.{field.name}: missing; expected {_describe(hints[field.name])}")
    cfg = cls(**values)
    check = getattr(cfg, "check", None)
    if check is not None:
        check(prefix)
    return cfg


def override(cls: type, mapping: Mapping[str, Any], path: str, text: str, prefix: str = "config") -> dict[str, Any]:
    """``mapping`` with the key at ``path`` ("rollout.sizes", "agents[0].lr") set to what ``text`` says.

    The annotation decides how the text is read, so ``None`` is the absent value of ``float | None`` and an ordinary
    string for ``str``. A tuple is written ``(4,4)``, ``4,4`` or ``a,b``.
    """
    return _put(cls, mapping, _split(path), lambda kind, where: _parse(kind, text, where), prefix)


def replace_path(cfg: T, path: str, value: Any, prefix: str = "config") -> T:
    """A copy of ``cfg`` with the value at the dotted ``path`` replaced, converted and checked as in `from_dict`."""
    tree = _put(type(cfg), to_dict(cfg), _split(path), lambda kind, where: to_dict(value), prefix)
    return from_dict(type(cfg), tree, prefix)


def flatten(cfg: Any, prefix: str = "config") -> dict[str, Any]:
    """Dotted key -> value, in the order of the fields. A tuple is one value, unless it holds mappings."""
    tree = to_dict(cfg)
    if isinstance(tree, tuple) and any(isinstance(value, Mapping) for value in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, _join(prefix, key))
    return flat


def diff(a: Any, b: Any, prefix: str = "config") -> list[str]:
    """What changed from ``a`` to ``b`` (configs, or mappings such as a stored one): ``["config.seed: 0 -> 1"]``."""
    old, new = flatten(a, prefix), flatten(b, prefix)
    absent = object()
    lines = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key, absent), new.get(key, absent)
        if before != after:
            shown = ("(absent)" if value is absent else repr(value) for value in (before, after))
            lines.append(f"{key}: {' -> '.join(shown)}")
    return lines


def fingerprint(cfg: Any) -> str:
    """sha256 of the canonical JSON of a config. Equal configs have equal fingerprints, however they were built."""
    canonical = to_dict(from_dict(type(cfg), cfg))  # converted first: lr=1 and lr=1.0 are the same float
    return hashlib.sha256(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def one_of(name: str, value: T, choices: Iterable[T]) -> T:
    """``value`` if it is among ``choices``; otherwise a ``ConfigError`` with the nearest of them."""
    choices = list(choices)
    # Compared with the type, because True == 1 == 1.0.
    if any(type(choice) is type(value) and choice == value for choice in choices):
        return value
    raise ConfigError(f"{name}: unknown value {_show(value)}; {nearest(value, choices)}")


def nearest(value: Any, choices: Iterable[Any], noun: str = "choose from") -> str:
    """``did you mean 'x'?``, or the list of all choices when none is near."""
    by_name = {str(choice): choice for choice in choices}
    close = difflib.get_close_matches(str(value), by_name, n=1) if isinstance(value, str) else []
    if close:
        return f"did you mean {by_name[close[0]]!r}?"
    return f"{noun} {', '.join(map(repr, by_name.values()))}" if by_name else "there are none"


def _convert(kind: Any, value: Any, path: str) -> Any:
    """``value`` as the annotation ``kind`` wants it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(kind, value, path)
    if origin is Literal:
        return one_of(path, value, args)
    if _is_config(kind):
        return from_dict(kind, value, path)
    if _is_tuple(kind):
        if isinstance(value, (tuple, list)):
            kinds = [args[0] if args else Any] * len(value) if not args or args[-1] is ... else args
            if len(kinds) == len(value):
                return tuple(_convert(k, v, f"{path}.{i}") for i, (k, v) in enumerate(zip(kinds, value)))
    elif _is_dict(kind):
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise ConfigError(f"{path}: expected keys of type str, got {_show(key)}")
            return {str(k): _convert(args[1] if args else Any, v, _join(path, k)) for k, v in value.items()}
    elif kind is bool or kind is types.NoneType:
        if isinstance(value, kind):
            return value
    elif kind is float:
        # NaN is refused because it differs from itself: a run could never be resumed with its own config.
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and not _too_large(value)
        if number and not math.isnan(value):
            return float(value)
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool) and not _too_large(value):
            return int(value)
    elif kind is str:
        if isinstance(value, str):
            return str(value)
    else:
        raise TypeError(f"{path}: a config field cannot be annotated {kind!r}")
    raise ConfigError(f"{path}: expected {_describe(kind)}, got {_show(value)}")


def _convert_union(kind: Any, value: Any, path: str) -> Any:
    if value is None and types.NoneType in typing.get_args(kind):
        return None
    errors = []
    members = _members(kind)
    for member in members:
        try:
            return _convert(member, value, path)
        except ConfigError as error:
            errors.append(error)
    # The one member that has parts knows better which part is wrong.
    if len(members) == 1 and members[0] not in (int, float, str, bool):
        raise errors[0]
    raise ConfigError(f"{path}: expected {_describe(kind)}, got {_show(value)}")


def _parse(kind: Any, text: str, path: str) -> Any:
    """The value that command-line ``text`` means for ``kind``. What cannot be read stays text: `from_dict` says so."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if types.NoneType in args and text in ("None", "none", "null"):
            return None
        for member in _members(kind):
            value = _parse(member, text, path)
            try:
                _convert(member, value, path)
            except ConfigError:
                continue  # the next member may fit; when none does, the text itself is reported
            return value
        return text
    if origin is Literal:
        return next((choice for choice in args if str(choice) == text), text)
    if _is_config(kind):
        raise ConfigError(f"{path}: set one of its keys: {', '.join(f'{path}.{key}' for key in _hints(kind))}")
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    if kind is int or kind is float:
        try:
            return kind(text)
        except ValueError:
            return text
    if kind is str:
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if not _is_tuple(kind):
            return text
        items = [item.strip() for item in text.strip().strip("()[]").split(",")]
        return tuple(_parse(args[0] if args else str, item, path) for item in items if item)
    return (value,) if _is_tuple(kind) and not isinstance(value, (tuple, list)) else value


def _put(kind: Any, tree: Any, keys: list[str], make: Callable[[Any, str], Any], path: str) -> Any:
    """A copy of ``tree`` in which ``make(annotation, path)`` stands at ``keys``."""
    if not keys:
        return make(kind, path)
    key, rest = keys[0], keys[1:]
    if typing.get_origin(kind) in (Union, types.UnionType):
        members = _members(kind)
        kind = next((m for m in members if _is_config(m) and key in _hints(m)), members[0])
    if _is_config(kind):
        hints = _hints(kind)
        if key not in hints:
            raise ConfigError(_unknown_key(path, key, hints))
        # The value the field would have had: setting one key of a group must keep the others.
        inner = tree[key] if isinstance(tree, Mapping) and key in tree else _default(kind, key)
        return {**(tree or {}), key: _put(hints[key], inner, rest, make, f"{path}.{key}")}
    if _is_dict(kind):
        value_kind = (typing.get_args(kind) or (str, Any))[1]
        tree = tree or {}
        return {**tree, key: _put(value_kind, tree.get(key), rest, make, _join(path, key))}
    if _is_tuple(kind):
        items = list(tree or ())
        if not key.isdecimal() or int(key) >= len(items):
            raise ConfigError(f"{path}: no item {_show(key)}; it has {len(items)}, counted from 0")
        args = typing.get_args(kind) or (Any, ...)
        item_kind = args[0] if args[-1] is ... else args[min(int(key), len(args) - 1)]
        items[int(key)] = _put(item_kind, items[int(key)], rest, make, f"{path}.{key}")
        return tuple(items)
    raise ConfigError(f"{path}: expected {_describe(kind)}, which has no key {_show(key)}")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in _fields(cls)}


def _fields(cls: Any) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(cls) if f.init]


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _default(cls: Any, key: str) -> Any:
    field = next(f for f in _fields(cls) if f.name == key)
    if _required(field):
        return None
    return to_dict(field.default if field.default_factory is dataclasses.MISSING else field.default_factory())


def _members(kind: Any) -> list[Any]:
    return [member for member in typing.get_args(kind) if member is not types.NoneType]


def _is_config(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _is_tuple(kind: Any) -> bool:
    return kind is tuple or typing.get_origin(kind) is tuple


def _is_dict(kind: Any) -> bool:
    return kind is dict or typing.get_origin(kind) in (dict, Mapping)


def _too_large(value: int | float) -> bool:
    return isinstance(value, int) and not -INT_LIMIT <= value < INT_LIMIT


def _split(path: str) -> list[str]:
    return re.sub(r"\[(\d+)\]", r".\1", path).split(".")


def _join(path: str, key: Any) -> str:
    plain = isinstance(key, str) and key.isidentifier() and key.isprintable()
    return f"{path}.{key}" if plain or isinstance(key, int) else f"{path}.{_show(key)}"


def _unknown_key(path: str, key: Any, known: Iterable[str]) -> str:
    return f"{_join(path, key)}: unknown key; {nearest(key, known, 'known keys:')}"


def _show(value: Any) -> str:
    """One short line for any value."""
    try:
        return " ".join(_brief.repr(value).split())
    except ValueError:  # an int of more than 4300 digits has no decimal form
        return f"{type(value).__name__} too large to show"


def _describe(kind: Any) -> str:
    """What an annotation asks for, in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        names = [_describe(member) for member in _members(kind)]
        return " or ".join(names + ["None"] * (types.NoneType in args))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if _is_config(kind):
        return f"the keys of {kind.__name__} ({', '.join(_hints(kind))})"
    if _is_tuple(kind):
        if args and args[-1] is not ...:
            return f"tuple of {len(args)} ({', '.join(map(_describe, args))})"
        return f"tuple of {_describe(args[0])}" if args else "tuple"
    if _is_dict(kind):
        return f"dict of {_describe(args[1])}" if args else "dict"
    return getattr(kind, "__name__", str(kind))
