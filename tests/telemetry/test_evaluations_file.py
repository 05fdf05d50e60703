"""evaluations.jsonl: what is written is read, also after a resume or a full disk, and what is damaged is one line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxmarl_llm.envs.splits import content_hash
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.runs.recorder import task_values
from jaxmarl_llm.telemetry.evaluations_file import NAME, Evaluation, EvaluationsFile, read_evaluations

TASKS = ("aa", "bb", "")
VALUES = {"return": (0.1, None, 2.0), "success": (0.0, None, 1.0)}


def filled(folder, *steps, resume=None, tasks=TASKS):
    file = EvaluationsFile(folder, tasks, resume)
    for step in steps:
        file.write(step, {name: [value and value * step for value in row] for name, row in VALUES.items()})
    return file


def test_what_is_written_is_read(tmp_path):
    filled(tmp_path, 0, 5)
    read = read_evaluations(tmp_path)
    assert read.tasks == TASKS and [row.step for row in read.rows] == [0, 5]
    assert read.rows[1] == Evaluation(5, {"return": (0.5, None, 10.0), "success": (0.0, None, 5.0)})
    assert read_evaluations(tmp_path / "none") is None


def test_a_resumed_run_has_the_same_bytes(tmp_path):
    """Also where the evaluation after the step of the checkpoint is measured again, and where a line was cut off."""
    (tmp_path / "straight").mkdir()
    filled(tmp_path / "straight", 0, 5, 10)
    straight = (tmp_path / "straight" / NAME).read_bytes()
    for resume, again in ((7, (10,)), (5, (5, 10)), (0, (0, 5, 10)), (10, ())):
        folder = tmp_path / str(resume)
        folder.mkdir()
        filled(folder, 0, 5, 10)
        with open(folder / NAME, "ab") as file:
            file.write(b'{"step":15')
        EvaluationsFile(folder, TASKS, resume)
        assert [row.step for row in read_evaluations(folder).rows] == [s for s in (0, 5, 10) if s <= resume]
        filled(folder, *again, resume=resume)
        assert (folder / NAME).read_bytes() == straight, resume
        assert not list(folder.glob("*.tmp"))


def test_a_new_run_and_other_tasks_leave_the_old_file_aside(tmp_path):
    filled(tmp_path, 0, 5)
    old = (tmp_path / NAME).read_bytes()
    for resume, tasks in ((None, TASKS), (5, ("aa", "cc", ""))):
        (tmp_path / NAME).write_bytes(old)
        filled(tmp_path, 7, resume=resume, tasks=tasks)
        assert [row.step for row in read_evaluations(tmp_path).rows] == [7]
        assert (tmp_path / f"{NAME}.old").read_bytes() == old


def test_a_line_that_the_disk_refused_is_written_with_the_next_one(tmp_path, caplog):
    file = filled(tmp_path, 0)
    (tmp_path / NAME).rename(tmp_path / "kept")
    (tmp_path / NAME).mkdir()
    file.write(5, VALUES)
    file.write(6, VALUES)
    assert caplog.text.count("cannot be written, training goes on") == 1
    (tmp_path / NAME).rmdir()
    (tmp_path / "kept").rename(tmp_path / NAME)
    file.write(10, VALUES)
    assert [row.step for row in read_evaluations(tmp_path).rows] == [0, 5, 6, 10]


WRONG = {
    "no tasks": ('{"step": 1}\n', "1: key 'tasks': expected a list of texts"),
    "no step": ('{"tasks": ["a"]}\n{"return": [1]}\n', "2: expected an evaluation with a step"),
    "another length": (
        '{"tasks": ["a"]}\n{"step": 1, "return": []}\n',
        "2: key 'return': expected 1 numbers of float32",
    ),
    "a text": ('{"tasks": ["a"]}\n{"step": 1, "return": ["1"]}\n', "2: key 'return': expected 1 numbers of float32"),
    "too large": (
        '{"tasks": ["a"]}\n{"step": 1, "return": [3.5e38]}\n',
        "2: key 'return': expected 1 numbers of float32",
    ),
    "a huge integer": (
        f'{{"tasks": ["a"]}}\n{{"step": 1, "return": [{10**40}]}}\n',
        "2: key 'return': expected 1 numbers of float32",
    ),
    "a huge step": (f'{{"tasks": []}}\n{{"step": {2**63}}}\n', "2: expected an evaluation with a step"),
    "no JSON": ('{"tasks": ["a"]}\n{step\n', ":2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_damaged_file_is_one_line(case, tmp_path):
    raw, said = WRONG[case]
    (tmp_path / NAME).write_text(raw)
    with pytest.raises(ConfigError) as caught:
        read_evaluations(tmp_path)
    assert str(tmp_path / NAME) in str(caught.value) and said in str(caught.value) and "\n" not in str(caught.value)


def test_return_and_success_of_each_task():
    seen = {"accuracy": np.array([1.0, 0.5, np.nan]), "form": np.array([0.5, 1.0, np.nan])}
    greedy = {"accuracy": np.array([0.0, 0.0, 1.0]), "form": np.zeros(3)}
    got = task_values({"": seen, "_greedy": greedy}, {"accuracy": 2.0, "form": -1.0})
    assert got == {
        "return": (1.5, 0.0, None),
        "success": (1.0, 0.5, None),
        "return_greedy": (0.0, 0.0, 2.0),
        "success_greedy": (0.0, 0.0, 1.0),
    }
    assert task_values({"": {"form": np.zeros(1)}}, {"form": 1.0}) == {"return": (0.0,)}


def test_the_largest_number_that_is_written_is_read(tmp_path):
    """Its difference of two runs is a number, too."""
    from jaxmarl_llm.telemetry.task_pairs import effect_of, pair_tasks

    largest = float(np.finfo(np.float32).max)
    for name, sign in (("one", 1), ("two", -1)):
        (tmp_path / name).mkdir()
        EvaluationsFile(tmp_path / name, TASKS, None).write(3, {"return": [sign * largest] * 3})
    one, two = (read_evaluations(tmp_path / name) for name in ("one", "two"))
    assert one.rows[0].values["return"] == (largest,) * 3
    assert effect_of(pair_tasks(one, two, "return")).mean == -2 * largest


def test_a_hash_is_of_content_and_not_of_a_name_or_an_address():
    one = {"id": 3, "question": "a", "table": np.arange(3)}
    assert content_hash(one) == content_hash({**one, "id": 4}) == content_hash(json.loads('{"id": 1}') | one)
    assert content_hash(one) != content_hash({**one, "question": "b"}) and len(content_hash(one)) == 16
    assert content_hash(one) != content_hash({**one, "table": np.array([0, 2, 1])})
    assert content_hash({"question": object()}) == ""
