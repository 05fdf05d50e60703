"""Models of the Hugging Face hub: local copies of what a name or a URL stands for, and uploads of exported folders."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jaxmarl_llm.data import remote
from jaxmarl_llm.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SMALL = ("*.json", "*.txt", "*.model", "*.jinja")  # configuration and tokenizer
# Folders that shipped configurations name. They are made by a command and are on no hub.
MADE = {"weights/smollm2": "jaxmarl-llm fetch_weights --out=weights/smollm2"}


def folder(path: str, key: str, *, weights: bool = True) -> Path:
    """The folder or file at ``path``; for a URL, or a hub model such as ``Qwen/Qwen2.5-0.5B-Instruct``, a local copy.

    Args:
        path: A folder, a .gguf file, the name of a hub model, or the URL of a folder or .gguf file (`data.remote`).
        key: Name of the value in messages.
        weights: Whether the weights are needed, and not the configuration and the tokenizer alone.

    Raises:
        ConfigError: The name is neither in the cache nor on a hub that can be reached, or the URL cannot be read.
    """
    patterns = [*SMALL, *["*.safetensors"] * weights]
    if remote.is_url(path):
        return remote.local(path, key, patterns)
    here = Path(path)
    if here.exists():
        return here
    if path in MADE:
        raise ConfigError(f"{key}: no folder {path!r}; make it with: {MADE[path]}")
    if not NAME.fullmatch(path) or here.parent.is_dir() or here.suffix == ".gguf":
        return here  # whoever reads it says what is missing
    return _snapshot(path, key, patterns, weights)


def _snapshot(name: str, key: str, patterns: list[str], weights: bool) -> Path:
    import huggingface_hub

    try:
        found = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        if (found / "config.json").is_file() and (not weights or any(found.glob("*.safetensors"))):
            return found
    except Exception:  # not in the cache, whatever form the cache has
        pass
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # no network, no such model, no permission: the hub's own errors are many
        local = f"weights/{name.rpartition('/')[2]}"
        raise ConfigError(
            f"{key}: no folder {name!r}, and the Hugging Face hub did not give it ({_why(error)}); "
            f"where there is a network: hf download {name} --local-dir {local}, then --{key}={local}"
        ) from None


def reserve(names: Sequence[str], key: str, *, private: bool) -> None:
    """Create repositories of models on the hub, where they do not exist. `huggingface_hub` finds address and login.

    Args:
        names: Of the repositories, each ``OWNER/NAME``.
        key: Name of the value in messages.
        private: Whether only their owner may read repositories that this call creates.

    Raises:
        ConfigError: A name is not of this form, or the hub cannot be reached or refuses.
    """
    import huggingface_hub

    for name in names:
        if not NAME.fullmatch(name):
            raise ConfigError(f"{key}: expected the name of a hub repository, OWNER/NAME, got {name!r}")
        try:
            huggingface_hub.HfApi().create_repo(name, private=private, exist_ok=True)
        except Exception as error:  # no network, no login, no permission: the hub's own errors are many
            raise ConfigError(
                f"{key}: the Hugging Face hub did not make {name!r} ({_why(error)}); log in with: hf auth login"
            ) from None


def upload(source: Path, name: str, key: str, *, only: Sequence[str] | None = None) -> str:
    """Upload the files of a folder to a repository of the hub, and return the address of the repository.

    Args:
        source: Folder to upload.
        name: Of the repository, which exists.
        key: Name of the value in messages.
        only: Names of files to upload; None uploads all.

    Raises:
        ConfigError: The hub cannot be reached or refuses. The folder stays, and the message has the command to retry.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi()
    try:
        api.upload_folder(
            repo_id=name, folder_path=source, allow_patterns=list(only) if only else None, commit_message="jaxmarl_llm"
        )
    except Exception as error:  # no network, no login, no permission: the hub's own errors are many
        raise ConfigError(
            f"{key}: {source} is written, but the Hugging Face hub did not take it ({_why(error)}); "
            f"try again with: hf upload {name} {source}"
        ) from None
    return f"{api.endpoint}/{name}"


def _why(error: Exception) -> str:
    """The hub's own words on one line."""
    return " ".join(str(error).split())[:160] or type(error).__name__
