"""`jaxmarl-llm view --text`: the tree of a task, what each completion earned, why it was trained, and a transcript."""

from __future__ import annotations

import argparse

import pytest

from jaxmarl_llm.cli import view
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.telemetry.rollouts_writer import encode
from tests.cli.test_cli import command

HEADER = rollouts.Header(
    1, 31, 11, "f" * 64, "grpo", 0, "toy", "product(2)", ("a", "b"), ("m", "b"), ("pay", "form"),
    {"pay": 1.0, "form": 0.5}, ("m",), 4, 2, {}, {},
)  # fmt: skip


def step(number, node, text, **more):
    values = {
        "token_ids": (5,), "logprobs": (-1.0,), "truncated": False, "source": "policy", "version": 0, "returns": 1.0,
        "advantage": 0.25, "group": 0, "valid": True, "selected": True, "trained": True, "why": "trained", **more,
    }  # fmt: skip
    return rollouts.Completion(step=number, node=node, text=text, **values)


def move(number, parent, steps, paid, turn=0, task=0, valid=True):
    rewards = {"pay": paid, "form": tuple(1.0 for _ in paid)} if valid else {"pay": (None,) * 2, "form": (None,) * 2}
    return rollouts.Transition(number, task, turn, parent, steps, rewards, turn == 1, valid)


def node(number, parent, role, turn=0, task=0, model="m"):
    return rollouts.Node(number, task, turn, role, model, parent, (1,), f"prompt {number}", (), ())


INVALID = {"returns": None, "advantage": None, "group": -1, "valid": False, "trained": False, "why": "no_return"}
ROWS = [
    rollouts.Task(0, 70), rollouts.Task(1, 71),
    # Task 0: roles in turn; task 1: both at once.
    node(0, -1, "a"), node(1, 0, "b", 1, model="b"), node(2, -1, "a", task=1), node(3, -1, "b", task=1),
    step(0, 0, "first\x1b[2J[red]\nline"),
    step(1, 0, "second", trained=False, why="group_not_selected", advantage=-0.75),
    step(2, 1, "lost", **INVALID), step(3, 2, "left", truncated=True), step(4, 3, "right"), step(5, 2, "x" * 200),
    step(6, 3, "last"),
    move(0, -1, (0, -1), (1.0, 9.0)), move(1, -1, (1, -1), (0.25, 9.0)),
    move(2, 0, (2, -1), (0.0, 0.0), 1, valid=False),
    move(3, -1, (3, 4), (2.0, 3.0), task=1), move(4, -1, (5, 6), (0.0, 0.0), task=1),
    rollouts.Group(0, 0, "a", 0, 5, 0.625, 0.5, 0.0, 1.0, True),
    rollouts.MemoryEvent("read", "a", 3, 0, 0.5, "entry", 1.0, 0.2),
    rollouts.MemoryEvent("written", "a", 2, -1, None, "new entry", 1.0, 0.2),
    rollouts.Failure(70, "step", 1, ("b",), "KeyError: no key"), rollouts.Failure(71, "reset", 0, (), "of task 1"),
]  # fmt: skip


@pytest.fixture
def run(tmp_path):
    (tmp_path / "rollouts").mkdir()
    for number in (21, 31):
        path = tmp_path / "rollouts" / f"step-{number:08}.jsonl.zst"
        path.write_bytes(encode(HEADER._replace(step=number), ROWS))
    return tmp_path


def shown(capsys, run, **more):
    given = {"run": [str(run)], "text": True, "serve": False, "out": None, "port": None, "step": None, "task": None}
    given |= {"node": None, "sample": None, "held_out": False, "chars": 60, **more}
    assert view.main(argparse.Namespace(**given)) == 0
    return capsys.readouterr().out.splitlines()


