"""Jails: one process for one program, confined by one of three tiers, and the channel to this process.

============ ==================================================================== =====================================
tier         confinement                                                          needs
============ ==================================================================== =====================================
``bwrap``    bubblewrap: own user, process, network, mount and IPC namespaces,    bubblewrap; user namespaces, or root
             a file system of the interpreter and its library alone, a small
             ``/tmp`` with few files; seccomp on x86-64 and AArch64
``landlock`` Landlock: reads the interpreter and its library, writes nowhere;     Linux >= 5.13 with Landlock, x86-64
             seccomp                                                              or AArch64
``unsafe``   only limits of resources                                             the caller's consent
============ ==================================================================== =====================================

In every tier, rlimits hold, the environment contains no secrets, and the process dies with its judge. Seccomp allows
what Python needs to compute, threads and files included, and nothing else (see `seccomp`). Where this process may make
control groups, they limit memory and processes too (see `cgroups`). docs/sandbox.md has the table of what each tier
confines.

If the caller is root, the jail runs under a separate user id that owns nothing. RLIMIT_NPROC does not limit root, and
it counts by user, so jails with the same id would share one limit of threads. The jail starts as root, because another
user may be unable to read the interpreter. The id changes before the program is loaded.
"""

from __future__ import annotations

import contextlib
import marshal
import math
import os
import secrets
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

from jaxmarl_llm.sandbox import cgroups, codec, command_line, seccomp

START_SECONDS = 20.0  # wall time in which an interpreter must start
TICK = 0.05  # seconds between two checks of the clocks
WALL = 3.0  # allowed wall seconds for each CPU second
STARVED = 4.0  # multiple of the wall deadline after which a lack of processor time is an error of the machine
SLEEP = 0.05  # seconds of waiting that a process must have for each time that it gave up its processor
PIECE = 1 << 16  # bytes of a reply for whose reading the judge may wait for a processor at the machine's expense
KERNEL_MB = 64  # memory that the kernel may hold for one jail, where control groups count it
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Stopped(BaseException):
    """Error that ends a jail.

    kind: timeout, oom, crash, protocol or infra_error. detail: one line of text. It is a BaseException, so that a test
    that expects an Exception does not catch it.
    """

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class Starved(Stopped):
    """Timeout because the machine gave no processor time. The judge retries once."""

    def __init__(self) -> None:
        super().__init__("infra_error", "no processor for too long")


