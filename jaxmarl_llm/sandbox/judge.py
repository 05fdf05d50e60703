"""Verdicts on programs that a language model wrote. Trusted tests run in this process, the program in a jail.

    from jaxmarl_llm.sandbox import judge as sandbox
    report = sandbox.judge("def add(a, b):\\n    return a + b\\n", [sandbox.Test("assert add(2, 3) == 5", ("add",))])

A test is trusted Python and runs in the calling process. That process is a worker of `rollout.env_pool.EnvPool`, not
the trainer. The names in ``functions`` are bound to proxies. A
call sends the name and the arguments to the jail, and the reply is decoded to plain builtins. So a program can return
wrong values, but no object of its own class. It cannot return an object that equals everything, inspect frames, or
change a test.

One budget of CPU and of wall time holds for the whole call. The call is all calls of the program, the decoding of its
replies, and the tests. Its end is the verdict TIMEOUT. So a program cannot choose to have no verdict. What the machine
caused, such as a jail that does not start or gets no processor, is INFRA_ERROR.

Differences from running test and program in one process: a function does not change the arguments of its caller. A
result that is not plain data (an object of the program's own class, a function) fails the test. A match of a regular
expression becomes its truth value. An exception is raised as the nearest builtin class among its base classes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.sandbox import codec, command_line, seccomp
from jaxmarl_llm.sandbox.budget import Budget, interrupting
from jaxmarl_llm.sandbox.jails import Jail, Starved, Stopped
from jaxmarl_llm.sandbox.replies import line, value_of

TIERS = ("bwrap", "landlock")
HINT = "install bubblewrap (Debian, Ubuntu: `make sandbox`, or apt-get install bubblewrap)"


class Verdict(enum.StrEnum):
    """Result of a test. FAIL: an assertion is false, or the program raised. INFRA_ERROR: no result; drop the sample."""

    PASS = "pass"
    FAIL = "fail"
    TIMEOUT = "timeout"
    OOM = "oom"
    CRASH = "crash"
    PROTOCOL = "protocol"
    INFRA_ERROR = "infra_error"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a program.

    cpu: CPU seconds for one call, and for loading; the wall deadline is 3 times as long. total: CPU seconds of one
    `judge` call: loading, all calls, restarted jails, decoding of replies, and tests. wall: wall seconds of the same,
    sleep included. memory_mb: address space. output_bytes: one encoded result. program_bytes: source code. file_mb: one
    file. tmp_mb: size of /tmp; 0 makes everything read-only. files: files, folders and links in /tmp. threads:
    processes and threads.

    A `judge` call takes at most about ``wall`` seconds and the start of one jail. Waiting for a processor adds to it.
    """

    cpu: float = 5.0
    total: float = 20.0
    wall: float = 30.0
    memory_mb: int = 512
    output_bytes: int = 4 << 20
    program_bytes: int = 2 << 20
    file_mb: int = 8
    tmp_mb: int = 16
    files: int = 1024
    threads: int = 16


class Test(NamedTuple):
    """Trusted test code.

    code: the test. functions: names that are bound to functions of the program. setup: code that runs before the
    binding.
    """

    code: str
    functions: tuple[str, ...]
    setup: str = ""


Test.__test__ = False  # type: ignore[attr-defined]  # otherwise pytest collects this class


class Report(NamedTuple):
    """Verdicts on one program.

    load: verdict on loading. tests: verdict on each test. details: one line for each test, empty for a pass.
    load_detail: the line about loading. seconds: wall time.
    """

    load: Verdict
    tests: tuple[Verdict, ...]
    details: tuple[str, ...]
    load_detail: str
    seconds: float

    @property
    def passed(self) -> int:
        """Number of tests that passed."""
        return self.tests.count(Verdict.PASS)

    @property
    def valid(self) -> bool:
        """Whether every verdict was reached. Otherwise the program has no score."""
        return Verdict.INFRA_ERROR not in (self.load, *self.tests)


class SandboxUnavailable(ConfigError):
    """Error: no tier works on this machine. The message gives the reason for each tier, and what to install."""


