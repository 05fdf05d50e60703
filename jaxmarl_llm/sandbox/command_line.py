"""Start of a jail: the files that its interpreter needs, its user id, and its command line."""

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
    "MALLOC_ARENA_MAX": "1",  # an env_runner reserves 64 MB of the address space for each thread
}
UID = 0x70000000  # first user id of a range that no distribution assigns
NOBODY = 65534


@functools.cache
def interpreter() -> str:
    """Path of the Python interpreter outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@functools.cache
def readable() -> tuple[str, ...]:
    """Paths that an interpreter needs: itself, its library, the system's libraries and their index."""
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
    """Folders of third-party packages below `readable`. They are hidden, so that a verdict does not depend on them."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    folders = [
        f"{sys.base_prefix}/lib/{v}/{d}" for v in (version, "python3") for d in ("site-packages", "dist-packages")
    ]
    return tuple(p for p in folders if os.path.isdir(p))


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


@functools.cache
def _bwrap_has(option: str) -> bool:
    """Whether the installed bubblewrap has this option."""
    done = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False)
    return option in done.stdout + done.stderr


def bwrap_command(channel: int, filter_: int | None, tmp_bytes: int) -> list[str]:
    """Command line of a jail of tier "bwrap".

    channel: descriptor of the socket to the judge. filter_: descriptor of a seccomp filter, or None. tmp_bytes: size of
    a writable /tmp; 0 makes /tmp read-only.
    """
    command = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--hostname", "jail", "--cap-drop", "ALL"]
    if os.getuid() == 0:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # until the user id changes
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    # Parent folders of the bound paths. By default, bubblewrap lets only their owner enter them.
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
    if tmp_bytes and _bwrap_has("--size"):  # bubblewrap >= 0.7; with older versions nothing is writable
        command += ["--perms", "1777", "--size", str(tmp_bytes), "--tmpfs", "/tmp"]
    else:
        command += ["--dir", "/tmp"]
    command += ["--remount-ro", "/", "--chdir", "/tmp"]
    if filter_ is not None:
        command += ["--seccomp", str(filter_)]
    return [*command, *python_command(channel)]


def python_command(channel: int) -> list[str]:
    """Command line of the interpreter inside a jail. ``channel``: descriptor of the socket to the judge."""
    # -I would ignore PYTHONHASHSEED. The environment is fixed, and -s -S -P give the same search path.
    return [interpreter(), "-s", "-S", "-P", "-c", SOURCE, str(channel)]
