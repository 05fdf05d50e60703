"""Rollouts that are played in a thread: their watchers see them later, where the step takes them."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

Seen = list[tuple[Any, bool]]  # arguments of `env_runner.EnvRunner.see`, by rollout
_LATER: contextvars.ContextVar[Seen | None] = contextvars.ContextVar("rollouts that a watcher sees later", default=None)


def later() -> Seen | None:
    """The list to which rollouts of this thread go; None: watchers see them at once."""
    return _LATER.get()


@contextlib.contextmanager
def watched_later() -> Iterator[Seen]:
    """Keep the rollouts of this thread from their watchers. Yields the list that they go to."""
    seen: Seen = []
    token = _LATER.set(seen)
    try:
        yield seen
    finally:
        _LATER.reset(token)
