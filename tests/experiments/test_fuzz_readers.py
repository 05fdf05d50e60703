"""A hundred mutated files of `experiments.fuzz_readers`; its own measurements can tell good from bad."""

from __future__ import annotations

import time

import pytest

from experiments.fuzz_readers import run
from experiments.fuzz_readers.__main__ import table
from experiments.fuzz_readers.kinds import KINDS, Kind
from jaxmarl_llm.errors import ConfigError


def written(tmp_path, files):
    for name, raw in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(raw)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_files_load(kind, tmp_path):
    assert run.read(kind, written(tmp_path, KINDS[kind].whole())) == (run.LOADED, "")


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_files_load_or_end_in_one_line(kind):
    for number in range(5):
        case = run.run_case(kind, 7, number)
        assert case.outcome in (run.LOADED, run.REFUSED), case


def test_a_seed_names_the_files():
    for kind in ("GGUF", "config.json", "chat template"):
        assert run.mutated(kind, 3, 1) == run.mutated(kind, 3, 1)
        assert len({run.mutated(kind, 3, number)[0] for number in range(20)}) > 3


def fails(error):
    def read(folder):
        raise error(folder)

    return read


def slow(folder):
    clock = time.process_time()
    while time.process_time() - clock < 0.2:
        pass


BAD = {
    "an exception": (fails(lambda folder: KeyError("x")), run.TRACEBACK),
    "a panic": (fails(lambda folder: type("PanicException", (BaseException,), {})()), run.TRACEBACK),
    "two lines": (fails(lambda folder: ConfigError(f"{folder}: a\nb")), run.TRACEBACK),
    "no file": (fails(lambda folder: ConfigError("wrong")), run.TRACEBACK),
    "a long line": (fails(lambda folder: ConfigError(f"{folder}: {'a' * 2000}")), run.TRACEBACK),
    "no memory": (fails(lambda folder: MemoryError()), run.MEMORY),
    "time": (slow, run.SLOW),
    "memory": (lambda folder: bytearray(2**30), run.MEMORY),  # far more than other tests leave to be freed
    "one line": (fails(lambda folder: ConfigError(f"{folder}: key 'a': expected b")), run.REFUSED),
    "nothing": (lambda folder: None, run.LOADED),
}


@pytest.mark.parametrize("case", BAD)
def test_outcomes_are_told_apart(case, monkeypatch):
    read, expected = BAD[case]
    # Pages of a busy machine come slowly, so only the slow case may meet its limit.
    monkeypatch.setattr(run, "SECONDS", 0.1 if expected == run.SLOW else float("inf"))
    monkeypatch.setattr(run, "MEGABYTES", 30)
    monkeypatch.setitem(KINDS, "x", Kind(lambda: {"a": b""}, lambda rng, files: ("", files), read))
    found = run.run_case("x", 0, 0)
    assert found.outcome == expected
    assert f"| x | 1 | {' | '.join(str(int(o == expected)) for o in run.OUTCOMES)} |" in table([found])
