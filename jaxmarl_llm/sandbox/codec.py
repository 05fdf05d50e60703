"""Decoder for the replies of a jail: untrusted JSON to plain builtins, with limits on size, depth and time.

A limit on bytes does not limit time and memory. Half a megabyte of integers with one hash keeps ``set()`` busy for
minutes, in the process that decides the verdict. Four megabytes of empty lists take 160 MB. So the number of elements
is limited before anything is built, and `plain` rejects hash collisions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jaxmarl_llm.sandbox.child import ELEMENTS, ITEMS, elements

DEPTH = 200  # JSON levels; a tag needs one, so more than twice the allowed levels of values
INTEGER_BITS = 1 << 18  # 79,000 decimal digits; a test may compute a power of a result
MAX_COLLISIONS = 64  # allowed number of different values with one hash
MAX_WORK = 8_000_000  # allowed sum of depths over all values, a bound of the cost of hashing nested values


class ProtocolError(Exception):
    """Error for a reply that an intact jail never sends."""


def decode(text: bytes) -> Any:
    """JSON value in ``text``, with tags. Raises ProtocolError."""
    if elements(text.decode("latin-1")) > ELEMENTS:
        raise ProtocolError(f"a reply of more than {ELEMENTS} elements")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not JSON: {type(error).__name__}") from None


def plain(value: Any) -> Any:
    """Python value of JSON with tags. A tag is an object with one key, which names a type that JSON lacks.

    Tags: ``i`` integer in hexadecimal, ``t`` tuple, ``s`` set, ``f`` frozenset, ``d`` dict as pairs. Also ``b`` bytes
    and ``a`` bytearray in hexadecimal, ``c`` complex, ``r`` range, ``n`` iterator (all elements). ``m`` is a match of a
    regular expression (only its truth value). Raises ProtocolError for anything else.
    """
    work, level, depth = 0, [value], 0
    while level:
        work += depth * len(level)
        if work > MAX_WORK or depth > DEPTH:
            raise ProtocolError("nested too deep" if depth > DEPTH else "too many values nested too deep")
        level = [
            v for node in level if type(node) in (list, dict) for v in (node if type(node) is list else node.values())
        ]
        depth += 1
    result = _plain(value)
    _reject_hash_collisions(result, deep=True)
    return result


def _plain(value: Any) -> Any:
    """Python value of JSON with tags, without the limits of `plain`."""
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
    except (TypeError, ValueError, OverflowError) as error:  # unhashable elements, wrong pairs, wrong digits
        raise ProtocolError(f"tag {tag}: {type(error).__name__}") from None


def _integer(text: Any) -> int:
    """Integer of hexadecimal digits, of limited length."""
    if len(text) > INTEGER_BITS // 4:
        raise ProtocolError(f"an integer of more than {INTEGER_BITS} bits")
    return int(text, 16)


def _dict(pairs: Any) -> dict:
    """Dict of pairs, without many keys of one hash."""
    _reject_hash_collisions([key for key, _ in pairs])
    return {key: value for key, value in pairs}


def _set_of(build: Callable) -> Callable:
    """Function from a list to ``build(list)``, which rejects many elements of one hash."""

    def of(items: Any) -> Any:
        if not isinstance(items, list):
            raise ProtocolError("a set of no list")
        _reject_hash_collisions(items)
        return build(items)

    return of


def _list(items: Any) -> list:
    """``items``, which must be a list."""
    if not isinstance(items, list):
        raise ProtocolError("a tuple of no list")
    return items


def _range(ends: Any) -> range:
    """Range of limited length from (start, stop, step)."""
    result = range(*_list(ends))
    if len(result) > ITEMS:  # a test may make a list of it
        raise ProtocolError(f"a range of more than {ITEMS} elements")
    return result


_BUILD: dict[str, Callable] = {
    "i": _integer,
    "t": lambda items: tuple(_list(items)),
    "s": _set_of(set),
    "f": _set_of(frozenset),
    "d": _dict,
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
    "c": lambda parts: complex(*_list(parts)),
    "r": _range,
    "n": lambda items: iter(_list(items)),
    "m": lambda _: object(),  # true, and not equal to any other value
}


def _reject_hash_collisions(value: Any, deep: bool = False) -> None:
    """Raise ProtocolError when many different elements of ``value`` have one hash, as chosen numbers and tuples can.

    deep: check all nested values together, because a test may collect them in one set.
    """
    by_hash: dict[int, set[str]] = {}
    stack = [value] if deep else list(value)
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind is dict:
            stack.extend([*item, *item.values()] if deep else ())
            continue
        if kind in (list, tuple, set, frozenset):
            stack.extend(item if deep else ())
        elif kind not in (int, float, complex, range) or (kind is int and -(2**60) < item < 2**60):
            continue
        try:
            key = hash(tuple(item) if kind in (list, set) else item)  # a test may convert lists to tuples
        except TypeError:
            continue
        same_hash = by_hash.setdefault(key, set())
        try:
            same_hash.add(_text(item))  # text, because hashes of text are seeded
        except ValueError:  # an integer inside has too many digits
            same_hash.add(str(id(item)))
        if len(same_hash) > MAX_COLLISIONS:
            raise ProtocolError(f"more than {MAX_COLLISIONS} values with one hash")


def _text(item: Any) -> str:
    """Text that is the same for equal numbers, ranges and containers. ValueError for an integer of too many digits."""
    if type(item) is range:  # range(3, 3) equals range(5, 5), and range(0, 3, 2) equals range(0, 4, 2)
        return repr((item[0], item[-1], item.step)) if len(item) > 1 else repr(list(item))
    return hex(item) if type(item) is int else repr(item)
