"""The benchmark command: forms are measured in turns, ratios are of rounds, every part runs on the tiny shape."""

import json
import subprocess
import sys

import numpy as np
import pytest

from experiments import bench
from experiments.bench import torch_forms


def test_forms_take_turns_and_ratios_are_of_rounds(monkeypatch):
    clock, called = [0.0], []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def form(name, seconds):
        def run():
            called.append(name)
            clock[0] += seconds * (10 if len(called) <= 2 else 1 + (len(called) - 1) // 2)  # the first call compiles

        return run

    row = bench.measure("part", "case", {"ours": form("ours", 1.0), "other": form("other", 3.0)}, 3, tokens=5)
    assert called == ["ours", "other"] * 4 and row.first == {"ours": 10, "other": 30} and row.facts == {"tokens": 5}
    assert row.seconds == {"ours": [2, 3, 4], "other": [6, 9, 12]}
    assert row.ratio("other") == (3, 3, 3)
    uneven = row._replace(seconds={"ours": [1.0, 1.0, 2.0], "other": [4.0, 6.0, 4.0]})
    assert uneven.ratio("other") == (4, 2, 6)


@pytest.mark.parametrize("part", ["decode", "head", "update"])
def test_a_part_runs_and_its_forms_do_the_same_work(part, monkeypatch):
    monkeypatch.setattr(torch_forms, "available", lambda: False)
    from importlib import import_module

    rows = import_module(f"experiments.bench.{part}").run("tiny", 1)
    assert rows and all(np.isfinite(s) and s > 0 for row in rows for form in row.seconds.values() for s in form)
    others = {"head": {"head_logprob", "dense", "jax.random.categorical", "jnp.argmax"}}.get(part, {"naive JAX"})
    assert {name for row in rows for name in row.seconds} == {"ours", *others}


@pytest.mark.parity
def test_the_command_writes_what_it_measured(tmp_path):
    out = tmp_path / "bench.json"
    line = [sys.executable, "-m", "experiments.bench", "--shape=tiny", "--only=decode", "--repeats=1", f"--out={out}"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "| decode | tiny, G=4, P=16, R=8 |" in done.stdout and "| transformers |" in done.stdout
    rows = json.loads(out.read_text())
    assert {"command", "date", "commit", "machine"} <= set(next(iter(rows.values())))
    done = subprocess.run([*line[:3], "--only=decod"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "did you mean 'decode'" in done.stderr
