"""Programming problems: samples, published splits, known errors of the data, one-line refusals."""

import ast
import gzip
import json
import os
import shutil
from pathlib import Path

import pytest

from jaxmarl_llm.data import code_tasks
from jaxmarl_llm.data.code_tasks import KNOWN_BAD, SHARED, SPLITS, load_code
from jaxmarl_llm.data.loaders import FIXTURES
from jaxmarl_llm.errors import ConfigError

DATA = Path(os.environ.get("JAXMARL_DATA", "data"))  # the full files, where somebody has them
COUNTS = {
    ("humaneval", "train"): 14, ("humaneval", "dev"): 4, ("humaneval", "test"): 6, ("humaneval", "all"): 24,
    ("mbpp", "train"): 8, ("mbpp", "dev"): 4, ("mbpp", "test"): 4, ("mbpp", "all"): 16,
}  # fmt: skip


@pytest.mark.parametrize("benchmark, split", COUNTS)
def test_samples(benchmark, split):
    tasks, source = load_code(benchmark, split=split)
    assert len(tasks) == COUNTS[benchmark, split] and f"split {split}" in source and benchmark in source
    for task in tasks:
        assert set(task) == {"id", "index", "prompt", "entry_point", "test", "solution"}
        first, last = SPLITS[benchmark].get(split, (0, 10**4))
        assert first <= task["index"] <= last
        scope = {}
        exec(task["solution"] + task["test"], scope)
        if task["entry_point"] != "check":
            scope["check"](scope[task["entry_point"]])


def test_samples_carry_their_licences():
    for folder, words in {"humaneval": "MIT License", "mbpp": "Attribution 4.0"}.items():
        assert words in (FIXTURES / folder / "LICENSE").read_text("utf-8").replace("The MIT", "MIT")
        assert "repo:" in (FIXTURES / folder / "SOURCE.txt").read_text("utf-8")
    assert not (FIXTURES / "coophumaneval").exists()
    with pytest.raises(ConfigError, match="states no licence"):
        load_code("coophumaneval", split="train")


def test_mbpp_looks_like_humaneval():
    task = next(t for t in load_code("mbpp", split="all")[0])
    (function,) = ast.parse(task["prompt"]).body
    assert function.name == task["entry_point"] and ast.get_docstring(function)
    assert "assert" in task["test"] and "candidate" in task["test"] and task["entry_point"] not in task["test"]


def che(number, name="f", asserts=("candidate(1) == 1",) * 5):
    body = "\n".join(f"    assert {a}" for a in asserts)
    return {
        "task_id": f"CoopHumanEval/{number}",
        "prompt": f"def {name}(n):\n    '''What it does.'''\n",
        "test": f"def check(candidate):\n{body}",
        "entry_point": name,
    }


def folder(tmp_path, rows):
    (tmp_path / "coophumaneval").mkdir(exist_ok=True)
    (tmp_path / "coophumaneval" / "che_raw.json").write_text(json.dumps(rows), "utf-8")
    return tmp_path


def test_known_bad_asserts_are_left_out_by_number(tmp_path):
    numbered = tuple(f"candidate({i}) == {i}" for i in range(5))
    rows = [che(2, asserts=numbered), che(3, asserts=numbered), che(30, asserts=numbered)]
    data = folder(tmp_path, rows)
    tasks, source = load_code("coophumaneval", data_dir=data, split="all")
    assert [t["id"] for t in tasks] == ["CoopHumanEval/2", "CoopHumanEval/3"] and "1 left out" in source
    assert [i for i in range(5) if f"candidate({i})" in tasks[0]["test"]] == [1, 3, 4]
    assert tasks[1]["test"] == rows[1]["test"]
    kept, _ = load_code("coophumaneval", data_dir=data, split="all", keep_bad_tests=True)
    assert [t["test"] for t in kept] == [r["test"] for r in rows]
    assert all(numbers and why for numbers, why in KNOWN_BAD.values())


def test_splits_and_shared_functions(tmp_path):
    rows = [che(n, name="unique" if n == 4 else f"f{n}") for n in range(82)]
    data = folder(tmp_path, rows)
    numbers = {}
    for split in ("train", "dev", "test"):
        numbers[split] = [t["index"] for t in load_code("coophumaneval", data_dir=data, split=split)[0]]
    assert numbers["train"] == [n for n in range(50) if n != 30] and numbers["dev"] == list(range(50, 66))
    assert numbers["test"] == list(range(66, 82))
    apart = load_code("coophumaneval", data_dir=data / "coophumaneval", split="train", exclude_shared=True)[0]
    assert [t["index"] for t in apart] == [n for n in numbers["train"] if n != 4] and len(SHARED) == 16


def edited(**fields):
    row = che(0) | fields
    return {k: v for k, v in row.items() if v is not None}


