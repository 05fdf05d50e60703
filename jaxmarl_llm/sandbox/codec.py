"""Reading what a jail answers: JSON of an enemy to plain builtins, bounded in size, depth and in the time it can cost.

Bounded time is more than bounded size: half a megabyte of integers that share one hash keeps ``set()`` busy for minutes
in the process that holds the verdict. `plain` refuses such a crowd.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jaxmarl_llm.sandbox.child import ITEMS

DEPTH = 200  # JSON levels; a tag takes one, so twice the levels of the values and some
INTEGER_BITS = 1 << 18  # 79,000 decimal digits; a test may raise a result to a power
CROWD = 64  # different values with one hash
WORK = 8_000_000  # sum over all values of the JSON levels above them: hashing a nest costs as much


class ProtocolError(Exception):
    """A reply that no honest jail sends."""


def decode(text: bytes) -> Any:
    """The JSON value in ``text``, tags still in place. Raises ProtocolError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None


def plain(value: Any) -> Any:
    """Values for JSON with tags: an object of one key, which names what JSON does not have.

    ``i`` integer in hexadecimal, ``t`` tuple, ``s`` set, ``f`` frozenset, ``d`` dict as pairs, ``b`` bytes and ``a``
    bytearray in hexadecimal, ``c`` complex, ``r`` range, ``n`` iterator (read to its end), ``m`` a regular expression's
    match, of which only its truth is kept. Raises ProtocolError for anything else.
    """
    work, level, depth = 0, [value], 0
    while level:
        work += depth * len(level)
        if work > WORK or depth > DEPTH:
            raise ProtocolError("nested too deep" if depth > DEPTH else "too many values nested too deep")
        level = [
            v for node in level if type(node) in (list, dict) for v in (node if type(node) is list else node.values())
        ]
        depth += 1
    result = _plain(value)
    _refuse_crowds(result, deep=True)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise ProtocolError("an object that is no tag")
    [(tag, content)] = value.items()
    if tag not in _BUILD:
        raise ProtocolError("an object that is no tag")
    try:
        return _BUILD[tag](_plain(content))
    except (TypeError, ValueError, OverflowError) as error:  # unhashable elements, pairs that are none, bad digits
        raise ProtocolError(f"tag {tag}: {type(error).__name__}") from None


def _integer(text: Any) -> int:
    if len(text) > INTEGER_BITS // 4:
        raise ProtocolError(f"an integer of more than {INTEGER_BITS} bits")
    return int(text, 16)


def _dict(pairs: Any) -> dict:
    _refuse_crowds([key for key, _ in pairs])
    return {key: value for key, value in pairs}


def _gathered(build: Callable) -> Callable:
    def of(items: Any) -> Any:
        if not isinstance(items, list):
            raise ProtocolError("a set of no list")
        _refuse_crowds(items)
        return build(items)

    return of


def _list(items: Any) -> list:
    if not isinstance(items, list):
        raise ProtocolError("a tuple of no list")
    return items


def _range(ends: Any) -> range:
    result = range(*_list(ends))
    if len(result) > ITEMS:  # a test may well list it
        raise ProtocolError(f"a range of more than {ITEMS} elements")
    return result


_BUILD: dict[str, Callable] = {
    "i": _integer,
    "t": lambda items: tuple(_list(items)),
    "s": _gathered(set),
    "f": _gathered(frozenset),
    "d": _dict,
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
    "c": lambda parts: complex(*_list(parts)),
    "r": _range,
    "n": lambda items: iter(_list(items)),
    "m": lambda _: object(),  # true, and equal to nothing
}


def _refuse_crowds(value: Any, deep: bool = False) -> None:
    """ProtocolError when many different elements of ``value`` have one hash: numbers and tuples can be chosen so.

    ``deep``: among all values inside it, because a test may gather them.
    """
    crowds: dict[int, set[str]] = {}
    stack = [value] if deep else list(value)
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind is dict:
            stack.extend([*item, *item.values()] if deep else ())
            continue
        if kind in (list, tuple, set, frozenset):
            stack.extend(item if deep else ())
        elif kind not in (int, float, complex) or (kind is int and -(2**60) < item < 2**60):
            continue
        try:
            key = hash(tuple(item) if kind in (list, set) else item)  # a test may well make tuples of lists
        except TypeError:
            continue
        crowd = crowds.setdefault(key, set())
        try:
            crowd.add(hex(item) if kind is int else repr(item))  # text: its hash is seeded
        except ValueError:  # an integer inside has too many digits
            crowd.add(str(id(item)))
        if len(crowd) > CROWD:
            raise ProtocolError(f"more than {CROWD} values with one hash")
