"""Jails: a process that runs one program, confined by one of three tiers, and the channel to it.

============ ==================================================================== =====================================
tier         what confines                                                        needs
============ ==================================================================== =====================================
``bwrap``    bubblewrap: own user, process, network, mount and IPC namespaces,    bubblewrap; user namespaces, or root
             a file system of the Python installation alone, a small ``/tmp``;
             seccomp where libseccomp is found
``landlock`` Landlock: reads the Python installation, writes nowhere; seccomp:    Linux >= 5.13 with Landlock,
             no new processes, no sockets, no signals, no change of metadata      libseccomp
``unsafe``   nothing but limits of resources                                      the caller's word
============ ==================================================================== =====================================

In all of them rlimits hold, the environment is empty of secrets, and the process dies with its judge. Seccomp refuses
new processes (threads remain), sockets of every family, signals, tracing, mounts and namespaces, keys, BPF, io_uring,
and memory that RLIMIT_AS does not count (System V shared memory, memfd).

As root the jail runs under a user id of its own that owns nothing: RLIMIT_NPROC does not bind root, and counts by user,
so jails that share an id would take threads from each other. bubblewrap is then started as root, because another user
may not be able to read the interpreter, and the id changes before the program is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import marshal
import math
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from jaxmarl_llm.sandbox import child, codec

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
START_SECONDS = 20.0  # wall time in which an interpreter must be up
TICK = 0.05  # seconds between two looks at the clocks
WALL = 3.0  # wall seconds for each CPU second
STARVED = 4.0  # times the wall deadline, after which waiting for a processor is the machine's fault
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Stopped(BaseException):
    """The jail is dead or must die: ``kind`` is timeout, oom, crash, protocol or infra_error.

    A BaseException, so that a test which expects an exception does not take this for one.
    """

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class Starved(Stopped):
    """Out of time because the machine gave no processor; worth one retry."""

    def __init__(self) -> None:
        super().__init__("infra_error", "no processor for too long")


# What seccomp refuses. A list of what is denied rather than of what is allowed: interpreters and C libraries differ in
# what they use, and behind the filter there are the namespaces or Landlock.
_DENIED = """
    fork vfork execveat unshare setns
    kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal pidfd_open pidfd_getfd
    ptrace process_vm_readv process_vm_writev process_madvise kcmp
    socket socketpair socketcall
    mount umount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr
    name_to_handle_at open_by_handle_at quotactl quotactl_fd fanotify_init
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat mknod mknodat
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr setxattrat removexattrat
    utime utimes utimensat futimesat
    keyctl add_key request_key bpf perf_event_open userfaultfd lookup_dcookie
    io_uring_setup io_uring_enter io_uring_register io_setup io_submit
    shmget shmat shmctl msgget semget mq_open memfd_create memfd_secret
    kexec_load kexec_file_load init_module finit_module delete_module create_module reboot swapon swapoff
    acct syslog settimeofday clock_settime clock_adjtime adjtimex sethostname setdomainname iopl ioperm
    personality modify_ldt vhangup setpriority ioprio_set sched_setscheduler sched_setparam sched_setattr
    sched_setaffinity migrate_pages move_pages process_mrelease truncate truncate64
    landlock_create_ruleset seccomp
