"""evaluations.jsonl, the file of what each held-out task brought at each evaluation of a run.

The first line is ``{"tasks": [...]}``: a hash of the content of each held-out task, in order; an empty one is unknown.
Each other line is one evaluation: ``step`` counts the completed steps, and each list has one number a task. The lists
are ``return``, and ``success`` where the environment pays an accuracy. The greedy ones end in ``_greedy``. An unknown
number is null. A resumed run writes the same bytes again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmarl_llm import json_files
from jaxmarl_llm.errors import ConfigError

NAME = "evaluations.jsonl"
LARGEST = (2.0 - 2.0**-23) * 2.0**127  # of float32, in which values are written


class Evaluation(NamedTuple):
    """Measurements of one evaluation.

    Attributes:
        step: Completed steps.
        values: Name of a metric behind ``eval/`` -> its value for each held-out task [n]; None: unknown.
    """

    step: int
    values: dict[str, tuple[float | None, ...]]


class Evaluations(NamedTuple):
    """The evaluations of a run.

    Attributes:
        tasks: Hash of the content of each held-out task [n]; "": unknown.
        rows: In the order of their steps.
    """

    tasks: tuple[str, ...]
    rows: list[Evaluation]


class EvaluationsFile:
    """Writer of evaluations.jsonl.

    workdir: Folder of the run. tasks: Hash of each held-out task [n]. resume_step: Step of the checkpoint that was
    restored; lines of later steps, which will run again, are dropped. None, or other tasks than those of the file,
    starts anew and renames an old file to ``evaluations.jsonl.old``.

    A file that cannot be written is one warning and never stops training.
    """

    def __init__(self, workdir: Path, tasks: Sequence[str], resume_step: int | None):
        self.path = workdir / NAME
        self._lines = [_line({"tasks": list(tasks)})]
        self._steps = [-1]
        self._warned = False
        if not self.path.exists():
            return
        old = None if resume_step is None else read_evaluations(workdir)
        if resume_step is None or old is None or old.tasks != tuple(tasks):
            os.replace(self.path, self.path.with_suffix(".jsonl.old"))
            return
        for row in old.rows:
            if row.step <= resume_step:
                self._steps.append(row.step)
                self._lines.append(_line({"step": row.step, **row.values}))
        self._put(b"".join(self._lines), 0)

    def write(self, step: int, values: Mapping[str, Sequence[float | None]]) -> None:
        """Append an evaluation, in place of those of ``step`` or later: a resumed run evaluates again.

        Args:
            step: Completed steps.
            values: As in `Evaluation`.
        """
        while self._steps[-1] >= step:
            self._steps.pop()
            self._lines.pop()
        kept = sum(map(len, self._lines))
        self._steps.append(step)
        self._lines.append(_line({"step": step, **{name: list(row) for name, row in values.items()}}))
        whole = not self.path.exists() or self.path.stat().st_size < kept
        self._put(b"".join(self._lines) if whole else self._lines[-1], 0 if whole else kept)

    def _put(self, raw: bytes, at: int) -> None:
        """Write bytes behind the first ``at`` ones of the file; 0: all of the file, whole or not at all."""
        partial = self.path.with_suffix(".jsonl.tmp")
        try:
            with open(self.path if at else partial, "r+b" if at else "wb") as file:
                file.truncate(at)  # removes an evaluation that is measured again, or half a line of a full disk
                file.seek(at)
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            if not at:
                os.replace(partial, self.path)
        except OSError as error:
            if not self._warned:
                self._warned = True
                logging.getLogger(__name__).warning("%s cannot be written, training goes on: %r", self.path, error)


def read_evaluations(workdir: str | os.PathLike) -> Evaluations | None:
    """Read the evaluations of a run.

    Args:
        workdir: Folder of the run.

    Returns:
        None where the run has no evaluations.jsonl. An incomplete last line is left out: it is being written.

    Raises:
        ConfigError: A line is damaged.
    """
    path = Path(workdir) / NAME
    if not path.is_file():
        return None
    with open(path, "rb") as file:
        rows = list(_rows(json_files.lines(file, str(path)), path))
    if not rows:
        return None
    tasks, *others = rows
    return Evaluations(tuple(tasks["tasks"]), [_evaluation(row, len(tasks["tasks"]), where) for where, row in others])


def _rows(lines: Iterator[bytes], path: Path) -> Iterator[Any]:
    """Yield the first line, and of each other one its place and its value."""
    for number, line in enumerate(lines, 1):
        where = f"{path}:{number}"
        if not line.endswith(b"\n"):
            return
        row = json_files.parse(json_files.decoded(line[:-1], str(path), number), where)
        if number > 1:
            yield where, row
            continue
        tasks = row.get("tasks") if isinstance(row, dict) else None
        if not isinstance(tasks, list) or not all(isinstance(task, str) for task in tasks):
            raise ConfigError(f"{where}: key 'tasks': expected a list of texts, found {json_files.shown(row)}")
        yield row


def _evaluation(row: Any, count: int, where: str) -> Evaluation:
    """One line, checked. ``count``: number of held-out tasks."""
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < 2**63:
        raise ConfigError(f"{where}: expected an evaluation with a step, found {json_files.shown(row)}")
    values = {name: value for name, value in row.items() if name != "step"}
    for name, value in values.items():
        known = isinstance(value, list) and all(v is None or _is_float32(v) for v in value)
        if not known or len(value) != count:
            raise ConfigError(
                f"{where}: key {name!r:.80}: expected {count} numbers of float32 or nulls, one a held-out task"
            )
    return Evaluation(row["step"], {name: tuple(value) for name, value in values.items()})


def _is_float32(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n").encode()
