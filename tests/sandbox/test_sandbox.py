"""The sandbox: honest programs pass; hostile ones forge nothing, reach nothing, leave nothing, and get a verdict."""

import ctypes
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.sandbox import hostile_programs
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.sandbox import child, codec, command_line, jails, seccomp
from jaxmarl_llm.sandbox import judge as sandbox
from jaxmarl_llm.sandbox.judge import Jail, Limits, Stopped, Test, Verdict, judge

ROOT = Path(__file__).parents[2]
FULL = Path(os.environ.get("JAXMARL_DATA", ROOT.parent / "shared" / "data"))
REFUSALS = {tier: sandbox.examine(tier) for tier in sandbox.TIERS}
WORKING = [tier for tier in sandbox.TIERS if not REFUSALS[tier]]
QUICK = Limits(cpu=0.5, total=1.5, wall=2.0, memory_mb=256)

needs_a_tier = pytest.mark.skipif(not WORKING, reason=f"no tier of the sandbox works here: {REFUSALS}")


@pytest.fixture(params=sandbox.TIERS)
def tier(request, monkeypatch):
    if REFUSALS[request.param]:
        pytest.skip(f"{request.param}: {REFUSALS[request.param]}")
    monkeypatch.setattr(sandbox, "_known", {False: request.param})
    return request.param


def verdict(program, test, *functions, limits=QUICK, setup="", **options):
    report = judge(program, [Test(test, functions or ("f",), setup)], limits, **options)
    assert len(report.tests) == len(report.details) == 1
    return report.tests[0]


# Hostile programs

NAMES = list(hostile_programs.EVERYTHING)


def buried(judge, seconds=10):
    """What lives in a jail of ``judge`` now is dead within ``seconds``; a busy machine takes its time to bury the dead
    (experiments.sandbox.check measures how long)."""
    left, deadline = set(hostile_programs.survivors(judge)), time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left &= set(hostile_programs.survivors(judge))
    return not left


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A host worth attacking, and the proof that it was not harmed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "secret"
    secret.write_text("secret")
    secret.chmod(0o666)
    outside.chmod(0o777)
    for folder in (outside, *list(outside.parents)[:3]):
        if folder.stat().st_uid == os.getuid():
            folder.chmod(folder.stat().st_mode | 0o055)
    monkeypatch.setenv("JAXMARL_SECRET", "secret")
    monkeypatch.chdir(outside)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        port = server.getsockname()[1]
        datagrams.bind(("127.0.0.1", port))
        home = set(os.listdir(Path.home()))
        limits = [subprocess_limits(name) for name in ("Max cpu time", "Max processes")]
        before = hostile_programs.fingerprint(outside)

        def unharmed():
            assert hostile_programs.fingerprint(outside) == before
            assert sorted(os.listdir(outside)) == ["secret"] and secret.read_text() == "secret"
            assert secret.stat().st_mode & 0o777 == 0o666
            assert "written_by_a_program" not in set(os.listdir(Path.home())) - home
            assert [subprocess_limits(name) for name in ("Max cpu time", "Max processes")] == limits
            for listener in (server, datagrams):
                listener.setblocking(False)
                with pytest.raises(BlockingIOError):
                    listener.accept() if listener is server else listener.recv(1)
            assert buried(os.getpid())

        yield lambda name: hostile_programs.prepare(name, outside, port, os.getpid()), unharmed


def subprocess_limits(name):
    return next(line for line in Path("/proc/self/limits").read_text().splitlines() if line.startswith(name))


def attack(name, host):
    aim, unharmed = host
    large = "megabyte" in name or "of one hash" in name or name.startswith("reply: ")
    limits = Limits(cpu=2.0, total=3.0) if large else QUICK
    report = judge(aim(name), [Test(hostile_programs.EVERYTHING[name].test, ("f",))], limits)
    assert report.tests[0] is not Verdict.PASS, "forged"
    assert str(report.tests[0]) in hostile_programs.EVERYTHING[name].verdicts.split(), report
    assert "LEAK" not in report.details[0] and len(report.details[0]) <= 200
    assert report.valid and report.passed == 0
    unharmed()


def every_other(tier):
    """All programs; those that the other tier judges in the tests that are not slow are slow here."""
    return [pytest.param(name, marks=[pytest.mark.slow] if i % 2 != tier else []) for i, name in enumerate(NAMES)]


@pytest.mark.parametrize("name", every_other(0) if len(WORKING) > 1 else NAMES)
@needs_a_tier
def test_hostile_programs(name, host):
    attack(name, host)


