"""Verdicts on programs that a language model wrote: trusted tests here, the program in a jail, plain data between them.

    from jaxmarl_llm import sandbox
    report = sandbox.judge("def add(a, b):\\n    return a + b\\n", [sandbox.Test("assert add(2, 3) == 5", ("add",))])

A test is trusted Python and runs in the calling process (a worker of `workers.EnvPool`, not the trainer: EnvPool's
timeout is the last resort against a test that does not end). The names in ``functions`` are bound to proxies: a call
sends the name and the arguments to the jail, and what comes back is decoded to plain builtins. So a program can return
wrong values, but no object of its own: nothing that equals everything, no frame to walk, no test to read or to patch.

What differs from running test and program in one process: a function does not change the arguments that a test holds;
a result that is no plain data (an object of the program's own class, a function) fails the test; of a regular
expression's match only its truth comes back; an exception is raised again as the nearest builtin class among its
ancestors.
"""

from __future__ import annotations

import builtins
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

from jaxmarl_llm.sandbox import codec, commands, seccomp
from jaxmarl_llm.sandbox.jails import Jail, Starved, Stopped
from jaxmarl_llm.text import ConfigError

TIERS = ("bwrap", "landlock")
HINT = "install bubblewrap and libseccomp (Debian, Ubuntu: `make sandbox`, or apt-get install bubblewrap libseccomp2)"


class Verdict(enum.StrEnum):
    """FAIL: an assertion is false or the program raised. INFRA_ERROR: no verdict; leave the sample out."""

    PASS = "pass"
    FAIL = "fail"
    TIMEOUT = "timeout"
    OOM = "oom"
    CRASH = "crash"
    PROTOCOL = "protocol"
    INFRA_ERROR = "infra_error"


@dataclasses.dataclass(frozen=True)
class Limits:
    """Budgets of a program.

    `judge` ends after at most about ``total`` wall seconds for a program that computes, ``3 * cpu`` for each timeout of
    one that sleeps (``stop_after_timeouts`` of them, or one in loading). Waiting for a processor comes on top.
    """

    cpu: float = 5.0  # CPU seconds for one call, and for loading; the wall deadline is 3 times that
    total: float = 20.0  # CPU seconds for loading and all calls, jails that had to be started again included
    memory_mb: int = 512  # address space
    output_bytes: int = 4 << 20  # one result, encoded
    program_bytes: int = 2 << 20
    file_mb: int = 8  # one file
    tmp_mb: int = 16  # /tmp; 0: nothing is writable. Only CPU time bounds its empty files, some 100 MB a second
    threads: int = 16  # processes and threads


class Test(NamedTuple):
    """Trusted code. ``setup`` runs first; then every name in ``functions`` is bound to the program's; then ``code``."""

    code: str
    functions: tuple[str, ...]
    setup: str = ""


Test.__test__ = False  # type: ignore[attr-defined]  # for pytest: nothing to collect


class Report(NamedTuple):
    """Verdicts on loading and on each test, each with one short line, empty when it passed; ``seconds`` on the wall."""

    load: Verdict
    tests: tuple[Verdict, ...]
    details: tuple[str, ...]
    load_detail: str
    seconds: float

    @property
    def passed(self) -> int:
        return self.tests.count(Verdict.PASS)

    @property
    def valid(self) -> bool:
        """False when some verdict could not be reached; then the program has no score."""
        return Verdict.INFRA_ERROR not in (self.load, *self.tests)


class SandboxUnavailable(ConfigError):
    """No tier works here; the message says why, for each, and what to install."""


class CandidateError(Exception):
    """What a program raised, when no builtin subclass of Exception is among its ancestors."""


