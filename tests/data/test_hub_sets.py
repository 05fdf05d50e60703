"""Data sets of the hub by name: from the cache, from the hub, and one line with the command where neither has them.

A stand-in of `datasets` reads JSON lines of a folder, and knows which names the hub has. The cache has the layout of
`huggingface_hub`, which finds it itself.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from jaxmarl_llm.data import hub_sets, loaders
from jaxmarl_llm.data.rows import read_rows
from jaxmarl_llm.envs import TextTask
from jaxmarl_llm.errors import ConfigError

ROWS = [{"question": f"{i} + 1?", "answer": f"so\n#### {i + 1}"} for i in range(8)]


class Rows(list):
    info = types.SimpleNamespace(version="1.0")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A machine with an empty cache and no network. What the stand-in was asked for, and what its hub has by name."""
    from huggingface_hub import constants

    asked, online = [], {}

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        if Path(path).is_dir():
            file = Path(path) / (config or "") / f"{split}.jsonl"
            if not file.exists():
                raise ValueError(f'Unknown split "{split}".\nand a second line')
            return Rows(map(json.loads, file.read_text().splitlines()))
        if path not in online:
            raise ConnectionError(f"Couldn't reach '{path}' on the Hub\nand a second line")
        return online[path]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return types.SimpleNamespace(asked=asked, online=online, cache=tmp_path / "cache")


def fetch(hub, repo, files):
    """Put files of a data set into the cache, as `hf download --repo-type dataset` does. Returns their folder."""
    place = hub.cache / f"datasets--{repo.replace('/', '--')}"
    folder = place / "snapshots" / ("a" * 40)
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("a" * 40)
    return str(folder)


@pytest.mark.parametrize(
    "name, parsed",
    [
        ("openai/gsm8k", ("openai/gsm8k", "main", None)),
        ("openai/gsm8k:socratic", ("openai/gsm8k", "socratic", None)),
        ("openai/gsm8k::test", ("openai/gsm8k", "main", "test")),
        ("a-b/c.d-v1.1:x:train", ("a-b/c.d-v1.1", "x", "train")),
        ("a/b", ("a/b", None, None)),
        ("data/capitals.jsonl", None),
        ("capitals", None),
        ("/root/data", None),
        ("a/b/c", None),
        ("here/data", None),
    ],
)
def test_forms_of_a_name(name, parsed, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub_sets.parse(name) == parsed


def test_a_fetched_set_is_read_without_a_network(hub):
    folder = fetch(hub, "openai/gsm8k", {"main/train.jsonl": ROWS, "main/test.jsonl": ROWS[:2]})
    rows = read_rows("openai/gsm8k", count=3)
    assert [row.fields for row in rows] == ROWS[:3] and rows[2].where == "openai/gsm8k, row 3"
    assert [row.fields for row in read_rows("openai/gsm8k:main:test")] == ROWS[:2]
    assert hub.asked == [(folder, "main", "train"), (folder, "main", "test")]
    tasks, source = loaders.load("openai/gsm8k", split="test")
    assert sorted(task["answer"] for task in tasks) == ["1", "2"] and source.startswith("hub openai/gsm8k (1.0), split")


def test_a_text_task_takes_the_name_of_a_set(hub):
    fetch(hub, "openai/gsm8k", {"main/train.jsonl": ROWS, "main/test.jsonl": [{"question": "5 + 5?", "answer": "10"}]})
    task = TextTask(
        "openai/gsm8k", {"solver": "{question}"}, lambda task, texts: 0.0, held_out="openai/gsm8k:main:test"
    )
    assert list(task.tasks) == ROWS and [row["question"] for row in task.held_out] == ["5 + 5?"]
    with pytest.raises(
        ConfigError, match=r"openai/gsm8k, row 1: prompts\['solver'\]: no field 'qestion'; did you mean"
    ):
        TextTask("openai/gsm8k", {"solver": "{qestion}"}, lambda task, texts: 0.0)


def test_the_hub_itself_gives_what_the_cache_does_not_have(hub):
    hub.online["a/b"] = Rows([{"q": "1"}])
    fetch(hub, "a/b", {"README.md": []})  # what other calls leave there
    assert [row.fields for row in read_rows("a/b")] == [{"q": "1"}]
    assert hub.asked == [("a/b", None, "train")]
    folder = fetch(hub, "c/d", {"test.jsonl": ROWS})  # a part of the set
    hub.online["c/d"] = Rows([{"q": "2"}])
    assert [row.fields for row in read_rows("c/d")] == [{"q": "2"}]
    assert hub.asked[1:] == [(folder, None, "train"), ("c/d", None, "train")]


def test_what_neither_has_ends_in_one_line_with_the_command(hub):
    for read in (lambda: read_rows("openai/gsm8k"), lambda: loaders.load("openai/gsm8k", split="train")):
        with pytest.raises(ConfigError) as error:
            read()
        assert str(error.value) == (
            "hub openai/gsm8k, split train: cannot be had (ConnectionError: Couldn't reach 'openai/gsm8k' on the Hub); "
            "where there is a network: hf download --repo-type dataset openai/gsm8k"
        )


def test_a_wrong_split_says_how_a_split_is_named(hub, monkeypatch):
    def load_dataset(path, config, split):
        raise ValueError("Unknown split 'tst'. Should be one of ['train', 'test'].")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", load_dataset)
    with pytest.raises(ConfigError, match=r"split tst: cannot be had .*; expected OWNER/NAME, OWNER/NAME:CONFIG or"):
        read_rows("a/b::tst")
    with pytest.raises(ConfigError, match="dataset 'a/b:c:test': expected a hub id OWNER/NAME or OWNER/NAME:CONFIG"):
        loaders.load("a/b:c:test", split="train")


def test_a_missing_package_names_the_extra(hub, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxmarl_llm\[hf\]'"):
        read_rows("openai/gsm8k")


def test_a_file_goes_before_a_name(hub, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_text('{"q": "of the file"}\n')
    assert read_rows("a/b")[0].fields == {"q": "of the file"} and not hub.asked
    with pytest.raises(ConfigError, match=r"nowhere.jsonl: no such file; expected a JSONL file.* or OWNER/NAME"):
        read_rows("nowhere.jsonl")