@pytest.mark.skipif(len(WORKING) < 2, reason=f"one tier at most works here: {REFUSALS}")
@pytest.mark.parametrize("name", every_other(1))
def test_hostile_programs_in_the_second_tier(name, host, monkeypatch):
    monkeypatch.setattr(sandbox, "_known", {False: WORKING[1]})
    attack(name, host)


def test_the_suite_of_hostile_programs_is_not_empty_words():
    """In this process, or in a jail without walls, the same programs do harm."""
    assert len(NAMES) >= 200
    scope = {}
    exec(hostile_programs.EVERYTHING["always equal"].program, scope)
    exec(hostile_programs.TEST, scope)  # passes


def test_the_unsafe_tier_would_let_them(host):
    aim, unharmed = host
    with mock.patch.object(sandbox, "_known", {True: "unsafe"}):
        judge(aim("writes outside"), [Test(hostile_programs.TEST, ("f",))], QUICK, unsafe=True)
    with pytest.raises(AssertionError):
        unharmed()


CALLS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def refused(number, *args):
    ctypes.set_errno(0)
    return libc.syscall(number, *args) == -1 and ctypes.get_errno()
"""
X86_64 = {  # number and arguments
    "ptrace TRACEME": (101, 0, 0, 0, 0),
    "mount": (165, None, b"/tmp", b"tmpfs", 0, None),
    "unshare user": (272, 0x10000000),
    "clone user": (56, 0x10000011, 0, 0, 0, 0),
    "fork": (57,),
    "vfork by clone": (56, 0x4111, 0, 0, 0, 0),
    "keyctl": (250, 0, -3, 0),
    "bpf": (321, 0, None, 0),
    "perf_event_open": (298, None, 0, -1, -1, 0),
    "ioctl TIOCSTI": (16, 0, 0x5412, b"x"),
    "ioctl TIOCSTI with high bits": (16, 0, 0x100005412, b"x"),
    "process_vm_readv": (310, 1, None, 0, None, 0, 0),
    "kexec_load": (246, 0, 0, None, 0),
    "io_uring_setup": (425, 8, None),
    "socket": (41, 2, 1, 0),
    "vsock": (41, 40, 1, 0),
    "kill": (62, 1, 0),
    "tgkill": (234, 1, 1, 0),
    "prlimit of another": (302, 1, 0, None, None),
    "fcntl F_SETOWN": (72, 0, 8, 1),
    "userfaultfd": (323, 0),
    "shmget": (29, 0, 4096, 0o1600),
    "chmod": (90, b"/tmp", 0o777),
    "setns": (308, 0, 0),
    "pidfd_getfd": (438, 0, 0, 0),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")
@pytest.mark.skipif(seccomp.seccomp_filter() is None, reason="no filter for this architecture")
def test_seccomp_refuses_each_call(tier):
    expected = "(1, 25, 38)"  # EPERM, ENOTTY for ioctl, ENOSYS for newer calls
    calls = [f"assert refused({', '.join(map(repr, call))}) in {expected}" for call in X86_64.values()]
    report = judge(CALLS, [Test(call, ("refused",)) for call in calls], QUICK)
    assert {n: d for n, v, d in zip(X86_64, report.tests, report.details, strict=True) if v is not Verdict.PASS} == {}
    # Refused by the filter, not for want of rights or of arguments: getppid, by the same road, works.
    assert verdict(CALLS, "assert refused(110) is False", "refused") is Verdict.PASS
    assert verdict(CALLS, "assert refused(435, None, 0) == 38", "refused") is Verdict.PASS  # clone3: ENOSYS


SEES = """
import os, sys
def see():
    return {
        "env": sorted(os.environ), "root": sorted(os.listdir("/")), "cwd": os.getcwd(), "uids": os.getresuid(),
        "groups": os.getgroups(), "pid": os.getpid(), "fds": [fd for fd in range(64) if is_open(fd)],
    }
def is_open(fd):
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False
def limit(name):
    import resource
    return resource.getrlimit(getattr(resource, name))
def status():
    import ctypes
    return ctypes.CDLL(None).prctl(39, 0, 0, 0, 0)