def judge(
    program: str,
    tests: Sequence[Test],
    limits: Limits = Limits(),
    *,
    stop_after_timeouts: int | None = 3,
    unsafe: bool = False,
) -> Report:
    """Load ``program`` in a jail and run ``tests`` against it, in order.

    The tests share a jail until one of them kills it; the next one begins in a fresh jail. After
    ``stop_after_timeouts`` timeouts (None: never) the remaining tests count as TIMEOUT. When the program does not load,
    every test has the verdict of loading. Raises SandboxUnavailable; whatever the program or a test does is a verdict.
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
    """One program under judgement: its present jail and what it has spent."""

    def __init__(self, tier: str, program: str, limits: Limits):
        self._tier, self._program, self._limits = tier, program, limits
        self._jail: Jail | None = None
        self._spent = 0.0  # CPU seconds of the jails before this one
        self._stopped: Stopped | None = None

    def load(self) -> tuple[Verdict, str]:
        """A fresh jail with the program in it; started once more when the machine is to blame."""
        if len(self._program) > self._limits.program_bytes:
            return Verdict.FAIL, f"a program of more than {self._limits.program_bytes} characters"
        for attempt in (1, 2):
            try:
                self._jail = Jail(self._tier, self._limits)
                reply = self._ask("load", self._program)
            except Stopped as stopped:
                self.close()
                if stopped.kind != "infra_error" or attempt == 2:
                    return Verdict(stopped.kind), stopped.detail
            else:
                try:
                    _value(reply)
                except Exception as error:
                    self.close()
                    return _failure(error)
                return Verdict.PASS, ""
        raise AssertionError("two attempts end in a verdict")

    def run(self, test: Test) -> tuple[Verdict, str]:
        verdict, detail = self._run(test)
        if isinstance(self._stopped, Starved):
            verdict, detail = self._run(test)
        return verdict, detail

    def _run(self, test: Test) -> tuple[Verdict, str]:
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
            return Verdict.INFRA_ERROR, f"the test itself is broken: {_line(error)}"
        scope |= {name: functools.partial(self._call, name) for name in test.functions}
        failure: BaseException | None = None
        try:
            exec(code, scope)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a test may call sys.exit
            failure = error
        # Not by the exception: a test that catches everything must not turn a dead jail into a pass.
        if self._stopped is not None:
            return Verdict(self._stopped.kind), self._stopped.detail
        return (Verdict.PASS, "") if failure is None else _failure(failure)

    def _call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if self._stopped is not None:  # the test went on after its jail had died
            raise self._stopped
        try:
            return _value(self._ask("call", name, args, kwargs))
        except ValueError as error:
            if "unmarshallable" in str(error):
                raise TypeError(f"an argument of {name} is no plain data") from None
            raise
        except codec.ProtocolError as error:
            self._stopped = Stopped("protocol", str(error))
        except Stopped as stopped:
            self._stopped = stopped
        self.close()
        raise self._stopped

    def _ask(self, verb: str, *args: Any) -> list:
        assert self._jail is not None
        left = self._limits.total - self._spent - self._jail.cpu()
        if left <= 0:
            raise Stopped("timeout", f"more than {self._limits.total:g} s of CPU in all")
        return self._jail.ask(verb, *args, seconds=min(self._limits.cpu, left))

    def close(self) -> None:
        if self._jail is not None:
            self._jail.close()
            self._spent += self._jail.cpu()
            self._jail = None


def _value(reply: list) -> Any:
    """What a reply returns or raises. ProtocolError for one that no honest jail sends."""
    match reply:
        case ["ok", value]:
            return codec.plain(value)
        case ["unplain", str(why)]:
            raise CandidateError(f"the function returned {why}")
        case ["raised", list(names), str(own), str(message)] if all(isinstance(n, str) for n in names):
            raise _builtin_error(names, own, message)
    raise codec.ProtocolError("a reply of unknown form")


def _builtin_error(names: list[str], own: str, message: str) -> Exception:
    """An exception of the nearest builtin class among ``names`` that a message alone can build."""
    for name in names:
        cls = getattr(builtins, name, None)
        if isinstance(cls, type) and issubclass(cls, Exception) and cls not in (Exception, StopIteration):
            with contextlib.suppress(TypeError):  # UnicodeDecodeError, ExceptionGroup
                return cls(message)
    return CandidateError(f"{own}: {message}" if own not in ("Exception", "BaseException") else message)


def _failure(error: BaseException) -> tuple[Verdict, str]:
    return (Verdict.OOM if isinstance(error, MemoryError) else Verdict.FAIL), _line(error)


def _line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # an integer of too many digits in the message
        text = ""
    name = "" if isinstance(error, CandidateError) else type(error).__name__
    line = ": ".join(part for part in (name, " ".join(text.split())) if part)
    return line[:200].encode("utf-8", "replace").decode("utf-8") or type(error).__name__


@functools.lru_cache(maxsize=1024)
def _compiled(code: str) -> CodeType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an odd escape in a string of a test is nobody's concern
        return compile(code, "<test>", "exec", dont_inherit=True)


# Which tier works here

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
    """The first tier that works here, tried for real: a program runs in it, and writing, reading and dialling outside
    are refused. The answer is kept for this process.

    ``unsafe``: without a working tier, "unsafe" in place of SandboxUnavailable.
    """
    if unsafe not in _known:
        _known[unsafe] = _probe(unsafe)
    known = _known[unsafe]
    if isinstance(known, SandboxUnavailable):
        raise known.with_traceback(None)
    return known


def _probe(unsafe: bool) -> str | SandboxUnavailable:
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
    """Why ``tier`` does not work here, in a few words; empty when it does."""
    if tier == "landlock" and seccomp.seccomp_filter(False) is None:
        return "libseccomp was not found"
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        secret, written = Path(folder, "secret"), Path(folder, "written")
        secret.write_text("secret")
        secret.chmod(0o644)
        os.chmod(folder, 0o777)  # the tier must refuse, not the mode of the file
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
                return _line(error)
        if written.exists():
            return "writing outside is not refused"
    return ""


def describe(unsafe: bool = False) -> str:
    """One line for a run's log. Raises SandboxUnavailable as `probe` does."""
    tier = probe(unsafe)
    if tier == "unsafe":
        return (
            "sandbox: tier=UNSAFE: generated code runs with this user's rights and network; only resources are limited"
        )
    uid = commands.jail_uid() if tier == "bwrap" else None
    uid = uid or (commands.NOBODY if tier == "bwrap" else os.getuid())
    filtered = "off" if seccomp.seccomp_filter(True) is None else "on"
    return f"sandbox: tier={tier} uid={uid} seccomp={filtered} net=off"
