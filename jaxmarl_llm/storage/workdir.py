"""A run's folder: on this machine, or in an object store (``gs://``, ``s3://``: whatever etils.epath opens).

Checkpoints go to either by themselves. Metrics are appended to, which object stores cannot do: those of a run in a
store are written to a folder of this machine and copied there with every checkpoint, and come from there on resuming.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from etils import epath

from jaxmarl_llm.text import ConfigError

ELSEWHERE = ("checkpoints", "corrupt")  # of the store: written there by Orbax


class Workdir:
    """``url``: what Orbax takes. ``local``: where files are written; the same folder unless ``url`` is in a store."""

    def __init__(self, url: str | os.PathLike):
        self.url = str(url)
        self._store = _open(self.url) if "://" in self.url else None
        name = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        here = Path(tempfile.gettempdir()) / f"jaxmarl_llm_{os.getuid()}"  # others may have the same store
        self.local = Path(url) if self._store is None else here / name

    def __str__(self) -> str:
        return self.url

    def fetch(self) -> None:
        """The store's files here, in place of what another run may have left."""
        if self._store is None:
            return
        shutil.rmtree(self.local, ignore_errors=True)
        self.local.mkdir(parents=True)
        if self._store.exists():
            _copy(self._store, epath.Path(self.local))

    def push(self) -> None:
        """The files here into the store."""
        if self._store is not None:
            _copy(epath.Path(self.local), self._store)


def _open(url: str) -> epath.Path:
    try:
        store = epath.Path(url)
        store.mkdir(parents=True, exist_ok=True)
    except (ImportError, KeyError) as error:  # a scheme that is not known, or whose client is not installed
        raise ConfigError(f"--workdir: cannot open {url!r}: {' '.join(str(error).split())}") from error
    except OSError as error:
        raise ConfigError(f"--workdir: cannot write to {url!r}: {error}") from error
    return store


def _copy(source: epath.Path, target: epath.Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for item in source.iterdir():
        if item.is_dir():
            if item.name not in ELSEWHERE:
                _copy(item, target / item.name)
        else:
            item.copy(target / item.name, overwrite=True)
