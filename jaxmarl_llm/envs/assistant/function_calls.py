"""Rules for function calls: reading one from a model's text, and comparing calls with gold calls.

The comparison follows the AST rules of the Berkeley Function Calling Leaderboard (BFCL), written anew, with an
argument-level share for partial credit. The shop's rule is equality of name and arguments. Nothing here raises on what
a model wrote; a malformed gold answer raises ValueError.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]  # function name, keyword arguments

MAX_CALL = 20_000  # characters of a JSON call
MAX_DEPTH = 20


def parse_call(text: str) -> Call | str:
    """A call from ``{"name": ..., "arguments": {...}}``; a string says what is wrong. Never raises.

    Text after the closing brace is ignored, since small models go on. Length and depth are limited before the parser
    sees the text: ``json`` recurses.
    """
    text = text.strip()
    if len(text) > MAX_CALL:
        return f"call longer than {MAX_CALL} characters"
    depth = deepest = 0
    for c in text:
        depth += (c in "{[") - (c in "}]")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return f"JSON nested deeper than {MAX_DEPTH}"
    if not text.startswith("{"):
        return 'call must be {"name": ..., "arguments": {...}}'
    try:
        value, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # ValueError includes integers beyond Python's digit limit
        return "call is not valid JSON"
    name, arguments = value.get("name"), value.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return 'call must be {"name": text, "arguments": {...}}'
    return (name, arguments) if _finite(arguments) else "NaN and infinity are not allowed"


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_finite(v) for v in value.values())
    if isinstance(value, list):
        return all(_finite(v) for v in value)
    return not isinstance(value, float) or math.isfinite(value)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "float": float, "number": float, "boolean": bool, "array": list, "tuple": list,
    "dict": dict, "object": dict, "any": object,
}  # fmt: skip


def standardize(value: Any) -> Any:
    """BFCL's comparison form of ``value``.

    Text is lower-cased without spaces and ``,./-_*^``, and quotes are alike. Lists are changed element by element.
    """
    if isinstance(value, str):
        return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')
    if isinstance(value, (list, tuple)):
        return [standardize(v) for v in value]
    return value


def _same(value: Any, gold: Any) -> bool:
    """Equality that keeps booleans apart from numbers."""
    if isinstance(value, bool) != isinstance(gold, bool):
        return False
    if isinstance(value, list) and isinstance(gold, list):
        return len(value) == len(gold) and all(_same(v, g) for v, g in zip(value, gold))
    if isinstance(value, dict) and isinstance(gold, dict):
        return value.keys() == gold.keys() and all(_same(v, gold[k]) for k, v in value.items())
    return value == gold


def _dict_ok(value: dict, gold: Any) -> bool:
    """A dict against a gold dict whose values are lists of allowed values."""
    if not isinstance(gold, dict) or not value.keys() <= gold.keys():
        return False
    if any("" not in gold[k] for k in gold.keys() - value.keys()):
        return False
    return all(_allowed(v, gold[k]) for k, v in value.items())


def _allowed(value: Any, allowed: Sequence[Any]) -> bool:
    """Is ``value`` one of the allowed ones?"""
    if isinstance(value, dict):
        return any(_dict_ok(value, g) for g in allowed)
    if isinstance(value, list) and any(isinstance(v, dict) for v in value):
        return any(
            isinstance(g, list)
            and len(g) == len(value)
            and all(
                _dict_ok(v, w) if isinstance(v, dict) else _same(standardize(v), standardize(w))
                for v, w in zip(value, g)
            )
            for g in allowed
        )
    return any(_same(standardize(value), standardize(g)) for g in allowed)


def argument_ok(value: Any, schema: Mapping[str, Any], allowed: Sequence[Any]) -> bool:
    """Whether the argument ``value`` fits the type of its ``schema`` and one of its ``allowed`` values.

    An integer may stand for a float.
    """
    kind = _TYPES.get(str(schema.get("type", "any")).lower(), object)
    if kind is float and type(value) is int:
        pass
    elif not isinstance(value, kind) and type(value) not in {type(g) for g in allowed if g != ""}:
        return False  # a gold value of another type than the schema's is a variable's name: its type is accepted too
    return _allowed(value, allowed)


def _pair(functions: Mapping[str, Mapping], call: Call, gold: Mapping[str, Mapping[str, list]]) -> tuple[int, int]:
    """(matched, counted) arguments of a call against one gold call; equal numbers mean a match."""
    (name, answers), (made, arguments) = next(iter(gold.items())), call
    if made != name:
        return 0, max(1, sum("" not in a for a in answers.values()))
    if name not in functions:
        raise ValueError(f"gold call {name!r} is not among the offered functions")
    properties = functions[name]["parameters"].get("properties", {})
    counted = {k for k, a in answers.items() if "" not in a or k in arguments} | set(arguments)
    counted |= set(functions[name]["parameters"].get("required", []))
    matched = sum(
        k in arguments and k in answers and k in properties and argument_ok(arguments[k], properties[k], answers[k])
        for k in counted
    )
    return (matched, len(counted)) if counted else (1, 1)


def call_score(functions: Sequence[Mapping], calls: Sequence[Call], answers: Sequence[Mapping]) -> float:
    """Share of matched arguments in [0, 1]; 1.0 exactly when BFCL's AST rules accept the calls, in any order.

    ``functions``: the offered JSON schemas; ``answers``: BFCL's ``ground_truth``. Gold calls and made calls are paired
    so that as many arguments as possible match; arguments of calls without a partner count as wrong.
    """
    if not answers:
        raise ValueError("call_score: no gold call")
    by_name = {f["name"]: f for f in functions}
    scores = [[_pair(by_name, call, gold) for call in calls[:32]] for gold in answers]
    best = _assign([[m / n for m, n in row] for row in scores])
    matched = sum(scores[i][j][0] for i, j in best.items())
    total = sum(scores[i][j][1] for i, j in best.items())
    total += sum(
        max(1, sum("" not in a for a in next(iter(g.values())).values()))
        for i, g in enumerate(answers)
        if i not in best
    )
    total += sum(max(1, len(call[1])) for j, call in enumerate(calls) if j not in best.values())
    return matched / total


def _assign(weight: list[list[float]]) -> dict[int, int]:
    """Row -> column, perfect pairs first, by augmenting paths (so 1.0 is never missed), then the heaviest."""
    owner: dict[int, int] = {}

    def augment(i: int, seen: set[int]) -> bool:
        for j, w in enumerate(weight[i]):
            if w == 1 and j not in seen:
                seen.add(j)
                if j not in owner or augment(owner[j], seen):
                    owner[j] = i
                    return True
        return False

    for i in range(len(weight)):
        augment(i, set())
    rest = sorted(((-w, i, j) for i, row in enumerate(weight) for j, w in enumerate(row) if w > 0))
    for _, i, j in rest:
        if j not in owner and i not in owner.values():
            owner[j] = i
    return {i: j for j, i in owner.items()}


def same_call(call: Call, gold: Call) -> bool:
    """Retail's rule: whether ``call`` and ``gold`` have equal names and equal keyword arguments."""
    return call[0] == gold[0] and _same(call[1], gold[1])