class Jail:
    """One confined process.

    tier: "bwrap", "landlock" or "unsafe". limits: `judge.Limits`. Raises Stopped with kind infra_error when the process
    does not start. After `ask` raised Stopped, only `close` is allowed.
    """

    def __init__(self, tier: str, limits: Any):
        self.limits, self._data, self._nonce = limits, bytearray(), ""
        self._cpu = self._delay = 0.0
        self._switches = 0
        self.wall = 0.0  # seconds of all requests, without waiting for a processor
        self.late = 0.0  # seconds in which the judge waited for a processor, to read what was there
        self.pid = 0
        self._cgroup: cgroups.Group | None = None
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            start = command_line.bwrap_command if tier == "bwrap" else command_line.python_command
            command = start(theirs.fileno())
            self._process = subprocess.Popen(
                command,
                env={**command_line.ENVIRONMENT, "PATH": os.environ.get("PATH", os.defpath)}
                if tier == "bwrap"
                else command_line.ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=tier != "bwrap",
            )
        except OSError as error:
            ours.close()
            raise Stopped("infra_error", f"{tier} does not start: {error}") from None
        finally:
            theirs.close()
        self._group = tier != "bwrap"
        self._channel = ours
        try:
            self._start(tier)
        except BaseException:
            self.close()
            raise

    def _start(self, tier: str) -> None:
        """Send the rights and limits to the new process, and wait until it is confined."""
        limits = self.limits
        filter_ = None if tier == "unsafe" else seccomp.seccomp_filter()
        how = {
            "tmp": f"size={limits.tmp_mb << 20},nr_inodes={limits.files + 1},mode=1777"
            if tier == "bwrap" and limits.tmp_mb
            else None,
            "uid": None if tier == "unsafe" else command_line.jail_uid(),
            "capabilities": command_line.capabilities() if tier == "landlock" and os.getuid() == 0 else 0,
            "die_with": None if tier == "bwrap" else os.getpid(),
            "readable": [*command_line.readable(), *command_line.DEVICES] if tier == "landlock" else None,
            "filter": filter_,
            "reply_bytes": limits.output_bytes,
            "rlimits": {
                "RLIMIT_CPU": math.ceil(limits.total) + 2,  # later than the finer clock of `_Clock`
                "RLIMIT_AS": limits.memory_mb << 20,
                "RLIMIT_STACK": min(64, limits.memory_mb // 4) << 20,
                "RLIMIT_FSIZE": limits.file_mb << 20,
                "RLIMIT_NOFILE": 64,
                # Without seccomp, this limit also allows processes, which would escape the clock.
                "RLIMIT_NPROC": 1 if tier == "bwrap" and filter_ is None else limits.threads,
                "RLIMIT_SIGPENDING": 64,  # also the number of POSIX timers
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
        if tier != "unsafe":  # the kernel's own memory for a jail comes on top of its address space and files
            memory = (limits.memory_mb + limits.tmp_mb + KERNEL_MB) << 20
            self._cgroup = cgroups.limited(self.pid, memory, limits.threads)

    def _complaint(self) -> str:
        """Last line that bubblewrap or the interpreter wrote to stderr."""
        self._process.kill()
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode("utf-8", "replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it ended without a message")[:300]

    # The clocks

    def cpu(self) -> float:
        """CPU seconds of the confined process and of the children it has waited for."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
            self._cpu = max(self._cpu, sum(map(int, fields[11:15])) / CLOCK_TICKS)
        except (OSError, ValueError, IndexError):
            pass  # the process has ended: keep the last value
        return self._cpu

    def _waited(self) -> float:
        """Seconds in which its main thread waited for a processor. 0 where the kernel does not report them."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            self._delay = int(Path(f"/proc/{self.pid}/schedstat").read_bytes().split()[1]) / 1e9
        return self._delay

    def _slept(self) -> int:
        """Number of times that its main thread gave up its processor."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            lines = Path(f"/proc/{self.pid}/status").read_bytes().split(b"\n")
            self._switches = next(int(x.split()[1]) for x in lines if x.startswith(b"voluntary_ctxt_switches"))
        return self._switches

    # Frames

    def _write(self, payload: bytes, out_of_time: Any) -> None:
        """Send one frame. Raises _TimeUp when ``out_of_time()`` is true, EOFError when the channel is closed."""
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
        """Payload of the next frame. Raises as `_write`, and Stopped for a frame that is too large."""
        self._channel.settimeout(TICK)
        size, before = None, waited_here()
        while size is None or len(self._data) < size:
            try:
                part, ancillary, _, _ = self._channel.recvmsg(1 << 18, socket.CMSG_SPACE(12))
            except TimeoutError:
                if out_of_time():
                    raise _TimeUp from None
                before = waited_here()
                continue
            except OSError:
                raise EOFError from None
            if not self.pid:
                for level, kind, data in ancillary:
                    if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                        self.pid = struct.unpack("3i", data)[0]  # the kernel translates it to this process namespace
            if not part:
                raise EOFError
            self._data += part
            if size is None and len(self._data) >= 4:
                size = 4 + int.from_bytes(self._data[:4], "big")
                if size > 4 + self.limits.output_bytes:
                    raise Stopped("protocol", f"a reply of {size - 4} bytes")
            now = waited_here()
            if len(part) >= PIECE or (size is not None and len(self._data) >= size):
                self.late += now - before
            before = now
            if out_of_time():  # also for a reply that arrives one byte at a time
                raise _TimeUp
        frame = bytes(self._data[4:size])
        del self._data[:size]
        return frame

    def ask(self, verb: str, *args: Any, seconds: float, wall: float = math.inf) -> list:
        """Send a request and return the reply, without its nonce.

        verb: "load" or "call". args: plain data; ValueError for other arguments. seconds: allowed CPU time. wall:
        allowed wall time, if it is less than `WALL` times ``seconds``. Raises Stopped when the jail must end.
        """
        nonce = secrets.token_hex(8)
        payload = marshal.dumps((nonce, verb, *args))
        clock = _Clock(self, seconds, wall)
        try:
            self._reject_early_bytes()
            self._write(payload, clock)
            reply = codec.decode(self._read(clock))
        except _TimeUp:
            raise clock.verdict from None
        except EOFError:
            raise self._ended(clock) from None
        except codec.ProtocolError as error:
            raise Stopped("protocol", str(error)) from None
        finally:
            self.wall += clock.counted()
        # A reply that was written before its request cannot contain the nonce.
        if not isinstance(reply, list) or len(reply) < 3 or reply[0] != nonce:
            raise Stopped("protocol", "a reply to another request")
        return reply[1:]

    def _reject_early_bytes(self) -> None:
        """Raise Stopped when the jail sent bytes before a request, EOFError when the channel is closed."""
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
            raise Stopped("protocol", "bytes without a request")

    def _ended(self, clock: _Clock) -> Stopped:
        """Reason why the channel is closed."""
        clock()
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return Stopped("protocol", "the channel was closed")
        number = -code if code < 0 else code - 128
        if number == signal.SIGXCPU or (number == signal.SIGKILL and self.cpu() >= self.limits.total):
            return Stopped("timeout", f"more than {self.limits.total:g} s of CPU in all")
        if number == signal.SIGKILL and self._cgroup is not None and self._cgroup.out_of_memory():
            return Stopped("oom", "more memory than its control group allows")
        if 0 < number < 65:
            return Stopped("crash", f"ended by signal {number}")
        return Stopped("crash", f"exited with code {code}")

    def close(self) -> None:
        """Kill the process and all processes that it started."""
        self.cpu()
        try:
            if self._group:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()  # this ends all processes of its namespace
        except (ProcessLookupError, PermissionError):
            pass
        self._process.wait()
        if self._cgroup is not None:
            self._cgroup.close()
        self._channel.close()
        if self._process.stderr is not None:
            self._process.stderr.close()


def waited_here() -> float:
    """Seconds in which this thread waited for a processor so far. 0 where the kernel does not report them."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1]) / 1e9
    return 0.0


class _TimeUp(Exception):
    """Signal that the time of a request is over."""


class _Clock:
    """Time budget of one request. A call returns whether the time is over; ``verdict`` then holds the error.

    jail: the process that is measured. seconds: allowed CPU time. wall: allowed wall time. Time in which the process
    waits for a processor does not count for the wall deadline, so a busy machine changes no verdict.

    A program that sleeps for moments waits for a processor after each. It could so wait for ever on a busy machine, and
    have no verdict. So each time that a process gives up its processor takes `SLEEP` seconds from its waiting.

    The judge waits for a processor too, while a reply is there to be read. This time does not count either, for pieces
    of at least `PIECE` bytes and for the last piece. So a program cannot gain time by sending single bytes.
    """

    def __init__(self, jail: Jail, seconds: float, wall: float = math.inf):
        self._jail, self._seconds, self._deadline = jail, seconds, min(WALL * seconds, wall)
        self._wall, self._cpu, self._delay = time.monotonic(), jail.cpu(), jail._waited()
        self._switches, self._late = jail._slept(), jail.late
        self._next = self._wall + TICK
        self.verdict = Stopped("timeout", "")

    def counted(self) -> float:
        """Wall seconds so far, without waiting for a processor."""
        waited = self._jail._waited() - self._delay - SLEEP * (self._jail._slept() - self._switches)
        return time.monotonic() - self._wall - max(0.0, waited) - (self._jail.late - self._late)

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + TICK
        if self._jail.cpu() - self._cpu >= self._seconds:
            self.verdict = Stopped("timeout", f"more than {self._seconds:g} s of CPU")
        elif self.counted() >= self._deadline:
            self.verdict = Stopped("timeout", f"no answer within {self._deadline:g} s")
        elif now - self._wall >= STARVED * WALL * max(self._seconds, self._jail.limits.cpu):
            self.verdict = Starved()
        else:
            return False
        return True
