"""Rows of a user's own data: a JSONL file, an iterable of mappings, or a data set of Hugging Face."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmarl_llm.data import hub_sets
from jaxmarl_llm.errors import ConfigError


class Row(NamedTuple):
    """One row of data.

    where: file and line, or the number of the row, for messages
    fields: name -> value
    """

    where: str
    fields: dict[str, Any]


def read_rows(source: Any, count: int | None = None, name: str = "data") -> list[Row]:
    """Rows of ``source``.

    Args:
        source: Path of a JSONL file, an iterable of mappings, or the name of a hub data set (`data.hub_sets`). A file
            has one object a line, and blank lines are skipped. A name without a split means ``train``.
        count: Rows at most; None: all.
        name: How messages call an iterable.

    Raises:
        ConfigError: A line or a row cannot be used; the message names the file, the line and the key.
    """
    is_named = isinstance(source, (str, Path))
    rows = list(itertools.islice(_of_name(source) if is_named else _of_rows(source, name), count))
    if not rows:
        raise ConfigError(f"{source if is_named else name}: no rows")
    return rows


def _of_name(source: str | Path) -> Iterator[Row]:
    """Rows of a file, or of a data set of the hub."""
    hub_set = None if isinstance(source, Path) else hub_sets.parse(source)
    if hub_set is None:
        return _of_file(source)
    found, _ = hub_sets.rows(hub_set, hub_set.split or "train")
    return (Row(where, dict(fields)) for where, fields in found)


def _of_file(source: str | Path) -> Iterator[Row]:
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; expected a JSONL file, one object a line, or {hub_sets.FORMS} of a hub"
        )
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Row(f"{path}:{number}", _object(line, f"{path}:{number}"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line.rstrip())
    except (ValueError, RecursionError) as error:
        why = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        hint = "; the file is one JSON list, write one object a line" if line.strip() in ("[", "[{") else ""
        raise ConfigError(f"{where}: not JSON: {why}{hint}") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{where}: expected an object, as {{"question": ...}}, got {type(value).__name__}')
    return value


def _of_rows(source: Any, name: str) -> Iterator[Row]:
    if not isinstance(source, Iterable):
        raise ConfigError(f"{name}: expected a path, or an iterable of mappings, got {type(source).__name__}")
    for number, fields in enumerate(source):
        if not isinstance(fields, Mapping) or not all(isinstance(key, str) for key in fields):
            raise ConfigError(f"row {number}: expected a mapping with names as keys, got {type(fields).__name__}")
        yield Row(f"row {number}", dict(fields))
