"""Running of cases: what a reader does with a mutated file, how long it takes and how much memory it takes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.fuzz_readers.kinds import KINDS, Files
from jaxmarl_llm.errors import ConfigError

SECONDS, MEGABYTES = 5.0, 200
HANG = 90.0  # seconds of wall time after which a process without an answer is killed: the machine may be busy
LOADED, REFUSED, TRACEBACK, SLOW, MEMORY = "loaded", "one line", "traceback", "too slow", "too much memory"
OUTCOMES = (LOADED, REFUSED, TRACEBACK, SLOW, MEMORY)


class Case(NamedTuple):
    """A case and what came of it."""

    kind: str
    number: int
    what: str  # the mutation
    outcome: str
    said: str  # message of the error
    seconds: float  # of CPU: the machine may be busy
    megabytes: float


def mutated(kind: str, seed: int, number: int) -> tuple[str, Files]:
    """Return the files of a case, which the arguments name exactly."""
    rng = random.Random(zlib.crc32(f"{kind} {seed} {number}".encode()))
    return KINDS[kind].mutate(rng, dict(KINDS[kind].whole()))


def run_case(kind: str, seed: int, number: int) -> Case:
    """Write the files of a case and read them."""
    what, files = mutated(kind, seed, number)
    folder = Path(tempfile.mkdtemp())
    try:
        for name, raw in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(raw)
        del files
        before, clock = start_peak(), time.process_time()
        outcome, said = read(kind, folder)
        seconds, grown = time.process_time() - clock, peak() - before
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if outcome in (LOADED, REFUSED):
        outcome = SLOW if seconds > SECONDS else MEMORY if grown > MEGABYTES else outcome
    return Case(kind, number, what[:200], outcome, said, seconds, grown)


def read(kind: str, folder: Path) -> tuple[str, str]:
    """Call a reader. A `ConfigError` counts as one line only if its text is one line that names the file."""
    try:
        KINDS[kind].read(folder)
    except ConfigError as error:
        text = str(error)
        text.encode()  # a terminal can show it
        fits = text.isprintable() and len(text) <= 500 + len(str(folder)) and str(folder) in text
        return (REFUSED if fits else TRACEBACK), text
    except MemoryError:
        return MEMORY, "MemoryError"
    except BaseException as error:  # a panic of a Rust library is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return TRACEBACK, traceback.format_exc(limit=-3)[-1500:]
    return LOADED, ""


def start_peak() -> float:
    """Begin a new measurement of the largest resident memory; return what is resident now, in MB."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> float:
    """Return the largest resident memory since `start_peak`, in MB."""
    return status("VmHWM")


def status(name: str) -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) / 1024


def work(kind: str, seed: int, first: int, last: int) -> None:
    """Run cases in this process and write each as a line of JSON. A process of its own may hang or be killed."""
    with open(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what libraries print is no answer
        run_case(kind, seed, first)  # imports and compiles, unmeasured
        room = int(status("VmData") * 2**20) + 2 * 2**30
        resource.setrlimit(resource.RLIMIT_DATA, (room, room))
        for number in range(first, last):
            print(json.dumps(run_case(kind, seed, number)), file=out, flush=True)


def run_kind(kind: str, seed: int, count: int) -> Iterator[Case]:
    """Run the cases of a reader in processes that are replaced when they hang or die."""
    number = 0
    while number < count:
        module = "experiments.fuzz_readers"
        command = [sys.executable, "-m", module, f"--work={kind}", f"--seed={seed}", f"--range={number},{count}"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, env=environment
        )
        limit = HANG + 60  # the first answer waits for imports
        try:
            while (line := next_line(process, limit)) is not None:
                yield Case(*json.loads(line))
                number, limit = number + 1, HANG
        finally:
            process.kill()
            process.wait()
        if number < count:
            hung = process.returncode == -9
            what = mutated(kind, seed, number)[0][:200]
            said = "no answer" if hung else f"the process ended with {process.returncode}"
            yield Case(kind, number, what, SLOW if hung else TRACEBACK, said, HANG, 0.0)
            number += 1


def next_line(process: subprocess.Popen[Any], limit: float) -> bytes | None:
    """Return the next line that a process writes; None at its end, or when it took longer than the limit."""
    import select

    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], limit)
    line = process.stdout.readline() if ready else b""
    if not line and ready:
        process.wait()
    return line or None
