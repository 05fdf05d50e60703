"""The lock of a workdir: a file that names the one run that writes there.

The file is made with its content by a hard link, which exactly one of several hosts succeeds in, also on NFS. A file
system without links gets an exclusive create. An object store has neither: there, the file is written and read back.

A thread of the holder touches the file. A run that was killed leaves the file behind. On the same host its process is
looked up, and a dead one's lock is taken over. Where the host has the same name but was restarted, or is another
container, no process can be looked up. The lock is then taken over once it is not touched for `SILENCE` seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmarl_llm.errors import ConfigError, RunError

NAME = "run.lock"
FLAG = "--break_lock"
REFRESH = 15.0  # seconds between two touches of the file
SILENCE = 60.0  # seconds without a touch after which a holder that cannot be looked up counts as dead

_held: set[str] = set()  # tokens of the locks that this process holds


@dataclasses.dataclass(frozen=True)
class Holder:
    """Entry of the file: the process that holds the lock.

    Attributes:
        host: Its name.
        process: Id of the process.
        taken: Local time at which the lock was taken.
        started: Start of the process in clock ticks since the host's; None where the system does not tell. An id that
            was given to a later process has another one.
        machine: Boot and namespace of process ids, in which ``process`` has a meaning.
        token: Unique for each lock.
    """

    host: str
    process: int
    taken: str
    started: int | None
    machine: str
    token: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host} since {self.taken}"


def this_process() -> Holder:
    """Return an entry for this process as the holder of a new lock."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return Holder(socket.gethostname(), os.getpid(), now, _started(os.getpid()), _machine(), uuid.uuid4().hex)


