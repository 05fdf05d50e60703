"""What one model has cached during one rollout, so that prompts of a growing conversation are not prefilled again.

A turn's prompt begins, token for token, with an earlier prompt and what was sampled there (token-in, token-out). Keys
and values depend on nothing but the tokens before them, so those of every prompt and sample are kept, each token once:
a trie over token ids for each task says which slot of one pool holds a token, whatever launch computed it. Before a
launch each prompt is looked up and its known beginning gathered from the pool; what several prompts of the launch share
beyond that (a stem: one task's text, read by another role for the first time) is extended once, stems of stems after
it, and then each prompt's rest along with the generation.

The pool holds 2 L K H numbers for each distinct token of prompts and samples of the turns before the last, rounded up
to a power of two, until the rollout ends.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmarl_llm.generate import bucket, fill, up_to
from jaxmarl_llm.sharding import meshed, row_parts
from jaxmarl_llm.types import Params, Policy, PyTree

SHORT = 8  # tokens: a shorter beginning is computed again, which takes less than fetching it
NOWHERE = np.iinfo(np.int32).max  # a slot beyond any pool: not written


class _Edge:
    """Tokens in a row, their slots, and what follows by first token."""

    __slots__ = ("ids", "next", "slots")

    def __init__(self, ids: np.ndarray, slots: np.ndarray, following: dict[int, _Edge]) -> None:
        self.ids, self.slots, self.next = ids, slots, following


class Trie:
    """Token sequences and a slot for each token; those that begin alike share edges (a radix tree)."""

    def __init__(self) -> None:
        none = np.zeros((0,), np.int32)
        self._root = _Edge(none, none, {})

    def _walk(self, ids: np.ndarray) -> tuple[list[np.ndarray], int, _Edge, int]:
        """Slots of the longest known beginning, its length, the edge it ends in and how many tokens of that it has."""
        edge, inside, at, slots = self._root, 0, 0, []
        while inside == len(edge.ids) and at < len(ids) and int(ids[at]) in edge.next:
            edge = edge.next[int(ids[at])]
            inside = common(edge.ids, ids[at:])
            slots.append(edge.slots[:inside])
            at += inside
        return slots, at, edge, inside

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Slots of the longest known beginning of ``ids``."""
        return np.concatenate([*self._walk(ids)[0], np.zeros((0,), np.int32)])

    def add(self, ids: np.ndarray, free: int) -> tuple[np.ndarray, int]:
        """Slots of all ``ids``, of which so many were known; the others get ``free``, ``free + 1``, ..."""
        slots, at, edge, inside = self._walk(ids)
        rest = np.arange(free, free + len(ids) - at, dtype=np.int32)
        if len(rest):
            if inside < len(edge.ids):
                behind = _Edge(edge.ids[inside:], edge.slots[inside:], edge.next)
                edge.next = {int(behind.ids[0]): behind}
                edge.ids, edge.slots = edge.ids[:inside], edge.slots[:inside]
            edge.next[int(ids[at])] = _Edge(ids[at:], rest, {})
        return np.concatenate([*slots, rest]), at


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences share at the beginning."""
    n = min(len(a), len(b))
    apart = np.flatnonzero(a[:n] != b[:n])
    return int(apart[0]) if len(apart) else n


def stems(rows: list[np.ndarray], known: int, shared: int, level: int = 0) -> Iterator[tuple[int, np.ndarray]]:
    """(level, tokens) of what two or more rows share beyond the ``known`` tokens that are cached for all of them.

    The rows are sorted and agree in ``shared`` tokens. A stem goes on where one of the level before ends; shorter than
    `SHORT` it is left to whatever goes on behind it.
    """
    longer = [row for row in rows if len(row) > shared]
    for _, alike in itertools.groupby(longer, lambda row: row[shared]):
        same = list(alike)
        if len(same) < 2:
            continue
        end = common(same[0], same[-1])
        if end - known >= SHORT:
            yield level, same[0][:end]
            yield from stems(same, end, end, level + 1)
        else:
            yield from stems(same, known, end, level)


class Ready(NamedTuple):
    """The arguments of `generate` for one launch, or of `fill` for stems; rows padded to ``bucket(rows, 4)``."""

    tokens: np.ndarray  # [N E] what is not cached, at least the last token of each prompt
    length: np.ndarray  # [N] of it
    prefix: PyTree  # gathered from the pool, or None when nothing was found
    start: np.ndarray | None  # [N] filled slots of it


class Prefixes:
    """The cache of one model. ``sent``: tokens of prompts that went through the trunk, by stems and by launches."""

    def __init__(self, policy: Policy, pad_id: int) -> None:
        self._policy, self._pad = policy, pad_id
        self._reuses = policy.extend is not None and not meshed()  # a pool is not cut over devices yet
        self._tries: dict[int, Trie] = {}
        self._pool: PyTree = None
        self._used = 0
        self.sent = 0

    def ready(self, variables: Params, tasks: Sequence[int], prompts: Sequence[np.ndarray]) -> Ready:
        """A launch of these prompts, one row each in their order, after the stems they share."""
        if not self._reuses:
            return self._gather(tasks, prompts)
        groups: dict[tuple[int, int], list[np.ndarray]] = {}
        known: dict[tuple[int, int], int] = {}
        for task, ids in zip(tasks, prompts):
            found = self._find(task, ids)
            place = task, int(found[-1]) if len(found) else -1  # a slot stands for all that leads to it
            groups.setdefault(place, []).append(ids[:-1])  # the last token's hidden state is always needed
            known[place] = len(found)
        levels: dict[int, list[tuple[int, np.ndarray]]] = {}
        for place, rows in groups.items():
            rows.sort(key=lambda row: row.tolist())
            for level, ids in stems(rows, known[place], known[place]):
                levels.setdefault(level, []).append((place[0], ids))
        for _, found_stems in sorted(levels.items()):
            of, beginnings = [task for task, _ in found_stems], [ids for _, ids in found_stems]
            to = self._gather(of, beginnings)
            prefix = _fill(self._policy, variables, to.tokens, to.length, to.prefix, to.start)
            self.keep(of, beginnings, prefix)
        return self._gather(tasks, prompts)

    def keep(
        self,
        tasks: Sequence[int],
        prompts: Sequence[np.ndarray],
        prefix: PyTree,
        suffix: PyTree = None,
        said: Sequence[Sequence[Sequence[int]]] = (),
    ) -> None:
        """Into the pool: prompts, and the samples ``said`` at each but their last tokens, from a launch's caches."""
        if not self._reuses:
            return
        to_prompt = np.full(prefix[0][0].shape[:2], NOWHERE, np.int32)
        to_said = None if suffix is None else np.full(suffix[0][0].shape[:3], NOWHERE, np.int32)
        for row, (task, ids) in enumerate(zip(tasks, prompts)):
            slots, known = self._add(task, ids)
            to_prompt[row, known : len(ids)] = slots[known:]
            for g, got in enumerate(said[row] if said else ()):
                slots, known = self._add(task, np.concatenate([ids, np.asarray(got[:-1], np.int32)]))
                assert to_said is not None
                to_said[row, g, known - len(ids) : len(got) - 1] = slots[known:]
        if self._pool is None:
            self._pool = jax.tree.map(lambda x: jnp.zeros((0, *x.shape[2:]), x.dtype), prefix)
        size = len(self._pool[0][0])
        if self._used > size:
            self._pool = _grow(self._pool, more=(1 << (max(self._used, 256) - 1).bit_length()) - size)
        self._pool = _put(self._pool, prefix, suffix, to_prompt, to_said)

    def _find(self, task: int, ids: np.ndarray) -> np.ndarray:
        slots = self._tries.setdefault(task, Trie()).find(ids[:-1])
        return slots if len(slots) >= SHORT else slots[:0]

    def _add(self, task: int, ids: np.ndarray) -> tuple[np.ndarray, int]:
        slots, known = self._tries[task].add(ids, self._used)
        self._used += len(ids) - known
        return slots, known

    def _gather(self, tasks: Sequence[int], prompts: Sequence[np.ndarray]) -> Ready:
        found = [self._find(task, ids) for task, ids in zip(tasks, prompts)]
        size, rest = (
            up_to(bucket(len(prompts), 4), row_parts()),
            [len(ids) - len(slots) for ids, slots in zip(prompts, found)],
        )
        self.sent += sum(rest)
        cached = any(len(slots) for slots in found)
        tokens = np.full((size, bucket(max(rest), 16 if cached else 32)), self._pad, np.int32)
        length, start = np.ones((size,), np.int32), np.zeros((size,), np.int32)
        slot = np.zeros((size, bucket(max(map(len, prompts)), 32)), np.int32)
        for row, (ids, slots) in enumerate(zip(prompts, found)):
            start[row], length[row] = len(slots), rest[row]
            tokens[row, : rest[row]], slot[row, : len(slots)] = ids[len(slots) :], slots
        if not cached:
            return Ready(tokens, length, None, None)
        return Ready(tokens, length, _take(self._pool, slot), start)


@functools.partial(jax.jit, static_argnames=("policy",), donate_argnames=("prefix",))
def _fill(policy: Policy, variables: Params, tokens: Any, length: Any, prefix: PyTree, start: Any) -> PyTree:
    return fill(policy, variables, tokens, length, prefix, start)[1]


@jax.jit
def _take(pool: PyTree, slot: Int[Array, "N P"]) -> PyTree:
    return jax.tree.map(lambda x: x[slot], pool)


@functools.partial(jax.jit, donate_argnames=("pool",))
def _put(pool: PyTree, prefix: PyTree, suffix: PyTree, to_prompt: Any, to_said: Any) -> PyTree:
    """Each row of the caches to its slot; none where that is `NOWHERE`."""
    pool = jax.tree.map(lambda x, new: x.at[to_prompt].set(new, mode="drop"), pool, prefix)
    if suffix is None:
        return pool
    return jax.tree.map(lambda x, new: x.at[to_said].set(new, mode="drop"), pool, suffix)


@functools.partial(jax.jit, static_argnames=("more",))
def _grow(pool: PyTree, *, more: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros((more, *x.shape[1:]), x.dtype)]), pool)
