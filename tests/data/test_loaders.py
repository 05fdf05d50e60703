"""Loading: samples, hashed splits, and one-line refusals of bad data."""

import json
import shutil

import pytest

from jaxmarl_llm.data import loaders
from jaxmarl_llm.errors import ConfigError

COUNTS = {
    ("gsm8k", "train"): 60,
    ("gsm8k", "test"): 40,
    ("bfcl", "train"): 52,
    ("bfcl", "test"): 8,
    ("hotpotqa", "train"): 23,
    ("hotpotqa", "test"): 7,
    ("taubench_retail", "train"): 26,
    ("taubench_retail", "dev"): 4,
    ("taubench_retail", "test"): 10,
}


@pytest.mark.parametrize("name, split", COUNTS)
def test_samples(name, split):
    tasks, source = loaders.load(name, split=split)
    assert len(tasks) == len({t["id"] for t in tasks}) == COUNTS[name, split]
    assert name in source and split in source and "fixtures" in source


def test_samples_are_small_and_carry_their_licences():
    files = [p for p in loaders.FIXTURES.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 1.5e6
    for folder, words in {
        "gsm8k": "MIT License",
        "bfcl": "Apache License",
        "hotpotqa": "Attribution-ShareAlike 4.0",
        "taubench_retail": "MIT License",
    }.items():
        assert words.lower() in (loaders.FIXTURES / folder / "LICENSE").read_text("utf-8").lower()
        assert "repo:" in (loaders.FIXTURES / folder / "SOURCE.txt").read_text("utf-8")


@pytest.mark.parametrize("name", ["bfcl", "hotpotqa"])
def test_hashed_splits_are_disjoint_and_do_not_depend_on_the_other_rows(name, tmp_path):
    train, test = ({t["id"] for t in loaders.load(name, split=s)[0]} for s in ("train", "test"))
    assert not train & test
    shutil.copytree(loaders.FIXTURES / name, tmp_path / name)
    if name == "hotpotqa":
        path = tmp_path / name / "dev_distractor_slice.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8"))[::2]), "utf-8")
    else:
        (tmp_path / name / "BFCL_v4_multiple.json").unlink()
    fewer = {t["id"] for t in loaders.load(name, split="train", data_dir=tmp_path)[0]}
    assert fewer < train


def test_seed_and_limit():
    a, _ = loaders.load("gsm8k", split="train", seed=1)
    b, _ = loaders.load("gsm8k", split="train", seed=1, limit=5)
    c, _ = loaders.load("gsm8k", split="train", seed=2)
    assert a[:5] == b and a != c and sorted(t["id"] for t in a) == sorted(t["id"] for t in c)


def test_the_samples_of_the_shop_are_complete():
    db, _ = loaders.load_retail_db()
    for split in ("train", "dev", "test"):
        for task in loaders.load("taubench_retail", split=split)[0]:
            for key in db["users"][task["user_id"]]["orders"]:
                assert all(item["product_id"] in db["products"] for item in db["orders"][key]["items"])
            for action in task["actions"]:
                assert action["kwargs"].get("order_id") in {None, *db["orders"]}


def test_rows_keep_their_meaning():
    task = next(t for t in loaders.load("hotpotqa", split="train")[0])
    assert set(task["supporting"]) <= {title for title, _ in task["passages"]} and len(task["passages"]) == 10
    task = loaders.load("gsm8k", split="train", limit=1)[0][0]
    assert task["solution"].endswith(f"#### {task['answer']}")


ROW = '{"question": "q", "answer": "x #### 1"}'
BAD_LINES = [
    (b"", "empty"),
    (b"\n \n", "empty"),
    (ROW.encode() + b"\n{oops\n", "line 2: not valid JSON"),
    (ROW.encode() + b'\n{"question": "q"}\n', "line 2: field 'answer' is missing"),
    (ROW.encode() + b'\n{"question": "", "answer": "#### 1"}\n', "line 2: field 'question' must be a filled str"),
    (ROW.encode() + b'\n{"question": "q", "answer": "1"}\n', "line 2: field 'answer' has no final answer"),
    (ROW.encode() + b"\n[1]\n", "line 2: field 'question' is missing"),
    (ROW.encode() + b'\n{"question": "\xff"}\n', "line 2: not UTF-8"),
    (ROW.encode() + b'\n{"question": 3, "answer": "#### 1"}\n', "line 2: field 'question' must be a filled str"),
]


