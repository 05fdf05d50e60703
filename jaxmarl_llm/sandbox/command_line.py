"""Start of a jail: the files that its interpreter needs, its user id, and its command line."""

from __future__ import annotations

import functools
import glob
import os
import re
import stat
import subprocess
import sys
import sysconfig
from pathlib import Path

from jaxmarl_llm.sandbox import child

SOURCE = Path(child.__file__).read_text("utf-8")
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUTF8": "1",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "HOME": "/tmp",
    "MALLOC_ARENA_MAX": "1",  # an env_runner reserves 64 MB of the address space for each thread
}
UID = 0x70000000  # first user id of a range that no distribution assigns
NOBODY = 65534
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_PACKAGES = ("site-packages", "dist-packages", "ensurepip")  # ensurepip contains packages


@functools.cache
def interpreter() -> str:
    """Path of the Python interpreter outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


# Imports what the interpreter's library has in compiled modules, and prints the files that are mapped then.
_MAPPED = """
import importlib, os, sys
for folder in sys.path:
    if folder.endswith("lib-dynload"):
        for name in os.listdir(folder):
            if not any(word in name for word in ("test", "xx", "tkinter")):
                try: importlib.import_module(name.split(".")[0])
                except Exception: pass  # a module of another system, or without its library: programs lack it too
import ctypes
try: ctypes.CDLL("libgcc_s.so.1")  # the C library loads it when a thread is cancelled
except OSError: pass  # another C library, which has no such file
print(*{line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if ".so" in line}, sep="\\n")
"""


@functools.cache
def library() -> tuple[str, ...]:
    """Folders of the standard library."""
    bases = {"installed_base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # not those of a virtual environment
    paths = (sysconfig.get_path(name, vars=bases) for name in ("stdlib", "platstdlib"))
    return tuple(dict.fromkeys(map(os.path.realpath, paths)))


@functools.cache
def hidden() -> tuple[str, ...]:
    """Folders below `library` that no program may read, so that a verdict does not depend on installed packages."""
    return tuple(p for folder in library() for name in _PACKAGES if os.path.isdir(p := os.path.join(folder, name)))


@functools.cache
def shared_objects() -> tuple[str, ...]:
    """Shared objects outside the standard library that the interpreter and its compiled modules load.

    Each file is listed under all its names, because the loader looks for some of them.
    """
    command = [interpreter(), "-s", "-S", "-P", "-c", _MAPPED]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    files = {f for f in done.stdout.split("\n") if f and not f.startswith(tuple(p + "/" for p in library()))}
    names = set(files)
    for file in files:  # libz.so.1.2.13 is also libz.so.1
        folder, name = os.path.split(file)
        stem = re.split(r"\.so|-\d", name)[0]
        names |= {
            p for p in glob.glob(f"{glob.escape(folder)}/{glob.escape(stem)}*.so*") if os.path.realpath(p) == file
        }
    loaders = (p for p in glob.glob("/lib*/ld-*.so*") if os.path.realpath(p) in files)  # named in the interpreter
    return tuple(sorted(names.union(loaders)))


@functools.cache
def readable() -> tuple[str, ...]:
    """Paths that Landlock allows to read: the interpreter, its library without `hidden`, and shared objects.

    A rule for a folder holds for all that is below. So the entries of `library` are listed, not the folders.
    """
    entries = [os.path.join(f, name) for f in library() for name in sorted(os.listdir(f)) if name not in _PACKAGES]
    return (*entries, *_common())


def _common() -> tuple[str, ...]:
    """The interpreter, its shared objects and their index."""
    return tuple(p for p in (interpreter(), *shared_objects(), "/etc/ld.so.cache") if os.path.exists(p))


def open_to_all(path: str) -> bool:
    """Whether every user may read ``path`` and enter the folders above it."""
    needed = stat.S_IROTH | (stat.S_IXOTH if os.path.isdir(path) else 0)
    above = all(folder.stat().st_mode & stat.S_IXOTH for folder in Path(path).parents)
    return above and os.stat(path).st_mode & needed == needed


@functools.cache
def capabilities() -> int:
    """Capabilities, as bits, that a jail of tier "landlock" keeps when it changes its user id.

    An interpreter in a folder of root is not readable for other users. CAP_DAC_READ_SEARCH lets its jail read there,
    and Landlock still allows the interpreter and its library alone.
    """
    return 0 if all(map(open_to_all, (*library(), *_common()))) else 1 << 2


def jail_uid() -> int | None:
    """User id for the jails of this process, if it runs as root. None means that a jail keeps the caller's user id."""
    if os.getuid() != 0:
        return None
    uid = UID + os.getpid()
    try:
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            first, _, count = map(int, line.split())
            if first <= uid < first + count:
                return uid
    except OSError:
        pass
    return NOBODY  # a container may map few user ids


def bwrap_command(channel: int) -> list[str]:
    """Command line of a jail of tier "bwrap". ``channel``: descriptor of the socket to the judge."""
    command = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--hostname", "jail", "--cap-drop", "ALL"]
    command += ["--cap-add", "CAP_SYS_ADMIN"]  # until `child.confine` has mounted /tmp
    if os.getuid() == 0:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # until the user id changes
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    paths = [
        os.path.join(os.path.realpath(folder), name) for folder, name in map(os.path.split, (*library(), *_common()))
    ]
    # Parent folders of the bound paths. By default, bubblewrap lets only their owner enter them.
    for folder in sorted({str(parent) for path in paths for parent in Path(path).parents} - {"/"}):
        command += ["--perms", "0755", "--dir", folder]
    for folder in filter(os.path.islink, glob.glob("/lib*")):  # /lib -> usr/lib
        command += ["--symlink", os.readlink(folder), folder]
    for path in paths:
        command += ["--ro-bind", path, path]
    for path in hidden():
        command += ["--tmpfs", path, "--remount-ro", path]
    for path in DEVICES:  # bubblewrap's own /dev would take a second user namespace, where nothing can be mounted
        command += ["--dev-bind", path, path]
    command += ["--dir", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    return [*command, *python_command(channel)]


def python_command(channel: int) -> list[str]:
    """Command line of the interpreter inside a jail. ``channel``: descriptor of the socket to the judge."""
    # -I would ignore PYTHONHASHSEED. The environment is fixed, and -s -S -P give the same search path.
    return [interpreter(), "-s", "-S", "-P", "-c", SOURCE, str(channel)]