"""


@pytest.mark.skipif("bwrap" not in WORKING, reason=REFUSALS["bwrap"])
def test_what_a_program_sees_in_bubblewrap(monkeypatch):
    monkeypatch.setattr(sandbox, "_known", {False: "bwrap"})
    session = sandbox._Session("bwrap", SEES, QUICK)
    assert session.load() == (Verdict.PASS, "")
    view = session._call("see")
    outer = {uid for uid in re.findall(r"\d+", next(x for x in status_lines(session._jail.pid) if "Uid" in x))}
    capabilities = {line for line in status_lines(session._jail.pid) if line.startswith(("CapEff", "CapPrm", "CapAmb"))}
    no_new = [line for line in status_lines(session._jail.pid) if line.startswith("NoNewPrivs")]
    limits = [session._call("limit", f"RLIMIT_{x}") for x in ("CPU", "AS", "FSIZE", "NOFILE", "CORE", "NPROC")]
    session.close()
    assert not {"JAXMARL_DATA", "PYTEST_CURRENT_TEST", "USER"} & set(view["env"])
    assert set(view["root"]) <= {"usr", "lib", "lib64", "etc", "dev", "tmp", "root", "home", "opt"}
    assert view["cwd"] == "/tmp" and view["pid"] < 10 and len(view["fds"]) == 4
    assert "0" not in outer and 0 not in view["uids"] and 0 not in view["groups"]
    assert {line.split()[1].strip("0") for line in capabilities} == {""} and no_new[0].split()[1] == "1"
    assert limits == [(x, x) for x in (4, 256 << 20, 8 << 20, 64, 0, 16)]


def status_lines(pid):
    return Path(f"/proc/{pid}/status").read_text().splitlines()


def test_results_do_not_depend_on_the_hash_seed_and_installed_packages(tier):
    program = "def f(): return hash('abc')\ndef g():\n    import numpy\ndef h():\n    import pip"
    tests = [Test("seen.append(f())", ("f",), "from tests_seen import seen")] * 2
    with mock.patch.dict(sys.modules, {"tests_seen": mock.Mock(seen=(seen := []))}):
        for _ in range(2):
            assert judge(program, tests, QUICK).passed == 2
    assert len(seen) == 4 and len(set(seen)) == 1
    for name in "gh":
        report = judge(program, [Test(f"{name}()", (name,))], QUICK)
        assert report.details[0].startswith("ModuleNotFoundError")
    look = """
import os
def look(path):
    try: return os.listdir(path)
    except PermissionError: return []
"""
    folders = [p for p in (*command_line.hidden(), "/usr/lib/python3/dist-packages", str(ROOT)) if os.path.isdir(p)]
    tests = [Test(f"try: assert look({f!r}) == []\nexcept FileNotFoundError: pass", ("look",)) for f in folders]
    assert judge(look, tests, QUICK).passed == len(folders) >= 2  # nor can they be listed


# Verdicts

ADD = "def add(a, b):\n    return a + b\n"


def test_a_report(tier):
    tests = [Test(f"assert add(2, {n}) == 5", ("add",)) for n in (3, 4)]
    report = judge(ADD, tests)
    assert report.tests == (Verdict.PASS, Verdict.FAIL) and report.load is Verdict.PASS
    assert report.details == ("", "AssertionError") and report.load_detail == ""
    assert report.passed == 1 and report.valid and 0 < report.seconds < 30


def test_a_program_that_does_not_load_gives_its_verdict_to_every_test(tier):
    for program, expected in {"x=": "fail", "import os; os._exit(0)": "crash", "while 1: pass": "timeout"}.items():
        report = judge(program, [Test("pass", ("f",))] * 2, QUICK)
        assert report.load == expected and report.tests == (report.load,) * 2
        assert report.details == (report.load_detail,) * 2 and report.load_detail
    assert judge("x=", [], QUICK)[:3] == (Verdict.FAIL, (), ())


POISON = """
import os
def f(what):
    if what == "exit": os._exit(0)
    while what == "loop": pass
    state.append(what)
    return len(state)
