"""Data sets on disk: named tables of arrays, and the configuration that produced them.

A data set is a folder with one ``<name>.npz`` for each table, and ``meta.json``. That file holds the configuration, the
numbers of rows, the SHA-256 of every array, and a checksum of itself (``seal``). The folder appears complete or not at
all. Reading verifies every checksum.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxmarl_llm import json_files
from jaxmarl_llm.config import diff
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.storage.checkpoint import meta_checksum
from jaxmarl_llm.storage.checksums import digests

Tables = dict[str, dict[str, np.ndarray]]


def save(folder: Path, config: Mapping[str, Any], tables: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Write a data set.

    folder: new folder; ConfigError when it exists. config: JSON values; everything that the contents depend on. tables:
    table -> column -> array.
    """
    if folder.exists():
        raise ConfigError(f"{folder}: exists; a data set is never written over")
    partial = folder.with_name(f"{folder.name}.tmp")
    if partial.exists():
        shutil.rmtree(partial)  # left by a process that was killed
    partial.mkdir(parents=True)
    for name, arrays in tables.items():
        with open(partial / f"{name}.npz", "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            _sync(file)
    rows = {name: {key: len(array) for key, array in arrays.items()} for name, arrays in tables.items()}
    meta = {"config": config, "rows": rows, "sha256": {name: digests(dict(arrays)) for name, arrays in tables.items()}}
    with open(partial / "meta.json", "w") as text:
        json.dump({**meta, "seal": meta_checksum(meta)}, text, indent=1)
        _sync(text)
    os.rename(partial, folder)


def load(
    folder: Path,
    config: Mapping[str, Any],
    current: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda stored: stored,
) -> Tables:
    """Read a data set and verify it.

    folder: the data set. config: the expected configuration. current: the stored configuration with the names that keys
    have now. Raises ConfigError, in one line, when the data set is missing, damaged, or of another configuration.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no data set is there")
    meta = _read_meta(folder / "meta.json")
    plain = lambda values: json.loads(json.dumps(values))
    changed = diff(plain(current(meta["config"])), plain(config))
    if changed:
        raise ConfigError(f"{folder}: the data set is of another configuration: {'; '.join(changed):.300}")
    return {name: _read_table(folder / f"{name}.npz", sha256) for name, sha256 in meta["sha256"].items()}


def _read_meta(path: Path) -> dict[str, Any]:
    """Verified contents of ``meta.json``."""
    if not path.is_file():
        raise ConfigError(f"{path}: missing; {_REMEDY}")
    try:
        meta = json_files.read(path, nan=True)
    except ConfigError as error:  # not JSON, or not UTF-8
        raise ConfigError(f"{error}: damaged; {_REMEDY}") from None
    if not isinstance(meta, dict) or meta.get("seal") != meta_checksum(meta):
        raise ConfigError(f"{path}: damaged (its checksum differs); {_REMEDY}")
    json_files.check(meta, {"config": dict, "sha256": dict}, str(path))
    for name, digests_ in meta["sha256"].items():
        if not isinstance(digests_, dict) or Path(name).name != name or "\0" in name or len(name) > 200:
            raise ConfigError(f"{path}: sha256: expected checksums of a table, found {name!r:.80}")
    return meta


def _read_table(path: Path, sha256: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Arrays of one table, verified against the checksums in ``sha256``."""
    try:
        with open(path, "rb") as raw:
            _refuse_size(raw, path)
            with np.load(raw, allow_pickle=False) as file:
                arrays = {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; {_REMEDY}") from None
    except (MemoryError, OverflowError, struct.error, SyntaxError, TypeError, RecursionError) as error:  # in a header
        raise ConfigError(f"{path}: damaged ({type(error).__name__}); {_REMEDY}") from None
    # numpy and zipfile raise these classes for a damaged archive, depending on the position of the damage.
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ConfigError(f"{path}: damaged ({type(error).__name__}); {_REMEDY}") from None
    if digests(arrays) != dict(sha256):
        raise ConfigError(f"{path}: damaged (its checksum differs); {_REMEDY}")
    return arrays


def _refuse_size(raw: Any, path: Path) -> None:
    """Refuse an archive whose arrays claim more bytes than the file has: `save` does not compress."""
    size = path.stat().st_size
    with zipfile.ZipFile(raw) as archive:
        for item in archive.infolist():
            if item.file_size > size:
                raise ValueError("an array is larger than the file")
            with archive.open(item) as member:
                first = np.lib.format.read_magic(member) == (1, 0)
                header = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
                shape, _, dtype = header(member)
            if math.prod(shape) * dtype.itemsize > size:
                raise ValueError("an array is larger than the file")
    raw.seek(0)


_REMEDY = "remove the data set's folder and the run's to sample it again"


def _sync(file: Any) -> None:
    """Write the buffers of an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def joined(parts: list[dict[str, np.ndarray]], tasks: int) -> dict[str, np.ndarray]:
    """One table of several batches; rows of tokens become as wide as the widest.

    parts: columns by name of each batch, with columns ``node`` and ``task`` that count from 0. tasks: tasks of each
    batch. Nodes and tasks are numbered on from batch to batch.
    """
    nodes = np.cumsum([0, *(len(p["task"]) for p in parts)])
    parts = [{**p, "node": p["node"] + nodes[k], "task": p["task"] + k * tasks} for k, p in enumerate(parts)]

    def column(name: str) -> np.ndarray:
        arrays = [p[name] for p in parts]
        width = max(x.shape[-1] for x in arrays) if arrays[0].ndim > 1 else None
        wide = lambda x: x if width is None else np.pad(x, ((0, 0), (0, width - x.shape[-1])))
        return np.concatenate([wide(x) for x in arrays])

    return {name: column(name) for name in parts[0]}