def matched_calls(calls: Sequence[Call], golds: Sequence[Call]) -> int:
    """Number of ``golds`` that were made. Each of ``calls`` is used once, in any order."""
    left = list(calls)
    count = 0
    for gold in golds:
        at = next((i for i, call in enumerate(left) if same_call(call, gold)), None)
        if at is not None:
            left.pop(at)
            count += 1
    return count


def gold_calls(functions: Sequence[Mapping], answers: Sequence[Mapping]) -> list[Call]:
    """One accepted call for each gold call: the first allowed value of every argument that must be there.

    ``functions``: their schemas. ``answers``: gold calls, with allowed values for each argument.
    """
    by_name = {f["name"]: f["parameters"].get("required", []) for f in functions}
    calls = []
    for gold in answers:
        name, allowed = next(iter(gold.items()))
        needed = {k for k, values in allowed.items() if "" not in values or k in by_name.get(name, [])}
        calls.append((name, {k: _first(allowed[k]) for k in allowed if k in needed}))
    return calls


def _first(allowed: Sequence[Any]) -> Any:
    value = next((v for v in allowed if v != ""), "")
    return _plain(value)


def _plain(value: Any) -> Any:
    """Within a gold dict every value is a list of allowed ones."""
    if isinstance(value, dict):
        return {k: _first(v) for k, v in value.items() if "" not in v}
    return [_plain(v) for v in value] if isinstance(value, list) else value
