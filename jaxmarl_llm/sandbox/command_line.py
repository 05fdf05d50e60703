"""How a jail is started: which files its interpreter needs, under which user, by which command line."""

from __future__ import annotations

import functools
import os
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
    "MALLOC_ARENA_MAX": "1",  # an arena reserves 64 MB of the address space for each thread
}
UID = 0x70000000  # the first of a range that no distribution assigns
NOBODY = 65534


@functools.cache
def interpreter() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def readable() -> tuple[str, ...]:
    """What an interpreter needs: itself, its library, the system's libraries and their index."""
    shared = sysconfig.get_config_var("INSTSONAME") or ""
    libraries = [f"{sys.base_prefix}/lib", sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["platstdlib"]]
    libraries = [p for p in libraries if p.startswith(sys.base_prefix)]
    system = ["/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/etc/ld.so.cache"]
    found = [interpreter(), f"{sysconfig.get_config_var('LIBDIR')}/{shared}" if ".so" in shared else "", *system]
    result: list[str] = []
    for path in [*libraries, *found]:
        covered = any(path == p or path.startswith(p + "/") for p in result)
        if path and os.path.exists(path) and not covered:
            result.append(path)
    return tuple(result)


@functools.cache
def _packages() -> tuple[str, ...]:
    """Third-party packages beneath what is readable: a verdict must not depend on what happens to be installed."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    folders = [
        f"{sys.base_prefix}/lib/{v}/{d}" for v in (version, "python3") for d in ("site-packages", "dist-packages")
    ]
    return tuple(p for p in folders if os.path.isdir(p))


def jail_uid() -> int | None:
    """As root: a user id of this process's own for its jails. None: the jail keeps the caller's."""
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
    return NOBODY  # in a container that maps few ids


@functools.cache
def _bwrap_has(option: str) -> bool:
    done = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False)
    return option in done.stdout + done.stderr


def bwrap_command(channel: int, filter_: int | None, tmp_bytes: int) -> list[str]:
    command = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--hostname", "jail", "--cap-drop", "ALL"]
    if os.getuid() == 0:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # gone with the change of user id
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    # Folders on the way to what is bound; of its own accord bubblewrap lets only their owner pass.
    for folder in sorted({str(parent) for path in readable() for parent in Path(path).parents} - {"/"}):
        command += ["--perms", "0755", "--dir", folder]
    for path in readable():
        if os.path.islink(path) and path.count("/") == 1:  # /lib -> usr/lib
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    for path in _packages():
        command += ["--tmpfs", path, "--remount-ro", path]
    command += ["--dev", "/dev", "--remount-ro", "/dev"]
    if tmp_bytes and _bwrap_has("--size"):  # bubblewrap >= 0.7; without it nothing is writable
        command += ["--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"]
    else:
        command += ["--dir", "/tmp"]
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    if filter_ is not None:
        command += ["--seccomp", str(filter_)]
    return [*command, *python_command(channel)]


def python_command(channel: int) -> list[str]:
    # Not -I: it would ignore PYTHONHASHSEED. The environment is ours, and -s -S -P leave the same search path.
    return [interpreter(), "-s", "-S", "-P", "-c", SOURCE, str(channel)]
