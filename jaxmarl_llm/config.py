"""Conversion of configurations, which are frozen dataclasses, to plain dictionaries and back, with checks.

A config class is a (possibly nested) frozen dataclass. Its fields are ``int``, ``float``, ``str``, ``bool``,
``X | None``, ``Literal[...]``, ``tuple[T, ...]``, ``dict[str, T]`` or another config class. The annotations are the
schema; there is no second list of keys. A config class may define:

* ``check(self, path: str) -> None``: raises ``ConfigError`` for a value of the right type that is out of range.
  ``path`` is the dotted key of the object, as ``config.optimizer``. Each message begins with the full dotted key of
  the field; the helpers `at_least`, `positive`, `in_range` and `one_of` write such messages. ``check`` compares the
  fields of its own object; nested objects are checked by their own ``check``.
* ``ALIASES: ClassVar[dict[str, str]]``: old name of a renamed key -> its new name. The old name is accepted for one
  release, with one line on stderr.
* ``REMOVED: ClassVar[dict[str, str]]``: name of a removed key -> what to do instead. The key is refused with that text.

This module does not import JAX: a mistyped key is reported before any device is touched.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import hashlib
import importlib
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar, Union

from absl import logging

from jaxmarl_llm.errors import ConfigError

T = TypeVar("T")
INT_LIMIT = 2**63  # what JAX and the checkpoint can hold
COUNT_LIMIT = 2**31 - 1  # largest count, number of steps or seed: arrays of integers are int32
ROW_LIMIT = 2**24  # largest number of rows that one table of a step holds: tasks, samples, tokens of a prompt

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 60


def to_dict(cfg: Any) -> Any:
    """Plain nested dictionaries of ``cfg``: no dataclasses, lists as tuples. A mapping is normalised too."""
    if dataclasses.is_dataclass(cfg) and not isinstance(cfg, type):
        return {f.name: to_dict(getattr(cfg, f.name)) for f in dataclasses.fields(cfg) if f.init}
    if isinstance(cfg, Mapping):
        return {key: to_dict(value) for key, value in cfg.items()}
    if isinstance(cfg, (tuple, list)):
        return tuple(to_dict(value) for value in cfg)
    return cfg


def from_dict(cls: type[T], mapping: Any, prefix: str = "config") -> T:
    """Build ``cls`` from nested mappings, by its annotations.

    Absent keys take their defaults. An int is accepted for a float, a bool never for a number. Of a union of config
    classes the first that accepts the keys is built. Such classes need a ``Literal`` field that tells them apart.

    Args:
        cls: A dataclass.
        mapping: Values by name, nested; or an instance of ``cls``.
        prefix: First part of the keys in messages.

    Raises:
        ConfigError: A wrong key or value; the message names the key.
    """
    if isinstance(mapping, cls):
        mapping = to_dict(mapping)
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{prefix}: expected {_describe(cls)}, got {_show(mapping)}")
    hints = _hints(typing.cast(Any, cls))
    mapping = _with_current_names(cls, mapping, prefix)
    for key in mapping:
        if key not in hints:
            raise ConfigError(_unknown_key(prefix, key, hints))
    values = {}
    for field in _fields(cls):
        if field.name in mapping:
            values[field.name] = _convert(hints[field.name], mapping[field.name], f"{prefix}.{field.name}")
        elif _required(field):
            raise ConfigError(f"{prefix}.{field.name}: missing; expected {_describe(hints[field.name])}")
    try:
        cfg = cls(**values)
    except ConfigError as error:  # an environment's Config checks itself and does not know its own key
        raise ConfigError(f"{prefix}: {error}") from None
    check = getattr(cfg, "check", None)
    if check is not None:
        check(prefix)
    return cfg


def override(cls: type, mapping: Mapping[str, Any], path: str, text: str, prefix: str = "config") -> dict[str, Any]:
    """Copy ``mapping`` with the key at ``path`` ("rollout.sizes", "agents[0].lr") set to what ``text`` says.

    The annotation of ``cls`` decides how the text is read. ``None`` is the absent value of ``float | None``, and an
    ordinary string for ``str``. A tuple is written ``(4,4)``, ``4,4`` or ``a,b``. ``prefix``: first part of keys in
    messages.
    """
    return _put(cls, mapping, _split(path), lambda kind, where: _parse(kind, text, where), prefix)


def replace_path(cfg: T, path: str, value: Any, prefix: str = "config") -> T:
    """Copy ``cfg`` with the ``value`` at the dotted ``path`` replaced, converted and checked as in `from_dict`.

    ``prefix``: first part of the keys in messages.
    """
    tree = _put(type(cfg), to_dict(cfg), _split(path), lambda kind, where: to_dict(value), prefix)
    return from_dict(type(cfg), tree, prefix)


def flatten(cfg: Any, prefix: str = "config") -> dict[str, Any]:
    """Dotted key -> value, in the order of the fields of ``cfg``. A tuple is one value, unless it holds mappings.

    ``prefix``: first part of every key.
    """
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
    """Changes from ``a`` to ``b`` (configs, or mappings such as a stored one): ``["config.seed: 0 -> 1"]``.

    ``prefix``: first part of every key.
    """
    old, new = flatten(a, prefix), flatten(b, prefix)
    absent = object()
    lines = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key, absent), new.get(key, absent)
        if before != after:
            shown = ("(absent)" if value is absent else repr(value) for value in (before, after))
            lines.append(f"{key}: {' -> '.join(shown)}")
    return lines


LATER = "later"


def later(default: Any) -> Any:
    """A field of a configuration that was added after runs were recorded.

    Args:
        default: With this value a run does what it did before the field was there.
    """
    return dataclasses.field(default=default, metadata={LATER: True})


def _without_later(cfg: Any, values: dict[str, Any]) -> dict[str, Any]:
    """``values`` of ``cfg`` without the fields of `later` that have their default, at any depth."""
    out = dict(values)
    for f in dataclasses.fields(cfg):
        own = getattr(cfg, f.name)
        if f.metadata.get(LATER) and own == f.default:
            del out[f.name]
        elif dataclasses.is_dataclass(own):
            out[f.name] = _without_later(own, values[f.name])
    return out


def fingerprint(cfg: Any) -> str:
    """SHA-256 of the canonical JSON of ``cfg``. Equal configs have equal fingerprints, however they were built.

    A field of `later` is left out at its default, so fingerprints of before the field stay valid.
    """
    converted = from_dict(type(cfg), cfg)  # lr=1 and lr=1.0 are the same float
    canonical = _without_later(converted, to_dict(converted))
    return hashlib.sha256(json.dumps(canonical, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def one_of(name: str, value: T, choices: Iterable[T]) -> T:
    """Return ``value`` if it is among ``choices``; otherwise raise a ``ConfigError`` with the nearest of them.

    ``name``: key of the value in the message.
    """
    choices = list(choices)
    # Compared with the type, because True == 1 == 1.0.
    if any(type(choice) is type(value) and choice == value for choice in choices):
        return value
    raise ConfigError(f"{name}: unknown value {_show(value)}; {nearest(value, choices)}")


def at_least(key: str, value: float, minimum: float, maximum: float | None = None) -> None:
    """Raise a ``ConfigError`` unless ``value`` is a finite number from ``minimum`` to ``maximum``, both included.

    ``key`` is the full dotted key that the message begins with. Without ``maximum`` an int may be as large as
    COUNT_LIMIT and a float as large as floats are.
    """
    finite(key, value)
    if maximum is None:
        maximum = COUNT_LIMIT if isinstance(value, int) else value
    if value < minimum:
        raise ConfigError(f"{key}: expected >= {minimum}, got {_show(value)}")
    if value > maximum:
        raise ConfigError(f"{key}: expected <= {maximum}, got {_show(value)}")


def positive(key: str, value: float) -> None:
    """Raise a ``ConfigError`` unless ``value`` is a finite number above 0. ``key``: as in `at_least`."""
    finite(key, value)
    if value <= 0:
        raise ConfigError(f"{key}: expected > 0, got {_show(value)}")


def finite(key: str, value: float) -> None:
    """Raise a ``ConfigError`` for a ``value`` that is infinite or NaN. ``key``: as in `at_least`."""
    if not math.isfinite(value):
        raise ConfigError(f"{key}: expected a finite number, got {_show(value)}")


def in_range(key: str, value: float, low: float, high: float, ends: str = "[]") -> None:
    """Raise a ``ConfigError`` unless ``value`` lies in an interval from ``low`` to ``high``.

    ``ends``: the two brackets of the interval; ``(`` and ``)`` exclude an end. ``key``: as in `at_least`.
    """
    above = value > low if ends[0] == "(" else value >= low
    below = value < high if ends[1] == ")" else value <= high
    if not (above and below):
        raise ConfigError(f"{key}: expected in {ends[0]}{low:g}, {high:g}{ends[1]}, got {_show(value)}")


def nearest(value: Any, choices: Iterable[Any], noun: str = "choose from") -> str:
    """``did you mean 'x'?`` for the one of ``choices`` near ``value``, or the list of all choices when none is near.

    ``noun``: words before the list.
    """
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
        raise ConfigError(f"{path}: set one of its keys as {path}.KEY=VALUE: {', '.join(_hints(kind))}")
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
        has = lambda m: key in _hints(m) or key in _inherited(m, "ALIASES") or key in _inherited(m, "REMOVED")
        kind = next((m for m in members if _is_config(m) and has(m)), members[0])
    if _is_config(kind):
        hints = _hints(kind)
        key = _current_name(kind, key, path)
        if key not in hints:
            raise ConfigError(_unknown_key(path, key, hints))
        tree = _with_current_names(kind, tree, path) if isinstance(tree, Mapping) else tree
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


@functools.cache
def _inherited(cls: type, name: str) -> dict[str, str]:
    """``ALIASES`` or ``REMOVED`` of a config class and of those it inherits from."""
    merged: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        merged |= vars(base).get(name, {})
    return merged


def _current_name(cls: type, key: Any, path: str) -> Any:
    """The name that ``key`` has now in the config class ``cls``, which stands at ``path``."""
    if not isinstance(key, str) or key in _hints(cls):
        return key
    if key in _inherited(cls, "REMOVED"):
        raise ConfigError(f"{path}.{key}: removed; {_inherited(cls, 'REMOVED')[key]}")
    new = _inherited(cls, "ALIASES").get(key)
    if new is None:
        return key
    _warn_of_alias(f"{path}.{key}", f"{path}.{new}")
    return new


def _with_current_names(cls: Any, mapping: Mapping[Any, Any], path: str) -> dict[Any, Any]:
    """``mapping``, keys of the config class ``cls``, with renamed keys under their new names."""
    renamed: dict[Any, Any] = {}
    old_names: dict[Any, Any] = {}
    for key, value in mapping.items():
        new = _current_name(cls, key, path)
        if new in renamed:
            old = old_names.get(new, key)
            raise ConfigError(
                f"{path}.{old}: the old name of {path}.{new}, which is given too; keep {path}.{new} alone"
            )
        renamed[new] = value
        if new != key:
            old_names[new] = key
    return renamed


@functools.cache
def _warn_of_alias(old: str, new: str) -> None:
    """One line on stderr, once a process, that the key ``old`` is now ``new``."""
    logging.warning("%s: renamed to %s; the old name is accepted in this release alone", old, new)


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


def load_module(key: str, name: str) -> types.ModuleType:
    """Import the module ``name``. Every failure is a ``ConfigError`` of one line that shows the module's own error.

    Args:
        key: dotted name of the config value, put in front of error messages.
        name: ``"package.module"``.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{key}: expected 'package.module', got {_show(name)}")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # whatever the module does while it is imported
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{key}: cannot import module {name!r}: {message}") from error


def load_object(key: str, dotted: str) -> Any:
    """Import the object that ``dotted`` names: ``"package.module:name"`` or ``"package.module:Class.name"``.

    Every failure is a ``ConfigError`` of one line. An error that the module raises is shown with its type and message.

    Args:
        key: dotted name of the config value, put in front of error messages (``"config.loss.objective"``).
        dotted: module and attribute, with a colon between.
    """
    module_name, colon, names = dotted.partition(":")
    if not colon or not all(part.isidentifier() for part in names.split(".")):
        raise ConfigError(f"{key}: expected 'package.module:name', got {_show(dotted)}")
    found: Any = load_module(key, module_name)
    owner = f"module {module_name!r}"
    for name in names.split("."):
        if not hasattr(found, name):
            public = [known for known in dir(found) if not known.startswith("_")]
            raise ConfigError(f"{key}: {owner} has no attribute {name!r}; {nearest(name, public, 'it has')}")
        found, owner = getattr(found, name), repr(f"{module_name}:{name}")
    return found
