"""The adapter blocks of `docs/your_reward_and_data.md` run as they are printed.

Small objects stand in for libraries that are not installed, those of `tests/envs`. Each block makes its task, which is
checked and played.
"""

from __future__ import annotations

import importlib
import sys
import types
from dataclasses import dataclass

import pytest

from jaxmarl_llm.envs.contract import check
from jaxmarl_llm.messages import Action, Message
from tests.docs.test_open_doors import FILE, page
from tests.envs import test_library_adapters as stand_ins
from tests.envs.test_adapters import Race
from tests.envs.test_library_adapters import without_inspect, without_verifiers  # noqa: F401  # fixtures

FILES = dict(FILE.findall(page("your_reward_and_data")))


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function from the name of a block's file, without its ending, to the task that the block makes."""
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def make(name):
        task = importlib.import_module(name).make()
        check(task, name)
        return task

    yield make
    for name in {file.removesuffix(".py") for file in FILES} - before:
        sys.modules.pop(name, None)


def module(monkeypatch, name, **members):
    """A module that is not installed, with these members."""
    found = types.ModuleType(name)
    vars(found).update(members)
    monkeypatch.setitem(sys.modules, name, found)


def last(task, held_out=False):
    """The environment of a task, its last row, the state and the prompts there."""
    env, row = task.make(), (task.held_out if held_out else task.tasks)[-1]
    state = env.reset(0, row)
    return env, row, state, env.observe(state)


def says(**texts):
    return {role: Action(text, tuple(text.encode())) for role, text in texts.items()}


def test_every_block_of_an_adapter_is_here():
    with_adapter = {file for file, text in FILES.items() if "jaxmarl_llm.envs.adapters" in text}
    assert with_adapter == {f"{name}.py" for name in (*BLOCKS, "guess")}  # guess is trained in test_open_doors


def test_exact_match(made):
    env, row, state, seen = last(made("more_sums"))
    assert seen == {"solver": (Message("user", f"{row['a']} + {row['b']} ="),)}
    assert env.step(0, state, says(solver=f" {row['a'] + row['b']}\nor more"))[1] == {"solver": {"accuracy": 1.0}}
    assert env.step(0, state, says(solver="no"))[1] == {"solver": {"accuracy": 0.0}}


def test_trl(made):
    env, row, state, seen = last(made("graded"))
    assert seen["solver"][0].text == f"The capital of {row['country']}?"
    assert env.step(0, state, says(solver=row["capital"]))[1] == {"solver": {"reward": 1.0}}


def test_textarena(made, monkeypatch):
    games = []
    module(monkeypatch, "textarena", make=lambda game: games.append(game) or Race())
    env, _, state, seen = last(made("tic_tac_toe"))
    assert set(games) == {"TicTacToe-v0"} and set(seen) == {"player_0"} and env.roles == ("player_0", "player_1")
    state, paid, done = env.step(0, state, says(player_0="1"))
    assert not done and not paid and set(env.observe(state)) == {"player_1"}


def test_verifiers(made, without_verifiers):  # noqa: F811
    asked = []
    sys.modules["verifiers"].load_environment = lambda name: asked.append(name) or stand_ins.Repeat()
    env, row, state, seen = last(made("own_verifiers"))
    assert set(asked) == {"my-environment"} and seen["solver"][0].text == row["prompt"][0]["content"]
    state, paid, done = env.step(0, state, says(solver="hm"))
    assert not done and not paid and env.observe(state)["solver"][-1].text == "again"


def test_inspect(made, monkeypatch, without_inspect):  # noqa: F811
    others = lambda: stand_ins.Evaluation(
        [stand_ins.MATCH], [stand_ins.ask], [stand_ins.Sample(f"{i} + 2?", str(i + 2)) for i in range(5)]
    )
    module(monkeypatch, "my_evals", capitals=stand_ins.evaluation, more_capitals=others)
    task = made("own_inspect")
    assert [len(task.tasks), len(task.held_out)] == [5, 12]
    env, row, state, _ = last(task, held_out=True)
    assert env.step(0, state, says(solver=row["target"]))[1] == {"solver": {"match": 1.0, "close": 1.0}}


def test_openenv(made, monkeypatch):
    @dataclass
    class EchoAction:
        message: str

    @dataclass
    class Heard:
        said: str

    class EchoEnv:
        def __init__(self, base_url):
            assert base_url == "http://localhost:8000"

        async def reset(self, seed):
            return types.SimpleNamespace(observation=Heard(f"say {seed}"), reward=None, done=False)

        async def step(self, action):
            echo, paid = Heard(action.message), float(len(action.message))
            return types.SimpleNamespace(observation=echo, reward=paid, done=False)

    module(monkeypatch, "echo_env", EchoAction=EchoAction, EchoEnv=EchoEnv)
    env, row, state, seen = last(made("own_openenv"))
    assert env.max_turns == 4 and f"say {row['seed']}" in seen["solver"][0].text
    state, paid, done = env.step(0, state, says(solver="echo"))
    assert paid == {"solver": {"reward": 4.0}} and not done and "echo" in env.observe(state)["solver"][-1].text


BLOCKS = {
    "more_sums": test_exact_match,
    "graded": test_trl,
    "tic_tac_toe": test_textarena,
    "own_verifiers": test_verifiers,
    "own_inspect": test_inspect,
    "own_openenv": test_openenv,
}
