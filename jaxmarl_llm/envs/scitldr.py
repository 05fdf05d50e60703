"""Articles of SciTLDR for environments: title, abstract and human summaries, in the published split.

An article is ``{id, title, text, targets}``, as in `data.loaders.writing_row`. ``text`` is the abstract, and
``targets`` are human summaries. The sample in the package has 64 training and 32 test articles (Apache-2.0).

Shared arguments: ``data`` is None for the sample, or a folder that holds (or is) a folder with ``SciTLDR-A``, or its
URL. ``split`` is train or test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmarl_llm.data import loaders, remote
from jaxmarl_llm.envs import checks
from jaxmarl_llm.errors import ConfigError

Article = dict[str, Any]
FETCH = "git clone https://github.com/allenai/scitldr, and --config.env.args.data=scitldr/SciTLDR-Data"


def articles(data: str | None, split: str, seed: int) -> tuple[list[Article], str]:
    """The articles of a split in an order fixed by ``seed``, and the source for the log.

    A training article whose abstract is also in test is left out, and counted in the source.

    Args:
        data: See above.
        split: See above.
        seed: Of the order.

    Raises:
        ConfigError: There is no such folder, or an article lacks its title, its abstract or a human summary.
    """
    if data is not None and not remote.is_url(data):
        base = Path(data)
        if not any((base / folder).is_dir() for folder in ("SciTLDR-A", "scitldr")):
            expected = f"a folder with SciTLDR-A or scitldr ({FETCH})"
            raise ConfigError(f"{checks.ARGS}.data: expected {expected}, got {data!r}: no such folder in it")
    return loaders.load("scitldr", data_dir=data, split=split, seed=seed)


def stand_in(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an environment that need no data but the package's, for plans. ``args``: those of a run."""
    return dict(args) if args.get("data") else {k: v for k, v in args.items() if k != "count"}


def first(tasks: list[Article], count: int, source: str) -> list[Article]:
    """The first ``count`` of ``tasks``, or all of them for 0.

    Args:
        tasks: Usable tasks, in order.
        count: Tasks that a Config asks for.
        source: Where the tasks were read, for the message.

    Raises:
        ConfigError: There are fewer tasks than ``count``, or none.
    """
    if len(tasks) < max(1, count):
        checks.refuse(checks.ARGS, "count", f"at most {len(tasks)}, the usable articles in {source}", max(1, count))
    return tasks[: count or None]


def opening(text: str, words: int) -> str:
    """The first ``words`` whitespace words of ``text``, joined by single spaces."""
    return " ".join(text.split()[:words])


def digest(text: str) -> str:
    """A hash of ``text``, for an order that depends on content alone: 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