BAD_ROWS = [
    ([], "expected a filled list"),
    ([3], "field 'task_id' is missing"),
    ([edited(task_id="zero")], "does not end with /<number>"),
    ([edited(prompt=None)], "row 1: field 'prompt' is missing"),
    ([edited(test="")], "row 1: field 'test' must be a filled str"),
    ([edited(test="x = 1")], "defines no function check"),
    ([edited(test="def check(candidate):\n    pass")], "asserts nothing about candidate"),
    ([edited(test="def check(candidate):\n    assert True")], "asserts nothing about candidate"),
    ([edited(test="def check(candidate:\n")], "field 'test' is not Python"),
    ([edited(prompt="def f(n:\n")], "field 'prompt' is not Python"),
    ([edited(prompt="\x00")], "field 'prompt' is not Python"),
    ([edited(entry_point="g")], "'g' is not defined in the prompt"),
    ([edited(entry_point=None)], "field 'entry_point' is missing"),
    ([edited(canonical_solution="    return (")], "field 'canonical_solution' is not Python"),
    ([che(0), che(0)], "row 2: field 'task_id': 'CoopHumanEval/0' is a duplicate of"),
    ([che(99)], "no tasks in split train"),
]


@pytest.mark.parametrize("rows, message", BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_bad_rows_are_named(tmp_path, rows, message):
    with pytest.raises(ConfigError) as error:
        load_code("coophumaneval", data_dir=folder(tmp_path, rows), split="train")
    assert message in str(error.value) and "che_raw.json" in str(error.value) and "\n" not in str(error.value)


ROW = {"task_id": 70, "prompt": "Write f.", "code": "def f(x):\n    return x", "test_list": ["assert f(1) == 1"]}
BAD_MBPP = [
    ({"task_id": "70"}, "field 'task_id' must be a filled int"),
    ({"test_list": []}, "'test_list' and 'test_imports' must be lists"),
    ({"test_list": ["assert g(1) == 1"]}, "calls no function that 'code' defines"),
    ({"code": "f = 3"}, "calls no function that 'code' defines"),
    ({"code": "def f("}, "field 'code' is not Python"),
    ({"test_list": ["assert f("]}, "field 'test_list' is not Python"),
    ({"test_list": ["f(1)"]}, "asserts nothing about candidate"),
    ({"prompt": "a ''' b"}, "field 'prompt' is not Python"),
]


@pytest.mark.parametrize("change, message", BAD_MBPP, ids=range(len(BAD_MBPP)))
def test_bad_mbpp_rows_are_named(tmp_path, change, message):
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps([ROW | change]), "utf-8")
    with pytest.raises(ConfigError) as error:
        load_code("mbpp", data_dir=tmp_path, split="train")
    assert message in str(error.value) and "sanitized-mbpp.json, row 1" in str(error.value)
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps([ROW]), "utf-8")
    assert load_code("mbpp", data_dir=tmp_path, split="train")[0][0]["id"] == "MBPP/70"


def test_compressed_files(tmp_path):
    raw = (FIXTURES / "humaneval" / "HumanEval.jsonl").read_bytes()
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(raw))
    assert load_code("humaneval", data_dir=tmp_path, split="all")[0] == load_code("humaneval", split="all")[0]
    for broken, message in {
        gzip.compress(raw)[:-20]: "not a whole gzip file",
        b"plain": "not a whole gzip file",
        gzip.compress(b"\xff{}"): "not UTF-8",
        gzip.compress(b"\n\n"): "empty",
        gzip.compress(raw + b"{oops\n"): "line 25: not valid JSON",
    }.items():
        path.write_bytes(broken)
        with pytest.raises(ConfigError) as error:
            load_code("humaneval", data_dir=tmp_path, split="all")
        assert message in str(error.value) and "HumanEval.jsonl.gz" in str(error.value)


def test_wrong_names_and_places(tmp_path):
    for arguments, message in [
        ({"benchmark": "apps", "split": "train"}, "expected one of humaneval"),
        ({"benchmark": "mbpp", "split": "validation"}, "expected one of dev, train, test or all"),
        ({"benchmark": "mbpp", "split": "train", "data_dir": tmp_path}, "none of the files sanitized-mbpp.json"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_code(**arguments)
    shutil.copytree(FIXTURES / "humaneval", tmp_path / "humaneval")
    (tmp_path / "humaneval" / "HumanEval.jsonl").write_bytes(b'{"task_id": "\xff"}')
    with pytest.raises(ConfigError, match="line 1: not UTF-8"):
        load_code("humaneval", data_dir=tmp_path, split="train")


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "humaneval").is_dir(), reason="needs the full data (JAXMARL_DATA)")
def test_full_data():
    sizes = {
        "humaneval": (100, 32, 31, 164),
        "coophumaneval": (49, 16, 16, 81),
        "mbpp": (50, 15, 192, 427),
    }
    for benchmark, wanted in sizes.items():
        splits = ("train", "dev", "test", "all")
        assert tuple(len(load_code(benchmark, data_dir=DATA, split=s)[0]) for s in splits) == wanted
    # the known bad asserts are there, and say what the table says
    rows = {t["id"]: t for t in load_code("coophumaneval", data_dir=DATA, split="all", keep_bad_tests=True)[0]}
    for key, (numbers, _) in KNOWN_BAD.items():
        check = ast.parse(rows[key]["test"]).body[-1]
        assert max(numbers) < sum(isinstance(s, ast.Assert) for s in check.body)
    both = {t["entry_point"] for t in rows.values()}
    both &= {t["entry_point"] for t in load_code("humaneval", data_dir=DATA, split="all")[0]}
    assert both == code_tasks.SHARED
