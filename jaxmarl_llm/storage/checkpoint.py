"""Orbax checkpoints of the whole state of a run, restored bit-exactly.

Orbax writes a step directory atomically but does not verify its contents. A flipped bit or an empty newest step would
restore wrong values or fail. So every step stores digests of each leaf (`storage.checksums`), and a restore verifies
them. A step that fails is moved to ``corrupt/``, and the previous step is tried. Errors that say nothing about the
files move nothing: memory is full, a store does not answer, or the caller asks for another structure.
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
from absl import logging as absl_logging
from etils import epath

from jaxmarl_llm.distributed import processes
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.storage.checksums import block_digests, damaged
from jaxmarl_llm.types import PyTree


def shapes(tree: PyTree) -> dict[str, str]:
    """Dtype and shape of every leaf, by path. tree: arrays, numbers or ShapeDtypeStructs."""

    def described(leaf: Any) -> str:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
        return f"{dtype} {tuple(leaf.shape if hasattr(leaf, 'shape') else np.shape(leaf)) or (1,)}"

    return {jax.tree_util.keystr(path): described(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def meta_checksum(meta: dict[str, Any]) -> str:
    """SHA-256 of a step's metadata, without its own entry ``seal``. ``meta``: JSON values by name."""
    rest = {k: v for k, v in meta.items() if k != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# gRPC codes in error messages of object stores: the store does not answer, or denies access.
TRANSIENT_ERRORS = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|PERMISSION_DENIED|UNAUTHENTICATED)\b"
)


def is_transient(error: BaseException) -> bool:
    """Whether an error in reading says nothing about the files, which may be intact. ``error``: the exception."""
    if isinstance(error, (MemoryError, jax.errors.JaxRuntimeError)):
        return True
    missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    if isinstance(error, OSError) and not isinstance(error, missing):
        return True
    return bool(TRANSIENT_ERRORS.search(str(error))) or (error.__cause__ is not None and is_transient(error.__cause__))


