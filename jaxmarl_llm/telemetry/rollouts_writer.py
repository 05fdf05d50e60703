"""Writer of the files that `telemetry.rollouts` describes and reads: whole or absent, and bounded by a setting."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from jaxmarl_llm import json_files
from jaxmarl_llm.telemetry.rollouts import (
    FOLDER,
    FULL,
    KIND_OF,
    KINDS,
    LEVEL,
    PREFIX,
    SCHEMA,
    SPLITS,
    TRAIN,
    Header,
    RolloutsConfig,
    Row,
    files_in,
)


class RolloutsFolder:
    """Writer of the folder rollouts/ of a workdir.

    workdir: Folder of the run. cfg: Settings. resume_step: Step of the checkpoint that was restored; files of later
    steps, which will run again, are deleted. None starts anew and renames an old folder to ``rollouts.old``. say:
    Prints a line. seen: Is called with the number and the rows of every training step that was written.

    A file that cannot be written is one line and never stops a run.
    """

    def __init__(
        self,
        workdir: Path,
        cfg: RolloutsConfig,
        resume_step: int | None,
        say: Callable[[str], None] = print,
        seen: Callable[[int, Sequence[Row]], None] = lambda step, rows: None,
    ):
        self.folder, self._cfg, self._say, self._seen = workdir / FOLDER, cfg, say, seen
        self._failed = False
        if resume_step is None and self.folder.exists():
            old = self.folder.with_name(f"{FOLDER}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(self.folder, old)
        for number, path in ((n, p) for split in SPLITS for n, p in files_in(self.folder, split).items()):
            if resume_step is not None and number > resume_step:
                path.unlink()
        self.full = self._was_full(resume_step)

    def _was_full(self, resume_step: int | None) -> bool:
        """Whether the folder was full before ``resume_step``, under a limit that is not smaller than today's."""
        mark = self.folder / FULL
        if not mark.exists():
            return False
        found = json_files.read_object(mark)
        json_files.check(found, {"step": int, "max_mb": float}, str(mark))
        if resume_step is None or found["step"] > resume_step or found["max_mb"] < self._cfg.max_mb:
            mark.unlink()
            return False
        return True

    def write(self, header: Header, rows: Iterable[Row]) -> None:
        """Write the file of a step, unless the folder is full.

        header: Its ``rows`` and ``columns`` are set here. rows: Of any kinds; they are written kind by kind.
        """
        if self.full:
            return
        rows = list(rows)
        try:
            self._write(header, rows)
            if not self.full and header.split == TRAIN:
                self._seen(header.step, rows)
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._say(f"{self.folder} cannot be written, the run goes on: {json_files.reason(error)}")

    def _write(self, header: Header, rows: Iterable[Row]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{PREFIX[header.split]}-{header.step:08}.jsonl.zst"
        partial = path.with_name(f".{path.name}.part")
        try:
            with open(partial, "wb") as file:
                file.write(encode(header, rows))
                file.flush()
                os.fsync(file.fileno())
            there = (p for split in SPLITS for p in files_in(self.folder, split).values())
            used = sum(p.stat().st_size for p in there if p != path)
            if used + partial.stat().st_size <= self._cfg.max_mb * 1e6:
                os.replace(partial, path)
                return
        finally:
            partial.unlink(missing_ok=True)
        self.full = True
        mark = self.folder / f".{FULL}.part"
        mark.write_text(json.dumps({"step": header.step, "max_mb": self._cfg.max_mb}))
        os.replace(mark, self.folder / FULL)
        limit = f"config.run.rollouts.max_mb={self._cfg.max_mb:g}"
        what = f"step {header.step}" if header.split == TRAIN else f"the evaluation after step {header.step}"
        self._say(f"{self.folder} is full ({limit}): no rollouts are written from {what} on")


def encode(header: Header, rows: Iterable[Row]) -> bytes:
    """Make the bytes of a file: equal arguments give equal bytes.

    Args:
        header: The first line; its ``rows`` and ``columns`` are set here.
        rows: Rows of any kinds; they are written kind by kind.
    """
    tables: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    for row in rows:
        tables[KIND_OF[type(row)]].append(row)
    header = header._replace(
        schema=SCHEMA,
        rows={kind: len(table) for kind, table in tables.items()},
        columns={kind: cls._fields for kind, cls in KINDS.items()},
    )
    out = io.BytesIO()
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    with compressor.stream_writer(out, closefd=False) as stream:
        stream.write(_line("header", header))
        for kind, table in tables.items():
            for row in table:
                stream.write(_line(kind, row))
    return out.getvalue()


def _line(kind: str, row: Any) -> bytes:
    text = json.dumps({"kind": kind, **row._asdict()}, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return (text + "\n").encode("utf-8", "replace")  # half of a surrogate pair becomes ?


def shortest(values: Any) -> tuple[float | None, ...]:
    """Numbers of float32 as the shortest decimals that name them; None where a number is NaN or infinite.

    Args:
        values: Array of one axis.
    """
    known = np.asarray(values, np.float32)
    return tuple(float(x) if fine else None for x, fine in zip(known.astype(str), np.isfinite(known)))
