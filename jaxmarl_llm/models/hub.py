"""Folders of models for a name of the Hugging Face hub or a URL: those of a local cache, or downloaded into it."""

from __future__ import annotations

import re
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
        why = " ".join(str(error).split())[:160] or type(error).__name__
        local = f"weights/{name.rpartition('/')[2]}"
        raise ConfigError(
            f"{key}: no folder {name!r}, and the Hugging Face hub did not give it ({why}); where there is a network: "
            f"hf download {name} --local-dir {local}, then --{key}={local}"
        ) from None
