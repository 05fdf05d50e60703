"""SHA-256 of the arrays of a tree: of each leaf, or of each block of a leaf that lies on several devices.

The state of a large team is cut over many hosts. With `block_digests` each process hashes what its own devices hold. So
no array is sent, and more hosts need less time. `damaged` compares a restored tree with what was recorded. On the
layout of the saved tree it also reads only what is there. On another layout it brings one block at a time together.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.distributed import processes
from jaxmarl_llm.distributed.sharding import pieces
from jaxmarl_llm.types import PyTree

Index = tuple[slice, ...]
NAN = "NaN"  # stands for the digest of a block that holds NaN
Recorded = str | Mapping[str, str]  # of a leaf: its digest, or those of its blocks by position (`_position`)


def digests(tree: PyTree) -> dict[str, str]:
    """SHA-256 of dtype, shape and bytes of every leaf, by path. A typed PRNG key counts as its key data.

    tree: arrays or numbers. The result does not depend on how arrays are split over devices. For a tree on devices of
    several processes this is a collective. Each process then computes some digests, and arrays that are split over
    processes are gathered piece by piece.
    """
    leaves = _leaves(tree)
    own, others = _share(leaves)
    found = {path: _digest(leaf, i % others == own) for i, (path, leaf) in enumerate(leaves.items())}
    out = {path: digest for i, (path, digest) in enumerate(found.items()) if i % others == own}
    return _joined(out) if others > 1 else out


def block_digests(tree: PyTree) -> dict[str, Recorded]:
    """SHA-256 of every leaf by path: as in `digests` for a leaf that is whole on a device, otherwise of each block.

    tree: arrays or numbers. For a tree on devices of several processes this is a collective. No array is sent: each
    process hashes blocks that its own devices hold. Raises FloatingPointError, in every process, where a leaf holds
    NaN. The values are on the host to be hashed, so no program is compiled to look for NaN.
    """
    leaves = _leaves(tree)
    own, others = _share(leaves)
    found = _hashed([block for block in _blocks(leaves) if block.holder == own or others == 1], nan=True)
    every = _joined(found) if others > 1 else found
    if bad := next((path for (path, _), digest in every.items() if digest == NAN), None):
        raise FloatingPointError(f"{bad} holds NaN")
    out: dict[str, Any] = {}
    for (path, position), digest in every.items():
        if position is None:
            out[path] = digest
        else:
            out.setdefault(path, {})[position] = digest
    return out


def damaged(tree: PyTree, recorded: Mapping[str, Recorded | None]) -> list[str]:
    """Paths of leaves whose values differ from what was recorded, of those that this process has looked at.

    tree: arrays or numbers. recorded: digests by path, as `digests` or `block_digests` of a tree on any layout returned
    them. For a tree on devices of several processes this is a collective. Together the processes look at every leaf.
    """
    leaves = _leaves(tree)
    own, others = _share(leaves)
    layout: dict[str, set[str | None]] = {path: set() for path in leaves}
    mine = []
    for block in _blocks(leaves):
        layout[block.path].add(block.position)
        if block.holder == own or others == 1:
            mine.append(block)
    direct = {path for path in leaves if layout[path] == _positions(recorded.get(path))}
    found = _hashed([block for block in mine if block.path in direct])
    wrong = [path for (path, position), digest in found.items() if digest != _expected(recorded[path], position)]
    for i, path in enumerate(leaves):  # gathers are collectives: in the same order in every process
        if path not in direct and not _same(leaves[path], recorded.get(path), i % others == own):
            wrong.append(path)
    return list(dict.fromkeys(wrong))


class _Block(NamedTuple):
    """Values of a leaf that some devices hold.

    position: where they are in the leaf (`_position`); None for the whole leaf. holder: the process that hashes them.
    values: an array on a device of this process; None where no device of this process has them.
    """

    path: str
    position: str | None
    holder: int
    values: Any


def _leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves by path; PRNG keys as their key data."""
    typed = lambda x: isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return {
        jax.tree_util.keystr(path): jax.random.key_data(leaf) if typed(leaf) else leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _share(leaves: Mapping[str, Any]) -> tuple[int, int]:
    """Index of this process and number of processes that divide the work: 0 and 1 for arrays of this process alone."""
    together = any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves.values())
    return (processes.index(), processes.count()) if together else (0, 1)


def _joined(out: dict[Any, str]) -> dict[Any, str]:
    """The entries of all processes. A collective."""
    return {key: digest for part in processes.all_gather(out) for key, digest in part.items()}


def _blocks(leaves: Mapping[str, Any]) -> Iterator[_Block]:
    """Blocks of all leaves, in the same order and with the same holders in every process."""
    count = 0
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            yield _Block(path, None, count % processes.count(), leaf)
            count += 1
            continue
        holders: dict[str, set[int]] = {}
        places: Mapping[Any, Index] = leaf.sharding.devices_indices_map(leaf.shape)
        for device, index in places.items():
            holders.setdefault(_position(index, leaf.shape), set()).add(device.process_index)
        here = {_position(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        for position, who in sorted(holders.items()):
            among = sorted(who)
            place = position if len(holders) > 1 else None
            yield _Block(path, place, among[count % len(among)], here.get(position))
            count += 1


def _position(index: Index, shape: tuple[int, ...]) -> str:
    """Block of an array of ``shape`` as text: start and end along each axis, such as ``0:4,8:16``."""
    return ",".join("{}:{}".format(*part.indices(size)[:2]) for part, size in zip(index, shape))


def _index(position: str) -> Index:
    """Inverse of `_position`."""
    return tuple(slice(*map(int, part.split(":"))) for part in position.split(","))


def _hashed(blocks: list[_Block], nan: bool = False) -> dict[tuple[str, str | None], str]:
    """Digests by path and position. Threads hash and copy from devices at once: hashlib releases the lock.

    nan: as in `_digest`.
    """
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda block: _digest(block.values, nan=nan), blocks)
        return {(block.path, block.position): digest for block, digest in zip(blocks, found)}


def _digest(leaf: Any, hashes: bool = True, nan: bool = False) -> str:
    """SHA-256 of dtype, shape and bytes. A collective for an array that is split over processes.

    hashes: False takes part in bringing the array together, and does not hash it. nan: whether `NAN` is returned where
    a value is NaN.
    """
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
    found, seen = hashlib.sha256(f"{dtype} {np.shape(leaf) or (1,)} ".encode()), False
    nan = nan and jnp.issubdtype(dtype, jnp.floating)
    for piece in pieces(leaf):
        if hashes:
            found.update(np.ascontiguousarray(piece).tobytes())
            seen = seen or (nan and bool(np.isnan(piece).any()))
    return NAN if seen else found.hexdigest()


def _positions(recorded: Recorded | None) -> set[str | None]:
    """Positions of the blocks that were recorded of a leaf."""
    return {None} if isinstance(recorded, str) else set(recorded or ())


def _expected(recorded: Recorded | None, position: str | None) -> str | None:
    """What was recorded of a block."""
    return recorded if recorded is None or isinstance(recorded, str) else recorded.get(position or "")


def _same(leaf: Any, recorded: Recorded | None, hashes: bool) -> bool:
    """Whether a leaf of another layout has the recorded values. A collective. hashes: as in `_digest`; then True."""
    parts = {None: recorded} if recorded is None or isinstance(recorded, str) else recorded
    cut = lambda index: jax.lax.slice(leaf, [part.start for part in index], [part.stop for part in index])
    found = {at: _digest(leaf if at is None else cut(_index(at)), hashes) for at in sorted(parts, key=str)}
    return found == parts or not hashes