state = []
"""


def poison(what, result=None):
    return Test(f"assert f({what!r}) == {result}", ("f",))


def test_a_test_that_kills_its_jail_does_not_poison_the_others(tier):
    tests = [poison("a", 1), poison("b", 2), poison("exit"), poison("c", 1), poison("loop"), poison("d", 1)]
    report = judge(POISON, tests, QUICK)
    assert report.tests == ("pass", "pass", "crash", "pass", "timeout", "pass")


def test_timeouts_end_the_program_after_a_while(tier):
    tests = [poison("loop"), poison("a", 1), *[poison("loop")] * 3, poison("b", 1)]
    limits = Limits(cpu=0.2, total=10)
    report = judge(POISON, tests, limits, stop_after_timeouts=2)
    assert report.tests == ("timeout", "pass", "timeout", "timeout", "timeout", "timeout")
    assert report.details[2].startswith("more than 0.2 s") and report.details[3] == "not run after 2 timeouts"
    report = judge(POISON, tests, limits, stop_after_timeouts=None)
    assert report.tests == ("timeout", "pass", "timeout", "timeout", "timeout", "pass")


def test_the_total_budget_spans_jails(tier):
    report = judge(POISON, [poison("loop")] * 4, Limits(cpu=0.3, total=0.5), stop_after_timeouts=None)
    assert report.tests == ("timeout",) * 4
    assert report.details[0].startswith("more than 0.3 s") and report.details[3].startswith("more than 0.5 s")


def test_many_short_calls_do_not_exceed_the_budget_of_one(tier):
    program = "def f():\n    for _ in range(10**6): pass\n    return 1"
    assert verdict(program, "for _ in range(40): f()", limits=Limits(cpu=0.5, total=60)) is Verdict.PASS


def test_a_test_cannot_turn_a_dead_jail_into_a_pass(tier):
    for way in ("except Exception: pass", "except BaseException: pass", "finally: import sys; sys.exit()"):
        assert verdict("import os\ndef f(): os._exit(0)", f"try: f()\n{way}") is Verdict.CRASH
    again = "for _ in range(3):\n    try: f()\n    except BaseException: pass"
    assert verdict("import os\ndef f(): os._exit(0)", again) is Verdict.CRASH


def test_broken_tests_are_nobodys_fault(tier):
    report = judge(ADD, [Test("assert add(1", ("add",)), Test("pass", (), "import no_such_module")])
    assert report.tests == ("infra_error",) * 2 and not report.valid
    assert verdict(ADD, "assert undefined == add(1, 2)", "add") is Verdict.FAIL
    assert verdict("def f(): return 'a'", "assert f() + 1 == 2") is Verdict.FAIL
    assert verdict(ADD, "import sys; sys.exit(0)", "add") is Verdict.FAIL


def test_interrupts_from_the_keyboard_pass_through(tier):
    with pytest.raises(KeyboardInterrupt):
        judge(ADD, [Test("raise KeyboardInterrupt", ("add",))])
    assert buried(os.getpid())


def test_waiting_for_a_processor_is_not_the_programs_time(tier):
    """The clock of a process that was ready to run all the while does not run; a sleeping one's does."""
    still = {"cpu": lambda: 0.0, "_slept": lambda: 0, "late": 0.0, "limits": Limits(cpu=0.1)}
    with mock.patch.object(Jail, "cpu", lambda jail: 0.0):
        clock = jails._Clock(mock.Mock(**still, _waited=lambda: 0.0), 0.1)
        clock._wall -= 0.31
        time.sleep(jails.TICK)
        assert clock() and clock.verdict.kind == "timeout"
        waited = iter([0.0, 0.25, 0.25])
        clock = jails._Clock(mock.Mock(**still, _waited=lambda: next(waited)), 0.1)
        clock._wall -= 0.31
        time.sleep(jails.TICK)
        assert not clock()
        clock._wall -= 10
        clock._next = 0
        clock._jail._waited = lambda: 10.2
        assert clock() and isinstance(clock.verdict, jails.Starved)


class Late:
    """A channel. Its reader gets a processor ``seconds`` after something came; ``waited``: the kernel's report."""

    def __init__(self, channel, seconds):
        self.channel, self.seconds, self.all = channel, seconds, 0.0

    def __getattr__(self, name):
        return getattr(self.channel, name)

    def recvmsg(self, *args):
        came = self.channel.recvmsg(*args)
        time.sleep(self.seconds)
        self.all += self.seconds
        return came

    def waited(self):
        return self.all


@pytest.mark.parametrize("size", [10, 1_500_000])
def test_a_reply_that_the_judge_reads_late_is_not_late(tier, size):
    """The judge waits for a processor after each piece of the reply, longer in all than the program may take."""
    read, late = Jail._read, []

    def reading(jail, out_of_time):
        if jail.late == 0.0 and jail.pid:  # not while the jail starts
            late.append(Late(jail._channel, 2.0 if size == 10 else 0.6))
            jail._channel = late[-1]
        return read(jail, out_of_time)

    waited = lambda: late[-1].waited() if late else 0.0
    with mock.patch.object(Jail, "_read", reading), mock.patch.object(jails, "waited_here", waited):
        report = judge("def f(n): return 'a' * n", [Test(f"assert f({size}) == 'a' * {size}", ("f",))], Limits(cpu=0.5))
    assert late and late[-1].all > 1.5 and report.tests == ("pass",)


def test_pieces_of_a_reply_gain_no_time():
    """A program that sends single bytes to a judge that is late makes no more of them the machine's time than one."""
    ours, theirs = socket.socketpair()
    jail = Jail.__new__(Jail)
    jail._data, jail.pid, jail.late, jail.limits, jail._channel = bytearray(), 1, 0.0, Limits(), Late(ours, 0.02)
    data = (40).to_bytes(4, "big") + b"x" * 40
    sender = threading.Thread(
        target=lambda: [(theirs.send(data[i : i + 4]), time.sleep(0.05)) for i in range(0, 44, 4)]
    )
    sender.start()
    with mock.patch.object(jails, "waited_here", jail._channel.waited):
        assert jail._read(lambda: False) == b"x" * 40
    sender.join(10)
    assert jail._channel.all > 0.1 and jail.late <= 0.021
    ours.close()
    theirs.close()


