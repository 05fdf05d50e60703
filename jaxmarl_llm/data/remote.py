"""Folders and files at a URL, copied to this machine: weights and data that every host of a run fetches for itself.

``gs://`` and ``s3://`` name a folder in an object store (etils). ``https://`` names a file, or a folder of a model, the
names of whose files are known. A web server lists no folder, so a data set has to be in a store.

A copy is in ``~/.cache/jaxmarl_llm`` (``XDG_CACHE_HOME``), and appears there complete or not at all. It is used again
while names, sizes and times in the store are the same. A copy from a web server is used again without a question.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from jaxmarl_llm import json_files
from jaxmarl_llm.errors import ConfigError

EXTRAS = {"gs": "gcs", "s3": "s3"}  # scheme of a store -> extra that has its client
LISTING = ".listing.json"  # of a copy: what the store said of each file
THREADS = 8  # files that are copied at once
SILENCE = 60.0  # seconds in which a web server has to send something
# Files of a model in Hugging Face's layout. A server has some of them; config.json and the weights are required.
MODEL = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"

Write = Callable[[Path], None]  # writes a file to the path


def is_url(path: str) -> bool:
    """Whether ``path`` is a URL, and not a path on this machine."""
    return "://" in path


def local(url: str, key: str, patterns: Sequence[str] = ("*",)) -> Path:
    """The file or folder at ``url``, copied to this machine.

    Args:
        url: ``gs://``, ``s3://`` or ``https://``. A last part with ``.gguf`` is a file, everything else a folder.
        key: Name of the value in messages.
        patterns: Names of the files that are wanted. A store is copied with its subfolders, a web server only has the
            files of a model.

    Raises:
        ConfigError: The URL cannot be read, or nothing is there that is wanted.
    """
    scheme = url.partition("://")[0]
    if scheme in EXTRAS:
        listing, files = _in_store(url, key, patterns)
    elif scheme in ("http", "https"):
        listing, files = {}, {}
    else:
        known = ", ".join(f"{name}://" for name in (*EXTRAS, "https"))
        raise ConfigError(f"{key}: expected a URL with {known}, got {url!r}")
    name = hashlib.sha256(json.dumps([url, *patterns]).encode()).hexdigest()[:16]
    last = PurePosixPath(url).name
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmarl_llm" / f"{last}-{name}"
    inside = home / last if last.endswith(".gguf") else home
    if (home / LISTING).is_file() and json_files.read(home / LISTING) == listing:
        return inside
    if scheme not in EXTRAS:
        files = _on_server(url, key, patterns)
    _copy(home, listing, files, f"{key}: {url}")
    return inside


def _copy(home: Path, listing: Mapping[str, Any], files: Mapping[str, Write], what: str) -> None:
    """Write ``files`` into a new folder, which takes the place of ``home``. what: start of messages."""
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{home.name}.", dir=home.parent))
        try:
            for name in files:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda name: files[name](partial / name), files))
            (partial / LISTING).write_text(json.dumps(listing))
            shutil.rmtree(home, ignore_errors=True)
            try:
                partial.rename(home)
            except OSError:
                if not (home / LISTING).is_file():  # otherwise another process of this host was faster
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{what}: cannot be copied to {home}: {_short(error)}") from error


# -- stores ------------------------------------------------------------------------------------------------------------


def _open(url: str) -> Any:
    from etils import epath  # not at the top: environment workers that read local files start without it

    return epath.Path(url)


def _in_store(url: str, key: str, patterns: Sequence[str]) -> tuple[dict[str, Any], dict[str, Write]]:
    """What the store says of the wanted files, and how to copy each."""
    found: dict[str, Any] = {}

    def walk(folder: Any, before: str) -> None:
        for item in folder.iterdir():
            name = f"{before}{item.name}"
            if item.is_dir():
                walk(item, f"{name}/")
            elif any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
                found[name] = item

    scheme = url.partition("://")[0]
    try:
        root = _open(url)
        if not root.exists():
            raise ConfigError(f"{key}: {url}: there is no such file or folder")
        if root.is_dir():
            walk(root, "")
        else:
            found[root.name] = root
        listing = {name: [(stat := item.stat()).length, int(stat.mtime)] for name, item in sorted(found.items())}
    except ConfigError:
        raise
    except ImportError as error:
        wanted = f"pip install 'jaxmarl_llm[{EXTRAS[scheme]}]'"
        raise ConfigError(f"{key}: {url}: {scheme}:// needs {wanted} ({_short(error)})") from error
    except Exception as error:  # the clients of stores have classes of their own for network and permissions
        raise ConfigError(f"{key}: {url}: cannot be read ({_short(error)})") from error
    if not found:
        raise ConfigError(f"{key}: {url}: no file is there that is called {' or '.join(patterns)}")
    return listing, {name: _from_store(item) for name, item in found.items()}


def _from_store(item: Any) -> Write:
    def write(path: Path) -> None:
        try:
            item.copy(path)
        except OSError:
            raise
        except Exception as error:  # as above
            raise OSError(_short(error)) from error

    return write


# -- web servers -------------------------------------------------------------------------------------------------------


def _on_server(url: str, key: str, patterns: Sequence[str]) -> dict[str, Write]:
    """How to copy each file of a model, or the file at ``url``."""
    name = PurePosixPath(url).name
    if name.endswith(".gguf"):
        return {name: lambda path: _download(url, path)}
    if not any(fnmatch.fnmatch(MODEL[0], pattern) for pattern in patterns) or "*" in patterns:
        raise ConfigError(f"{key}: {url}: a web server lists no folder; expected gs://, s3:// or a folder here")
    base = url.rstrip("/")
    wanted = [*MODEL, *_weights(base, key)] if any("safetensors" in pattern for pattern in patterns) else [*MODEL]

    def write(name: str, path: Path) -> None:
        try:
            _download(f"{base}/{name}", path)
        except urllib.error.HTTPError as error:
            if error.code != 404 or name not in MODEL[1:]:
                raise OSError(f"{base}/{name}: HTTP {error.code}") from None

    return {name: functools.partial(write, name) for name in wanted}


def _weights(base: str, key: str) -> list[str]:
    """Names of the weight files of the model at ``base``: those of its index, or the only one."""
    try:
        with urllib.request.urlopen(f"{base}/{INDEX}", timeout=SILENCE) as answer:
            index = json_files.parse(answer.read().decode(errors="replace"), f"{base}/{INDEX}")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return [WEIGHTS]
        raise ConfigError(f"{key}: {base}/{INDEX}: HTTP {error.code}") from None
    except OSError as error:
        raise ConfigError(f"{key}: {base}: cannot be read ({_short(error)})") from error
    table = index.get("weight_map") if isinstance(index, dict) else None
    names = sorted({str(name) for name in table.values()}) if isinstance(table, dict) else []
    for name in names:
        if PurePosixPath(name).name != name or not name.endswith(".safetensors"):
            raise ConfigError(f"{key}: {base}/{INDEX}: expected names of files, found {name!r:.80}")
    if not names:
        raise ConfigError(f"{key}: {base}/{INDEX}: expected a table weight_map of file names")
    return [INDEX, *names]


def _download(url: str, path: Path) -> None:
    """Write what is at ``url`` to ``path``. Raises OSError when it ends before the announced number of bytes."""
    with urllib.request.urlopen(url, timeout=SILENCE) as answer, open(path, "wb") as file:
        shutil.copyfileobj(answer, file, 1 << 20)
        announced = answer.headers.get("Content-Length")
    if announced is not None and path.stat().st_size != int(announced):
        raise OSError(f"{url}: {path.stat().st_size} of {announced} bytes came")


def _short(error: BaseException) -> str:
    """First words of an error, on one line."""
    return " ".join(str(error).split())[:160] or type(error).__name__
