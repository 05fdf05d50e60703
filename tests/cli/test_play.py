"""`jaxmarl-llm play`: people and scripts on rewards that are known, and a trained team beside its rollout."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmarl_llm.cli import play
from jaxmarl_llm.cli.episodes import printable
from jaxmarl_llm.errors import ConfigError
from tests.cli.tiny_runs import tiny_run


def given(env=None, **changes):
    defaults = {
        "workdir": None,
        "best": False,
        "role": [],
        "say": [],
        "watch": False,
        "hot_seat": False,
        "greedy": False,
        "temperature": None,
        "task": "0",
        "seed": 0,
    }
    return argparse.Namespace(env=env, **{**defaults, **changes})


def test_a_person_and_a_script_see_prompts_and_rewards(capitals, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("It is\\nTokyo\n"))
    assert play.main(given(capitals, say=["judge=fine"], task="1")) == 0
    shown = capsys.readouterr().out
    assert "--- turn 0, solver reads\n[user] Capital of Japan?" in shown
    assert "--- solver says\nIt is\nTokyo" in shown and "--- judge says\nfine" in shown
    assert "--- rewards\nsolver: accuracy 1.0, length 4" in shown
    assert shown.endswith("--- sums\nsolver: accuracy 1, length 4\njudge: accuracy 1, length 4\n")
    assert shown.index("solver reads") < shown.index("you are solver") < shown.index("--- rewards")


SECRETS = """
from jaxmarl_llm.envs.contract import HostTask
from jaxmarl_llm.messages import HostEnv, Message

def reset(seed, task):
    return {"last": {}, "cards": task}

def observe(state):
    if state["last"].keys() == {"seller"}:
        return {"ann": (Message("user", "ann alone: once more"),)}
    if state["last"]:
        return {"seller": (Message("user", "for the seller: two bids"),)}
    return {role: (Message("user", f"{role}: your card is {card}"),) for role, card in state["cards"].items()}

def step(seed, state, actions):
    bids = {role: action.text for role, action in actions.items()}
    paid = {role: {"won": float(len(bid)), "spent": None if bid == "?" else -1.0} for role, bid in bids.items()}
    return {**state, "last": bids}, paid, "ann" in bids and bool(state["last"])

def make():
    env = HostEnv("bid", ("ann", "ben", "seller"), 3, ("won", "spent"), reset, observe, step)
    return HostTask(lambda: env, [{"ann": "RED", "ben": "BLUE"}], [{"ann": "BLUE", "ben": "RED"}])
"""


@pytest.fixture
def secrets(own_module):
    return own_module("own_secrets", SECRETS)


def test_people_at_one_terminal_see_their_own_role_alone(secrets, monkeypatch, capsys):
    """Two people and a script: what is on the screen between two handovers belongs to one role."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\nfour\n\n?\n\nxy\n"))
    monkeypatch.setattr(play, "_clear", lambda: print("<clear>"))
    assert play.main(given(secrets, say=["seller=yes"], hot_seat=True)) == 0
    screens = capsys.readouterr().out.split("<clear>\n")
    handover = "--- pass the keyboard to {}, and press Enter: "
    assert screens == [
        "",
        handover.format("ann"),
        "--- turn 0, ann reads\n[user] ann: your card is RED\n--- you are ann: ",
        handover.format("ben"),
        "--- turn 0, ben reads\n[user] ben: your card is BLUE\n--- you are ben: ",
        handover.format("ann"),
        "--- turn 2, ann reads\n[user] ann alone: once more\n--- you are ann: ",
        "--- sums\nann: won 6, spent -2\nben: won 1, spent unknown\nseller: won 3, spent -1\n",
    ]


def test_a_role_that_acts_again_keeps_the_keyboard_and_the_end_of_input_ends(secrets, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("\none\n"))
    show = play.HotSeat(["ann", "ben"])
    show.reads(0, "ann", (), [])
    show.reads(1, "seller", (), [])
    show.reads(2, "ann", (), [])
    assert capsys.readouterr().out.count("pass the keyboard") == 1
    monkeypatch.setattr("sys.stdin", io.StringIO("\none\n"))
    assert play.main(given(secrets, say=["seller=yes"], hot_seat=True)) == 0
    assert capsys.readouterr().out.endswith("\nended\n")


def test_the_screen_is_cleared_with_what_was_scrolled(monkeypatch, capsys):
    play._clear()
    assert capsys.readouterr().out == "\n" * play.shutil.get_terminal_size().lines
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    play._clear()
    assert capsys.readouterr().out == "\x1b[H\x1b[2J\x1b[3J"


