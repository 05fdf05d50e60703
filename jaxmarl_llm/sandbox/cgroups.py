"""Limits of memory and processes by control groups (cgroup v2), where this process may make a group.

rlimits count the address space of one process. A control group counts what the kernel holds for it, too: page tables,
pipes, and files in /tmp. Most containers do not let a process make a group. Then the other limits hold alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import time
from pathlib import Path

CONTROLLERS = {"memory", "pids"}
BURIAL = 1.0  # seconds in which the kernel removes the dead from a group


@functools.cache
def parent() -> Path | None:
    """Nearest group, from the one of this process upwards, in which limited groups can be made; None without one."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines() if " cgroup2 " in line]
        own = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    except OSError:
        return None
    return nearest(Path(mounts[0][4]), own[0]) if mounts and own else None


def nearest(root: Path, own: str) -> Path | None:
    """Nearest group in which limited groups can be made, from ``own`` upwards; None without one. See `parent`.

    root: folder where cgroup v2 is mounted. own: group of this process, as the kernel names it.
    """
    folder = root / own.lstrip("/")
    for group in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            passed_on = set((group / "cgroup.subtree_control").read_text().split())
            if passed_on >= CONTROLLERS and os.access(group, os.W_OK):
                return group
        if group == root:
            break
    return None


class Group:
    """One control group with limits. Raises OSError where it cannot be made.

    folder: the group in which it is made. memory: bytes. pids: processes and threads.
    """

    def __init__(self, folder: Path, memory: int, pids: int):
        self.folder = folder / f"jaxmarl-{os.getpid()}-{secrets.token_hex(4)}"
        self.folder.mkdir()
        try:
            (self.folder / "memory.max").write_text(str(memory))
            (self.folder / "pids.max").write_text(str(pids))
            with contextlib.suppress(OSError):  # a kernel without swap has no such file
                (self.folder / "memory.swap.max").write_text("0")
        except OSError:
            self.close()
            raise

    def add(self, pid: int) -> None:
        """Move the process ``pid`` into the group."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def out_of_memory(self) -> bool:
        """Whether the kernel killed a process of the group because of its memory."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            events = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
            return int(events.get("oom_kill", 0)) > 0
        return False

    def close(self) -> None:
        """Remove the group. Its processes must be dead."""
        deadline = time.monotonic() + BURIAL
        while self.folder.exists():
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.005)


def limited(pid: int, memory: int, pids: int) -> Group | None:
    """A new group with limits that holds the process ``pid``; None where no group can be made.

    memory: bytes that the group may use. pids: processes and threads that it may have.
    """
    folder = parent()
    if folder is None:
        return None
    try:
        group = Group(folder, memory, pids)
    except OSError:
        return None
    try:
        group.add(pid)
    except OSError:
        group.close()
        return None
    return group
