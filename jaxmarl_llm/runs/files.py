"""Where a run writes: its workdir with one writer, its checkpoints, and the best of them."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from etils import epath

from jaxmarl_llm.distributed import processes, signals
from jaxmarl_llm.errors import ConfigError, RunError
from jaxmarl_llm.storage.checkpoint import Checkpointer
from jaxmarl_llm.storage.lock import WorkdirLock
from jaxmarl_llm.storage.workdir import Workdir
from jaxmarl_llm.types import TrainState


class RunFiles(NamedTuple):
    """Folder, lock and checkpoints of a run."""

    folder: Workdir
    lock: WorkdirLock
    saver: Checkpointer
    best_saver: Checkpointer | None  # of the best step; None: it is not kept

    def save(self, step: int, state: TrainState, meta: Mapping[str, Any], *, best: bool = False) -> None:
        """Start to save ``state`` as ``step``, unless another run has taken the workdir. A collective.

        meta: JSON values (`loop._meta`). best: as the best step, in place of the one before.
        """

        def problem() -> str | None:
            """Why this run may not write."""
            try:
                self.lock.check()
            except RunError as error:
                return str(error)
            return None

        if (why := processes.broadcast_from_0(problem)) is not None:
            raise RunError(why)
        saver = self.best_saver if best else self.saver
        assert saver is not None
        if best:
            saver.delete_from(step)  # of a run that was killed after its newest checkpoint
        saver.save(step, without_shared(state), dict(meta))


@contextlib.contextmanager
def one_writer(folder: Workdir, break_lock: bool) -> Iterator[WorkdirLock]:
    """Context manager: process 0 holds the lock of the workdir. A collective.

    Args:
        folder: The workdir.
        break_lock: Take the lock from whoever holds it.

    Raises:
        ConfigError: Process 0 cannot take the lock. Every process raises it.
    """
    lock = WorkdirLock(folder.home)

    def refusal() -> str | None:
        """Take the lock, or say why it cannot be taken."""
        try:
            lock.acquire(break_lock=break_lock)
        except ConfigError as error:
            return str(error)
        return None

    if (why := processes.broadcast_from_0(refusal)) is not None:
        raise ConfigError(why)
    with signals.at_exit(lock.release):
        try:
            yield lock
        finally:
            if processes.index() == 0:
                lock.release()


def check_shared(folder: Workdir) -> None:
    """Raise ConfigError when some process does not see the files that process 0 writes. ``folder``: the workdir."""
    if processes.count() == 1:
        return
    workdir = epath.Path(folder.url)

    def write() -> str:
        """Write an empty file with a unique name; return the name."""
        workdir.mkdir(parents=True, exist_ok=True)
        name = f".of_process_0_{uuid.uuid4().hex}"
        (workdir / name).write_text("")
        return name

    mark = workdir / processes.broadcast_from_0(write)
    blind = [k for k, sees in enumerate(processes.all_gather(mark.exists())) if not sees]
    if processes.index() == 0:
        mark.unlink()
    if blind:
        raise ConfigError(
            f"--workdir: process {blind[0]} does not see what process 0 writes to {workdir}; it has to be one folder "
            "that all hosts have mounted"
        )


def without_shared(state: TrainState) -> TrainState:
    """Return ``state`` without the frozen backbone, which follows from the configuration.

    The backbone's fingerprint is saved instead.
    """
    return state.replace(params={k: v for k, v in state.params.items() if k != "shared"})