def test_the_kernel_says_how_long_a_thread_waited():
    """A thread waits where more processes compute than there are processors."""
    if not os.path.exists("/proc/thread-self/schedstat"):
        pytest.skip("this kernel does not report it")
    before = jails.waited_here()
    assert before >= 0.0
    busy = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(2 * os.cpu_count())]
    end = time.monotonic() + 5
    while jails.waited_here() - before < 0.05 and time.monotonic() < end:
        sum(range(100_000))
    for process in busy:
        process.kill()
        process.wait()
    assert jails.waited_here() - before >= 0.05


def test_a_starved_test_is_tried_once_more(tier):
    for times, expected in {1: Verdict.PASS, 2: Verdict.INFRA_ERROR}.items():
        left, ask = [jails.Starved()] * times, Jail.ask

        def starving(jail, verb, *args, seconds, wall, left=left, ask=ask):
            if verb == "call" and left:
                raise left.pop()
            return ask(jail, verb, *args, seconds=seconds, wall=wall)

        with mock.patch.object(Jail, "ask", starving):
            report = judge(ADD, [Test("assert add(1, 2) == 3", ("add",))])
        assert report.tests == (expected,) and report.valid == (times == 1)


# Honest programs

HONEST = {
    "tuple": ("def f(x): return (x, [x], (x,))", "assert f(1) == (1, [1], (1,)) and type(f(1)) is tuple"),
    "set": ("def f(x): return {x, (x, 1)}", "assert f(2) == {2, (2, 1)} and f(2) | {3} == {3, 2, (2, 1)}"),
    "frozenset": ("def f(x): return {frozenset(x): 1}", "assert f([1]) == {frozenset([1]): 1}"),
    "floats": ("def f(x): return x / 3", "import math\nassert f(1) == 1 / 3 and math.isnan(f(float('nan')))"),
    "infinite float": ("def f(x): return -x", "assert f(float('inf')) == -float('inf')"),
    "None": ("def f(x): pass", "assert f(1) is None"),
    "bool": ("def f(x): return x > 1", "assert f(2) is True and f(1) is False"),
    "big integer": ("def f(n): return 3 ** n", "assert f(5000) == 3 ** 5000 and f(1) == 3"),
    "negative big integer": ("def f(n): return -(3 ** n)", "assert f(500) == -(3 ** 500)"),
    "Counter": ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
    "defaultdict": (
        "from collections import *\ndef f():\n    d = defaultdict(list)\n    d[(1, 2)] += [3]\n    return d",
        "assert f() == {(1, 2): [3]}",
    ),
    "namedtuple": (
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\ndef f(): return P(3)",
        "assert f() == (3,)",
    ),
    "match": (
        "import re\ndef f(s): return re.match('a+$', s)",
        "assert f('aa')\nassert not f('b')\nassert f('a') != True",
    ),
    "generator": ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]\nassert f(3) != [0, 1, 2]"),
    "map": ("def f(s): return map(int, s)", "assert sum(f('123')) == 6"),
    "range": ("def f(n): return range(1, n, 2)", "assert f(9) == range(1, 9, 2)"),
    "keys": ("def f(d): return d.keys()", "assert set(f({1: 2})) == {1}"),
    "bytes": (
        "def f(b): return b[::-1], bytearray(b)",
        "assert f(b'\\xff\\x00') == (b'\\x00\\xff', bytearray(b'\\xff\\x00'))",
    ),
    "complex": ("def f(z): return z * 1j", "assert f(1 + 2j) == -2 + 1j"),
    "text": (
        "def f(s): return s + 'é\\u2028\\x00\\U0001f600'",
        "assert f('\\ud800') == '\\ud800é\\u2028\\x00\\U0001f600'",
    ),
    "keywords": ("def f(a, *, b=1): return a - b", "assert f(5, b=2) == 3 and f(a=5) == 4"),
    "expected exception": (
        "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x",
        "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n    assert 'negative' in str(e)\nassert f(1) == 1",
    ),
    "own exception": (
        "class Bad(KeyError): pass\ndef f(): raise Bad(1)",
        "try: f()\nexcept KeyError: pass\nelse: assert 0",
    ),
    "exception of a decoder": ("def f(): b'\\xff'.decode()", "try: f()\nexcept ValueError: pass\nelse: assert 0"),
    "any exception": (
        "class Bad(Exception): pass\ndef f(): raise Bad",
        "try: f()\nexcept Exception: pass\nelse: assert 0",
    ),
    "division": ("def f(x): return 1 / x", "try: f(0)\nexcept ZeroDivisionError: pass\nelse: assert 0"),
    "state": ("n = 0\ndef f():\n    global n\n    n += 1\n    return n", "assert [f(), f(), f()] == [1, 2, 3]"),
    "print": ("print('hello')\ndef f():\n    print('x' * 10**6)\n    return 1", "assert f() == 1"),
    "dataclass": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass P:\n    x: int\ndef f(): return P(2).x",
        "assert f() == 2",
    ),
    "main guard": ("def f(): return 1\nif __name__ == '__main__': raise SystemExit(f())", "assert f() == 1"),
    "standard library": (
        "import math, re, json, itertools, functools, heapq, bisect, random, datetime, decimal, statistics, hashlib\n"
        "def f(s): return hashlib.md5(s.encode()).hexdigest(), str(decimal.Decimal('1') / 8)",
        "assert f('Hello world') == ('3e25960a79dbc69b674cd4ec67a72c62', '0.125')",
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(20000)\ndef f(n): return n and 1 + f(n - 1)",
        "assert f(9000) == 9000",
    ),
    "class inside": (
        "class Stack(list):\n    pass\ndef f(x):\n    s = Stack()\n    s.append(x)\n    return s",
        "assert f(1) == [1]",
    ),
    "class method": (
        "class S:\n    @staticmethod\n    def f(x): return x\nf = S.f",
        "assert f({'a': [None]}) == {'a': [None]}",
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_programs_pass(name, tier):
    program, test = HONEST[name]
    report = judge(program, [Test(test, ("f",))])
    assert report.tests == (Verdict.PASS,), report
    with_flaw = judge(program, [Test(f"{test}\nassert False, 'flaw'", ("f",))])
    assert with_flaw.tests == (Verdict.FAIL,) and "flaw" in with_flaw.details[0]  # the test is run to its end


def test_threads_and_files_of_its_own_work_in_bubblewrap(monkeypatch):
    if "bwrap" not in WORKING:
        pytest.skip(REFUSALS["bwrap"])
    monkeypatch.setattr(sandbox, "_known", {False: "bwrap"})
    program = """
import threading, tempfile
def f():
    out = []
    threads = [threading.Thread(target=out.append, args=(i,)) for i in range(4)]
    [t.start() for t in threads]; [t.join() for t in threads]
    with tempfile.TemporaryFile("w+") as file:
        file.write("text"); file.seek(0)
        return sorted(out), file.read()
"""
    assert verdict(program, "assert f() == ([0, 1, 2, 3], 'text')") is Verdict.PASS


def test_setup_is_trusted_and_the_programs_functions_replace_its_own(tier):
    setup = "def poly(xs, x): return sum(c * x**i for i, c in enumerate(xs))\ndef f(xs): return 'the stub'"
    program = "def poly(xs, x): return 0\ndef f(xs): return -xs[0] / xs[1]"
    assert verdict(program, "assert abs(poly([1, 2], f([1, 2]))) < 1e-4", setup=setup) is Verdict.PASS
    assert verdict(program.replace("-xs", "xs"), "assert abs(poly([1, 2], f([1, 2]))) < 1e-4", setup=setup) == "fail"


def test_arguments_that_cannot_cross(tier):
    report = judge("def f(x): return x", [Test("f(lambda: 1)", ("f",))])
    assert report.tests == ("fail",) and "argument of f is no plain data" in report.details[0]


# The codec

NESTED = (
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text()
        | st.binary()
        | st.complex_numbers(allow_nan=False),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.integers() | st.text(), inner),
        max_leaves=20,
    )
    | st.sets(st.integers() | st.text())
    | st.frozensets(st.tuples(st.integers(), st.text()))
)