def judge(
    program: str,
    tests: Sequence[Test],
    limits: Limits = Limits(),
    *,
    stop_after_timeouts: int | None = 3,
    unsafe: bool = False,
) -> Report:
    """Load a program in a jail and run tests against it, in order.

    program: source code. tests: trusted tests. limits: limits of the program. stop_after_timeouts: after this many
    timeouts, the remaining tests count as TIMEOUT (None: never). unsafe: allow a run without confinement.

    The tests share one jail until it dies; the next test starts a new jail. When the program does not load, every test
    gets the verdict of loading. Raises SandboxUnavailable. Any behaviour of the program or a test becomes a verdict.
    """
    tier = probe(unsafe)
    start = time.monotonic()
    with contextlib.closing(_Session(tier, program, limits)) as session:
        load, load_detail = session.load()
        results: list[tuple[Verdict, str]] = []
        for test in tests:
            timeouts = sum(verdict is Verdict.TIMEOUT for verdict, _ in results)
            if load is not Verdict.PASS:
                results.append((load, load_detail))
            elif stop_after_timeouts is not None and timeouts >= stop_after_timeouts:
                results.append((Verdict.TIMEOUT, f"not run after {timeouts} timeouts"))
            else:
                results.append(session.run(test))
    verdicts, details = zip(*results, strict=True) if results else ((), ())
    return Report(load, verdicts, details, load_detail, time.monotonic() - start)


class _Session:
    """Session of one program: its current jail, and the time that it has used."""

    def __init__(self, tier: str, program: str, limits: Limits):
        self._tier, self._program, self._limits = tier, program, limits
        self._jail: Jail | None = None
        self._budget = Budget(limits.total, limits.wall)
        self._loaded = False
        self._stopped: Stopped | None = None
        self._testing = False  # the test itself runs, not a call into the jail

    def load(self) -> tuple[Verdict, str]:
        """Start a jail and load the program. Tries a second time after an error of the machine.

        The first start is the machine's time. The program caused all others.
        """
        if len(self._program) > self._limits.program_bytes:
            return Verdict.FAIL, f"a program of more than {self._limits.program_bytes} characters"
        if over := self._over():
            return Verdict.TIMEOUT, over
        for attempt in (1, 2):
            try:
                start = time.monotonic()
                self._jail = Jail(self._tier, self._limits)
                if self._loaded:
                    self._budget.jails_wall += time.monotonic() - start
                reply = self._ask("load", self._program)
            except Stopped as stopped:
                self.close()
                if stopped.kind != "infra_error" or attempt == 2:
                    return Verdict(stopped.kind), stopped.detail
            else:
                try:
                    value_of(reply)
                except Exception as error:
                    self.close()
                    return _failure(error)
                self._loaded = True
                return Verdict.PASS, ""
        raise AssertionError("two attempts end in a verdict")

    def run(self, test: Test) -> tuple[Verdict, str]:
        """Verdict on one test and a line about it. Repeats the test once if the machine gave no processor time."""
        verdict, detail = self._run(test)
        if isinstance(self._stopped, Starved):
            verdict, detail = self._run(test)
        return verdict, detail

    def _run(self, test: Test) -> tuple[Verdict, str]:
        """Verdict on one test and one line about it, from a single attempt."""
        self._stopped = None
        if self._jail is None:
            load, detail = self.load()
            if load is not Verdict.PASS:
                return load, detail
        scope: dict[str, Any] = {"__name__": "test"}
        try:
            code = _compiled(test.code)
            exec(_compiled(test.setup), scope)
        except Exception as error:
            return Verdict.INFRA_ERROR, f"the test itself is broken: {line(error)}"
        scope |= {name: functools.partial(self._call, name) for name in test.functions}
        failure: BaseException | None = None
        try:
            with interrupting(self._look):
                try:
                    self._testing = True
                    exec(code, scope)
                finally:
                    self._testing = False
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a test may call sys.exit
            failure = error
        # This does not depend on the exception: a test that catches every exception must not pass with a dead jail.
        if self._stopped is not None:
            return Verdict(self._stopped.kind), self._stopped.detail
        return (Verdict.PASS, "") if failure is None else _failure(failure)

    def _look(self) -> None:
        """End a test that has spent the budget. A test may compute for ever with a value that the program chose."""
        if self._testing and (over := self._over()):
            self._testing, self._stopped = False, Stopped("timeout", over)
            raise self._stopped

    def _over(self) -> str:
        """Which limit of the whole call is exceeded, in a few words; empty if none."""
        return self._budget.over(*self._used())

    def _used(self) -> tuple[float, float]:
        """CPU and wall seconds of the current jail."""
        return (self._jail.cpu(), self._jail.wall) if self._jail is not None else (0.0, 0.0)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the program in the jail, for a test."""
        self._testing = False
        if self._stopped is not None:  # the test continued after its jail died
            raise self._stopped
        try:
            reply = self._ask("call", name, args, kwargs)
            try:
                return value_of(reply)
            finally:
                if over := self._over():  # also spent in decoding
                    raise Stopped("timeout", over)
        except ValueError as error:
            if "unmarshallable" in str(error):
                raise TypeError(f"an argument of {name} is no plain data") from None
            raise
        except codec.ProtocolError as error:
            self._stopped = Stopped("protocol", str(error))
        except Stopped as stopped:
            self._stopped = stopped
        finally:
            self._testing = self._stopped is None
        self.close()
        raise self._stopped

    def _ask(self, verb: str, *args: Any) -> list:
        """Reply of the jail within the remaining time."""
        assert self._jail is not None
        if over := self._over():
            raise Stopped("timeout", over)
        cpu, wall = self._budget.left(*self._used())
        return self._jail.ask(verb, *args, seconds=min(self._limits.cpu, cpu), wall=wall)

    def close(self) -> None:
        """End the current jail."""
        if self._jail is not None:
            self._jail.close()
            self._budget.jails_cpu += self._jail.cpu()
            self._budget.jails_wall += self._jail.wall
            self._jail = None


def _failure(error: BaseException) -> tuple[Verdict, str]:
    """Verdict for an exception of a test or a program, and one line about it."""
    return (Verdict.OOM if isinstance(error, MemoryError) else Verdict.FAIL), line(error)


@functools.lru_cache(maxsize=1024)
def _compiled(code: str) -> CodeType:
    """Code object of a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in a string of a test does not matter
        return compile(code, "<test>", "exec", dont_inherit=True)


