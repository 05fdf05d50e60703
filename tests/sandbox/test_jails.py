"""What each tier confines, cell by cell of the table in docs/sandbox.md."""

import contextlib
import dataclasses
import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.sandbox import hostile_programs
from jaxmarl_llm.sandbox import command_line, seccomp
from jaxmarl_llm.sandbox import judge as sandbox
from jaxmarl_llm.sandbox.judge import Limits, Test, Verdict, judge

ROOT = Path(__file__).parents[2]
REFUSALS = {tier: sandbox.examine(tier) for tier in sandbox.TIERS}
QUICK = Limits(cpu=0.5, total=1.5, wall=5.0, memory_mb=256)
ODD = 4000  # an error number that no call of the kernel returns
needs_filter = pytest.mark.skipif(seccomp.seccomp_filter() is None, reason="no filter for this architecture")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can take another user id")


@pytest.fixture(params=sandbox.TIERS)
def tier(request, monkeypatch):
    if REFUSALS[request.param]:
        pytest.skip(f"{request.param}: {REFUSALS[request.param]}")
    monkeypatch.setattr(sandbox, "_known", {False: request.param})
    return request.param


@contextlib.contextmanager
def session_of(tier, program, limits=QUICK):
    session = sandbox._Session(tier, program, limits)
    with contextlib.closing(session):
        assert session.load() == (Verdict.PASS, "")
        yield session


# The filter, asked by running programs

UNDER_FILTER = """
import ctypes, sys
sys.path.insert(0, {root!r})
from jaxmarl_llm.sandbox import child, seccomp
libc = ctypes.CDLL(None, use_errno=True)
child.prctl(38, 1)
child.install(seccomp.seccomp_filter({odd}))
def error(number, *args):
    ctypes.set_errno(0)
    libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, args))
    return ctypes.get_errno()
"""