@given(NESTED)
def test_plain_data_come_back_equal_and_of_equal_type(value):
    back = codec.plain(codec.decode(child.encode(value).encode()))
    assert back == value and type(back) is type(value)
    assert repr(sorted(map(repr, back)) if isinstance(back, (set, frozenset)) else back) == repr(
        sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
    )


@given(
    st.binary()
    | st.text().map(str.encode)
    | st.recursive(
        st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from([*codec._BUILD]), x, max_size=2),
    ).map(lambda v: json.dumps(v).encode())
)
def test_whatever_comes_is_decoded_or_refused(data):
    try:
        value = codec.plain(codec.decode(data))
    except codec.ProtocolError:
        return
    allowed = (
        bool,
        int,
        float,
        str,
        list,
        tuple,
        set,
        frozenset,
        dict,
        bytes,
        bytearray,
        complex,
        range,
        object,
        type(None),
        type(iter([])),
    )
    assert type(value) in allowed


@pytest.mark.parametrize(
    "values",
    [
        [k * (2**61 - 1) for k in range(1000)],
        [(k * (2**61 - 1),) for k in range(1000)],
        [[k * (2**61 - 1), "a"] for k in range(1000)],
        [complex(-1000003 * k, k) for k in range(1000)],
        {k * (2**61 - 1): 0 for k in range(1000)},
    ],
)
def test_values_chosen_to_have_one_hash_are_refused(values):
    with pytest.raises(codec.ProtocolError, match="one hash"):
        codec.plain(codec.decode(child.encode(values).encode()))


