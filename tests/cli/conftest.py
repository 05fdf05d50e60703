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
def own_module(tmp_path, monkeypatch):
    """own_module(name, text) makes a module that can be imported; returns the name of its function ``make``."""
    made = []

    def make(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        made.append(name)
        return f"{name}:make"

    yield make
    for name in made:
        sys.modules.pop(name, None)


@pytest.fixture
def capitals(own_module):
    return own_module("own_capitals", CAPITALS)
