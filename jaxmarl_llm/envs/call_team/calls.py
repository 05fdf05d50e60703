"""The written form of one call, and how much of a gold call it matches.

The form is ``name(first="a text", second=3)``. Values are JSON: texts in double quotes, numbers, true, false, null and
lists. JSON as a whole, ``{"name": ..., "arguments": {...}}``, has half as many tokens again: 37 of SmolLM2 on average
in place of 25. 96 % of the gold calls fit into 48 tokens, and 86 % as JSON. These counts are of the 769 training tasks
of the full data, with the stop token (2026-11-28).

Python's True, False, None and texts in single quotes are read as well. What stands behind the closing bracket is not
read, so a second call has no effect. A call that gives an argument twice cannot be read.

Nothing here raises on what a model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jaxmarl_llm.envs.assistant.function_calls import Call, argument_ok

MAX_CALL = 4000  # characters of a reply that are read
MAX_DEPTH = 20  # of brackets
_NAME = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(\s*")
_KEY = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*")
_NEXT = re.compile(r"\s*([,)])\s*")
_PYTHON = re.compile(r"(True|False|None)\b|'([^'\\\n]*)'")
_WORDS = {"True": True, "False": False, "None": None}


class Grade(NamedTuple):
    """Comparison of a call with a gold call.

    Attributes:
        score: In [0, 1]: the share of the gold arguments that match, less one share for each extra argument. An extra
            argument is not in the gold call, or may be absent and is wrong. Another function has 0.
        function: Whether the name is the gold name.
        met: Whether every argument of ``strict`` is there and as demanded; True without any.
    """

    score: float
    function: bool
    met: bool

    @property
    def exact(self) -> bool:
        """Whether the whole call is right."""
        return self.score == 1.0


def write(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as text.

    Args:
        name: Of the function.
        arguments: By name; values that JSON can write.
    """
    given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    return f"{name}({given})"


def read(text: str) -> Call | str:
    """The call that ``text`` begins with: name and arguments. A string says why there is none."""
    text = text[:MAX_CALL]
    if _depth(text) > MAX_DEPTH:
        return f"brackets nested deeper than {MAX_DEPTH}"
    begins = _NAME.match(text)
    if not begins:
        return 'expected name(argument="value", ...)'
    at, arguments = begins.end(), dict[str, Any]()
    if text[at : at + 1] == ")":
        return begins[1], arguments
    while key := _KEY.match(text, at):
        try:
            value, at = _value(text, key.end())
        except (ValueError, RecursionError) as error:  # ValueError includes integers beyond Python's digit limit
            return f"argument {key[1]}: {str(error)[:80]}"
        if key[1] in arguments:
            return f"argument {key[1]} is given twice"
        arguments[key[1]] = value
        behind = _NEXT.match(text, at)
        if not behind:
            return f"argument {key[1]}: expected , or ) behind it"
        if behind[1] == ")":
            return begins[1], arguments
        at = behind.end()
    return "expected argument=value"


def _depth(text: str) -> int:
    depth = deepest = 0
    for c in text:
        depth += (c in "{[(") - (c in "}])")
        deepest = max(deepest, depth)
    return deepest


def _value(text: str, at: int) -> tuple[Any, int]:
    """The value that stands in ``text`` at ``at``, and where it ends. Raises ValueError."""
    if plain := _PYTHON.match(text, at):
        return (_WORDS[plain[1]] if plain[1] else plain[2]), plain.end()
    return _JSON.raw_decode(text, at)


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")


def _number(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError("a number is too large")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key is given twice")
    return made


_JSON = json.JSONDecoder(parse_constant=_constant, parse_float=_number, object_pairs_hook=_object)


def gold_arguments(answers: Mapping[str, list], required: Collection[str]) -> dict[str, Any]:
    """The arguments of a perfect call: the first allowed value of each one that has to be there.

    Args:
        answers: Allowed values of each argument; "" among them means that it may be absent.
        required: Arguments that the schema requires.
    """
    needed = _needed(answers, required)
    return {key: next((v for v in values if v != ""), "") for key, values in answers.items() if key in needed}


def _needed(answers: Mapping[str, list], required: Collection[str]) -> set[str]:
    return {key for key, values in answers.items() if "" not in values} | (set(required) & set(answers))


def grade(
    call: Call, name: str, answers: Mapping[str, list], parameters: Mapping[str, Any], strict: Collection[str] = ()
) -> Grade:
    """Compare a call with the gold call, argument by argument, by BFCL's rules for values.

    Args:
        call: Name and arguments.
        name: Of the gold call.
        answers: Its allowed values by argument; "" among them means that the argument may be absent.
        parameters: JSON schema of the gold function: ``properties`` with types, and ``required``.
        strict: Arguments whose text has to be one of the allowed ones to the letter.
    """
    made, arguments = call
    if made != name:
        return Grade(0.0, False, not strict)
    properties, needed = parameters["properties"], _needed(answers, parameters.get("required", ()))

    def fits(key: str) -> bool:
        if key not in arguments or key not in answers or key not in properties:
            return False
        if key in strict:
            value = arguments[key]
            return isinstance(value, str) and value.strip() in answers[key]
        return argument_ok(arguments[key], properties[key], answers[key])

    matched = sum(map(fits, needed))
    extra = sum(key not in needed and not fits(key) for key in arguments)
    met = all(map(fits, strict))
    if not needed:
        return Grade(float(not extra), True, met)
    return Grade(max(0, matched - extra) / len(needed), True, met)