def test_nests_of_sets_are_cheap_or_refused():
    nest = '{"f":[' * 40 + ",".join(map(str, range(5_000))) + "]}" * 40
    assert type(codec.plain(codec.decode(nest.encode()))) is frozenset  # no step may double the work for each level
    nest = '{"f":[' * 60 + ",".join(map(str, range(90_000))) + "]}" * 60
    start = time.process_time()
    with pytest.raises(codec.ProtocolError, match="nested too deep"):
        codec.plain(codec.decode(nest.encode()))
    assert time.process_time() - start < 20  # many minutes otherwise


@pytest.mark.parametrize(
    "values", [[7] * 9999, [2**70] * 999, [(1, "a")] * 999, [0.5, 1e300] * 999, list(range(9999)), [[]] * 999]
)
def test_many_equal_values_are_no_crowd(values):
    assert codec.plain(codec.decode(child.encode(values).encode())) == values


# Tiers


def test_probe_says_what_is_missing_and_never_falls_back(monkeypatch):
    monkeypatch.setattr(sandbox, "_known", {})
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(seccomp, "seccomp_filter", lambda: None)
    with pytest.raises(sandbox.SandboxUnavailable) as caught:
        sandbox.probe()
    assert isinstance(caught.value, ConfigError)
    message = str(caught.value)
    assert "\n" not in message and "apt-get install bubblewrap" in message
    assert "bwrap: " in message and "landlock: no seccomp filter for" in message
    with pytest.raises(sandbox.SandboxUnavailable):
        judge(ADD, [Test("pass", ("add",))])
    with pytest.raises(sandbox.SandboxUnavailable):
        sandbox.describe()
    assert sandbox.probe(unsafe=True) == "unsafe" and "UNSAFE" in sandbox.describe(unsafe=True)
    assert judge(ADD, [Test("assert add(1, 2) == 3", ("add",))], unsafe=True).passed == 1


def test_what_could_work_here_does():
    """Otherwise a tier that a change has broken would only be skipped."""
    bare = ["bwrap", "--unshare-net", "--ro-bind", "/", "/", "true"]
    if shutil.which("bwrap") and subprocess.run(bare, capture_output=True, check=False).returncode == 0:
        assert REFUSALS["bwrap"] == ""
    if seccomp.seccomp_filter() and ctypes.CDLL(None).syscall(444, None, 0, 1) > 0:  # the version of Landlock
        assert REFUSALS["landlock"] == ""


@pytest.mark.skipif("bwrap" not in WORKING, reason=REFUSALS["bwrap"])
def test_bubblewrap_without_seccomp(host, monkeypatch):
    """Namespaces and rlimits hold alone, and the line of the log says that they are alone."""
    aim, unharmed = host
    monkeypatch.setattr(sandbox, "_known", {})
    monkeypatch.setattr(seccomp, "seccomp_filter", lambda: None)
    assert sandbox.examine("bwrap") == "" and sandbox.describe().endswith("seccomp=off net=off")
    for name in (
        "fork bomb that catches",
        "daemon",
        "loopback",
        "kills the judge",
        "mount",
        "thread bomb",
        "subprocess",
    ):
        report = judge(aim(name), [Test(hostile_programs.TEST, ("f",))], QUICK)
        assert (
            str(report.tests[0]) in hostile_programs.EVERYTHING[name].verdicts.split()
            and "LEAK" not in report.details[0]
        )
        unharmed()


def test_unsafe_prefers_a_tier_that_works():
    if not WORKING:
        pytest.skip(str(REFUSALS))
    with mock.patch.object(sandbox, "_known", {}):
        assert sandbox.probe(unsafe=True) == sandbox.probe() == WORKING[0]
        assert sandbox.describe().startswith(f"sandbox: tier={WORKING[0]} uid=")
        assert sandbox.describe().endswith("seccomp=on net=off" if seccomp.seccomp_filter() else "seccomp=off net=off")


