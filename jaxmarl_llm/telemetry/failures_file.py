"""failures.jsonl, the file of what failed in the environment of a run. It is only appended to."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "failures.jsonl"


class FailuresFile:
    """One JSON object a line: time, step, and what `write` is given.

    ``folder``: the workdir. A traceback is written once for each process, and later lines name it by ``trace``, the
    first eight digits of its SHA-256. A file that cannot be written is one warning and never stops training.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._known: set[str] = set()
        self._warned = False

    def write(self, step: int, failure: Mapping[str, Any], traceback: str = "") -> None:
        """Append one failure. ``step``: completed steps. ``failure``: JSON values by name."""
        row = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "step": step, **failure}
        if traceback:
            row["trace"] = hashlib.sha256(traceback.encode(errors="backslashreplace")).hexdigest()[:8]
            if row["trace"] not in self._known:
                row["traceback"] = traceback
        try:
            with open(self.path, "ab") as file:
                # A run that was killed, or a full disk, may have left half a line.
                file.write((b"" if self._ends_with_a_line() else b"\n") + json.dumps(row).encode() + b"\n")
        except OSError as error:
            if not self._warned:
                self._warned = True
                logging.getLogger(__name__).warning("%s cannot be written, training goes on: %r", self.path, error)
        else:
            self._known.add(row.get("trace", ""))

    def _ends_with_a_line(self) -> bool:
        with open(self.path, "rb") as file:
            if not file.seek(0, 2):
                return True
            file.seek(-1, 2)
            return file.read(1) == b"\n"
