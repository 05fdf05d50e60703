"""metrics.jsonl, the file of a run's metrics: the backend that writes it, and the function that reads it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmarl_llm import json_files
from jaxmarl_llm.errors import ConfigError

LARGEST = 1.7976931348623157e308  # float64


class JsonLines:
    """metrics.jsonl: one JSON object a line, each step once. A value that was not finite is null.

    ``path``: the file. ``resume_step``: last step whose line is kept; None keeps none and renames the old file.
    Lines that the disk refused wait for the next call.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path, resume_step: int | None):
        self._path = path
        self._pending: list[bytes] = []
        if path.exists() and resume_step is None:
            os.replace(path, path.with_suffix(".jsonl.old"))
        elif path.exists():
            kept = [row for row in read_metrics(path.parent, allow_empty=True) if row["step"] <= resume_step]
            partial = path.with_suffix(".jsonl.tmp")
            with open(partial, "wb") as file:
                file.writelines(_encode(row) for row in kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        self._size = path.stat().st_size if path.exists() else 0

    def write(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self._pending.append(_encode({"step": step, **metrics}))
        self.close()

    def close(self) -> None:
        """Write the lines that wait."""
        if not self._pending:
            return
        with open(self._path, "ab") as file:
            file.truncate(self._size)  # removes half a line of a write that failed
            file.write(b"".join(self._pending))
            file.flush()
            self._size = file.tell()
        self._pending = []


def read_metrics(workdir: str | os.PathLike, *, allow_empty: bool = False) -> list[dict[str, Any]]:
    """The lines of ``workdir``/metrics.jsonl as dictionaries.

    An incomplete last line is left out: the process was killed, or it is writing the line. ``allow_empty``: return an
    empty list for a file without a line. Otherwise, and for a damaged line, ConfigError is raised. Every other value of
    a line is a number or null.
    """
    path = Path(workdir) / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; is this the workdir of a run?")
    with open(path, "rb") as file:
        rows = list(_rows(json_files.lines(file, str(path)), path))
    if not rows and not allow_empty:
        raise ConfigError(f"{path}: no step has been logged yet")
    return rows


def _rows(lines: Iterable[bytes], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file. ``path``: its name, for errors."""
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        try:
            row = json_files.parse(json_files.decoded(line.rstrip(), where), where)
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ConfigError(f"{where}: not a JSON object with a step")
        except ConfigError:
            if not line.endswith(b"\n"):  # it is being written
                return
            raise
        for key, value in row.items():
            if value is not None and (type(value) not in (int, float) or not abs(value) <= LARGEST):
                found = json_files.shown(value)
                raise ConfigError(f"{where}: key {key!r:.80}: expected a finite number or null, found {found}")
        if not 0 <= row["step"] < 2**63:
            raise ConfigError(f"{where}: key 'step': expected an integer from 0, found {json_files.shown(row['step'])}")
        yield row


def _encode(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n").encode()


def roles_of(keys: Iterable[str]) -> list[str]:
    """The roles in ``keys``, in the order of their first keys."""
    return list(dict.fromkeys(key.split("/")[1] for key in keys if re.match(r"agent/[^/]+/", key)))