def test_the_probe_is_cached(monkeypatch):
    monkeypatch.setattr(sandbox, "_known", {})
    with mock.patch.object(sandbox, "examine", return_value="broken") as examine:
        for _ in range(3):
            with pytest.raises(sandbox.SandboxUnavailable, match="broken"):
                sandbox.probe()
    assert examine.call_count == len(sandbox.TIERS)


@pytest.mark.parametrize("what", ["reading outside", "writing outside", "the network"])
def test_a_tier_with_a_hole_is_not_used(what, tier, monkeypatch):
    """The probe looks at what a tier does, not at what it is called."""
    real, command = command_line.readable(), command_line.bwrap_command

    def opened(*args):
        words = command(*args)
        at = words.index(command_line.interpreter(), words.index("--chdir"))
        if what == "the network":
            return [word for word in words if word != "--unshare-net"]
        return [*words[:at], "--bind", "/tmp", "/tmp", *words[at:]]

    if tier == "bwrap":
        monkeypatch.setattr(command_line, "bwrap_command", opened)
        source = command_line.SOURCE.replace('if how["tmp"] is not None:', "if False:")  # it would cover the hole
        assert source != command_line.SOURCE
        monkeypatch.setattr(command_line, "SOURCE", source)
        if what == "writing outside":
            monkeypatch.setattr(sandbox, "_LOOK", sandbox._LOOK.replace("open(path)", "open('/none')"))
        if what == "the network":
            monkeypatch.setattr(seccomp, "seccomp_filter", lambda: None)
    elif what == "the network":
        pytest.skip("Landlock and seccomp both refuse it")
    else:
        monkeypatch.setattr(command_line, "readable", lambda: (*real, "/tmp"))
        if what == "writing outside":
            source = command_line.SOURCE.replace("allowed = execute", "allowed = rights if path == '/tmp' else execute")
            assert source != command_line.SOURCE
            monkeypatch.setattr(command_line, "SOURCE", source)
            monkeypatch.setattr(sandbox, "_LOOK", sandbox._LOOK.replace("open(path)", "open('/none')"))
    assert sandbox.examine(tier) == f"{what} is not refused"


def test_a_judge_that_is_killed_leaves_no_jail(tier):
    script = f"""
import sys, threading, os, time
sys.path.insert(0, {str(ROOT)!r})
from jaxmarl_llm.sandbox import judge as sandbox
sandbox._known = {{False: {tier!r}}}
def tell():
    time.sleep(0.8)
    print("up", flush=True)
threading.Thread(target=tell, daemon=True).start()
sandbox.judge("while True: pass", [], sandbox.Limits(cpu=60, total=60))
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    assert len(hostile_programs.survivors(process.pid)) >= 1
    process.kill()
    process.wait()
    process.stdout.close()
    assert buried(process.pid)


def test_no_descriptor_is_left_open(tier):
    judge(ADD, [Test("add(1, 2)", ("add",))])
    before = len(os.listdir("/proc/self/fd"))
    for program in (ADD, "x=", "import os; os._exit(0)"):
        judge(program, [Test("add(1, 2)", ("add",))])
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_jail_that_cannot_start_is_an_infra_error(tier, monkeypatch):
    monkeypatch.setattr(command_line, "SOURCE", "raise SystemExit('broken interpreter')")
    with pytest.raises(Stopped) as caught:
        Jail(tier, QUICK)
    assert caught.value.kind == "infra_error" and "broken interpreter" in caught.value.detail
    report = judge(ADD, [Test("pass", ("add",))])
    assert report.load is Verdict.INFRA_ERROR and not report.valid


# Reference solutions


@pytest.mark.slow
@pytest.mark.skipif(not (FULL / "humaneval").is_dir(), reason=f"{FULL}/humaneval is absent")
@needs_a_tier
def test_humaneval():
    from experiments.sandbox import check as sandbox_check

    reports = {
        name: judge(program, tests, sandbox_check.REFERENCE_LIMITS)
        for name, program, tests in sandbox_check.humaneval(FULL)
    }
    assert len(reports) == 164
    assert {n: r for n, r in reports.items() if r.passed != len(r.tests)} == {}


@pytest.mark.slow
@pytest.mark.skipif(not (FULL / "mbpp").is_dir(), reason=f"{FULL}/mbpp is absent")
@needs_a_tier
def test_mbpp():
    from experiments.sandbox import check as sandbox_check

    reports = {
        name: judge(program, tests, sandbox_check.REFERENCE_LIMITS) for name, program, tests in sandbox_check.mbpp(FULL)
    }
    assert len(reports) == 427
    assert {n: r for n, r in reports.items() if r.passed != len(r.tests)} == {}
