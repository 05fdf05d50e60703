"""Data sets of the Hugging Face hub by name, read by the package `datasets` (extra ``hf``).

A name is ``OWNER/NAME``, ``OWNER/NAME:CONFIG`` or ``OWNER/NAME:CONFIG:SPLIT``, for example ``openai/gsm8k:main:test``.
An empty CONFIG is the one of the set, as in ``openai/gsm8k::test``. Files in the local cache of the hub come first. So
a machine without a network reads what ``hf download --repo-type dataset OWNER/NAME`` has fetched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmarl_llm.errors import ConfigError

NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(?::(?P<config>[\w.-]*))?(?::(?P<split>[\w.-]+))?")
FILES = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow", ".gz", ".zst", ".zip")
CONFIGS = {"openai/gsm8k": "main", "hotpotqa/hotpot_qa": "distractor"}  # where a name has none
SPLITS = {("OpenMLRL/arXiv_abstract", "test"): "val"}  # no test split upstream
FORMS = "OWNER/NAME, OWNER/NAME:CONFIG or OWNER/NAME:CONFIG:SPLIT"


class HubSet(NamedTuple):
    """A data set of the hub.

    repo: OWNER/NAME
    config: its configuration; None: the only one
    split: its split; None: not named
    """

    repo: str
    config: str | None
    split: str | None


def parse(name: str) -> HubSet | None:
    """The data set that a name means; None where the name is a path of a file or of no known form.

    Args:
        name: As in the docstring of this module.
    """
    found = NAME.fullmatch(name)
    if found is None or found["repo"].endswith(FILES) or Path(found["repo"]).parent.is_dir():
        return None
    return HubSet(found["repo"], found["config"] or CONFIGS.get(found["repo"]), found["split"])


def rows(of: HubSet, split: str) -> tuple[Iterator[tuple[str, Mapping[str, Any]]], str]:
    """Rows of a split with their positions for messages, and the source with its version.

    Args:
        of: The data set, whose own ``split`` is not read.
        split: Name of the split; for some sets another name of upstream, see ``SPLITS``.

    Raises:
        ConfigError: `datasets` is not installed, or neither the cache nor the hub has the set.
    """
    try:
        import datasets  # an optional extra: most runs read local files
    except ImportError:
        raise ConfigError(
            f"dataset {of.repo!r} is a hub id and needs the extra: pip install 'jaxmarl_llm[hf]'"
        ) from None
    found = _load(datasets, of, SPLITS.get((of.repo, split), split))
    positions = ((f"{of.repo}, row {number}", row) for number, row in enumerate(found, 1))
    return positions, f"hub {of.repo} ({found.info.version})"


def _load(datasets: Any, of: HubSet, split: str) -> Any:
    """The split of a set from the cache of the hub, else by its name."""
    snapshot = _cached(of.repo)
    if snapshot is not None:
        try:
            return datasets.load_dataset(str(snapshot), of.config, split=split)
        except Exception:  # a part of the files, or a form that needs the hub: its name may still be readable
            pass
    try:
        return datasets.load_dataset(of.repo, of.config, split=split)
    except Exception as error:  # a wrong name, a wrong split and a lost connection have different classes
        why = " ".join(next(iter(str(error).split("\n")), "").split())[:200]
        form = isinstance(error, ValueError)  # of a configuration or a split that the set does not have
        advice = f"expected {FORMS}" if form else f"where there is a network: hf download --repo-type dataset {of.repo}"
        raise ConfigError(
            f"hub {of.repo}, split {split}: cannot be had ({type(error).__name__}: {why}); {advice}"
        ) from None


def _cached(repo: str) -> Path | None:
    """Folder of a data set in the local cache of the hub; None where it is not there."""
    try:
        import huggingface_hub

        found = Path(huggingface_hub.snapshot_download(repo, repo_type="dataset", local_files_only=True))
    except Exception:  # not in the cache, whatever form the cache has
        return None
    return found if any(path.name.endswith(FILES) for path in found.rglob("*")) else None