def test_the_tree_of_roles_in_turn(run, capsys):
    lines = shown(capsys, run)
    depth = {line.split("·")[0].strip(" │├└─"): len(line) - len(line.lstrip(" │├└─")) for line in lines}
    assert lines[0].startswith("step 31 (RL step 11) · task 0 of 2 (training task 70) · toy · product(2)")
    assert "pay 1, form 0.5" in lines[1] and "updated: m" in lines[1]
    (head,) = [line for line in lines if "node 0" in line]
    assert "turn 0 · a (m) · node 0 · group 0: mean 0.625, variance 0.5, selected · “prompt 0”" in head
    (first,) = [line for line in lines if "● 0 " in line]
    assert "● 0 · reward 1.5 · return 1 · advantage +0.25 · trained · “first\\x1b[2J[red]\\nline”" in first
    (second,) = [line for line in lines if "○ 1 " in line]
    assert "○ 1 · reward 0.75 · return 1 · advantage -0.75 · group_not_selected · “second”" in second
    (lost,) = [line for line in lines if "○ 2 " in line]
    assert "○ 2 · invalid · return – · advantage – · no_return · “lost”" in lost
    assert depth["turn 0"] < depth["● 0"] == depth["○ 1"] < depth["turn 1"] < depth["○ 2"]
    order = [line.strip(" │├└─").split(" · ")[0] for line in lines[2:8]]
    assert order == ["start", "turn 0", "memory 3 (0.5): entry", "● 0", "turn 1", "○ 2"]
    text = "\n".join(lines)
    assert "failure: step of b, turn 1: “KeyError: no key”" in text and "of task 1" not in text
    assert "new entry" not in text and "left" not in text and "\x1b" not in text
    transcript = [line.split() for line in lines[lines.index("transcript of the first line of play") + 1 :]]
    assert transcript == [["prompt", "“prompt", "0”"], ["a", "“first\\x1b[2J[red]\\nline”"], ["b", "“lost”"]]


def test_the_tree_of_roles_at_once(run, capsys):
    lines = shown(capsys, run, task=1, chars=20, step=21)
    text = "\n".join(lines)
    assert lines[0].startswith("step 21 ") and "failure: reset, turn 0" in text
    assert "● 3 · return 1 · advantage +0.25 · trained · cut off · “left”" in text  # a reward belongs to a joint action
    assert "joint action 3 + 4 · a: reward 2.5 · b: reward 3.5" in text
    assert f"“{'x' * 20}…”" in text and "x" * 21 not in text
    assert [line.split()[0] for line in lines[-2:]] == ["a", "b"]


def test_every_completion_of_the_task_is_shown_once(run, capsys):
    for task, numbers in ((0, {0, 1, 2}), (1, {3, 4, 5, 6})):
        found = [
            line.strip(" │├└─").split()[1] for line in shown(capsys, run, task=task) if "● " in line or "○ " in line
        ]
        assert sorted(map(int, found)) == sorted(numbers)


def test_a_long_episode_is_one_level_deep(tmp_path, capsys):
    """Turns without siblings continue at their own level, however many there are."""
    turns = 3000
    nodes = [node(t, t - 1, "a", t) for t in range(turns)]
    moves = [move(t, t - 1, (t, -1), (0.0, 0.0), t) for t in range(turns)]
    rows = [rollouts.Task(0, 0), *nodes, *(step(t, t, "say") for t in range(turns)), *moves, ROWS[-5]]
    path = tmp_path / "step-00000031.jsonl.zst"
    path.write_bytes(encode(HEADER, rows))
    lines = shown(capsys, path)
    assert max(len(line) - len(line.lstrip(" │├└─")) for line in lines[:-turns]) < 16
    assert sum("● " in line for line in lines) == turns


def test_a_held_out_task_of_the_newest_evaluation(run, capsys):
    for number in (0, 31):
        header = HEADER._replace(step=number, rl_step=number, split="held_out", schema=rollouts.SCHEMA)
        (run / "rollouts" / f"eval-{number:08}.jsonl.zst").write_bytes(encode(header, ROWS))
    lines = shown(capsys, run, held_out=True, task=1)
    assert lines[0].startswith("evaluation after step 31 (RL step 31) · task 1 of 2 (held-out task 71)")
    assert shown(capsys, run, held_out=True, step=0)[0].startswith("evaluation after step 0 ")
    with pytest.raises(ConfigError, match=r"--step: step 21 was not written to .*; there are 0, 31"):
        shown(capsys, run, held_out=True, step=21)


WRONG = {
    "step": ({"step": 30}, "--step: step 30 was not written to .*; there are 21, 31"),
    "task": ({"task": 2}, r"--task: expected one of \[0, 1\], which .*step-00000031.jsonl.zst has, got 2"),
    "negative": ({"task": -1}, "--task"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_there_is_one_line(case, run, capsys):
    more, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        shown(capsys, run, **more)


def test_the_command(run, tmp_path):
    done = command("jaxmarl_llm", "view", str(run), "--text", "--step=21", folder=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("step 21 (RL step 11)"), done.stderr
    done = command("jaxmarl_llm", "view", str(tmp_path / "none"), "--text", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "is this the workdir of a run" in done.stderr
