"""Word lists of the writing rewards, read from a file: connectives by category, and stopwords.

The authors of MAGRPO publish their lists with their code. With those lists in a file, ``reward="parity"`` equals their
functions everywhere. Two formats, by the name of the file:

    *.json  {"transitions": {"addition": ["and", "in addition"], ...}, "stopwords": ["the", ...]}
    other   plain text, one entry a line under a heading in brackets; ``#`` begins a comment

        [transitions addition]
        and
        in addition
        [stopwords]
        the

Entries are compared in lower case. An entry of ``transitions`` may be a phrase.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxmarl_llm import json_files
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.writing.rewards import Lists
from jaxmarl_llm.errors import ConfigError

LISTS = ("transitions", "stopwords")


@lru_cache(maxsize=8)
def read(file: str | None, path: str = checks.ARGS) -> Lists:
    """The lists in ``file``; the lists of this project for None.

    Args:
        file: Name of a JSON or text file, as the module describes.
        path: Dotted name of the Config, for messages.

    Raises:
        ConfigError: One line that begins with ``<path>.word_lists``, for a file that is missing or lacks a list.
    """
    if file is None:
        return Lists()
    where = f"{path}.word_lists: {file}"
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8"
        raise ConfigError(f"{where}: cannot be read ({why})") from None
    found = _from_json(text, where) if file.endswith(".json") else _from_text(text, where)
    for name in LISTS:
        if not found.get(name):
            raise ConfigError(f"{where}: expected the lists {' and '.join(LISTS)}, found no {name!r}")
    if unknown := sorted(set(found) - set(LISTS)):
        raise ConfigError(f"{where}: expected the lists {' and '.join(LISTS)}, found {unknown[0]!r:.80} too")
    return _checked(found, where)


def _from_json(text: str, where: str) -> dict[str, Any]:
    found = json_files.parse(text, where)
    if not isinstance(found, dict):
        raise ConfigError(f"{where}: expected a JSON object with the lists {' and '.join(LISTS)}")
    return found


def _from_text(text: str, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    current: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if heading := re.fullmatch(r"\[(transitions)\s+(.+)\]|\[(\w+)\]", line):
            _, category, name = heading.groups()
            current = found.setdefault("transitions", {}).setdefault(category, []) if category else None
            current = found.setdefault(name, []) if name else current
        elif line and current is None:
            raise ConfigError(f"{where}, line {number}: expected a heading such as [stopwords] before {line!r:.80}")
        elif line and current is not None:
            current.append(line)
    return found


def _checked(found: Mapping[str, Any], where: str) -> Lists:
    transitions, stopwords = found["transitions"], found["stopwords"]
    if not isinstance(transitions, dict) or not all(_texts(phrases) for phrases in transitions.values()):
        raise ConfigError(f"{where}: expected category -> phrases in 'transitions', with a phrase in each category")
    if not _texts(stopwords):
        raise ConfigError(f"{where}: expected words in 'stopwords'")
    lowered = {category: tuple(p.lower() for p in phrases) for category, phrases in transitions.items()}
    return Lists(lowered, frozenset(word.lower() for word in stopwords))


def _texts(entries: Any) -> bool:
    """Is this a filled list of texts, none of them blank?"""
    return isinstance(entries, list) and bool(entries) and all(isinstance(e, str) and e.strip() for e in entries)
