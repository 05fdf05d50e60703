"""Rollouts far larger than a process should hold: the viewer decodes the steps that it shows, and no others."""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import random

import pytest
import zstandard

from experiments.viewer.samples import completion, written
from jaxmarl_llm.cli import view
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.viewer import data
from jaxmarl_llm.viewer.data import index, open_runs
from jaxmarl_llm.viewer.page import write_page
from jaxmarl_llm.viewer.serve import KEPT
from tests.viewer.test_serve import ask, serving

STEPS, TEXT = 4000, 1_500_000  # 6 GB of text; one file on the disk has 4000 names


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A workdir of 4000 steps and 400 evaluations, each with a completion of 1.5 MB that no compression makes small."""
    folder = tmp_path_factory.mktemp("large")
    text = base64.b64encode(random.Random(0).randbytes(TEXT * 3 // 4)).decode()
    node = rollouts.Node(0, 0, 0, "a", "m", -1, (1,), "prompt", (), ())
    written(folder, [rollouts.Task(0, 0), node, completion(0, 0, text, None, 0.0)], 1)
    (one,) = (folder / "rollouts").iterdir()
    for step in range(2, STEPS + 1):
        os.link(one, one.with_name(f"step-{step:08}.jsonl.zst"))
    for step in range(0, STEPS, 10):
        os.link(one, one.with_name(f"eval-{step:08}.jsonl.zst"))
    assert sum(path.stat().st_size for path in one.parent.iterdir()) > 4e9
    return folder


@pytest.fixture
def decoded(monkeypatch):
    """Bytes that each file of rollouts gave when it was decompressed, in the order in which the files were opened."""
    seen = []

    class Counted(io.RawIOBase):
        def __init__(self, stream):
            self._stream = stream
            seen.append(0)

        def readable(self):
            return True

        def readinto(self, into):
            count = self._stream.readinto(into)
            seen[-1] += count
            return count

    class Decompressor:
        def __init__(self, **settings):
            self._own = zstandard.ZstdDecompressor(**settings)

        def stream_reader(self, raw):
            return Counted(self._own.stream_reader(raw))

    fake = argparse.Namespace(ZstdDecompressor=Decompressor, ZstdError=zstandard.ZstdError)
    monkeypatch.setattr(rollouts, "zstandard", fake)
    return seen


def test_the_index_decodes_nothing_and_a_step_is_one_file(large, decoded):
    (run,) = open_runs([str(large)])
    (row,) = index([run])["runs"]
    assert (len(row["steps"]), len(row["held_out"])) == (STEPS, STEPS // 10) and decoded == []
    data.read_step(run, 77)
    assert len(decoded) == 1 and TEXT <= decoded[0] < TEXT + 10_000


def test_a_server_decodes_what_the_page_asks_for_and_keeps_a_few_steps(large, decoded):
    with serving(large) as server:
        assert ask(server, "/index")[0] == 200 and decoded == []
        for _ in range(2):
            for step in (5, "eval-10"):
                assert ask(server, f"/step?run=0&step={step}")[0] == 200
        assert len(decoded) == 2  # the second time from memory
        for step in range(100, 101 + KEPT):
            ask(server, f"/step?run=0&step={step}")
        assert len(server._steps) == KEPT and len(decoded) == 3 + KEPT


def test_a_page_decodes_the_steps_that_it_holds(large, decoded, tmp_path):
    (run,) = open_runs([str(large)])
    (held,) = write_page([run], tmp_path / "view.html", 16)
    assert 1 in held and STEPS in held and len(held) < 12
    assert (tmp_path / "view.html").stat().st_size < 17e6
    assert len(decoded) <= 2 * len(held) and max(decoded) < TEXT + 10_000


def test_the_terminal_decodes_one_step(large, decoded, capsys):
    assert view.main(view.parser().parse_args([str(large), "--text", "--step=9"])) == 0
    assert len(decoded) == 1 and "prompt" in capsys.readouterr().out
    steps = rollouts.read(large)
    next(steps), next(steps)
    assert len(decoded) == 3


def test_the_witness_counts_what_a_file_holds(large, decoded):
    """The bytes are those of the lines, so that a count of 0 means something."""
    (run,) = open_runs([str(large)])
    raw = zstandard.ZstdDecompressor().decompressobj().decompress(run.files()[3].read_bytes())
    rollouts.read_file(run.files()[3])
    assert decoded == [len(raw)] and json.loads(raw.split(b"\n")[0])["kind"] == "header"
