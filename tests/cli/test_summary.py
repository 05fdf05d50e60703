"""`jaxmarl-llm summary` on runs whose evaluations are known."""

from __future__ import annotations

import argparse
import json

import pytest

from jaxmarl_llm.cli import summary


def told(folder, rows, capsys):
    """Exit code and lines of the command for a run with these metrics."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = summary.main(argparse.Namespace(workdir=folder))
    return code, capsys.readouterr().out.replace(str(folder), "RUN").splitlines()


@pytest.mark.parametrize("metric", ["success", "return"])
def test_the_first_and_the_newest_evaluation(metric, tmp_path, capsys):
    rows = [
        {"step": 11, f"eval/{metric}": 0.25, f"eval/{metric}_greedy": 0.5, "time/step": 1.5},
        {"step": 21, f"eval/{metric}": None, f"eval/{metric}_greedy": 0.75, "time/step": None},
        {"step": 30, f"final/{metric}": 0.875, "eval/other": 9.0, "time/step": 2.0},
    ]
    assert told(tmp_path / "run", rows, capsys) == (
        0,
        [
            "RUN: 30 steps in 4 s",
            f"  {metric} on held-out tasks, sampled: 0.250 after step 10 -> 0.875 after step 30",
            f"  {metric} on held-out tasks, greedy : 0.500 after step 10 -> 0.750 after step 20",
        ],
    )


def test_a_run_in_progress(tmp_path, capsys):
    rows = [{"step": 1, "eval/success": 0.5, "eval/return": 3.0, "time/step": 1.0}, {"step": 2, "reward/total": 1.0}]
    once = "  success on held-out tasks, sampled: 0.500 after step 0"
    assert told(tmp_path / "run", rows, capsys) == (0, ["RUN: 2 steps in 1 s", once])
    assert told(tmp_path / "none", rows[1:], capsys) == (1, ["RUN: the run has no evaluation yet"])


def test_warnings_are_those_of_the_weights_of_the_run(tmp_path, capsys):
    unknown = {"reward/accuracy": None}  # a metric that was not finite
    rows = [{"step": t, "reward/total": float(t), "agent/a/truncated": 0.5} | unknown for t in range(1, 12)]
    none = ["RUN: the run has no evaluation yet"]
    assert told(tmp_path / "random", rows, capsys) == (1, none)
    for number, (config, warns) in enumerate(
        [
            ({"team": {"backbone": {"path": "DIR"}, "overrides": {}}}, True),
            ({"team": {"backbone": {"path": None}, "overrides": {"a": {"path": "DIR"}}}}, True),
            ({"team": {"backbone": {"path": None}, "overrides": {}}, "env": {"path": "DIR"}}, False),
        ]
    ):
        folder = tmp_path / f"run_{number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert summary.main(argparse.Namespace(workdir=folder)) == 1
        lines = capsys.readouterr().out.splitlines()[1:]
        assert len(lines) == warns and all("step 10: the length limit ends 50%" in line for line in lines)
