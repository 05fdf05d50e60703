"""Folder of a run, on this machine or in an object store (``gs://``, ``s3://``, all that etils.epath opens).

Orbax writes checkpoints to either. Object stores cannot append to a file, as metrics need. So the other files of a run
in a store are written to a local folder. Every checkpoint copies that folder to the store, and resuming copies it back.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from etils import epath

from jaxmarl_llm.data.remote import EXTRAS
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.storage import lock

ORBAX_FOLDERS = ("checkpoints", "best", "corrupt")  # written by Orbax directly; never copied


class Workdir:
    """Folder of a run.

    url: folder, or URL in a store, that Orbax writes to. ``local``: folder for all other files. It is the same folder
    unless ``url`` is in a store.
    """

    def __init__(self, url: str | os.PathLike):
        self.url = str(url)
        self._store = _open(self.url) if "://" in self.url else None
        name = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        here = Path(tempfile.gettempdir()) / f"jaxmarl_llm_{os.getuid()}"  # a folder for each user
        self.local = Path(url) if self._store is None else here / name

    def __str__(self) -> str:
        return self.url

    @property
    def home(self) -> Any:
        """The folder itself, in the store or on this machine: it holds the lock."""
        return self.local if self._store is None else self._store

    def fetch(self) -> None:
        """Replace the local folder by the files in the store. Without a store, do nothing."""
        if self._store is None:
            return
        shutil.rmtree(self.local, ignore_errors=True)
        self.local.mkdir(parents=True)
        if self._store.exists():
            _copy(self._store, epath.Path(self.local))

    def push(self) -> None:
        """Copy the local files to the store. Without a store, do nothing."""
        if self._store is not None:
            _copy(epath.Path(self.local), self._store)


def _open(url: str) -> epath.Path:
    """Folder of a store, created if necessary. Raises ConfigError when it cannot be opened or written."""
    try:
        store = epath.Path(url)
        store.mkdir(parents=True, exist_ok=True)
    except (ImportError, KeyError) as error:  # the scheme is unknown, or its client is not installed
        extra = EXTRAS.get(url.partition("://")[0])
        remedy = f"; pip install 'jaxmarl_llm[{extra}]'" if extra and isinstance(error, ImportError) else ""
        raise ConfigError(f"--workdir: cannot open {url!r}: {' '.join(str(error).split())}{remedy}") from error
    except Exception as error:  # the clients of stores have classes of their own for network and permissions
        raise ConfigError(f"--workdir: cannot write to {url!r}: {' '.join(str(error).split())}") from error
    return store


def _copy(source: epath.Path, target: epath.Path) -> None:
    """Copy all files of ``source`` to ``target``, except the lock and the folders that Orbax writes."""
    target.mkdir(parents=True, exist_ok=True)
    for item in source.iterdir():
        if item.is_dir():
            if item.name not in ORBAX_FOLDERS:
                _copy(item, target / item.name)
        elif item.name != lock.NAME:
            item.copy(target / item.name, overwrite=True)