def test_what_controls_a_terminal_is_not_printed(capitals, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("a\x1b[31m\tb\n"))
    assert play.main(given(capitals, say=["judge=\x07"])) == 0
    shown = capsys.readouterr().out
    assert "--- solver says\na\ufffd[31m\tb\n" in shown and "--- judge says\n\ufffd\n" in shown


def test_a_task_of_ones_own_and_the_end_of_input(capitals, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Rome\n"))
    own = '{"country": "Italy", "capital": "Rome"}'
    assert play.main(given(capitals, say=["judge="], task=own)) == 0
    assert "Capital of Italy?" in (shown := capsys.readouterr().out) and "accuracy 1.0, length 0" in shown
    assert play.main(given(capitals, role=["solver", "judge"])) == 0
    assert capsys.readouterr().out.endswith("\nended\n")


def test_the_users_own_exception_is_shown(capitals):
    with pytest.raises(ValueError, match="my own mistake"):
        play.main(given(capitals, say=["judge=x", "solver=boom"]))


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"role": ["sovler"]}, "--role=sovler: no such role; the roles are solver, judge"),
        ({"say": ["judge"]}, "--say=judge: expected ROLE=TEXT"),
        ({"role": ["solver"]}, "nobody plays 'judge'"),
        ({"hot_seat": True, "say": ["judge=x"]}, "--hot-seat: expected two people or more, got 1"),
        ({"watch": True}, "--watch: expected --workdir=RUN and no --role"),
        ({"task": "7"}, "--task=7: expected a number below 2, or a task in JSON"),
        ({"task": "{"}, "expected a number, or a task in JSON"),
    ],
)
def test_bad_input_is_one_line(capitals, changes, says):
    with pytest.raises(ConfigError, match=says):
        play.main(given(capitals, **changes))


def test_an_environment_or_a_run_is_asked_for(capitals):
    for wrong in (given(), given(capitals, workdir="x")):
        with pytest.raises(ConfigError, match="expected an environment, or a run as RUN or --workdir=RUN, one"):
            play.main(wrong)


def test_an_array_environment_is_played_by_its_tokens(monkeypatch, capsys):
    """The solver reads the question of the first training task; the right answer and a wrong one are paid as such."""
    from jaxmarl_llm.envs.chain import array as chain

    tasks = chain.make_tasks(chain.Config())
    answer = int(tasks["answer"][0])
    for said, paid in ((answer, 1.0), ((answer + 1) % 10, 0.0)):
        monkeypatch.setattr("sys.stdin", io.StringIO(f"{said}\n"))
        play.main(given("chain", role=["solver"], say=["verifier=y"]))
        shown = capsys.readouterr().out
        assert f"accuracy {paid}" in shown and "--- turn 0, solver reads" in shown
    with pytest.raises(ConfigError, match="expected a number: the tasks of an array environment are arrays"):
        play.main(given("chain", task="{}"))


def test_the_trained_team_says_what_its_rollout_says(capitals, monkeypatch, capsys, tmp_path):
    """At temperature 0, for every role: the texts of `EnvRunner.play` on the same held-out task."""
    import jax

    from jaxmarl_llm.cli import trained_run
    from jaxmarl_llm.generation.sampling import Sampling
    from jaxmarl_llm.rollout.plans import single

    cfg, recipe, state = tiny_run(capitals)
    key = jax.random.key(9)
    greedy = Sampling(temperature=0.0)
    rollout = recipe.env_runner.play(recipe.team, state.params, {}, [0], single(), key, greedy, None, held_out=True)
    expected = [rollout.completion_text(i) for i in range(len(recipe.team.roles))]
    monkeypatch.setattr(trained_run, "open_run", lambda *_, **__: (cfg, recipe, state))
    assert play.main(given(workdir="run", watch=True, greedy=True)) == 0
    shown = capsys.readouterr().out
    assert "Capital of Peru?" in shown  # held out
    for role, text in zip(("solver", "judge"), expected, strict=True):
        assert f"--- {role} says\n{printable(text)}\n" in shown
    with pytest.raises(ConfigError, match="--workdir: expected --role=ROLE, the role that you play, or --watch"):
        play.main(given(workdir="run"))


def test_the_command_ends_wrong_input_with_one_line(tmp_path):
    command = [sys.executable, "-m", "jaxmarl_llm", "play", "capital"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=env)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
