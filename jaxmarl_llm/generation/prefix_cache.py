"""Prefix cache of one model during one rollout: prompts of a growing conversation are not prefilled again.

A turn's prompt begins, token for token, with an earlier prompt and what was sampled there (token-in, token-out). Keys
and values depend only on their token and the tokens before it. Those of every prompt and sample are therefore kept,
each token once, in one pool of slots. For each task a trie over token ids gives the slot of a token, whatever launch
computed it.

Before a launch each prompt is looked up, and its cached prefix is gathered from the pool. Several prompts may share
more than that: one task's text, read by another role for the first time. Such a shared prefix is extended once, then
shared prefixes that continue it. Each prompt's rest is extended along with the generation. Where few rests are long,
they are extended before it, so that all rows of the launch are not padded to them.

The pool holds 2 L K H numbers for each distinct token of prompts and samples of the turns before the last. Its number
of slots is rounded up to a power of two. It lives until the rollout ends.

On a mesh each part of the rows has slots and tries of its own (`prefix_pool`). A row of a launch is placed on the part
that holds most of its prefix (`placement`). What that part lacks is sent there from the part with the longest prefix.
So a prompt token goes through the model once, as on one device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmarl_llm.distributed.sharding import by_device, meshed, row_parts, settle
from jaxmarl_llm.generation import prefix_pool
from jaxmarl_llm.generation.buckets import bucket, up_to
from jaxmarl_llm.generation.generate import TOGETHER, Rows, fill, to_fill
from jaxmarl_llm.generation.placement import place_rows
from jaxmarl_llm.generation.prefix_pool import NO_SLOT, Cut
from jaxmarl_llm.generation.trie import Trie, common
from jaxmarl_llm.types import Params, Policy, PyTree

MIN_REUSED_TOKENS = 8  # a shorter prefix is computed again, which takes less time than gathering it
MOVED_TOKENS = 1 << 15  # tokens that a device of a mesh receives at once, at most, or one from each part
LEAST_ROWS, LEAST_REST = 4, 16  # rows of a program, and columns behind cached prefixes, with padding
NONE = np.zeros((0,), np.int32)  # slots


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
    """Arguments for one part of a launch, or of `fill` for shared prefixes, on the host. N is padded, see `Prefixes`.

    On a mesh the N rows are those of the first part of the mesh's rows, then those of the second, and so on.
    """

    tokens: np.ndarray  # [N E] tokens that are not cached, at least the last token of each prompt
    length: np.ndarray  # [N] number of these tokens
    prefix: PyTree  # cache gathered from the pool, on the devices, or None if no token is cached
    start: np.ndarray | None  # [N] filled slots of the cache
    rows: np.ndarray  # row of each prompt

    @property
    def active(self) -> np.ndarray:
        """Which rows have a prompt [N]; the others are padding."""
        return np.isin(np.arange(len(self.length)), self.rows)

    @property
    def prompts(self) -> np.ndarray:
        """Index of the prompt of each row [N]; that of the last prompt where a row has none."""
        index = np.full(len(self.length), len(self.rows) - 1)
        index[self.rows] = np.arange(len(self.rows))
        return index


class Prefixes:
    """Prefix cache of one model, or of models that sample at once in blocks of devices.

    ``prefilled_tokens`` counts the prompt tokens that went through the trunk, in shared prefixes and in launches.
    ``moved_tokens`` counts the cached tokens that were sent to other parts of a mesh.

    Args:
        policy: functions of the model. Without ``extend`` nothing is cached.
        pad_id: token that fills up rows.
        padded: how sizes of rows and columns are rounded up: (entries, least size) -> size.
        applied: how functions are applied to rows.
        blocks: blocks of devices that the rows of a launch are divided into.
    """

    def __init__(
        self,
        policy: Policy,
        pad_id: int,
        padded: Callable[[int, int], int] = bucket,
        applied: Rows = TOGETHER,
        blocks: int = 1,
    ) -> None:
        self._policy, self._pad, self._padded = policy, pad_id, padded
        self._applied, self._blocks, self._parts = applied, blocks, row_parts()
        # The invariant form computes all heads on every device.
        self._cut = Cut(applied.axes() if meshed() else (), "tensor" if policy.draw is None else None)
        self._tries: dict[Hashable, dict[int, Trie]] = {}  # task -> part of the rows -> what it has in its slots
        self._pool: PyTree = None
        self._used = [0] * self._parts
        self.prefilled_tokens = self.moved_tokens = 0

    def prepare(
        self,
        variables: Params,
        tasks: Sequence[Hashable],
        prompts: Sequence[np.ndarray],
        parts: Sequence[int],
        blocks: Mapping[Any, tuple[int, ...]] | None = None,
        layers: Params | None = None,
        adapters: Mapping[Any, int] | None = None,
        room: np.ndarray | None = None,
    ) -> list[LaunchInputs]:
        """Extend the cache by the prefixes that prompts share, and gather the inputs of their launch.

        Args:
            variables: variables of the model, as ``applied`` takes them.
            tasks: task of each prompt. Prompts of different tasks share nothing.
            prompts: token ids of each prompt, those of the first part of the launch first.
            parts: number of prompts of each part of the launch.
            blocks: blocks of devices that may have the prompts of a task. Two tasks have equal blocks, or none in
                common. None: all blocks.
            layers: `Policy.unstack` of the variables, which continue cached prefixes; None: the variables do.
            adapters: index of the adapter of each task, see `PromptRows`; None: the variables have one.
            room: rows that each part of the mesh's rows may have, in each part of a launch without blocks. Their sum is
                at least the number of prompts. None: as many as are needed.

        Returns:
            Inputs of each part, with the rows of its prompts. All parts have equally many columns.
        """
        blocks = dict.fromkeys(tasks, tuple(range(self._blocks))) if blocks is None else blocks
        if self._policy.extend is None:
            return self._gather(tasks, prompts, parts, blocks, room)
        groups: dict[tuple[Hashable, int, int], list[np.ndarray]] = {}
        known: dict[tuple[Hashable, int, int], int] = {}
        for task, ids in zip(tasks, prompts):
            part, found = _longest(self._find(task, ids))
            # The last slot identifies the whole cached prefix. Every prompt finds it on the same part.
            group = task, part, int(found[-1]) if len(found) else -1
            groups.setdefault(group, []).append(ids[:-1])  # the last token's hidden state is always needed
            known[group] = len(found)
        levels: dict[int, list[tuple[Hashable, np.ndarray]]] = {}
        for group, rows in groups.items():
            rows.sort(key=lambda row: row.tolist())
            for level, ids in shared_prefixes(rows, known[group], known[group]):
                levels.setdefault(level, []).append((group[0], ids))
        extend = functools.partial(self._extend, variables, layers, adapters, blocks)
        for _, found_prefixes in sorted(levels.items()):
            extend(found_prefixes)
        long = self._long_rests(tasks, prompts, parts)
        if long:
            extend(long)
        return self._gather(tasks, prompts, parts, blocks, room)

    def _extend(
        self,
        variables: Params,
        layers: Params | None,
        adapters: Mapping[Any, int] | None,
        blocks: Mapping[Any, tuple[int, ...]],
        beginnings: Sequence[tuple[Hashable, np.ndarray]],
    ) -> None:
        """Put beginnings of prompts, each with its task, into the pool. The other arguments are those of `prepare`."""
        owners, prefixes = [task for task, _ in beginnings], [ids for _, ids in beginnings]
        (inputs,) = self._gather(owners, prefixes, [len(prefixes)], blocks)
        adapter = None if adapters is None else np.array([adapters[task] for task in owners])[inputs.prompts]
        tokens, length, start, adapter = self._applied.put((inputs.tokens, inputs.length, inputs.start, adapter))
        read = to_fill(inputs.prefix, variables, layers)
        prefix = _fill(self._policy, self._applied, read, tokens, length, inputs.prefix, start, adapter)
        self.store(owners, prefixes, prefix, rows=inputs.rows)

    def _long_rests(
        self, tasks: Sequence[Hashable], prompts: Sequence[np.ndarray], parts: Sequence[int]
    ) -> list[tuple[Hashable, np.ndarray]]:
        """Prompts, each with its task and without its last token, that are better read before their launch.

        All rows of a launch have as many columns as the longest rest. Where few rests are long, these are read by
        themselves, if that leaves out at least half of the tokens with padding. A launch that continues nothing stays
        as it is, so that its shape is known before the run (`costs.counts.launches`).
        """
        known = [_longest(self._find(task, ids))[1] for task, ids in zip(tasks, prompts)]
        rest = [len(ids) - len(slots) for ids, slots in zip(prompts, known)]
        short = self._padded(1, LEAST_REST)
        long = {(task, *ids.tolist()): (task, ids[:-1]) for task, ids, n in zip(tasks, prompts, rest) if n > short}
        if not long or not any(len(slots) for slots in known):
            return []
        rows, columns = sum(self._padded(count, LEAST_ROWS) for count in parts), self._padded(max(rest), LEAST_REST)
        apart = self._padded(len(long), LEAST_ROWS) * columns + rows * short
        return list(long.values()) if 2 * apart <= rows * columns else []

    def store(
        self,
        tasks: Sequence[Hashable],
        prompts: Sequence[np.ndarray],
        prefix: PyTree,
        suffix: PyTree = None,
        samples: Sequence[Sequence[Sequence[int]]] = (),
        rows: np.ndarray | None = None,
    ) -> None:
        """Copy the caches of a launch into the pool: prompts, and samples without their last tokens.

        Args:
            tasks: task of each prompt.
            prompts: token ids of each prompt.
            prefix: cache of the prompts, (k, v) [N P K H] of each layer.
            suffix: cache of the samples, (k, v) [N G R K H] of each layer, or None.
            samples: token ids of each sample at each prompt.
            rows: row of each prompt, `LaunchInputs.rows`. None: they are in order, on one device.
        """
        if self._policy.extend is None:
            return
        n, *slots_of_prompt = _rows_first(prefix, len(self._cut.rows))
        to_prompt = np.full((n, *slots_of_prompt), NO_SLOT, np.int32)
        to_sample = None if suffix is None else np.full(_rows_first(suffix, len(self._cut.rows)), NO_SLOT, np.int32)
        for i, (task, ids, row) in enumerate(zip(tasks, prompts, range(n) if rows is None else rows)):
            part = int(row) * self._parts // n
            slots, known = self._add(task, part, ids)
            to_prompt[row, known : len(ids)] = slots[known:]
            for g, sampled in enumerate(samples[i] if samples else ()):
                slots, known = self._add(task, part, np.concatenate([ids, np.asarray(sampled[:-1], np.int32)]))
                assert to_sample is not None
                to_sample[row, g, known - len(ids) : len(sampled) - 1] = slots[known:]
        self._reserve(prefix)
        tables = self._applied.put((to_prompt, to_sample))
        self._pool = settle(prefix_pool.put(self._pool, prefix, suffix, *tables, cut=self._cut))

    def _find(self, task: Hashable, ids: np.ndarray) -> dict[int, np.ndarray]:
        """Slots of the longest known prefix without the last token, on each part that has enough of it."""
        found = {part: trie.find(ids[:-1]) for part, trie in self._tries.get(task, {}).items()}
        return {part: slots for part, slots in found.items() if len(slots) >= MIN_REUSED_TOKENS}

    def _add(self, task: Hashable, part: int, ids: np.ndarray) -> tuple[np.ndarray, int]:
        slots, known = self._tries.setdefault(task, {}).setdefault(part, Trie()).add(ids, self._used[part])
        self._used[part] += len(ids) - known
        return slots, known

    def _reserve(self, like: PyTree) -> None:
        """Make room for the slots in use. ``like``: a cache, for the shapes of the first pool."""
        size = 0 if self._pool is None else len(jax.tree.leaves(self._pool)[0]) // self._parts
        need = 1 << (max(*self._used, 256) - 1).bit_length()
        if self._pool is None:
            self._pool = prefix_pool.make(like, size=need, cut=self._cut)
        elif need > size:
            self._pool = prefix_pool.grow(self._pool, more=need - size, cut=self._cut)

    def _gather(
        self,
        tasks: Sequence[Hashable],
        prompts: Sequence[np.ndarray],
        parts: Sequence[int],
        blocks: Mapping[Any, tuple[int, ...]],
        room: np.ndarray | None = None,
    ) -> list[LaunchInputs]:
        found = [self._find(task, ids) for task, ids in zip(tasks, prompts)]
        rest = [len(ids) - len(_longest(slots)[1]) for ids, slots in zip(prompts, found)]
        self.prefilled_tokens += sum(rest)
        ends = list(itertools.accumulate(parts))
        ranges = [slice(end - count, end) for end, count in zip(ends, parts)]
        placed = [self._place(found[own], [blocks[task] for task in tasks[own]], room) for own in ranges]
        of_row = [int(part) for where, _ in placed for part in where]
        self._move(tasks, prompts, found, of_row)
        slots = [
            of.get(part, NONE) if len(of.get(part, NONE)) == len(_longest(of)[1]) else self._find(task, ids)[part]
            for task, ids, of, part in zip(tasks, prompts, found, of_row)
        ]
        cached = any(len(own) for own in slots)
        columns = self._padded(max(rest), LEAST_REST if cached else 32), self._padded(max(map(len, prompts)), 32)
        pairs = list(zip(prompts, slots, strict=True))
        return [
            self._gather_part(pairs[own], *columns, *at, cached=cached) for own, at in zip(ranges, placed, strict=True)
        ]

    def _place(
        self,
        found: Sequence[dict[int, np.ndarray]],
        blocks: Sequence[tuple[int, ...]],
        room: np.ndarray | None,
    ) -> tuple[np.ndarray, int]:
        """Part of the mesh's rows for each prompt of one part of a launch, and the rows that each part has.

        ``room``: as of `prepare`.
        """
        alike: dict[tuple[int, ...], list[int]] = {}
        for n, own in enumerate(blocks):
            alike.setdefault(own, []).append(n)
        of_block = self._parts // self._blocks
        count = max(-(-len(rows) // len(own)) for own, rows in alike.items())
        capacity = up_to(self._padded(count, LEAST_ROWS), of_block) // of_block
        free = np.full(self._parts, len(found)) if room is None else room
        while np.minimum(free, capacity).sum() < len(found):
            capacity = self._padded(capacity + 1, 1)
        where = np.zeros(len(found), int)
        for own, rows in alike.items():
            open_to = [block * of_block + k for block in own for k in range(of_block)]
            known = np.zeros((len(rows), len(open_to)), int)
            for row, n in enumerate(rows):
                for part, slots in found[n].items():
                    if part in open_to:
                        known[row, open_to.index(part)] = len(slots)
            where[rows] = np.array(open_to)[place_rows(known, np.minimum(free[open_to], capacity))]
        return where, capacity

    def _move(
        self,
        tasks: Sequence[Hashable],
        prompts: Sequence[np.ndarray],
        found: Sequence[dict[int, np.ndarray]],
        parts: Sequence[int],
    ) -> None:
        """Send what the part of each prompt lacks of its longest known prefix. ``parts``: of the mesh's rows."""
        sent: dict[tuple[int, int], list[tuple[np.ndarray, np.ndarray]]] = {}  # from, to -> slots there and here
        for task, ids, known, part in zip(tasks, prompts, found, parts):
            source, slots = _longest(known)
            if len(slots) > len(known.get(part, ())):
                here, already = self._add(task, part, ids[: len(slots)])
                sent.setdefault((source, part), []).append((slots[already:], here[already:]))
        if not sent:
            return
        self._reserve(self._pool)
        pairs = {pair: np.concatenate([np.stack(slots) for slots in of], axis=1) for pair, of in sent.items()}
        self.moved_tokens += sum(slots.shape[1] for slots in pairs.values())
        longest = max(slots.shape[1] for slots in pairs.values())
        size = min(self._padded(longest, 16), max(MOVED_TOKENS // self._parts, 1))
        for first in range(0, longest, size):
            out = np.zeros((self._parts, self._parts, size), np.int32)
            to = np.full_like(out, NO_SLOT)
            for (source, part), slots in pairs.items():
                there, here = slots[:, first : first + size]
                out[source, part, : len(there)], to[part, source, : len(here)] = there, here
            self._pool = settle(prefix_pool.move(self._pool, *self._cut.put((out, to)), cut=self._cut))

    def _gather_part(
        self,
        pairs: Sequence[tuple[np.ndarray, np.ndarray]],
        new: int,
        slots: int,
        where: np.ndarray,
        capacity: int,
        *,
        cached: bool,
    ) -> LaunchInputs:
        """Inputs of one part of a launch.

        pairs: token ids of each prompt, and the slots of its cached prefix. new: columns of tokens that are not cached.
        slots: columns of the cache. where: part of the mesh's rows of each prompt. capacity: rows of each such part.
        cached: whether the launch continues cached prefixes.
        """
        size, filled = self._parts * capacity, [0] * self._parts
        rows = np.zeros(len(pairs), int)
        tokens = np.full((size, new), self._pad, np.int32)
        length, start = np.ones((size,), np.int32), np.zeros((size,), np.int32)
        slot = np.zeros((size, slots), np.int32)
        for n, ((ids, known), part) in enumerate(zip(pairs, where)):
            row = rows[n] = part * capacity + filled[part]
            filled[part] += 1
            start[row], length[row] = len(known), len(ids) - len(known)
            tokens[row, : length[row]], slot[row, : len(known)] = ids[len(known) :], known
        if not cached:
            return LaunchInputs(tokens, length, None, None, rows)
        prefix = prefix_pool.take(self._pool, self._applied.put(slot), cut=self._cut)
        return LaunchInputs(tokens, length, prefix, start, rows)


def _longest(found: dict[int, np.ndarray]) -> tuple[int, np.ndarray]:
    """The part with the most slots, the first of equal ones, and these slots; (-1, none) without parts."""
    part = max(sorted(found), key=lambda part: len(found[part]), default=-1)
    return part, found.get(part, NONE)


def _rows_first(cache: PyTree, leading: int) -> tuple[int, ...]:
    """Shape [N ...] of a cache without heads, whose rows have ``leading`` axes on a mesh."""
    *shape, _, _ = jax.tree.leaves(cache)[0].shape
    return (int(np.prod(shape[: max(leading, 1)])), *shape[max(leading, 1) :])


@functools.partial(jax.jit, static_argnames=("policy", "applied"), donate_argnames=("prefix",))
def _fill(
    policy: Policy,
    applied: Rows,
    variables: Params,
    tokens: Any,
    length: Any,
    prefix: PyTree,
    start: Any,
    adapter: Any = None,
) -> PyTree:
    on_rows = lambda variables, *rows: fill(policy, variables, *rows)[1]
    if policy.draw is not None and meshed():  # as in `sample_launch`
        return by_device(on_rows, variables, tokens, length, prefix, start)
    return applied.over(on_rows)(variables, tokens, length, prefix, start, adapter)