"""
CLONE_THREAD = 0x10000
NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
IOCTLS = (0x5412, 0x541C, 0x8901, 0x8902)  # TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP
FCNTLS = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals by another way
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # SCMP_ACT_*
_NOT_EQUAL, _MASKED_EQUAL = 1, 7  # SCMP_CMP_*


class _Compare(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


@functools.cache
def seccomp_filter(with_exec: bool) -> bytes | None:
    """The filter as a BPF program written by libseccomp, None where libseccomp is not installed.

    Other architectures than the native one (32-bit calls on x86-64) are killed, which is libseccomp's default.
    ``with_exec``: the filter is loaded before the interpreter is started.
    """
    try:
        lib = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    lib.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(lib.seccomp_init(ctypes.c_uint32(_ALLOW)))
    refuse, absent = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS

    def rule(action: int, name: str, *compare: _Compare) -> None:
        number = lib.seccomp_syscall_resolve_name(name.encode())
        if number != -1:  # a call that this libseccomp does not know cannot be named
            array = (_Compare * max(len(compare), 1))(*compare)
            result = lib.seccomp_rule_add_array(context, ctypes.c_uint32(action), number, len(compare), array)
            # Calls of other architectures have negative numbers and may be refused.
            if result and number >= 0:
                raise OSError(-result, f"libseccomp: {name}: {os.strerror(-result)}")

    try:
        for name in _DENIED.split():
            rule(refuse, name)
        if not with_exec:
            rule(refuse, "execve")
        # The C library falls back from clone3, whose flags a filter cannot see, to clone.
        rule(absent, "clone3")
        rule(refuse, "clone", _Compare(0, _MASKED_EQUAL, CLONE_THREAD, 0))
        for bit in range(32):
            if NAMESPACES >> bit & 1:
                rule(refuse, "clone", _Compare(0, _MASKED_EQUAL, 1 << bit, 1 << bit))
        rule(refuse, "prlimit64", _Compare(0, _NOT_EQUAL, 0, 0))  # limits of another process
        for name, requests in {"ioctl": IOCTLS, "fcntl": FCNTLS}.items():
            for request in requests:  # the kernel reads 32 bits of it
                rule(refuse, name, _Compare(1, _MASKED_EQUAL, 0xFFFFFFFF, request))
        fd = _memory_file(b"")
        try:
            if lib.seccomp_export_bpf(context, fd):
                return None
            return os.pread(fd, 1 << 20, 0)
        finally:
            os.close(fd)
    finally:
        lib.seccomp_release(context)


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("sandbox")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


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


def _bwrap_command(channel: int, filter_: int | None, tmp_bytes: int) -> list[str]:
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
    return [*command, *_python(channel)]


def _python(channel: int) -> list[str]:
    # Not -I: it would ignore PYTHONHASHSEED. The environment is ours, and -s -S -P leave the same search path.
    return [interpreter(), "-s", "-S", "-P", "-c", SOURCE, str(channel)]


class Jail:
    """One confined process. ``ask`` raises Stopped, after which the jail can only be closed.

    Raises Stopped with kind infra_error when the process does not come up.
    """

    def __init__(self, tier: str, limits: Any):
        self.limits, self._data, self._nonce = limits, bytearray(), ""
        self._cpu = self._delay = 0.0
        self.pid = 0
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        fds = [theirs.fileno()]
        try:
            filter_ = seccomp_filter(True) if tier == "bwrap" else None
            if tier == "bwrap":
                if filter_ is not None:
                    fds.append(_memory_file(filter_))
                command = _bwrap_command(fds[0], fds[1] if filter_ else None, limits.tmp_mb << 20)
            else:
                command = _python(fds[0])
            self._process = subprocess.Popen(
                command,
                env={**ENVIRONMENT, "PATH": os.environ.get("PATH", os.defpath)} if tier == "bwrap" else ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=fds,
                start_new_session=tier != "bwrap",
            )
        except OSError as error:
            ours.close()
            raise Stopped("infra_error", f"{tier} does not start: {error}") from None
        finally:
            theirs.close()
            for fd in fds[1:]:
                os.close(fd)
        self._group = tier != "bwrap"
        self._channel = ours
        try:
            self._start(tier)
        except BaseException:
            self.close()
            raise

    def _start(self, tier: str) -> None:
        limits = self.limits
        how = {
            "uid": jail_uid() if tier == "bwrap" else None,
            "die_with": None if tier == "bwrap" else os.getpid(),
            "readable": [*readable(), "/dev/null", "/dev/urandom", "/dev/zero"] if tier == "landlock" else None,
            "filter": seccomp_filter(False) if tier == "landlock" else None,
            "reply_bytes": limits.output_bytes,
            "rlimits": {
                "RLIMIT_CPU": math.ceil(limits.total) + 2,  # behind our own clock, which is finer
                "RLIMIT_AS": limits.memory_mb << 20,
                "RLIMIT_STACK": min(64, limits.memory_mb // 4) << 20,
                "RLIMIT_FSIZE": limits.file_mb << 20,
                "RLIMIT_NOFILE": 64,
                # Without seccomp threads cannot be told from processes, and processes escape the clock of this one.
                "RLIMIT_NPROC": 1 if tier == "bwrap" and seccomp_filter(True) is None else limits.threads,
                "RLIMIT_CORE": 0,
                "RLIMIT_MEMLOCK": 0,
                "RLIMIT_MSGQUEUE": 0,
            },
        }
        deadline = time.monotonic() + START_SECONDS
        try:
            self._write(marshal.dumps(how), lambda: time.monotonic() > deadline)
            hello = self._read(lambda: time.monotonic() > deadline)
        except _TimeUp:
            raise Stopped("infra_error", f"{tier}: no interpreter within {START_SECONDS:g} s") from None
        except EOFError:
            raise Stopped("infra_error", f"{tier}: {self._complaint()}") from None
        if hello != b'"ready"':
            raise Stopped("infra_error", f"{tier}: unexpected greeting")

    def _complaint(self) -> str:
        """The last line that bubblewrap or the interpreter wrote before it gave up."""
        self._process.kill()
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it ended without a word")[:300]

    # The clocks

    def cpu(self) -> float:
        """Seconds of processor time of the confined process and of children that it has waited for."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
            self._cpu = max(self._cpu, sum(map(int, fields[11:15])) / CLOCK_TICKS)
        except (OSError, ValueError, IndexError):
            pass  # it has ended: the last figure stands
        return self._cpu

    def _waited(self) -> float:
        """Seconds for which its main thread was ready to run and had no processor. 0 where the kernel does not tell."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            self._delay = int(Path(f"/proc/{self.pid}/schedstat").read_bytes().split()[1]) / 1e9
        return self._delay

    # Frames

    def _write(self, payload: bytes, out_of_time: Any) -> None:
        data = memoryview(len(payload).to_bytes(4, "big") + payload)
        self._channel.settimeout(TICK)
        while data:
            try:
                data = data[self._channel.send(data) :]
            except TimeoutError:
                if out_of_time():
                    raise _TimeUp from None
            except OSError:
                raise EOFError from None

    def _read(self, out_of_time: Any) -> bytes:
        self._channel.settimeout(TICK)
        size = None
        while size is None or len(self._data) < size:
            try:
                part, ancillary, _, _ = self._channel.recvmsg(1 << 18, socket.CMSG_SPACE(12))
            except TimeoutError:
                if out_of_time():
                    raise _TimeUp from None
                continue
            except OSError:
                raise EOFError from None
            if not self.pid:
                for level, kind, data in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                        self.pid = struct.unpack("3i", data)[0]  # translated to our process namespace by the kernel
            if not part:
                raise EOFError
            self._data += part
            if size is None and len(self._data) >= 4:
                size = 4 + int.from_bytes(self._data[:4], "big")
                if size > 4 + self.limits.output_bytes:
                    raise Stopped("protocol", f"a reply of {size - 4} bytes")
            if out_of_time():  # a reply that comes a byte at a time
                raise _TimeUp
        frame = bytes(self._data[4:size])
        del self._data[:size]
        return frame

    def ask(self, verb: str, *args: Any, seconds: float) -> list:
        """The reply, without its nonce, within ``seconds`` of CPU. Raises Stopped, and ValueError for arguments that
        are no plain data."""
        nonce = secrets.token_hex(8)
        payload = marshal.dumps((nonce, verb, *args))
        clock = _Clock(self, seconds)
        try:
            self._refuse_early_words()
            self._write(payload, clock)
            reply = codec.decode(self._read(clock))
        except _TimeUp:
            raise clock.verdict from None
        except EOFError:
            raise self._ended(clock) from None
        except codec.ProtocolError as error:
            raise Stopped("protocol", str(error)) from None
        # A reply that was written before its question does not know the nonce.
        if not isinstance(reply, list) or len(reply) < 3 or reply[0] != nonce:
            raise Stopped("protocol", "a reply to another question")
        return reply[1:]

    def _refuse_early_words(self) -> None:
        self._channel.setblocking(False)
        try:
            early = self._channel.recv(1)
        except BlockingIOError:
            early = None
        except OSError:
            early = b""
        if early == b"":
            raise EOFError
        if early or self._data:
            raise Stopped("protocol", "words without a question")

    def _ended(self, clock: _Clock) -> Stopped:
        """The channel is closed: why."""
        clock()
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return Stopped("protocol", "the channel was closed")
        number = -code if code < 0 else code - 128
        if number == signal.SIGXCPU or (number == signal.SIGKILL and self.cpu() >= self.limits.total):
            return Stopped("timeout", f"more than {self.limits.total:g} s of CPU in all")
        if 0 < number < 65:
            return Stopped("crash", f"ended by signal {number}")
        return Stopped("crash", f"exited with code {code}")

    def close(self) -> None:
        """End the process and all that it started."""
        self.cpu()
        try:
            if self._group:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()  # its namespace dies with it
        except (ProcessLookupError, PermissionError):
            pass
        self._process.wait()
        self._channel.close()
        if self._process.stderr is not None:
            self._process.stderr.close()


class _TimeUp(Exception):
    pass


class _Clock:
    """Budget of one question: called, it says whether time is up, and keeps the verdict.

    Time for which the process waited for a processor does not count against the wall deadline, so that a busy machine
    changes no verdict.
    """

    def __init__(self, jail: Jail, seconds: float):
        self._jail, self._seconds = jail, seconds
        self._wall, self._cpu, self._delay = time.monotonic(), jail.cpu(), jail._waited()
        self._next = self._wall + TICK
        self.verdict = Stopped("timeout", "")

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + TICK
        wall, deadline = now - self._wall, WALL * self._seconds
        if self._jail.cpu() - self._cpu >= self._seconds:
            self.verdict = Stopped("timeout", f"more than {self._seconds:g} s of CPU")
        elif wall - (self._jail._waited() - self._delay) >= deadline:
            self.verdict = Stopped("timeout", f"no answer within {deadline:g} s")
        elif wall >= STARVED * deadline:
            self.verdict = Starved()
        else:
            return False
        return True
