"""Orbax checkpoints of the whole run: one save, one restore, bit-exact.

Orbax makes a step directory atomic but does not check its contents: a flipped bit or an empty newest step restores
silently wrong or not at all. So every step carries the SHA-256 of each leaf, a restore verifies them, and a step that
fails is moved to ``corrupt/`` in favour of the one before it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
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


def seal(meta: dict[str, Any]) -> str:
    """SHA-256 of the meta, but for the seal itself."""
    rest = {k: v for k, v in meta.items() if k != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


class Checkpointer:
    """Steps under ``<workdir>/checkpoints/<step>``; saving is asynchronous, ``close`` waits for it."""

    def __init__(self, workdir: str | epath.Path, *, keep: int = 2):
        self.root = epath.Path(workdir).absolute() / "checkpoints"
        self._manager = self._open(keep)
        self._keep = keep

    def _open(self, keep: int) -> ocp.CheckpointManager:
        # cleanup_tmp_directories removes what a killed save left half-written.
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=True)
        return ocp.CheckpointManager(self.root, options=options)

    def steps(self) -> list[int]:
        return processes.first(lambda: sorted(self._manager.all_steps()))

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
        """Start saving; returns once the arrays are copied. ``meta`` is JSON: configuration, versions, cursors."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            floating = isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
            if floating and bool(jax.numpy.isnan(leaf).any()):
                raise FloatingPointError(f"checkpoint {step}: {jax.tree_util.keystr(path)} holds NaN; not saved")
        meta = {**meta, "sha256": digests(state)}
        meta["seal"] = seal(meta)
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        )

    def restore(
        self, like: PyTree, step: int | None = None, *, part: bool = False
    ) -> tuple[PyTree, dict[str, Any], int] | None:
        """The newest good step (or ``step``) as (state, meta, step); None when nothing was ever saved.

        ``like`` gives structure, shapes, dtypes and shardings (arrays or ShapeDtypeStructs). ``part``: it is a dict of
        some of the state's fields, themselves with some of their keys, as one agent's parameters; nothing else is read.
        Raises ConfigError when there are steps but none is good: never a fresh start in a used directory.
        """
        tried = []
        places = ocp.checkpoint_utils.construct_restore_args(like)
        some = ocp.args.PyTreeRestore(item=like, restore_args=places, partial_restore=True)
        wanted = some if part else ocp.args.StandardRestore(like)
        for candidate in [step] if step is not None else self.steps()[::-1]:
            got = problem = None
            try:
                got = self._manager.restore(
                    candidate,
                    args=ocp.args.Composite(state=wanted, meta=ocp.args.JsonRestore()),
                )
                if got.meta["seal"] != seal(got.meta):
                    problem = "checksum of meta differs"
                else:
                    # A part's fields are keys, those of the saved state attributes.
                    named = lambda path: re.sub(r"^\['(\w+)'\]", r".\1", path) if part else path
                    wrong = [k for k, v in digests(got.state).items() if got.meta["sha256"].get(named(k)) != v]
                    problem = f"checksum of {wrong[0]} differs" if wrong else None
            except Exception as error:  # Orbax raises anything on damage, a bare Exception for a truncated array
                problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            problem = next((p for p in processes.everyone(problem) if p is not None), None)
            if problem is None:
                assert got is not None  # or there was a problem
                return got.state, got.meta, candidate
            tried.append(f"step {candidate} ({problem})")
            logging.getLogger(__name__).warning("checkpoint %s: %s; trying the one before", self.root, tried[-1])
            if step is None:
                self._quarantine(candidate)
        if tried:
            raise ConfigError(f"{self.root}: no usable checkpoint: {'; '.join(tried)}")
        return None

    def read_meta(self) -> dict[str, Any] | None:
        """Meta of the newest step whose meta can be read, without touching its arrays."""
        for step in self.steps()[::-1]:
            try:
                meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
                good = meta["seal"] == seal(meta)
            except Exception:  # as in restore
                good = False
            if all(processes.everyone(good)):
                return meta
        return None

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
        self._manager = self._open(self._keep)

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.wait_until_finished()
        self._manager.close()
