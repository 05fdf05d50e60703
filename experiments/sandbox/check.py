"""Check whether the verdicts of the sandbox are correct and repeatable, also on an overloaded machine.

    python -m experiments.sandbox.check [--data=DIR] [--tier=TIER] [--repeats=5] [--oversubscribe=4] [--workers=0]

It runs the programs of `hostile_programs` ``--repeats`` times. With ``--data`` it also runs the reference solutions of
HumanEval and MBPP (sanitised) below DIR. At the same time it runs ``--oversubscribe`` busy processes for each
processor. ``--workers`` is the number of parallel judges; 0 means one for each processor. ``--limit`` judges a part.

It prints counts, times, and every program with a wrong verdict or with different verdicts. The exit code is 1 if there
is such a program, one without a verdict, a change outside, or a process that is left.
"""

from __future__ import annotations

import collections
import concurrent.futures
import gzip
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from absl import flags

from experiments.sandbox import hostile_programs
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.sandbox import judge as sandbox
from jaxmarl_llm.sandbox.judge import Limits, Test

FLAGS = flags.FLAGS
HOSTILE_LIMITS = Limits(cpu=1.0, total=3.0, wall=4.0, memory_mb=256)
REFERENCE_LIMITS = Limits(
    cpu=30.0, total=90.0, wall=270.0
)  # whether they are right is the question: MBPP/123 takes 5 s
# Verdicts of these depend on which of two limits is met first, so only that they do not pass is compared.
RACES = {name for name, program in hostile_programs.EVERYTHING.items() if len(program.verdicts.split()) > 1}

Case = tuple[str, str, list[Test]]  # name, program, tests


def humaneval(folder: Path) -> Iterator[Case]:
    """The 164 tasks with their reference solutions. The helper functions in a prompt are trusted, because the test
    calls them.
    """
    path = next(Path(folder).glob("humaneval/*.jsonl.gz"))
    for line in gzip.decompress(path.read_bytes()).splitlines():
        task = json.loads(line)
        name = task["entry_point"]
        test = Test(f"{task['test']}\ncheck({name})", (name,), task["prompt"])
        yield task["task_id"], task["prompt"] + task["canonical_solution"], [test]


def mbpp(folder: Path) -> Iterator[Case]:
    """The 427 tasks of sanitised MBPP with their reference solutions, with one test for each assertion."""
    for task in json.loads(Path(folder, "mbpp/sanitized-mbpp.json").read_text("utf-8")):
        defined = set(re.findall(r"^def (\w+)", task["code"], re.MULTILINE))
        names = tuple(sorted(defined & set(re.findall(r"\w+", " ".join(task["test_list"])))))
        setup = "\n".join(["import sys", *task["test_imports"]])  # 596 names sys, which only its solution imports
        yield f"MBPP/{task['task_id']}", task["code"], [Test(test, names, setup) for test in task["test_list"]]


def attacks() -> Iterator[Case]:
    for name in hostile_programs.EVERYTHING:
        yield f"hostile: {name}", name, [Test(hostile_programs.EVERYTHING[name].test, ("f",))]


def _judge(case: Case, outside: str, port: int, tier: str) -> tuple[str, tuple[str, ...], str, float]:
    name, program, tests = case
    sandbox._known[False] = tier
    attack = name.startswith("hostile: ")
    if attack:  # aimed here, because the judge is this process
        program = hostile_programs.prepare(program, outside, port, os.getpid())
    report = sandbox.judge(program, tests, HOSTILE_LIMITS if attack else REFERENCE_LIMITS)
    return name, tuple(map(str, report.tests)), next(filter(None, report.details), ""), report.seconds


