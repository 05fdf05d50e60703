"""Prefix cache of one model during one rollout: prompts of a growing conversation are not prefilled again.

A turn's prompt begins, token for token, with an earlier prompt and what was sampled there (token-in, token-out). Keys
and values depend only on their token and the tokens before it. Those of every prompt and sample are therefore kept,
each token once, in one pool of slots. For each task a trie over token ids gives the slot of a token, whatever launch
computed it.

Before a launch each prompt is looked up, and its cached prefix is gathered from the pool. Several prompts may share
more than that: one task's text, read by another role for the first time. Such a shared prefix is extended once, then
shared prefixes that continue it. Each prompt's rest is extended along with the generation.

The pool holds 2 L K H numbers for each distinct token of prompts and samples of the turns before the last. Its number
of slots is rounded up to a power of two. It lives until the rollout ends.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmarl_llm.distributed.sharding import meshed, row_parts
from jaxmarl_llm.generation.buckets import bucket, up_to
from jaxmarl_llm.generation.generate import fill
from jaxmarl_llm.types import Params, Policy, PyTree

MIN_REUSED_TOKENS = 8  # a shorter prefix is computed again, which takes less time than gathering it
NO_SLOT = np.iinfo(np.int32).max  # beyond any pool: writes to it are dropped


class _Edge:
    """Edge of a `Trie`: consecutive tokens, their slots, and the edges that follow, by their first token."""

    __slots__ = ("ids", "next", "slots")

    def __init__(self, ids: np.ndarray, slots: np.ndarray, following: dict[int, _Edge]) -> None:
        self.ids, self.slots, self.next = ids, slots, following


class Trie:
    """Radix tree of token sequences with a slot for each token. Sequences share the edges of a common prefix."""

    def __init__(self) -> None:
        none = np.zeros((0,), np.int32)
        self._root = _Edge(none, none, {})

    def _walk(self, ids: np.ndarray) -> tuple[list[np.ndarray], int, _Edge, int]:
        """Follow ``ids`` as far as they are known.

        Returns:
            Slots of the longest known prefix, its length, the edge it ends in, and its number of tokens in that edge.
        """
        edge, inside, known, slots = self._root, 0, 0, []
        while inside == len(edge.ids) and known < len(ids) and int(ids[known]) in edge.next:
            edge = edge.next[int(ids[known])]
            inside = common(edge.ids, ids[known:])
            slots.append(edge.slots[:inside])
            known += inside
        return slots, known, edge, inside

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the slots of the longest known prefix of ``ids``."""
        return np.concatenate([*self._walk(ids)[0], np.zeros((0,), np.int32)])

    def add(self, ids: np.ndarray, free: int) -> tuple[np.ndarray, int]:
        """Add a sequence.

        Args:
            ids: its tokens.
            free: slot of the first token that is not known yet; the next ones get ``free + 1``, ...

        Returns:
            Slots of all tokens, and how many of the tokens were known before.
        """
        slots, known, edge, inside = self._walk(ids)
        rest = np.arange(free, free + len(ids) - known, dtype=np.int32)
        if len(rest):
            if inside < len(edge.ids):
                behind = _Edge(edge.ids[inside:], edge.slots[inside:], edge.next)
                edge.next = {int(behind.ids[0]): behind}
                edge.ids, edge.slots = edge.ids[:inside], edge.slots[:inside]
            edge.next[int(ids[known])] = _Edge(ids[known:], rest, {})
        return np.concatenate([*slots, rest]), known


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix of two token sequences, ``a`` and ``b``."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def shared_prefixes(
    rows: list[np.ndarray], known: int, shared: int, level: int = 0
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (level, tokens) of each prefix that two or more rows share beyond what is cached for all of them.

    A prefix of one level continues one of the level before. If it continues that by fewer than `MIN_REUSED_TOKENS`
    tokens, it is left out, and its tokens count to the prefixes and rows that continue it.

    Args:
        rows: token sequences, sorted, that agree in their first ``shared`` tokens.
        known: number of tokens that are cached for all rows, or are in a prefix of the level before.
        shared: number of tokens in which all rows agree, at least ``known``.
        level: level of the prefixes to yield first.
    """
    longer = [row for row in rows if len(row) > shared]
    for _, alike in itertools.groupby(longer, lambda row: row[shared]):
        same = list(alike)
        if len(same) < 2:
            continue
        end = common(same[0], same[-1])
        if end - known >= MIN_REUSED_TOKENS:
            yield level, same[0][:end]
            yield from shared_prefixes(same, end, end, level + 1)
        else:
            yield from shared_prefixes(same, known, end, level)


class LaunchInputs(NamedTuple):
    """Arguments for one part of a launch, or of `fill` for shared prefixes. N is padded, see `Prefixes`."""

    tokens: np.ndarray  # [N E] tokens that are not cached, at least the last token of each prompt
    length: np.ndarray  # [N] number of these tokens
    prefix: PyTree  # cache gathered from the pool, or None if no token is cached
    start: np.ndarray | None  # [N] filled slots of the cache


class Prefixes:
    """Prefix cache of one model.

    ``prefilled_tokens`` counts the prompt tokens that went through the trunk, in shared prefixes and in launches.

    Args:
        policy: functions of the model. Without ``extend``, and on a mesh, nothing is cached.
        pad_id: token that fills up rows.
        padded: how sizes of rows and columns are rounded up: (entries, least size) -> size.
    """

    def __init__(self, policy: Policy, pad_id: int, padded: Callable[[int, int], int] = bucket) -> None:
        self._policy, self._pad, self._padded = policy, pad_id, padded
        self._reuses = policy.extend is not None and not meshed()  # the pool is not sharded
        self._tries: dict[int, Trie] = {}
        self._pool: PyTree = None
        self._used = 0
        self.prefilled_tokens = 0

    def prepare(
        self, variables: Params, tasks: Sequence[int], prompts: Sequence[np.ndarray], parts: Sequence[int]
    ) -> list[LaunchInputs]:
        """Extend the cache by the prefixes that prompts share, and gather the inputs of their launch.

        Args:
            variables: variables of the model.
            tasks: task of each prompt. Prompts of different tasks share nothing.
            prompts: token ids of each prompt, those of the first part of the launch first.
            parts: number of prompts of each part of the launch.

        Returns:
            Inputs of each part, whose row i is prompt i of the part. All parts have equally many columns.
        """
        if not self._reuses:
            return self._gather(tasks, prompts, parts)
        groups: dict[tuple[int, int], list[np.ndarray]] = {}
        known: dict[tuple[int, int], int] = {}
        for task, ids in zip(tasks, prompts):
            found = self._find(task, ids)
            group = task, int(found[-1]) if len(found) else -1  # the last slot identifies the whole cached prefix
            groups.setdefault(group, []).append(ids[:-1])  # the last token's hidden state is always needed
            known[group] = len(found)
        levels: dict[int, list[tuple[int, np.ndarray]]] = {}
        for group, rows in groups.items():
            rows.sort(key=lambda row: row.tolist())
            for level, ids in shared_prefixes(rows, known[group], known[group]):
                levels.setdefault(level, []).append((group[0], ids))
        for _, found_prefixes in sorted(levels.items()):
            owners, beginnings = [task for task, _ in found_prefixes], [ids for _, ids in found_prefixes]
            (inputs,) = self._gather(owners, beginnings, [len(beginnings)])
            prefix = _fill(self._policy, variables, inputs.tokens, inputs.length, inputs.prefix, inputs.start)
            self.store(owners, beginnings, prefix)
        return self._gather(tasks, prompts, parts)

    def store(
        self,
        tasks: Sequence[int],
        prompts: Sequence[np.ndarray],
        prefix: PyTree,
        suffix: PyTree = None,
        samples: Sequence[Sequence[Sequence[int]]] = (),
    ) -> None:
        """Copy the caches of a launch into the pool: prompts, and samples without their last tokens.

        Args:
            tasks: task of each prompt.
            prompts: token ids of each prompt.
            prefix: cache of the prompts, (k, v) [N P K H] of each layer.
            suffix: cache of the samples, (k, v) [N G R K H] of each layer, or None.
            samples: token ids of each sample at each prompt.
        """
        if not self._reuses:
            return
        to_prompt = np.full(prefix[0][0].shape[:2], NO_SLOT, np.int32)
        to_sample = None if suffix is None else np.full(suffix[0][0].shape[:3], NO_SLOT, np.int32)
        for row, (task, ids) in enumerate(zip(tasks, prompts)):
            slots, known = self._add(task, ids)
            to_prompt[row, known : len(ids)] = slots[known:]
            for g, sampled in enumerate(samples[row] if samples else ()):
                slots, known = self._add(task, np.concatenate([ids, np.asarray(sampled[:-1], np.int32)]))
                assert to_sample is not None
                to_sample[row, g, known - len(ids) : len(sampled) - 1] = slots[known:]
        if self._pool is None:
            self._pool = jax.tree.map(lambda x: jnp.zeros((0, *x.shape[2:]), x.dtype), prefix)
        size = len(self._pool[0][0])
        if self._used > size:
            self._pool = _grow(self._pool, more=(1 << (max(self._used, 256) - 1).bit_length()) - size)
        self._pool = _put(self._pool, prefix, suffix, to_prompt, to_sample)

    def _find(self, task: int, ids: np.ndarray) -> np.ndarray:
        slots = self._tries.setdefault(task, Trie()).find(ids[:-1])
        return slots if len(slots) >= MIN_REUSED_TOKENS else slots[:0]

    def _add(self, task: int, ids: np.ndarray) -> tuple[np.ndarray, int]:
        slots, known = self._tries[task].add(ids, self._used)
        self._used += len(ids) - known
        return slots, known

    def _gather(self, tasks: Sequence[int], prompts: Sequence[np.ndarray], parts: Sequence[int]) -> list[LaunchInputs]:
        found = [self._find(task, ids) for task, ids in zip(tasks, prompts)]
        rest = [len(ids) - len(slots) for ids, slots in zip(prompts, found)]
        self.prefilled_tokens += sum(rest)
        cached = any(len(slots) for slots in found)
        columns = self._padded(max(rest), 16 if cached else 32), self._padded(max(map(len, prompts)), 32)
        rows = iter(zip(prompts, found, strict=True))
        return [self._gather_part(list(itertools.islice(rows, count)), *columns, cached=cached) for count in parts]

    def _gather_part(
        self, rows: Sequence[tuple[np.ndarray, np.ndarray]], new: int, slots: int, *, cached: bool
    ) -> LaunchInputs:
        """Inputs of one part of a launch.

        rows: token ids of each prompt, and the slots of its cached prefix. new: columns of tokens that are not cached.
        slots: columns of the cache. cached: whether the launch continues cached prefixes.
        """
        size = up_to(self._padded(len(rows), 4), row_parts())
        tokens = np.full((size, new), self._pad, np.int32)
        length, start = np.ones((size,), np.int32), np.zeros((size,), np.int32)
        slot = np.zeros((size, slots), np.int32)
        for row, (ids, known) in enumerate(rows):
            start[row], length[row] = len(known), len(ids) - len(known)
            tokens[row, : length[row]], slot[row, : len(known)] = ids[len(known) :], known
        if not cached:
            return LaunchInputs(tokens, length, None, None)
        return LaunchInputs(tokens, length, _take(self._pool, slot), start)


@functools.partial(jax.jit, static_argnames=("policy",), donate_argnames=("prefix",))
def _fill(policy: Policy, variables: Params, tokens: Any, length: Any, prefix: PyTree, start: Any) -> PyTree:
    return fill(policy, variables, tokens, length, prefix, start)[1]


@jax.jit
def _take(pool: PyTree, slot: Int[Array, "N P"]) -> PyTree:
    return jax.tree.map(lambda x: x[slot], pool)


@functools.partial(jax.jit, donate_argnames=("pool",))
def _put(pool: PyTree, prefix: PyTree, suffix: PyTree, to_prompt: Any, to_sample: Any) -> PyTree:
    """Write each row of the caches to its slot. Rows whose slot is `NO_SLOT` are dropped."""
    pool = jax.tree.map(lambda x, new: x.at[to_prompt].set(new, mode="drop"), pool, prefix)
    if suffix is None:
        return pool
    return jax.tree.map(lambda x, new: x.at[to_sample].set(new, mode="drop"), pool, suffix)


@functools.partial(jax.jit, static_argnames=("more",))
def _grow(pool: PyTree, *, more: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.concatenate([x, jnp.zeros((more, *x.shape[1:]), x.dtype)]), pool)