def under_filter(code):
    done = subprocess.run(
        [sys.executable, "-S", "-c", UNDER_FILTER.format(root=str(ROOT), odd=ODD) + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


@needs_filter
def test_every_call_of_the_kernel_that_is_not_on_the_list_is_refused():
    """Every number is called, whatever its name. A kernel that is newer than the list adds calls and opens nothing."""
    machine = os.uname().machine
    on_list = {*seccomp.allowed(machine).values()}
    # Linux 6.14 and later let uretprobe and uprobe pass every filter. Outside a probe they end the process.
    on_list |= {335, 336} if machine == "x86_64" else set()
    asked = on_list | {row[1][seccomp._COLUMN[machine] - 1] for row in seccomp._CONDITIONAL}
    answers = under_filter(f"print({{n: error(n, -1, -1, -1, -1, -1, -1) for n in range(1024) if n not in {asked}}})")
    assert len(answers) == 1024 - len(asked) and 463 in answers and 469 in answers
    assert {number: error for number, error in answers.items() if error != ODD} == {}
    assert len(asked) < 120
    harmless = {"getpid", "getppid", "getuid", "gettid", "getcpu", "uname", "umask", "times"} & {
        *seccomp.allowed(machine)
    }
    passed = under_filter(f"print({{n: error(n) for n in {[seccomp.allowed(machine)[n] for n in harmless]}}})")
    assert len(passed) >= 8 and ODD not in passed.values()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86-64")
def test_arguments_decide_about_a_few_calls():
    flags = {"thread and user": 0x10010000, "process": 17, "none": 0, "vfork": 0x4111, "new pid": 0x20000000}
    answers = under_filter(f"""
out = {{}}
for option in range(1, 80): out["prctl", option] = error(157, option, -1, -1, -1, -1)
for command in (0, 1, 2, 3, 5, 6, 7, 8, 10, 15, 36, 37, 38, 1024, 1026, 1030, 1031, 1032, 1033):
    out["fcntl", command] = error(72, -1, command, 0)
for request in (0x5401, 0x5413, 0x541B, 0x5412, 0x541C, 0x40086602, 0x401C5820, 0x8901, 0x5412 + (1 << 40)):
    out["ioctl", request] = error(16, -1, request, 0)
for pid in (0, 1): out["prlimit64", pid] = error(302, pid, 7, 0, 0)
for name, flag in {flags}.items(): out["clone", name] = error(56, flag, 0, 0, 0, 0)
print(out)
""")
    granted = {key for key, error in answers.items() if error != ODD}
    assert granted == {
        *(("prctl", option) for option in (3, 15, 16, 21, 39)),
        *(("fcntl", command) for command in (0, 1, 2, 3, 1030, 1032)),
        *(("ioctl", request) for request in (0x5401, 0x5413, 0x541B)),
        ("prlimit64", 0),
    }


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x32 is an interface of x86-64")
def test_a_call_of_another_interface_ends_the_process(tier):
    program = "import ctypes\ndef f(n): return ctypes.CDLL(None).syscall(n)"
    tests = [Test("assert f(39) > 0", ("f",)), Test("f(0x40000027)", ("f",))]
    assert judge(program, tests, QUICK).tests == ("pass", "crash")


def test_the_numbers_are_those_of_the_kernels_headers():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.is_file():
        pytest.skip(f"{header} is absent")
    numbers = {name: int(n) for name, n in re.findall(r"#define __NR_(\w+) (\d+)", header.read_text())}
    names = {name: number for name, (number, _), *_ in seccomp._CONDITIONAL} | seccomp.allowed("x86_64")
    assert names == {name: numbers[name] for name in names}
    assert seccomp._CLONE[0] == numbers["clone"]


def test_the_errors_let_libraries_take_their_other_way(tier):
    program = """
import os, shutil, threading
def f(path):
    errors = []
    for act in (lambda: os.listxattr("/"), lambda: os.kill(os.getpid(), 0), lambda: os.eventfd(0)):
        try: act()
        except OSError as error: errors.append(error.errno)
        except AttributeError: errors.append(1)
    thread = threading.Thread(target=errors.append, args=(0,))
    thread.start(); thread.join()
    return errors
"""
    expected = [errno.ENOTSUP, errno.EPERM, errno.EPERM, 0]
    assert judge(program, [Test(f"assert f('') == {expected}", ("f",))], QUICK).passed == 1


# Processes and users


DISOBEYS = "import ctypes, time\nlibc = ctypes.CDLL(None)\nlibc.prctl(1, 0, 0, 0, 0)\nwhile True: time.sleep(60)"
KILLED = """
import sys
sys.path.insert(0, {root!r})
from jaxmarl_llm.sandbox import jails, judge as sandbox
session = sandbox._Session({tier!r}, "import ctypes, time", sandbox.Limits(cpu=60, total=60, wall=200))
session.load()
print(session._jail.pid, flush=True)
session._jail.ask("load", {program!r}, seconds=60)
"""


def test_no_program_outlives_its_judge(tier):
    script = KILLED.format(root=str(ROOT), tier=tier, program=DISOBEYS)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    jail = int(process.stdout.readline())
    deadline = time.monotonic() + 30
    while "nanosleep" not in Path(f"/proc/{jail}/wchan").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)  # until the program has asked to outlive its judge
    assert jail in hostile_programs.survivors(process.pid)
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 10
    while not (over := dead(jail)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if not over:
        os.kill(jail, 9)
    assert over


def dead(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


THREADS = """
import threading, time
def f():
    started = 0
    try:
        for _ in range(200):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            started += 1
    except RuntimeError: pass
    return started
"""


def test_threads_are_limited(tier):
    with session_of(tier, THREADS) as session:
        assert 1 <= session._call("f") < QUICK.threads


@needs_root
def test_a_jail_of_root_has_a_user_id_of_its_own(tier):
    with session_of(tier, "import os\ndef f(): return os.getresuid() + os.getresgid(), os.getgroups()") as session:
        status = Path(f"/proc/{session._jail.pid}/status").read_text()
        assert session._call("f") == ((command_line.jail_uid(),) * 6, [])
    capabilities = int(re.search(r"CapEff:\s*(\w+)", status)[1], 16)
    assert capabilities == (command_line.capabilities() if tier == "landlock" else 0) in (0, 4)
    assert f"uid={command_line.jail_uid()} " in sandbox.describe()


# Files


SEES = """
import os
def names(path): return sorted(os.listdir(path))
def size(path): return os.stat(path).st_size
def read(path):
    with open(path, "rb") as file: return len(file.read(10))
def count(kind):
    n = 0
    try:
        for n in range(5000):
            if kind == "file": os.close(os.open(f"/tmp/{n}", os.O_CREAT))
            if kind == "folder": os.mkdir(f"/tmp/{n}")
            if kind == "link": os.symlink("a", f"/tmp/{n}")
            if kind == "hard": os.close(os.open("/tmp/a", os.O_CREAT)) if n == 0 else os.link("/tmp/a", f"/tmp/{n}")
    except OSError: pass
    return n
"""


@pytest.mark.parametrize("kind", ["file", "folder", "link", "hard"])
def test_files_without_contents_are_counted(tier, kind):
    with session_of(tier, SEES) as session:
        count = session._call("count", kind)
    assert 900 <= count <= QUICK.files if tier == "bwrap" else count == 0


def test_a_jail_without_tmp_writes_nothing(tier):
    with session_of(tier, SEES, dataclasses.replace(QUICK, tmp_mb=0)) as session:
        assert session._call("count", "file") == 0


def test_nothing_but_the_interpreter_and_its_library_is_read(tier):
    stdlib = command_line.library()[0]
    outside = ["/etc/passwd", "/etc/os-release", "/proc/self/status", "/proc/version", "/sys/kernel/notes", __file__]
    outside += [str(p) for p in Path("/usr/lib/python3/dist-packages").glob("*.py")][:1]
    outside += [str(p) for p in list(Path(stdlib, "site-packages").rglob("*.py"))[:1]]
    outside = [path for path in outside if os.path.exists(path)]
    folders = [
        f"{stdlib}/site-packages",
        f"{stdlib}/ensurepip",
        "/usr/lib/python3/dist-packages",
        "/usr/share",
        "/etc/ssl",
        str(ROOT),
    ]
    with session_of(tier, SEES) as session:
        assert session._call("read", f"{stdlib}/os.py") == 10
        assert session._call("size", f"{stdlib}/os.py") > 10
        for path in outside:
            with pytest.raises(OSError):
                session._call("read", path)
        for folder in folders:
            with contextlib.suppress(OSError):
                assert session._call("names", folder) == []
    assert len(outside) >= 5


def test_sizes_of_files_outside(tier, tmp_path):
    """bubblewrap hides them. Landlock cannot: whoever may enter the folder sees the size, but never the contents."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    file = tmp_path / "file"
    file.write_text("12345")
    with session_of(tier, SEES) as session:
        if tier == "bwrap":
            with pytest.raises(FileNotFoundError):
                session._call("size", str(file))
        else:
            assert session._call("size", str(file)) == 5
        with pytest.raises(OSError):
            session._call("read", str(file))


LOCKS = """
import ctypes, fcntl, os
def f(kind):
    file = os.open(os.__file__, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if kind == "flock": fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if kind == "lockf": fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    if kind == "lease": fcntl.fcntl(file, 1024, 0)
    if kind == "notify": fcntl.fcntl(os.open("/", 0), 1026, 1)
    if kind == "inotify" and libc.inotify_init1(0) < 0: raise OSError(ctypes.get_errno(), "")
    if kind == "timer" and libc.syscall(222, 1, None, ctypes.create_string_buffer(8)) < 0: raise OSError(1, "")
    return 1
"""


@needs_filter
@pytest.mark.parametrize("kind", ["flock", "lockf", "lease", "notify", "inotify", "timer"])
def test_locks_watches_and_timers_are_refused(tier, kind):
    with session_of(tier, LOCKS) as session:
        assert session._call("f", "") == 1
        with pytest.raises(PermissionError):
            session._call("f", kind)
