"""Two commits in turns: seconds of a turn, ratios of the table, and modules of each process."""

import json
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest

from experiments.bench import commits
from tests.test_layering import ROOT


def turn(*calls, compiles=0):
    return {"calls": list(calls), "compiles": compiles}


def test_seconds_are_means_over_calls_or_over_sampled_tokens():
    assert commits.seconds(turn({"all": 1.0}, {"all": 2.0}), "all") == 1.5
    ragged = turn({"all": 6.0, "rollout": 4.0, "tokens": 10.0}, {"all": 2.0, "rollout": 1.0, "tokens": 30.0})
    assert commits.seconds(ragged, "all") == 8 / 40 and commits.seconds(ragged, "rollout") == 5 / 40


class Scripted:
    """Worker with given turns; it keeps the order in which commits were asked."""

    order: ClassVar[list] = []

    def __init__(self, folder, case):
        self.name, self.turns = str(folder), iter(case[str(folder)])

    def turn(self):
        Scripted.order.append(self.name)
        return next(self.turns)

    def close(self):
        pass


def test_rounds_change_the_order_and_ratios_are_new_over_old(monkeypatch):
    monkeypatch.setattr(commits, "Worker", Scripted)
    monkeypatch.setattr(Scripted, "order", [])
    old = [turn({"all": 2.0}), turn({"all": 4.0}), turn({"all": 1.0})]
    new = [turn({"all": 3.0}), turn({"all": 4.0}, compiles=2), turn({"all": 2.0})]
    got = commits.measure(Path("old"), Path("new"), {"old": old, "new": new}, 3)
    assert Scripted.order == ["old", "new", "new", "old", "old", "new"]
    assert got["compiles"] == {"old": 0, "new": 2}
    (line,) = commits.rows("what", got)
    assert line == "| what | 2 | 3 | 1.500 | 1.000 to 2.000 | 0, 2 |"


def test_the_page_is_that_of_the_record():
    record = json.loads((ROOT / "docs/results/commits.json").read_text())
    assert commits.page(record) == (ROOT / "docs/bench/commits.md").read_text()


@pytest.mark.slow
def test_a_worktree_runs_its_own_modules_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    before = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout
    case = {"step": ["tiny", 1, 4, 16, 8], "warm": 1, "calls": 2}
    with commits.worktree("HEAD", tmp_path / "tree") as tree:
        # A turn fails in the worktree alone: the process has not imported the modules of this checkout.
        marked = tree / "experiments/bench/step.py"
        worker = commits.Worker(tree, case)
        assert len(worker.turn()["calls"]) == 2
        worker.close()
        marked.write_text("raise RuntimeError('this worktree')\n")
        with pytest.raises(RuntimeError, match="ended with 1"):
            commits.Worker(tree, case)
    assert subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout == before
