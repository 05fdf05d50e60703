"""Held-out tasks of evaluations in the page: its index, its steps, its room, its server."""

from __future__ import annotations

import base64
import json

import pytest

from experiments.viewer.samples import held_out_rows, tree_rows, written
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.viewer import data
from jaxmarl_llm.viewer.data import index, open_run
from jaxmarl_llm.viewer.page import write_page
from tests.viewer.test_page import parts
from tests.viewer.test_serve import ask, serving

EVALUATION = {"split": "held_out", "updated": (), "plan": "single"}


def run_of(folder, *contents, evaluations=(0, 50, 100), steps=(1, 51)):
    """A workdir whose evaluations played tasks of these contents."""
    for step in evaluations:
        written(folder, held_out_rows(f"after {step}", *contents), step, **EVALUATION)
    return written(folder, tree_rows(8), *steps) if steps else folder


def test_evaluations_are_behind_the_steps_of_a_page(tmp_path):
    run = open_run(run_of(tmp_path / "run", "aa", "bb"))
    names = ["eval-0", "eval-50", "eval-100"]
    assert list(run.files()) == [1, 51, *names]
    (held,) = write_page([run], tmp_path / "view.html", 8)
    shown, steps = parts(tmp_path / "view.html")
    assert held == [1, 51, *names] and list(steps) == [f"0.{name}" for name in held]
    (row,) = shown["runs"]
    assert (row["steps"], row["held_out"], row["left_out"]) == ([1, 51], names, [])
    made = steps["0.eval-50"]
    assert made["header"]["split"] == "held_out" and made["header"]["step"] == 50
    assert [(t["content"], t["reward"], t["trained"], t["advantage"]) for t in made["tasks"]] == [
        ("aa", 1.0, 0, None),
        ("bb", 3.0, 0, None),
    ]
    assert made["tables"]["step"]["text"] == [f"after 50 {k}" for k in range(4)]


def test_a_run_may_have_evaluations_alone_and_a_file_is_of_its_own_split(tmp_path):
    folder = run_of(tmp_path / "run", "aa", steps=())
    run = open_run(folder)
    assert list(run.files()) == ["eval-0", "eval-50", "eval-100"] and index([run])["runs"][0]["steps"] == []
    assert list(open_run(folder / "rollouts" / "eval-00000050.jsonl.zst").files()) == ["eval-50"]
    with pytest.raises(ConfigError, match="step eval-7 was not written"):
        data.read_step(run, "eval-7")


def test_evaluations_take_at_most_half_of_the_room(tmp_path):
    many = range(0, 400, 10)
    run = open_run(run_of(tmp_path, *[f"{k:016x}" for k in range(8)], evaluations=many, steps=range(1, 41)))
    sizes = {s: len(base64.b64encode(data.read_step(run, s))) for s in run.files()}
    room = sum(sizes.values()) / 4
    (held,) = write_page([run], tmp_path / "view.html", room / 1e6)
    trained, evaluations = ([s for s in held if isinstance(s, kind)] for kind in (int, str))
    assert held == trained + evaluations and sum(sizes[s] for s in held) <= room
    assert trained[0] == 1 and trained[-1] == 40 and len(trained) > 5
    assert evaluations[0] == "eval-0" and evaluations[-1] == "eval-390" and 5 < len(evaluations) < 40
    assert sum(sizes[s] for s in evaluations) <= room / 2
    left_out = parts(tmp_path / "view.html")[0]["runs"][0]["left_out"]
    assert set(left_out) | set(held) == set(run.files()) and not set(left_out) & set(held)
    with pytest.raises(ConfigError, match=r"--max-mb: eval-390 of .* needs"):
        write_page([run], tmp_path / "view.html", 1e-4)


def test_a_server_has_evaluations(tmp_path):
    with serving(run_of(tmp_path, "aa", "bb")) as server:
        assert json.loads(ask(server, "/index")[1])["runs"][0]["held_out"] == ["eval-0", "eval-50", "eval-100"]
        assert json.loads(ask(server, "/step?run=0&step=eval-50")[1])["header"]["step"] == 50
        for step, status in {"eval-51": 409, "eval-": 400, "eval--1": 400, "step-1": 400, "eval-50x": 400}.items():
            assert ask(server, f"/step?run=0&step={step}")[0] == status, step
