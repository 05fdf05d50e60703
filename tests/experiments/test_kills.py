"""Runs that are killed and resumed: what the comparison finds, and the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from experiments.kills import compare, kinds, run
from experiments.kills.__main__ import page
from jaxmarl_llm.cli import config_flags

ROOT = Path(__file__).parents[2]
GOLDEN = sorted((ROOT / "tests/storage/golden").glob("*.zip"))[-1]


@pytest.fixture
def two(tmp_path):
    """Two equal workdirs, with rollouts and an episode."""
    for name in ("expected", "got"):
        with zipfile.ZipFile(GOLDEN) as archive:
            archive.extractall(tmp_path / name)
        (tmp_path / name / "episodes.md").write_text("# Episodes\n")
        (tmp_path / name / "rollouts0.txt").write_text("1 training aa\n2 training bb\n2 held_out cc\n")
    return tmp_path / "expected", tmp_path / "got"


def rows(workdir, change):
    path = workdir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in change(lines)))


def one_value(workdir):
    """The next larger value in one array of the checkpoint."""
    import orbax.checkpoint as ocp

    (step,) = (workdir / "checkpoints").glob("[0-9]*")
    tree = compare.restored(step)
    tree["memory"]["first"]["weight"] = np.nextafter(tree["memory"]["first"]["weight"], 1e9)
    writer = ocp.PyTreeCheckpointer()
    writer.save(step / "state", tree, force=True)
    writer.close()


def add(workdir, line):
    """One more rollout."""
    with open(workdir / "rollouts0.txt", "a") as file:
        file.write(line + "\n")


def changed(row):
    return {**row, "reward/payoff": row["reward/payoff"] + 1e-12}


DEFECTS = {
    "an array": (one_value, "checkpoints/32: ['memory']['first']['weight'] differs"),
    "a step twice": (lambda w: rows(w, lambda r: [*r, r[-1]]), "metrics.jsonl: steps ["),
    "a step less": (lambda w: rows(w, lambda r: r[:-1]), "metrics.jsonl: steps ["),
    "a metric": (lambda w: rows(w, lambda r: [*r[:-1], changed(r[-1])]),
                 "metrics.jsonl: step 32: reward/payoff differs"),
    "a rollout more": (lambda w: add(w, "4 held_out dd"), "rollouts0: step 4, held_out: differs"),
    "another rollout": (lambda w: add(w, "1 training ee"), "rollouts0: step 1, training: differs"),
    "episodes": (lambda w: (w / "episodes.md").write_text("# Episodes"), "episodes.md: differs"),
    "a configuration": (lambda w: (w / "config.json").unlink(), "config.json: differs"),
    "half a save": (lambda w: (w / "checkpoints/4.orbax-checkpoint-tmp").mkdir(), "left over: checkpoints/4.orbax"),
    "a lock": (lambda w: (w / "run.lock").write_text(""), "left over: run.lock"),
    "no save": (lambda w: (w / "checkpoints/32").rename(w / "x"), "checkpoints: newest step [], expected ['32']"),
}  # fmt: skip


def test_equal_runs_have_no_difference(two):
    expected, got = two
    assert compare.differences(expected, got) == []
    rows(got, lambda r: [{**row, "time/step": 5.0} for row in r])
    add(got, "2 training bb")  # played again after a kill
    assert compare.differences(expected, got) == []


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_difference_is_found(two, defect):
    spoil, said = DEFECTS[defect]
    spoil(two[1])
    (found,) = compare.differences(*two)
    assert found.startswith(said)


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_a_kind_is_a_configuration_whose_phases_are_known(kind):
    """Checkpoints come between the first and the last step of a phase, so that a kill costs steps."""
    cfg = config_flags.load(f"{ROOT}/experiments/kills/kinds.py:{kind.replace(' ', '_')}", [])
    steps = [cfg.sft.steps]
    if kind == "stages":
        steps.append(steps[0] + cfg.imitation.steps)
    assert kinds.STAGES[kind] == tuple(steps) and steps[0] % cfg.run.checkpoint_every != 0


def test_the_page_shows_what_was_killed_and_what_differs():
    kills = [
        run.Kill("array", 0, "after 3.0 s", True, True, 4, 3, []),
        run.Kill("host", 0, "at 'update', time 2", False, False, 9, 9, ["metrics.jsonl: steps [1, 1]"]),
    ]
    record = {
        "date": "d",
        "commit": "c",
        "machine": "m",
        "jax": "j",
        "command": "x",
        "kills": [k._asdict() for k in kills],
    }
    text = page(record)
    assert "| array | 1 | 1 | 1 | 1 |" in text and "| all | 2 | 1 | 1 | 1 |" in text
    assert "| host | 0 | at 'update', time 2; the run had ended | 9 | 9 | metrics.jsonl: steps [1, 1] |" in text


@pytest.mark.slow
def test_killed_runs_are_the_run_that_was_not(tmp_path):
    """Two kills by the command, which then goes on after what it has recorded."""
    out = tmp_path / "kills.md"
    command = [sys.executable, "-m", "experiments.kills", "--only=array", f"--out={out}", f"--work={tmp_path / 'work'}"]
    done = subprocess.run([*command, "--count=2"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.with_suffix(".json").read_text())
    assert [(k["kind"], k["number"], k["problems"]) for k in record["kills"]] == [("array", 0, []), ("array", 1, [])]
    assert any(k["landed"] for k in record["kills"]) and "| all | 2 |" in out.read_text()
    again = subprocess.run([*command, "--count=2"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (again.returncode, again.stdout) == (0, "")