@pytest.mark.parametrize("content, message", BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_lines_are_named(tmp_path, content, message):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        loaders.load("gsm8k", split="train", data_dir=tmp_path)
    assert message in str(error.value) and "train.jsonl" in str(error.value) and "\n" not in str(error.value)


def test_windows_line_ends_are_fine(tmp_path):
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_bytes(ROW.encode() + b"\r\n" + ROW.encode() + b"\r\n")
    assert len(loaders.load("gsm8k", split="train", data_dir=tmp_path)[0]) == 2


def refused(**kwargs):
    with pytest.raises(ConfigError) as error:
        loaders.load(**kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_places(tmp_path):
    assert "no such folder" in refused(name="gsm8k", split="train", data_dir=tmp_path)
    (tmp_path / "gsm8k").mkdir()
    assert "cannot be read" in refused(name="gsm8k", split="train", data_dir=tmp_path)
    (tmp_path / "bfcl").mkdir()
    assert "none of the files" in refused(name="bfcl", split="train", data_dir=tmp_path)
    assert "'wikipedia'" in refused(name="wikipedia", split="train")
    assert "expected train or test" in refused(name="bfcl", split="dev")
    assert "limit" in refused(name="gsm8k", split="train", limit=0)


def test_a_hub_id_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    assert "jaxmarl_llm[hf]" in refused(name="openai/gsm8k", split="train")


def test_a_hub_id_goes_through_datasets(monkeypatch):
    class Rows(list):
        info = type("Info", (), {"version": "1.0"})

    class Hub:
        @staticmethod
        def load_dataset(name, config, split):
            return Rows([{"question": f"{name} {config} {split}", "answer": "so\n#### 7"}])

    monkeypatch.setitem(__import__("sys").modules, "datasets", Hub)
    (task,), source = loaders.load("openai/gsm8k", split="test")
    assert (
        task["question"] == "openai/gsm8k main test" and task["answer"] == "7" and source.startswith("hub openai/gsm8k")
    )


def copy_of(name, tmp_path):
    shutil.copytree(loaders.FIXTURES / name, tmp_path / name)
    return tmp_path / name


def test_duplicate_ids_are_refused(tmp_path):
    path = copy_of("bfcl", tmp_path) / "BFCL_v4_multiple.json"
    lines = path.read_text("utf-8").strip().split("\n")
    path.write_text("\n".join([*lines, lines[3]]), "utf-8")
    message = refused(name="bfcl", split="train", data_dir=tmp_path)
    assert "line 31: field 'id'" in message and "line 4" in message


def test_a_call_without_an_answer_is_refused(tmp_path):
    path = copy_of("bfcl", tmp_path) / "possible_answer" / "BFCL_v4_multiple.json"
    path.write_text("\n".join(path.read_text("utf-8").strip().split("\n")[1:]), "utf-8")
    assert "no row in possible_answer" in refused(name="bfcl", split="train", data_dir=tmp_path)


def test_passages_need_a_title_each(tmp_path):
    path = copy_of("hotpotqa", tmp_path) / "dev_distractor_slice.json"
    rows = json.loads(path.read_text("utf-8"))
    rows[2]["context"]["title"].pop()
    path.write_text(json.dumps(rows), "utf-8")
    assert "row 3: field 'context'" in refused(name="hotpotqa", split="train", data_dir=tmp_path)


def test_the_shop_must_be_consistent(tmp_path):
    folder = copy_of("taubench_retail", tmp_path)
    users = json.loads((folder / "users.json").read_text("utf-8"))
    users.pop(next(iter(users)))
    (folder / "users.json").write_text(json.dumps(users), "utf-8")
    with pytest.raises(ConfigError, match="'user_id' names no user"):
        loaders.load_retail_db(tmp_path)
    (folder / "products.json").write_text("[]", "utf-8")
    with pytest.raises(ConfigError, match=r"products\.json"):
        loaders.load_retail_db(tmp_path)