class WorkdirLock:
    """The lock of one workdir.

    folder: the workdir, a path or one of etils.epath.
    """

    def __init__(self, folder: Any):
        self.folder, self.path = folder, folder / NAME
        self.own = this_process()
        self._ended = threading.Event()

    def acquire(self, *, break_lock: bool = False) -> None:
        """Take the lock. ConfigError where another run holds it, or where the workdir cannot be written.

        break_lock: take it from whoever holds it.
        """
        _held.add(self.own.token)  # before the file is there: another thread takes over what nobody holds
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not self._create():
                self._take_over(break_lock)
        except BaseException as error:
            _held.discard(self.own.token)
            if not isinstance(error, OSError):
                raise
            raise ConfigError(f"--workdir: cannot write to {str(self.folder)!r}: {error.strerror or error}") from error
        if isinstance(self.path, Path):
            threading.Thread(target=self._refresh, name="jaxmarl_llm lock", daemon=True).start()

    def check(self) -> None:
        """Raise RunError where another run has broken the lock. A file that was removed is made again."""
        holder = self._read()
        if holder is None and self._create():
            return
        holder = holder or self._read()
        if holder is None or holder.token != self.own.token:
            raise RunError(
                f"--workdir: the lock of {self.folder} was broken, and is held by {holder or 'an unknown process'}; "
                "this run ends and saves nothing more"
            )

    def release(self) -> None:
        """Remove the file, if it is still this lock's. Twice is once."""
        self._ended.set()
        _held.discard(self.own.token)
        with contextlib.suppress(OSError):
            holder = self._read()
            if holder is not None and holder.token == self.own.token:
                self.path.unlink()

    def _take_over(self, break_lock: bool) -> None:
        """Take a lock that exists: a dead holder's, or anybody's with ``break_lock``; ConfigError for another one."""
        holder = self._read()
        if holder is None:  # an exclusive create writes after it creates
            time.sleep(1.0)
            holder = self._read()
        if not break_lock and (holder is None or not self._is_dead(holder)):
            raise self._refusal(holder)
        with self._alone():
            if self._read() == holder:
                self._remove(holder)
            if not self._create():
                raise self._refusal(self._read())

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Context manager: no other process of this host takes the lock over, where the file system can tell."""
        folder = os.open(self.folder, os.O_RDONLY) if isinstance(self.path, Path) else None
        try:
            if folder is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            if folder is not None:
                os.close(folder)

    def _refusal(self, holder: Holder | None) -> ConfigError:
        whose = f"held by {holder}" if holder else "there, and names no holder"
        return ConfigError(
            f"--workdir: {self.folder} has one writer: its lock {NAME} is {whose}; wait for that run, use another "
            f"--workdir, or, if that run has ended, break the lock with {FLAG}"
        )

    def _is_dead(self, holder: Holder) -> bool:
        """Whether the holder is known to have ended."""
        if holder.host != self.own.host:
            return False
        if holder.machine == self.own.machine:
            if holder.process == self.own.process and holder.started == self.own.started:
                return holder.token not in _held
            return not _alive(holder.process, holder.started)
        return isinstance(self.path, Path) and self._silent()

    def _silent(self) -> bool:
        """Whether nobody touches the file for `SILENCE` seconds. Compares no clocks."""
        first, until = self._touched(), time.monotonic() + SILENCE
        while time.monotonic() < until:
            time.sleep(min(1.0, SILENCE / 10))
            if self._touched() != first:
                return False
        return True

    def _touched(self) -> int | None:
        try:
            with open(self.path, "rb") as file:  # opening makes NFS ask its server
                return os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return None

    def _create(self) -> bool:
        """Make the file with its content. False where it exists."""
        text = json.dumps(dataclasses.asdict(self.own))
        if not isinstance(self.path, Path):
            if self.path.exists():
                return False
            self.path.write_text(text)
            return self.path.read_text() == text
        draft = self.path.with_name(f".{NAME}.{self.own.token}")
        try:
            draft.write_text(text)
            try:
                os.link(draft, self.path)
                return True
            except FileExistsError:
                return draft.stat().st_nlink == 2  # NFS: the link was made, and the answer was lost
            except OSError:  # no hard links here
                return self._create_exclusively(text)
        finally:
            draft.unlink(missing_ok=True)

    def _create_exclusively(self, text: str) -> bool:
        try:
            with open(self.path, "x") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True

    def _remove(self, holder: Holder | None) -> None:
        """Remove the file of ``holder``; another one, which was made in the meantime, is put back."""
        if not isinstance(self.path, Path):
            self.path.unlink(missing_ok=True)
            return
        aside = self.path.with_name(f".{NAME}.{self.own.token}.old")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _parsed(aside.read_text()) != holder:
            with contextlib.suppress(FileExistsError):
                os.link(aside, self.path)
        aside.unlink()

    def _read(self) -> Holder | None:
        """What the file says; None where there is none, or none that can be read."""
        try:
            return _parsed(self.path.read_text())
        except (OSError, UnicodeDecodeError):
            return None

    def _refresh(self) -> None:
        """Touch the file until `release`, as long as it is this lock's."""
        while not self._ended.wait(REFRESH):
            holder = self._read()
            if holder is not None and holder.token == self.own.token:
                with contextlib.suppress(OSError):
                    os.utime(self.path)


@contextlib.contextmanager
def locked(folder: Any, *, break_lock: bool = False) -> Iterator[WorkdirLock]:
    """Context manager: hold the lock of ``folder``. Raises ConfigError as `WorkdirLock.acquire` does.

    break_lock: take the lock from whoever holds it.
    """
    lock = WorkdirLock(folder)
    lock.acquire(break_lock=break_lock)
    try:
        yield lock
    finally:
        lock.release()


def _parsed(text: str) -> Holder | None:
    try:
        return Holder(**json.loads(text))
    except (ValueError, TypeError):
        return None


def _started(process: int) -> int | None:
    """Start of a process in clock ticks; None where it is not known, or where the process only waits to be reaped."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _alive(process: int, started: int | None) -> bool:
    """Whether the process that began at ``started`` still runs."""
    if started is not None and Path("/proc/self/stat").exists():
        return _started(process) == started
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _machine() -> str:
    """Boot of this host and namespace of its process ids, as far as the system tells."""
    parts = []
    for read in (lambda: Path("/proc/sys/kernel/random/boot_id").read_text(), lambda: os.readlink("/proc/self/ns/pid")):
        with contextlib.suppress(OSError):
            parts.append(read().strip())
    return " ".join(parts)