def describe_error(error: BaseException) -> str:
    """Class of ``error`` and the first 200 characters of its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


class Checkpointer:
    """Checkpoints of the steps of a run, in ``<workdir>/<name>/<step>``. Saving is asynchronous.

    workdir: folder or URL of the run. keep: number of newest steps to keep. read_only: for use beside a run that still
    writes; nothing is created, moved or deleted. name: ``checkpoints``, or ``best`` for the best step of a run. Raises
    ConfigError where a file has that name.
    """

    def __init__(self, workdir: str | epath.Path, *, keep: int = 2, read_only: bool = False, name: str = "checkpoints"):
        self.root = epath.Path(workdir).absolute() / name
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"--workdir: {self.root} is a file, expected the folder of a run's checkpoints")
        self._keep, self._read_only = keep, read_only
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager:
        # cleanup_tmp_directories deletes unfinished steps, also those that another process is writing now.
        writes = {"max_to_keep": self._keep, "create": True, "cleanup_tmp_directories": True}
        reads = {"read_only": True, "create": False, "save_interval_steps": 0}
        options = ocp.CheckpointManagerOptions(**(reads if self._read_only else writes))
        level = absl_logging.get_verbosity()
        if self._read_only:
            absl_logging.set_verbosity(absl_logging.ERROR)  # Orbax warns of what `reads` asks for
        try:
            return ocp.CheckpointManager(self.root, options=options)
        finally:
            absl_logging.set_verbosity(level)

    def steps(self) -> list[int]:
        """Saved steps in ascending order. A collective."""
        return processes.broadcast_from_0(lambda: sorted(self._manager.all_steps()))

    def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
        """Start to save a step; return as soon as the arrays are copied.

        step: its number. state: arrays; FloatingPointError if one holds NaN. meta: JSON values, such as configuration
        and versions; their ``step`` becomes the step.
        """
        try:
            found = block_digests(state)
        except FloatingPointError as error:
            raise FloatingPointError(f"checkpoint {step}: {error}; not saved") from None
        meta = {**meta, "step": step, "sha256": found, "shapes": shapes(state)}
        meta["seal"] = meta_checksum(meta)
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        )

    def restore(
        self, like: PyTree | Callable[[int], PyTree], step: int | None = None, *, part: bool = False
    ) -> tuple[PyTree, dict[str, Any], int] | None:
        """Restore the newest intact step as (state, meta, step). Returns None when no step was ever saved.

        like: structure, shapes, dtypes and shardings of the state (arrays or ShapeDtypeStructs), or a function from a
        step to them. step: restore this step only. part: ``like`` is a dict with some fields of the state, and only
        these are read. A field may have only some of its keys, such as one agent's parameters.

        Raises ConfigError when steps exist but none is intact, so that a used directory never starts again from zero.
        Raises ConfigError when an intact step holds other leaves than ``like``.
        """
        tried = []
        for candidate in [step] if step is not None else self.steps()[::-1]:
            got = None
            meta, problem = self._checked_meta(candidate)
            if meta is not None:
                wanted = like(candidate) if callable(like) else like
                self._check_leaves(candidate, wanted, meta, part)
                got, problem = self._read(candidate, wanted, meta, part)
            if problem is None:
                assert meta is not None  # otherwise there is a problem
                return got, meta, candidate
            tried.append(f"step {candidate} ({problem})")
            logging.getLogger(__name__).warning("checkpoint %s: %s; trying the one before", self.root, tried[-1])
            if step is None and not self._read_only:
                self._quarantine(candidate)
        if tried:
            raise ConfigError(f"{self.root}: no usable checkpoint: {'; '.join(tried)}")
        return None

    def read_meta(self, step: int | None = None) -> dict[str, Any] | None:
        """Metadata of the newest step whose metadata is intact, or of ``step``. Reads no arrays."""
        steps = self.steps()[::-1] if step is None else [step]
        return next((meta for step in steps if (meta := self._checked_meta(step)[0]) is not None), None)

    def _checked_meta(self, step: int) -> tuple[dict[str, Any] | None, str | None]:
        """Metadata of a step and None, or None and the problem that some process found."""
        meta = problem = None
        try:
            meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore())).meta
            intact = meta["seal"] == meta_checksum(meta) and isinstance(meta["sha256"], dict)
            problem = None if intact else "checksum of meta differs"
            if intact and meta.get("step", step) != step:  # steps of earlier versions may not say
                problem = f"it holds step {meta['step']}: its folder was renamed"
        except Exception as error:  # Orbax raises many classes for a damaged file
            if is_transient(error):
                raise
            problem = describe_error(error)
        problem = next((p for p in processes.all_gather(problem) if p is not None), None)
        return (meta if problem is None else None), problem

    def _read(self, step: int, like: PyTree, meta: dict[str, Any], part: bool) -> tuple[PyTree | None, str | None]:
        """State of a step, and the problem that some process found, or None. Arguments as in `restore`."""
        places = ocp.checkpoint_utils.construct_restore_args(like)
        some = ocp.args.PyTreeRestore(item=like, restore_args=places, partial_restore=True)
        state = problem = None
        try:
            wanted = some if part else ocp.args.StandardRestore(like)
            state = self._manager.restore(step, args=ocp.args.Composite(state=wanted)).state
            kept = {path: meta["sha256"].get(_saved_as(path, part)) for path in shapes(state)}
            wrong = damaged(state, kept)
            problem = f"checksum of {wrong[0]} differs" if wrong else None
        except Exception as error:  # Orbax raises a bare Exception for a truncated array
            if is_transient(error):
                raise
            problem = describe_error(error)
        problem = next((p for p in processes.all_gather(problem) if p is not None), None)
        return state, problem

    def _check_leaves(self, step: int, like: PyTree, meta: dict[str, Any], part: bool) -> None:
        """Raise ConfigError for the first leaf that differs between the step and ``like``."""
        asked = {_saved_as(path, part): shape for path, shape in shapes(like).items()}
        held = dict.fromkeys(meta["sha256"]) | meta.get("shapes", {})  # steps of earlier versions have no shapes
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
        """Move a damaged step to ``corrupt/`` of the workdir, under a new name."""

        def move() -> None:
            target = self.root.parent / "corrupt"
            target.mkdir(parents=True, exist_ok=True)
            name, n = f"{step}", 0
            while (target / name).exists():
                n += 1
                name = f"{step}.{n}"
            (self.root / str(step)).rename(target / name)

        self._manager.close()
        processes.broadcast_from_0(move)
        self._manager = self._open()

    def delete_from(self, step: int) -> None:
        """Delete all steps from ``step`` on. A collective."""
        for later in [saved for saved in self.steps() if saved >= step]:
            self._manager.delete(later)

    def wait(self) -> None:
        """Wait until the save in progress is complete."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait until the save in progress is complete, and close the manager."""
        self._manager.wait_until_finished()
        self._manager.close()


def _saved_as(path: str, part: bool) -> str:
    """Path of a leaf in the saved state: fields are dict keys in a partial state, attributes in a whole one."""
    return re.sub(r"^\['(\w+)'\]", r".\1", path) if part else path