# Detection of the tier that works on this machine

_known: dict[bool, str | SandboxUnavailable] = {}

_LOOK = """
import os
def work(n):
    return [i * i for i in range(n)]
def leave(path):
    with open(path, "w") as f:
        f.write("out")
def peek(path):
    with open(path) as f:
        return f.read()
def dial(port):
    import socket
    socket.create_connection(("127.0.0.1", port), timeout=1).close()
def spawn():
    return os.fork()
"""


def probe(unsafe: bool = False) -> str:
    """First tier that works on this machine. The result is cached for this process.

    The test runs a program in each tier, and checks that the tier denies files and network outside. unsafe: return
    "unsafe" when no tier works, instead of raising SandboxUnavailable.
    """
    if unsafe not in _known:
        _known[unsafe] = _probe(unsafe)
    known = _known[unsafe]
    if isinstance(known, SandboxUnavailable):
        raise known.with_traceback(None)
    return known


def _probe(unsafe: bool) -> str | SandboxUnavailable:
    """Result of `probe` without the cache; an error is returned."""
    reasons = []
    for tier in TIERS:
        reason = examine(tier)
        if not reason:
            return tier
        reasons.append(f"{tier}: {reason}")
    return (
        "unsafe" if unsafe else SandboxUnavailable(f"no sandbox to run generated code in; {HINT}; {'; '.join(reasons)}")
    )


def examine(tier: str) -> str:
    """Reason why ``tier`` does not work on this machine, in a few words; empty if it works."""
    if tier == "landlock" and seccomp.seccomp_filter() is None:
        return f"no seccomp filter for {os.uname().machine}"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        secret, written = Path(folder, "secret"), Path(folder, "written")
        secret.write_text("secret")
        secret.chmod(0o644)
        os.chmod(folder, 0o777)  # so that only the tier can deny access, not the mode of the file
        session = _Session(tier, _LOOK, Limits())
        refused: dict[str, Callable[[], Any]] = {
            "reading outside": lambda: session._call("peek", str(secret)),
            "writing outside": lambda: session._call("leave", str(written)),
            "the network": lambda: session._call("dial", server.getsockname()[1]),
        }
        with contextlib.closing(session):
            try:
                verdict, detail = session.load()
                if verdict is not Verdict.PASS:
                    return detail
                if session._call("work", 3) != [0, 1, 4]:
                    return "a trivial program gave a wrong answer"
                for what, attempt in refused.items():
                    with contextlib.suppress(OSError):
                        attempt()
                        return f"{what} is not refused"
            except (Stopped, Exception) as error:
                return line(error)
        if written.exists():
            return "writing outside is not refused"
    return ""


def describe(unsafe: bool = False) -> str:
    """Line about the sandbox for the log of a run. Raises SandboxUnavailable as `probe` does.

    unsafe: whether generated code may run without a jail where no tier works, as in `probe`.
    """
    tier = probe(unsafe)
    if tier == "unsafe":
        return (
            "sandbox: tier=UNSAFE: generated code runs with this user's rights and network; only resources are limited"
        )
    uid = command_line.jail_uid() or (command_line.NOBODY if tier == "bwrap" else os.getuid())
    filtered = "off" if seccomp.seccomp_filter() is None else "on"
    return f"sandbox: tier={tier} uid={uid} seccomp={filtered} net=off"
