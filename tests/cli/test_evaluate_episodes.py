"""`jaxmarl-llm evaluate` writes episodes beside those of training, and `view` shows them."""

from __future__ import annotations

import argparse
import sys
from types import SimpleNamespace

import pytest

from jaxmarl_llm.cli import evaluate, view
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.viewer.data import index, open_run, open_runs
from tests.cli.tiny_runs import tiny_run

SUMS = """
from jaxmarl_llm import TextTask

def make():
    rows = [{"a": str(a), "sum": str(a + 1)} for a in range(7)]
    prompts = {"solver": "{a} + 1 = ?", "judge": "Say fine."}
    return TextTask({"train": rows[:4], "test": rows[4:]}, prompts, lambda task, texts: {"accuracy": 0.5})

def alone():
    rows = {"train": [{"a": "9"}], "test": [{"a": "8"}]}
    return TextTask(rows, {"judge": "Say {a}."}, lambda task, texts: {"accuracy": 0.25})
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one step on three held-out tasks, of which training wrote two at each evaluation."""
    from jaxmarl_llm.runs import loop

    place = tmp_path_factory.mktemp("sums")
    (place / "own_sums.py").write_text(SUMS)
    sys.path.insert(0, str(place))
    settings = {"rollouts": {"eval_tasks": 2}, "tensorboard": False, "eval_greedy": False}
    cfg, recipe, _ = tiny_run("own_sums:make", run=settings)
    loop.fit(cfg, recipe, place / "run")
    yield place / "run"
    sys.path.remove(str(place))
    sys.modules.pop("own_sums", None)


def evaluated(run, **changes):
    names = {"env": None, "partner": None, "solo": None, "relay": 0, "out": None, "best": False, "eval_tasks": None}
    values = {**names, "mesh": ["1", "1", "1"], **changes}

    class Flags(dict):
        __getattr__ = lambda self, name: values[name]

    evaluate.main(None, str(run), Flags({name: SimpleNamespace(value=value) for name, value in values.items()}))


def of_training(run):
    inside = (path for path in run.rglob("*") if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in inside if "evaluate" not in str(path)}


def test_evaluate_writes_what_training_wrote_at_that_step_in_a_folder_of_its_own(trained, capsys):
    before = of_training(trained)
    evaluated(trained)
    assert f"episodes in {trained}/evaluate: jaxmarl-llm view {trained}" in capsys.readouterr().err
    (name,) = (trained / "evaluate" / "rollouts").iterdir()
    assert name.read_bytes() == (trained / "rollouts" / name.name).read_bytes()
    (rollout,) = rollouts.read(trained / "evaluate", "held_out")
    assert [task.number for task in rollout.tasks] == [0, 1] and rollout.header.batch == 3
    later = name.with_name("eval-00000007.jsonl.zst")
    later.write_bytes(name.read_bytes())
    evaluated(trained, eval_tasks=3)
    assert later.read_bytes() == (trained / "rollouts" / name.name).read_bytes()
    later.unlink()
    (more,) = rollouts.read(trained / "evaluate", "held_out")
    assert [task.number for task in more.tasks] == [0, 1, 2] and more.tasks[:2] == rollout.tasks
    assert of_training(trained) == before


def test_no_episodes_are_written_of_no_tasks(trained, capsys):
    files = {path: path.read_bytes() for path in trained.glob("evaluate*/rollouts/*")}
    evaluated(trained, eval_tasks=0)
    assert {path: path.read_bytes() for path in trained.glob("evaluate*/rollouts/*")} == files
    assert "episodes in" not in capsys.readouterr().err


def test_another_environment_has_a_folder_of_its_own(trained):
    evaluated(trained, env="own_sums:alone")
    (rollout,) = rollouts.read(trained / "evaluate-own_sums.alone", "held_out")
    assert (rollout.header.roles, rollout.header.batch, rollout.nodes[0].prompt) == (("judge",), 1, "Say 8.")
    assert rollout.transitions[0].rewards == {"accuracy": (0.25,)}


def test_a_folder_that_cannot_be_written_is_one_line(trained, capsys):
    (trained / "evaluate-own_sums.alone").rename(trained / "aside")
    (trained / "evaluate-own_sums.alone").touch()
    evaluated(trained, env="own_sums:alone")
    shown = capsys.readouterr()
    assert shown.err.count("cannot be written, the run goes on") == 1 and "eval/return" in shown.out
    (trained / "evaluate-own_sums.alone").unlink()
    (trained / "aside").rename(trained / "evaluate-own_sums.alone")


def test_the_page_of_a_run_has_what_evaluate_wrote(trained, tmp_path, capsys):
    name = trained.resolve().name
    runs = open_runs([str(trained)])
    assert [run.name for run in runs] == [name, f"{name}/evaluate", f"{name}/evaluate-own_sums.alone"]
    assert [row["evaluated"] for row in index(runs)["runs"]] == [False, True, True]
    assert list(runs[1].files()) == ["eval-1"] and runs[1].workdir is None
    explicit = open_runs([str(trained), str(trained / "evaluate")])  # a folder that is named is there once
    assert [run.name for run in explicit] == [name, f"{name}/evaluate-own_sums.alone", "evaluate"]
    (trained / "rollouts").rename(trained / "aside")
    try:
        assert [run.folder for run in open_runs([str(trained)])] == [trained, trained]
        with pytest.raises(ConfigError, match="no files step-N"):
            open_run(trained)
    finally:
        (trained / "aside").rename(trained / "rollouts")
    given = {"serve": False, "text": True, "out": None, "port": None, "step": None, "task": None, "node": None}
    given |= {"sample": None, "held_out": False, "chars": 60, "run": [str(trained / "evaluate")]}
    assert view.main(argparse.Namespace(**given)) == 0  # a folder of evaluations alone
    assert "evaluation after step 1" in capsys.readouterr().out
