"""Environments that several commands play."""

import sys

import pytest

CAPITALS = """
from jaxmarl_llm import TextTask

def reward(task, texts):
    if "boom" in texts["solver"]:
        raise ValueError("my own mistake")
    return {"accuracy": float(task["capital"] in texts["solver"]), "length": len(texts["judge"])}

def make():
    rows = [{"country": c, "capital": t} for c, t in (("France", "Paris"), ("Japan", "Tokyo"), ("Peru", "Lima"))]
    prompts = {"solver": "Capital of {country}?", "judge": "Say fine."}
    return TextTask({"train": rows[:2], "test": rows[2:]}, prompts, reward)
"""


@pytest.fixture
def capitals(tmp_path, monkeypatch):
    (tmp_path / "own_capitals.py").write_text(CAPITALS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_capitals:make"
    sys.modules.pop("own_capitals", None)
