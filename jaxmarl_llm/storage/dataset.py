"""Data sets on disk: named tables of arrays, and the configuration that made them.

A folder of one ``<name>.npz`` a table and ``meta.json`` (configuration, rows, SHA-256 of every array, a seal over all
that). It appears whole or not at all, and is verified when it is read: what is used is what was written.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxmarl_llm.checkpoint import digests, seal
from jaxmarl_llm.config import diff
from jaxmarl_llm.text import ConfigError

Tables = dict[str, dict[str, np.ndarray]]


def save(folder: Path, config: Mapping[str, Any], tables: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Write a data set. ``config`` is JSON: all that its contents depend on. ConfigError when ``folder`` is there."""
    if folder.exists():
        raise ConfigError(f"{folder}: exists; a data set is never written over")
    partial = folder.with_name(f"{folder.name}.tmp")
    if partial.exists():
        shutil.rmtree(partial)  # of a process that was killed
    partial.mkdir(parents=True)
    for name, arrays in tables.items():
        with open(partial / f"{name}.npz", "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
            _sync(file)
    rows = {name: {key: len(array) for key, array in arrays.items()} for name, arrays in tables.items()}
    meta = {"config": config, "rows": rows, "sha256": {name: digests(dict(arrays)) for name, arrays in tables.items()}}
    with open(partial / "meta.json", "w") as text:
        json.dump({**meta, "seal": seal(meta)}, text, indent=1)
        _sync(text)
    os.rename(partial, folder)


def load(folder: Path, config: Mapping[str, Any]) -> Tables:
    """Read a data set. ConfigError, in one line, when it is missing, damaged or of a configuration not ``config``."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no data set is there")
    meta = _read_meta(folder / "meta.json")
    changed = diff(meta["config"], json.loads(json.dumps(config)))
    if changed:
        raise ConfigError(f"{folder}: the data set is of another configuration: {'; '.join(changed)}")
    return {name: _read_table(folder / f"{name}.npz", sha256) for name, sha256 in meta["sha256"].items()}


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; {_REMEDY}") from None
    except ValueError:  # no JSON, no UTF-8
        raise ConfigError(f"{path}: damaged (not JSON); {_REMEDY}") from None
    if not isinstance(meta, dict) or meta.get("seal") != seal(meta):
        raise ConfigError(f"{path}: damaged (its checksum differs); {_REMEDY}")
    return meta


def _read_table(path: Path, sha256: Mapping[str, str]) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; {_REMEDY}") from None
    # All that numpy and zipfile raise on a damaged archive, by where the damage is.
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ConfigError(f"{path}: damaged ({type(error).__name__}); {_REMEDY}") from None
    if digests(arrays) != dict(sha256):
        raise ConfigError(f"{path}: damaged (its checksum differs); {_REMEDY}")
    return arrays


_REMEDY = "remove the data set's folder and the run's to sample it again"


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