def main(argv: list[str]) -> None:
    if FLAGS.data is not None and not Path(FLAGS.data).is_dir():
        raise ConfigError("--data: name the folder that holds humaneval/ and mbpp/")
    tier = FLAGS.tier or sandbox.probe()
    if reason := sandbox.examine(tier):
        raise ConfigError(f"--tier: {tier} does not work on this machine: {reason}")
    sandbox._known[False] = tier
    cores = len(os.sched_getaffinity(0))
    print(sandbox.describe())
    before = set(hostile_programs.survivors(os.getpid()))  # orphans of others
    busy = [
        subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(FLAGS.oversubscribe * cores)
    ]
    verdicts: dict[str, list[tuple[str, ...]]] = collections.defaultdict(list)
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    details, harm = {}, []
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as outside, socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            Path(outside, "secret").write_text("secret")
            kept = hostile_programs.fingerprint(outside)
            cases = [*humaneval(FLAGS.data), *mbpp(FLAGS.data)] if FLAGS.data else []
            cases += attacks()
            cases = cases[:: max(1, len(cases) // FLAGS.limit)] if FLAGS.limit else cases
            spawn = multiprocessing.get_context("spawn")
            with concurrent.futures.ProcessPoolExecutor(FLAGS.workers or cores, mp_context=spawn) as pool:
                jobs = [pool.submit(_judge, c, outside, port, tier) for _ in range(FLAGS.repeats) for c in cases]
                for job in concurrent.futures.as_completed(jobs):
                    name, got, detail, took = job.result()
                    verdicts[name].append(got)
                    seconds[name.split("/")[0].split(":")[0]].append(took)
                    details[name] = detail
            server.setblocking(False)
            try:
                server.accept()
                harm.append("a program reached the network")
            except BlockingIOError:
                pass
            if hostile_programs.fingerprint(outside) != kept:
                harm.append(f"files outside: {hostile_programs.fingerprint(outside)}")
            time.sleep(1)
            if left := set(hostile_programs.survivors(os.getpid())) - before:
                harm.append(f"processes left: {left}")
    finally:
        for process in busy:
            process.kill()
            process.wait()

    print(
        f"{FLAGS.repeats} repeats, {len(busy)} busy processes on {cores} processors, {time.monotonic() - start:.0f} s"
    )
    bad = 0
    for group, times in seconds.items():
        names = [n for n in verdicts if n.split("/")[0].split(":")[0] == group]
        passed = [n for n in names if all(v == "pass" for got in verdicts[n] for v in got)]
        print(
            f"{group:10} {len(passed)} of {len(names)} programs pass; seconds a program: median "
            f"{statistics.median(times):.3f}, longest {max(times):.1f}"
        )
        forged = [n for n in names if any("pass" in got for got in verdicts[n])]
        wrong = forged if group == "hostile" else [n for n in names if n not in passed]
        for name in wrong:
            print(f"  WRONG {name}: {verdicts[name]} {details[name]}")
        unlike = [n for n in names if len(set(verdicts[n])) > 1]
        for name in unlike:
            print(f"  DIFFERS {name}{' (a race of two limits)' * (name[9:] in RACES)}: {verdicts[name]}")
        bad += len(wrong) + len([n for n in unlike if n[9:] not in RACES])
    invalid = sum("infra_error" in got for runs in verdicts.values() for got in runs)
    print(f"{bad} wrong or different, {invalid} without a verdict; harm outside: {'; '.join(harm) or 'none'}")
    sys.exit(1 if bad or invalid or harm else 0)


if __name__ == "__main__":
    flags.DEFINE_string("data", None, "Folder with humaneval/ and mbpp/.")
    flags.DEFINE_enum("tier", None, sandbox.TIERS, "Tier of the sandbox; none: the first one that works.")
    flags.DEFINE_integer("repeats", 5, "How often everything is judged.")
    flags.DEFINE_integer("oversubscribe", 4, "Busy processes for each processor.")
    flags.DEFINE_integer("workers", 0, "Judges at once; 0: one for each processor.")
    flags.DEFINE_integer("limit", 0, "Judge only about this many programs; 0: all.")
    config_flags.run(lambda *_: main([]), required=())
