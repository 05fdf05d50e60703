"""One kill: start a run, kill it at a moment that a seed names, resume it to the end, and compare."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.kills.compare import differences
from experiments.kills.kinds import STAGES
from jaxmarl_llm.distributed.signals import EXIT_RETRY
from jaxmarl_llm.errors import RunError

ROOT = Path(__file__).parents[2]
EVENTS = ("rollout", "held_out", "update", "save", "step")  # lines of events.txt after whose beginning a kill comes
MOMENTS = ("time", "half a save", "stage", *EVENTS)
MOST = 1800.0  # seconds that a run may take before this command gives it up
PATIENCE = 120.0  # seconds in which the other processes of a run, and its workers, have to end
FLAGS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"


class Unbroken(NamedTuple):
    """A run that nothing stopped."""

    workdir: Path
    seconds: float


class Kill(NamedTuple):
    """A kill and what came of it."""

    kind: str
    number: int
    moment: str  # in words
    landed: bool  # the run had not ended before
    in_save: bool  # a checkpoint was half written
    step: int  # completed steps when it was killed
    resumed: int  # newest checkpoint, from which the run went on; 0: from the start
    problems: list[str]


class Processes:
    """The processes of one run, which this object alone starts and ends.

    kind: of `KINDS`. workdir: of the run. cache: folder of compiled programs.
    """

    def __init__(self, kind: str, workdir: Path, cache: Path):
        self.kind = kind
        self.count = 2 if kind == "two processes" else 1
        config = f"{ROOT}/experiments/kills/kinds.py:{kind.replace(' ', '_')}"
        command = [sys.executable, "-m", "experiments.kills.train", f"--config={config}", f"--workdir={workdir}"]
        command += [f"--compilation_cache={cache}"]
        more: list[list[str]] = [[]]
        if self.count > 1:
            place = [f"--coordinator={_address()}", f"--processes={self.count}", f"--init_timeout={PATIENCE}"]
            more = [[*place, f"--process={i}"] for i in range(self.count)]
        devices = f"--xla_force_host_platform_device_count={2 if self.count > 1 else 1}"
        own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{devices} {FLAGS}", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, **own, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
        self.log = workdir.with_suffix(".log")
        with open(self.log, "ab") as out:
            # A session of its own for each: its processes are then known, workers included.
            self.all = [
                subprocess.Popen([*command, *words], env=env, stdout=out, stderr=out, start_new_session=True)
                for words in more
            ]

    def alive(self) -> bool:
        """Whether no process has ended."""
        return all(process.poll() is None for process in self.all)

    def codes(self, seconds: float) -> list[int]:
        """Exit codes; a process that takes longer is killed."""
        end = time.monotonic() + seconds
        for process in self.all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.1))
        late = [process for process in self.all if process.poll() is None]
        for process in late:
            process.kill()
            process.wait()
        return [process.returncode for process in self.all]

    def survivors(self, seconds: float) -> list[int]:
        """Processes of these sessions that are alive after ``seconds``; they are killed."""
        sessions, end = {process.pid for process in self.all}, time.monotonic() + seconds
        while (left := [pid for pid, session in _sessions() if session in sessions]) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def end(self) -> None:
        """Kill what is still there."""
        self.codes(0)
        self.survivors(0)


def _address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def _sessions() -> Iterator[tuple[int, int]]:
    """Living processes of this machine and their sessions."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = file.read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                yield int(file.parent.name), int(session)


def unbroken(kind: str, work: Path) -> Unbroken:
    """Run a kind from start to end twice, unless that was done: the first run compiles, the second takes the time.

    work: folder of the runs. Both runs have to be equal.
    """
    workdir, took = work / kind.replace(" ", "_"), work / f"{kind.replace(' ', '_')}.seconds"
    if not took.exists():
        for target in (work / "first", workdir):
            shutil.rmtree(target, ignore_errors=True)
            start = time.monotonic()
            _to_the_end(kind, target, work / "cache")
        took.write_text(f"{time.monotonic() - start:.1f}")
        if problems := differences(work / "first", workdir):
            raise RunError(f"{kind}: two runs that nothing stopped differ: {'; '.join(problems[:3])}")
        shutil.rmtree(work / "first")
    return Unbroken(workdir, float(took.read_text()))


def _to_the_end(kind: str, workdir: Path, cache: Path) -> None:
    run = Processes(kind, workdir, cache)
    try:
        codes = run.codes(MOST)
        left = run.survivors(PATIENCE)
    finally:
        run.end()
    if any(codes) or left:
        raise RunError(f"{kind}: exit codes {codes}, {len(left)} processes left; see {run.log}")


def kill(kind: str, number: int, seed: int, whole: Unbroken, work: Path) -> Kill:
    """Make the kill that ``kind``, ``number`` and ``seed`` name. whole: the run to compare with."""
    rng = random.Random(zlib.crc32(f"{kind} {number} {seed}".encode()))
    workdir = work / f"{kind.replace(' ', '_')}_{number}"
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.with_suffix(".log").unlink(missing_ok=True)
    run = Processes(kind, workdir, work / "cache")
    try:
        said = _wait(rng, run, workdir, whole)
        landed, victim = run.alive(), rng.choice(run.all)
        victim.kill()
        in_save = any((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp"))
        codes = run.codes(PATIENCE)
        problems = [] if not run.survivors(PATIENCE) else ["processes outlived the killed one"]
    finally:
        run.end()
    if landed and sorted(codes) != sorted([-signal.SIGKILL] + [EXIT_RETRY] * (run.count - 1)):
        problems.append(f"exit codes {codes} after the kill")
    steps = [int(p.name) for p in (workdir / "checkpoints").glob("[0-9]*") if p.name.isdigit()]
    done = [int(line.split()[1]) for line in _lines(workdir / "events0.txt") if line.startswith("step ")]
    try:
        _to_the_end(kind, workdir, work / "cache")
        problems += differences(whole.workdir, workdir)
    except RunError as error:
        problems.append(str(error))
    if not problems:
        shutil.rmtree(workdir)
    return Kill(kind, number, said, landed, in_save, max(done, default=0), max(steps, default=0), problems)


def _wait(rng: random.Random, run: Processes, workdir: Path, whole: Unbroken) -> str:
    """Wait until a random moment, or until the run has ended. Returns the moment in words."""
    moment, said = rng.choice(MOMENTS), ""
    events = lambda folder: _lines(folder / "events0.txt")
    if moment == "time":
        seconds = rng.uniform(0.02, 0.95) * whole.seconds
        end = time.monotonic() + seconds
        there, said = lambda: time.monotonic() >= end, f"after {seconds:.1f} s"
    elif moment == "half a save":
        half: set[Path] = set()
        most = len(list((whole.workdir / "checkpoints").glob("[0-9]*")))
        at = rng.randrange(most) + 1

        def there() -> bool:
            half.update((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp"))
            return len(half) >= at

        said = f"while save {at} is half written"
    else:
        line = f"step {rng.choice(STAGES[run.kind])}" if moment == "stage" else moment
        count = lambda folder: sum(f"{event} ".startswith(f"{line} ") for event in events(folder))
        at = rng.randrange(count(whole.workdir)) + 1
        there, said = lambda: count(workdir) >= at, f"at '{line}', time {at}"
    while run.alive() and not there():
        time.sleep(0.001)
    pause = 0.0 if moment == "time" else rng.choice([0.0, rng.uniform(0, 0.02), rng.uniform(0, 0.3)])
    time.sleep(pause)
    return said + (f", {1000 * pause:.0f} ms later" if pause else "")


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
