"""Written forms of arguments that no prompt states. A team learns the forms by trial, and a memory can keep them.

    kind     arguments                                    demanded form        accepted otherwise, for example
    dates    every allowed text is a whole date           2024-03-07           3/7/2024, March 7, 2024, 2024/03/07
    units    texts, ``unit``, ``units``, ``*_unit``       a code: C, km, kg    celsius, Celsius, kilometers
    places   texts, ``location``, ``city``, ``loc``,      the first part       Boston, MA
             ``destination``, ``origin``, ``*_location``
    ids      texts, ``*_id`` and ``username``             order:W6067464       #W6067464

The table is the same for every seed. A convention holds for an argument where each of its allowed values has the
demanded form or can be brought to it. The value then has to be that form to the letter, apart from spaces around it.
Other arguments keep BFCL's rules, which ignore case, spaces and most punctuation.

An argument that may be absent has no convention, nor has a date without a year or with a time of day.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import date, datetime

CODES: Mapping[str, str] = {  # unit in small letters -> code
    **dict.fromkeys(("celsius", "c", "centigrade"), "C"),
    **dict.fromkeys(("fahrenheit", "f"), "F"),
    **dict.fromkeys(("kelvin", "k"), "K"),
    **dict.fromkeys(("kilometers", "kilometer", "kilometres", "kms", "km"), "km"),
    **dict.fromkeys(("miles", "mile", "mi"), "mi"),
    **dict.fromkeys(("meters", "meter", "metres", "m"), "m"),
    **dict.fromkeys(("centimeters", "cm"), "cm"),
    **dict.fromkeys(("feet", "foot", "ft"), "ft"),
    **dict.fromkeys(("inches", "inch", "in"), "in"),
    **dict.fromkeys(("kilograms", "kilogram", "kgs", "kg"), "kg"),
    **dict.fromkeys(("grams", "gram", "g"), "g"),
    **dict.fromkeys(("pounds", "pound", "lbs", "lb"), "lb"),
    **dict.fromkeys(("metric",), "SI"),
    **dict.fromkeys(("imperial",), "US"),
}
_DATES = ("%Y-%m-%d", "%Y/%m/%d", "%m/%d/%Y", "%m-%d-%Y", "%d/%m/%Y", "%B %d, %Y", "%B %d %Y", "%b %d, %Y", "%d %B %Y")
_PLACES = ("location", "city", "loc", "destination", "origin")


def _date(key: str, text: str) -> str | None:
    plain = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", text)
    for form in _DATES:
        try:
            found: date = datetime.strptime(plain, form).date()
        except ValueError:
            continue
        return found.isoformat() if found.year >= 1000 else None
    return None


def _unit(key: str, text: str) -> str | None:
    return CODES.get(text.lower().rstrip(".")) if re.fullmatch(r"units?|\w+_units?", key) else None


def _place(key: str, text: str) -> str | None:
    named = key.lower() in _PLACES or key.lower().endswith("_location")
    first = text.split(",")[0].strip()
    return first if named and first and not re.search(r"\d", text) else None


def _id(key: str, text: str) -> str | None:
    kind = "user" if key == "username" else key.removesuffix("_id")
    if (key != "username" and not key.endswith("_id")) or not re.fullmatch(r"#?[\w-]+", text):
        return None
    return f"{kind}:{text.removeprefix('#')}"


KINDS: Mapping[str, Callable[[str, str], str | None]] = {"dates": _date, "units": _unit, "places": _place, "ids": _id}


def demanded(key: str, allowed: list) -> tuple[str, list] | None:
    """The convention of an argument.

    Args:
        key: Name of the argument.
        allowed: Its allowed values; "" among them means that it may be absent, and there is no convention then.

    Returns:
        Name of the kind, and the allowed values in the demanded form; None where no convention holds.
    """
    if not allowed or not all(isinstance(value, str) and value for value in allowed):
        return None
    for kind, convert in KINDS.items():
        made = [convert(key, value.strip()) for value in allowed]
        if all(value is not None for value in made):
            return kind, [*dict.fromkeys(made)]
    return None


def apply(answers: Mapping[str, list]) -> tuple[dict[str, list], tuple[str, ...]]:
    """The allowed values under the conventions, and the arguments that a convention governs.

    Args:
        answers: Allowed values by argument.
    """
    found = {key: demanded(key, allowed) for key, allowed in answers.items()}
    changed = {key: got[1] if (got := found[key]) else allowed for key, allowed in answers.items()}
    return changed, tuple(key for key, got in found.items() if got)
