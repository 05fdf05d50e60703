"""`jaxmarl-llm sweep`: its settings by hand, and a sweep that is stopped, has a failing run, and goes on."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmarl_llm.cli import sweep
from jaxmarl_llm.cli.sweep import Axis
from jaxmarl_llm.errors import ConfigError

# A stand-in for training: it notes each start, fails for one group, and is stopped once for another. The command,
# its processes, records and table are the real ones; that `train` trains is shown in test_cli.py.
TRAIN = """
import json, pathlib, sys
given = dict(a.split("=", 1) for a in sys.argv[1:])
folder, group = pathlib.Path(given["--workdir"]), int(given["--config.group"])
seed, rate = int(given.get("--config.seed", 0)), given["--config.optimizer.learning_rate"]
folder.mkdir(parents=True, exist_ok=True)
log = folder.parent / "starts.txt"
with open(log, "a") as file:
    print(folder.name, rate, file=file)
if group == 5:
    sys.exit(1)
if group == 4 and log.read_text().count(folder.name + " ") == 1:
    sys.exit(75)
(folder / "config.json").write_text(json.dumps({"group": group, "seed": seed}))
(folder / "metrics.jsonl").write_text(json.dumps({"step": 9, "final/success": group / 10 + seed / 100}) + "\\n")
"""


def test_a_grid_is_every_combination():
    axes = [sweep.parse_axis("group=2,4"), sweep.parse_axis("env.name=a.b:make"), sweep.parse_axis("seed=0,1")]
    assert axes[1] == Axis("env.name", ("a.b:make",))
    found = sweep.settings(axes, None, 0)
    assert [dict(setting) for setting in found] == [
        {"group": g, "env.name": "a.b:make", "seed": s} for g in ("2", "4") for s in ("0", "1")
    ]
    assert sweep.folder_name(found[1]) == "group=2,env.name=a.b_make,seed=1"


def test_draws_are_within_the_range_even_in_the_logarithm_and_the_same_again():
    axes = [sweep.parse_axis("lr=1e-4:1e-2"), sweep.parse_axis("group=2,4")]
    found = sweep.settings(axes, 400, 7)
    rates = [float(dict(setting)["lr"]) for setting in found]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates) and len(set(rates)) > 390
    below = sum(rate < 1e-3 for rate in rates) / len(rates)  # half the decades; 0.09 if the range itself were even
    assert abs(below - 0.5) < 4 * math.sqrt(0.25 / 400)
    assert found[:10] == sweep.settings(axes, 10, 7) != sweep.settings(axes, 10, 8)
    assert {dict(setting)["group"] for setting in found} == {"2", "4"}


@pytest.mark.parametrize(
    "over, trials, says",
    [
        (["group"], None, r"--over=group: expected KEY=VALUE,VALUE,\.\.\. or KEY=LOW:HIGH"),
        (["lr=1:0.1"], 3, "expected 0 < LOW < HIGH"),
        (["lr=0:1"], 3, "expected 0 < LOW < HIGH"),
        (["lr=0.1:1"], None, "--over=lr: a range needs --trials"),
        (["group=2,2"], None, "expected different values"),
        (["group=2", "group=4"], None, "--over=group: given twice"),
    ],
)
def test_bad_axes_are_one_line(over, trials, says):
    with pytest.raises(ConfigError, match=says):
        sweep.settings([sweep.parse_axis(text) for text in over], trials, 0)


def run(folder, *args):
    """The command, with a stand-in for the training of a run."""
    code = (
        "import sys; from jaxmarl_llm.cli import sweep, config_flags; own = sys.executable; "
        f"import subprocess; real = subprocess.Popen; "
        f"sweep.subprocess.Popen = lambda c: real([own, {str(folder / 'train.py')!r}, *c[4:]]); "
        "config_flags.run(sweep.main)"
    )
    command = [sys.executable, "-c", code, *args]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=folder)


def test_a_sweep_goes_on_where_it_was_stopped_and_shows_what_failed(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    given = ["--config=grpo:tiny", f"--workdir={tmp_path / 's'}", "--config.optimizer.learning_rate=0.01"]
    given += ["--over=group=2,4,5", "--over=seed=0,1"]
    starts = lambda: (tmp_path / "s" / "starts.txt").read_text().splitlines()
    first = run(tmp_path, *given)
    assert first.returncode == 75 and [s.split()[0] for s in starts()] == [
        "group=2,seed=0", "group=2,seed=1", "group=4,seed=0",
    ], first.stderr  # fmt: skip
    second = run(tmp_path, *given)
    assert second.returncode == 75 and len(starts()) == 5, second.stderr  # group=4,seed=0 again, seed=1
    third = run(tmp_path, *given)
    assert third.returncode == 1, third.stderr
    assert [s.split()[0] for s in starts()[5:]] == ["group=4,seed=1", "group=5,seed=0", "group=5,seed=1"]
    assert {s.split()[1] for s in starts()} == {"0.01"}
    assert "  group=4 minus group=2: +0.200 ± 0.000 over 2 seeds: above 0" in third.stdout
    assert "group=5,seed=1: failed with exit code 1" in third.stdout
    assert json.loads((tmp_path / "s" / "sweep.json").read_text())["group=4,seed=1"] == 0
    fourth = run(tmp_path, *given)
    assert [s.split()[0] for s in starts()[8:]] == ["group=5,seed=0", "group=5,seed=1"], fourth.stderr


def test_a_table_without_seeds_has_the_best_first(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    given = ["--config=grpo:tiny", f"--workdir={tmp_path / 's'}", "--config.optimizer.learning_rate=0.01"]
    done = run(tmp_path, *given, "--over=group=2,8,3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == ["  0.800  group=8", "  0.300  group=3", "  0.200  group=2"]


def test_every_setting_is_checked_before_the_first_run(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(tmp_path, "--config=grpo:tiny", f"--workdir={tmp_path / 's'}", "--over=group=2,no")
    assert done.returncode == 2 and done.stderr.strip() == "error: config.group: expected int, got 'no'"
    assert not (tmp_path / "s" / "starts.txt").exists()
