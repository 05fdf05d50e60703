"""What a run was made with: versions, the kind of device, and the commit of the folder it was started in."""

from __future__ import annotations

import functools
import platform
import subprocess
from pathlib import Path

import jax

from jaxmarl_llm._version import __version__

SECONDS = 5.0  # for one answer of git


@functools.lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Versions of packages and the kind of device."""
    import jaxlib

    return {
        "jaxmarl_llm": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def commit_of(folder: Path) -> str | None:
    """Commit of the git checkout that a folder is in; ``+changes`` follows where tracked files differ from it.

    Args:
        folder: The folder.

    Returns:
        None where the folder is in no checkout, the checkout has no commit, or git does not answer.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return f"{commit}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def _git(folder: Path, *words: str) -> str | None:
    """What a git command prints about ``folder``; None where it fails."""
    try:
        ran = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None
