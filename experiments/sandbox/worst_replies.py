"""Time and memory of the judge for the replies that cost it most, and time of strict grading for the worst texts.

    python -m experiments.sandbox.worst_replies

Each case runs in a process of its own. It prints CPU seconds, the growth of the peak memory, and the outcome.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from absl import app

from jaxmarl_llm.envs.coding import rewards
from jaxmarl_llm.envs.coding.analysis import syntax
from jaxmarl_llm.sandbox import child, codec
from jaxmarl_llm.sandbox.judge import Limits, Report, Test, Verdict

N, M = child.ELEMENTS - 50, 2**61 - 1  # elements of a reply; integers that differ by M have one hash


def _set(element: Callable[[int], str], count: int) -> str:
    return '{"s":[' + ",".join(map(element, range(count))) + "]}"


def _crowd(k: int) -> int:
    """Integers of which 60 have one hash, which is allowed."""
    return k % 60 * M + k // 60


REPLIES: dict[str, Callable[[], str]] = {
    "empty lists": lambda: "[" + ",".join(["[]"] * (N // 2)) + "]",
    "empty sets": lambda: "[" + ",".join(['{"s":[]}'] * (N // 3)) + "]",
    "empty dicts": lambda: "[" + ",".join(['{"d":[]}'] * (N // 3)) + "]",
    "1.3 million empty lists": lambda: "[" + ",".join(["[]"] * 1_300_000) + "]",
    "ranges of one hash": lambda: _set(lambda k: f'{{"r":[{k * M},{k * M + 1},1]}}', N // 5),
    "ranges, 60 of one hash": lambda: _set(lambda k: f'{{"r":[{_crowd(k)},{_crowd(k) + 1},1]}}', N // 5),
    "integers of one hash": lambda: _set(lambda k: f'{{"i":"{k * M:x}"}}', N // 2),
    "integers, 60 of one hash": lambda: _set(lambda k: f'{{"i":"{_crowd(k):x}"}}', N // 2),
    "integers with low bits zero": lambda: _set(lambda k: str(k << 38), N),
    "tuples, 60 of one hash": lambda: _set(lambda k: f'{{"t":[{_crowd(k)},{{"t":[]}}]}}', N // 6),
    "long tuples of equal start": lambda: _set(lambda k: '{"t":[' + "7," * 1000 + f"{_crowd(k)}]}}", N // 1003),
    "deep frozensets": lambda: '{"f":[' * 60 + ",".join(map(str, range(N // 2))) + "]}" * 60,
    "many deep tuples": lambda: "[" + ",".join(['{"t":[' * 60 + "]}" * 60] * (N // 121)) + "]",
    "integers of 4300 digits": lambda: "[" + ",".join(["9" * 4300] * 930) + "]",
    "integers of 2^18 bits": lambda: "[" + ",".join(['{"i":"' + "f" * 65536 + '"}'] * 60) + "]",
    "a float of 4 million digits": lambda: "[0." + "1" * 4_000_000 + "]",
    "a text of escapes": lambda: '"' + "\\u00e9" * 690_000 + '"',
}
HEAD, END, ROOM = "def f(n):\n", "    return aux(n)\n", syntax.MAX_CODE - 80
TEXTS: dict[str, str] = {
    "statements": HEAD + "    1" + ";1" * (ROOM // 2) + "\n" + END,
    "branches": HEAD + "    if aux(n): n = 1\n" * (ROOM // 21) + END,
    "chain of and": HEAD + "    return aux(n)" + " and n" * (ROOM // 6) + "\n",
    "comparisons": HEAD + "    return n" + "<n" * (ROOM // 2) + "\n",
    "nested lambdas": HEAD + "    return " + "lambda:" * (ROOM // 7) + "n\n",
    "broken definitions": "@\n" * (ROOM // 2),
    "literal of 16,000 digits": HEAD + "    return 0x" + "f" * ROOM + "\n",
}
TASK = {"id": "t", "entry_point": "f", "prompt": 'def f(n):\n    """doc"""\n',
        "test": "def check(candidate):\n    assert candidate(1) == 2\n"}  # fmt: skip


def decoded(text: str) -> str:
    """Outcome of a reply."""
    try:
        codec.plain(codec.decode(text.encode()))
    except codec.ProtocolError as error:
        return str(error)
    return "decoded"


def graded(text: str) -> str:
    """Outcome of a text as both completions, with a sandbox that passes everything."""

    def passing(program: str, tests: Sequence[Test]) -> Report:
        return Report(Verdict.PASS, (Verdict.PASS,) * len(tests), ("",) * len(tests), "", 0.0)

    return f"reward {rewards.grade_strict(text.replace('f(n)', 'aux(n)'), text, TASK, passing).total:.1f}"


def _memory(name: str) -> float:
    """A line of /proc/self/status in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measured(work: Callable[[str], str], text: str) -> tuple[float, float, str]:
    """CPU seconds, growth of the peak memory in MB, and outcome of ``work(text)``, in a process of its own."""
    end, start = os.pipe()
    pid = os.fork()
    if pid == 0:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
        before, clock = _memory("VmRSS"), time.process_time()
        outcome = work(text)
        os.write(start, f"{time.process_time() - clock}\t{_memory('VmHWM') - before}\t{outcome}".encode())
        os._exit(0)
    os.close(start)
    os.waitpid(pid, 0)
    with open(end) as file:
        seconds, memory, outcome = file.read().split("\t")
    return float(seconds), float(memory), outcome


def main(argv: list[str]) -> None:
    for title, cases, work in (("reply", {n: f() for n, f in REPLIES.items()}, decoded), ("text", TEXTS, graded)):
        worst = [0.0, 0.0]
        for name, text in cases.items():
            assert len(text) <= Limits().output_bytes + 1000, name
            seconds, memory, outcome = measured(work, text)
            worst = [max(worst[0], seconds), max(worst[1], memory)]
            print(f"{title} {name:28} {len(text) / 1e6:5.2f} MB  {seconds:5.2f} s  {memory:6.1f} MB  {outcome}")
        print(f"{title}: at most {worst[0]:.2f} s of CPU and {worst[1]:.0f} MB")
    sys.exit(0)


if __name__ == "__main__":
    app.run(main)
