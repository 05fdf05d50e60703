"""Which tasks are held out: a rule on the content of a task, the same for every seed.

A generated task belongs to the training side or to the held-out side by a hash of its content, such as the question. So
no held-out task is a training task of any seed, and no demonstration shows one.

Shared argument: ``held_out`` is the side of the split, True for held-out tasks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxmarl_llm.envs import checks
from jaxmarl_llm.errors import ConfigError

HELD_OUT_SHARE = 0.25  # of all contents
MOST_DRAWS = 2000  # for one task
T = TypeVar("T")


def is_held_out(content: str | bytes) -> bool:
    """Whether a task of this ``content`` is held out."""
    return _position(content) < HELD_OUT_SHARE * 2**64


def _position(content: str | bytes) -> int:
    """The hash of ``content``, evenly in [0, 2^64)."""
    raw = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big")


def split_contents(contents: Sequence[str]) -> np.ndarray | None:
    """Which of ``contents`` are held out [n] bool, by `is_held_out`; equal contents are on one side.

    Where a few contents leave a side empty, the content of the nearest hash moves there. None: there is one content.
    """
    if len(set(contents)) < 2:
        return None
    mask = np.array([is_held_out(content) for content in contents])
    if mask.all() or not mask.any():
        order = sorted(set(contents), key=_position)
        moved = order[-1] if mask.all() else order[0]
        mask = np.where(np.array(contents, object) == moved, ~mask, mask).astype(bool)
    return mask


def draw_task(draw: Callable[[], T], content: Callable[[T], str | bytes], held_out: bool) -> T:
    """The first of several draws that lies on the wanted side.

    Args:
        draw: Draws a task at random.
        content: Task -> content that decides the side.
        held_out: The side: held-out tasks, or training tasks.

    Raises:
        ConfigError: None of `MOST_DRAWS` draws lies on that side.
    """
    for _ in range(MOST_DRAWS):
        task = draw()
        if is_held_out(content(task)) == held_out:
            return task
    raise empty_side(held_out, MOST_DRAWS)


def empty_side(held_out: bool, draws: int) -> ConfigError:
    """The error for settings under which one side of the split has no task among ``draws`` drawn ones."""
    side, other = ("held-out", "training") if held_out else ("training", "held-out")
    return ConfigError(
        f"{checks.ARGS}: expected settings with more different tasks: each of {draws} drawn tasks is a {other} task, "
        f"and the {side} side stays empty"
    )


def fingerprint(task: Any) -> Any:
    """A hashable value of ``task`` that two tasks share when they are equal in every field."""
    if isinstance(task, Mapping):
        return tuple(sorted((str(k), fingerprint(v)) for k, v in task.items()))
    if dataclasses.is_dataclass(task) and not isinstance(task, type):
        return fingerprint({f.name: getattr(task, f.name) for f in dataclasses.fields(task)})
    if isinstance(task, (list, tuple)):
        return tuple(fingerprint(x) for x in task)
    if isinstance(task, np.ndarray):
        return task.shape, task.tobytes()
    return task if isinstance(task, (str, bytes, int, float, bool, type(None))) else repr(task)


def shared(training: Iterable[Any], held_out: Iterable[Any]) -> np.ndarray:
    """Whether each ``held_out`` task equals some ``training`` task in every field but ``id`` [n] bool."""
    known = {_content(task) for task in training}
    return np.array([_content(task) in known for task in held_out], bool)


def content_hash(task: Any) -> str:
    """Hash of all fields of a task but ``id``: 16 hexadecimal digits, the same in every process.

    Args:
        task: A mapping, a dataclass, arrays, texts and numbers, or sequences of these.

    Returns:
        "" where a field is an object of another kind, whose content has no fixed form.
    """
    text = _content(task)
    if re.search(r" at 0x[0-9a-f]+", text):
        return ""
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def _content(task: Any) -> str:
    """The content of a task as text, without its ``id``."""
    if isinstance(task, Mapping):
        task = {key: value for key, value in task.items() if key != "id"}
    return repr(fingerprint(task))
