"""Orbax checkpoints of the whole run: one save, one restore, bit-exact.

Orbax makes a step directory atomic but does not check its contents: a flipped bit or an empty newest step restores
silently wrong or not at all. So every step carries the SHA-256 of each leaf, a restore verifies them, and a step that
fails is moved to ``corrupt/`` in favour of the one before it. What says nothing about the files (memory is full, a
store does not answer, another structure is asked for) is an error, and moves nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxmarl_llm import processes
from jaxmarl_llm.sharding import pieces
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import PyTree


def digests(tree: PyTree) -> dict[str, str]:
    """SHA-256 of dtype, shape and bytes of every leaf, by path. Typed keys count as their key data.

    Of a tree on devices of several processes each computes some, and all have to ask; what is cut over them is brought
    together piece by piece.
    """
    out, leaves = {}, jax.tree_util.tree_leaves_with_path(tree)
    together = any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for _, leaf in leaves)
    own, others = (processes.index(), processes.count()) if together else (0, 1)
    for i, (path, leaf) in enumerate(leaves):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
        found = hashlib.sha256(f"{dtype} {np.shape(leaf) or (1,)} ".encode())
        for piece in pieces(leaf):
            if i % others == own:
                found.update(np.ascontiguousarray(piece).tobytes())
        if i % others == own:
            out[jax.tree_util.keystr(path)] = found.hexdigest()
    return {path: digest for part in processes.everyone(out) for path, digest in part.items()} if together else out


def shapes(tree: PyTree) -> dict[str, str]:
    """Dtype and shape of every leaf (arrays or ShapeDtypeStructs), by path."""

    def described(leaf: Any) -> str:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
        return f"{dtype} {tuple(leaf.shape if hasattr(leaf, 'shape') else np.shape(leaf)) or (1,)}"

    return {jax.tree_util.keystr(path): described(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def seal(meta: dict[str, Any]) -> str:
    """SHA-256 of the meta, but for the seal itself."""
    rest = {k: v for k, v in meta.items() if k != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# In messages of what reads a store for Orbax (gRPC's codes): it does not answer, or does not let us in.
AWAY = re.compile(r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|PERMISSION_DENIED|UNAUTHENTICATED)\b")


def passes(error: BaseException) -> bool:
    """Whether an error of reading says nothing about the files, so that they may be fine when it is over."""
    if isinstance(error, (MemoryError, jax.errors.JaxRuntimeError)):
        return True
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    if isinstance(error, OSError) and not isinstance(error, missing):
        return True
    return bool(AWAY.search(str(error))) or (error.__cause__ is not None and passes(error.__cause__))


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


class Checkpointer:
    """Steps under ``<workdir>/checkpoints/<step>``; saving is asynchronous, ``close`` waits for it.

    ``read_only``: beside a run that is still writing. Nothing is made, moved or cleaned up.
    """

    def __init__(self, workdir: str | epath.Path, *, keep: int = 2, read_only: bool = False):
        self.root = epath.Path(workdir).absolute() / "checkpoints"
        self._keep, self._read_only = keep, read_only
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        # cleanup_tmp_directories removes what a killed save left half-written, or another process is writing just now.
        writes = {"max_to_keep": self._keep, "create": True, "cleanup_tmp_directories": True}
        reads = {"read_only": True, "create": False, "save_interval_steps": 0}
        return ocp.CheckpointManager(
            self.root, options=ocp.CheckpointManagerOptions(**(reads if self._read_only else writes))
        )

    def steps(self) -> list[int]:
        return processes.first(lambda: sorted(self._manager.all_steps()))

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
        """Start saving; returns once the arrays are copied. ``meta`` is JSON: configuration, versions, cursors."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            floating = isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
            if floating and bool(jax.numpy.isnan(leaf).any()):
                raise FloatingPointError(f"checkpoint {step}: {jax.tree_util.keystr(path)} holds NaN; not saved")
        meta = {**meta, "sha256": digests(state), "shapes": shapes(state)}
        meta["seal"] = seal(meta)
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        )

    def restore(
        self, like: PyTree | Callable[[int], PyTree], step: int | None = None, *, part: bool = False
    ) -> tuple[PyTree, dict[str, Any], int] | None:
        """The newest good step (or ``step``) as (state, meta, step); None when nothing was ever saved.

        ``like`` gives structure, shapes, dtypes and shardings (arrays or ShapeDtypeStructs); a function gives those of
        the step it is given. ``part``: it is a dict of some of the state's fields, themselves with some of their keys,
        as one agent's parameters; nothing else is read.
        Raises ConfigError when there are steps but none is good: never a fresh start in a used directory. Also when a
        step is good but holds other leaves than ``like``.
        """
        tried = []
        for candidate in [step] if step is not None else self.steps()[::-1]:
            got = None
            meta, problem = self._sealed(candidate)
            if meta is not None:
                wanted = like(candidate) if callable(like) else like
                self._check_leaves(candidate, wanted, meta, part)
                got, problem = self._read(candidate, wanted, meta, part)
            if problem is None:
                assert meta is not None  # or there was a problem
                return got, meta, candidate
            tried.append(f"step {candidate} ({problem})")
            logging.getLogger(__name__).warning("checkpoint %s: %s; trying the one before", self.root, tried[-1])
            if step is None and not self._read_only:
                self._quarantine(candidate)
        if tried:
            raise ConfigError(f"{self.root}: no usable checkpoint: {'; '.join(tried)}")
        return None

    def read_meta(self) -> dict[str, Any] | None:
        """Meta of the newest step whose meta can be read, without touching its arrays."""
        return next((meta for step in self.steps()[::-1] if (meta := self._sealed(step)[0]) is not None), None)

    def _sealed(self, step: int) -> tuple[dict[str, Any] | None, str | None]:
        """The meta of a step, or what is wrong with it in any process."""
        meta = problem = None
        try:
            meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
            problem = (
                None if meta["seal"] == seal(meta) and isinstance(meta["sha256"], dict) else "checksum of meta differs"
            )
        except Exception as error:  # Orbax raises anything on damage
            if passes(error):
                raise
            problem = said(error)
        problem = next((p for p in processes.everyone(problem) if p is not None), None)
        return (meta if problem is None else None), problem

    def _read(self, step: int, like: PyTree, meta: dict[str, Any], part: bool) -> tuple[PyTree | None, str | None]:
        """The state of a step, or what is wrong with it in any process."""
        places = ocp.checkpoint_utils.construct_restore_args(like)
        some = ocp.args.PyTreeRestore(item=like, restore_args=places, partial_restore=True)
        state = problem = None
        try:
            wanted = some if part else ocp.args.StandardRestore(like)
            state = self._manager.restore(step, args=ocp.args.Composite(state=wanted)).state
            wrong = [k for k, v in digests(state).items() if meta["sha256"].get(_saved_as(k, part)) != v]
            problem = f"checksum of {wrong[0]} differs" if wrong else None
        except Exception as error:  # a bare Exception for a truncated array
            if passes(error):
                raise
            problem = said(error)
        problem = next((p for p in processes.everyone(problem) if p is not None), None)
        return state, problem

    def _check_leaves(self, step: int, like: PyTree, meta: dict[str, Any], part: bool) -> None:
        """ConfigError with the first leaf of ``like`` that the step does not hold like that, or the other way round."""
        asked = {_saved_as(path, part): shape for path, shape in shapes(like).items()}
        held = dict.fromkeys(meta["sha256"]) | meta.get("shapes", {})  # steps of earlier versions have paths alone
        for path in sorted(asked.keys() | (() if part else held.keys())):
            if path not in held or path not in asked:
                which = "holds no" if path not in held else "also holds"
                raise ConfigError(
                    f"{self.root}: step {step} {which} {path}: it was saved with another configuration, or another "
                    "version"
                )
            if held[path] not in (None, asked[path]):
                raise ConfigError(
                    f"{self.root}: step {step} holds {path} as {held[path]}, expected {asked[path]}: it was saved with "
                    "another configuration"
                )

    def _quarantine(self, step: int) -> None:
        def move() -> None:
            target = self.root.parent / "corrupt"
            target.mkdir(parents=True, exist_ok=True)
            name, n = f"{step}", 0
            while (target / name).exists():
                n += 1
                name = f"{step}.{n}"
            (self.root / str(step)).rename(target / name)

        self._manager.close()
        processes.first(move)
        self._manager = self._open()

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _saved_as(path: str, part: bool) -> str:
    """A part's fields are keys, those of the saved state attributes."""
    return re.sub(r"^\['(\w+)'\]", r".\1", path) if part else path
