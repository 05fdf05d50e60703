"""The door of an own task: `--config=magrpo:task --config.env.name=capitals:make`, and the commands around it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest

from jaxmarl_llm.cli import config_flags, envs, evaluate, play
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from tests.cli.test_cli import command
from tests.cli.tiny_runs import SHAPE, tiny_run

NAME = [("env.name", "own_capitals:make")]


@pytest.mark.parametrize("spec", ["magrpo:task", "grpo:task"])
def test_the_task_configurations_take_an_environment_by_its_name_alone(spec, capitals):
    cfg = config_flags.load(spec, NAME)
    assert cfg.env == EnvConfig("own_capitals:make", {}, workers=0, eval_tasks=64)
    recipe = config_flags.recipe_module(cfg.recipe).make(cfg)
    assert recipe.cfg.reward == {"accuracy": 1.0, "length": 1.0} and recipe.total_steps == cfg.steps
    half = config_flags.load(spec, [*NAME, ("reward.length", "-0.5")])
    made = config_flags.recipe_module(half.recipe).make(half)
    assert made.cfg.reward == {"accuracy": 1.0, "length": -0.5}


def test_another_environment_leaves_the_arguments_of_the_old_one_out(capitals, caplog):
    config_flags._warn_of_args.cache_clear()
    assert config_flags.load("grpo:tiny").env.args == {"efficiency": 0.05, "wrong_product": 0.25}
    assert config_flags.load("grpo:tiny", NAME).env.args == {}
    assert "config.env.args: efficiency, wrong_product of environment 'dispatch_solo' left out" in caplog.text
    given = ("env.args.efficiency", "0.1")
    for order in ([given, ("env.name", "dispatch")], [("env.name", "dispatch"), given]):
        assert config_flags.load("grpo:tiny", order).env.args == {"efficiency": 0.1}
    same = config_flags.load("grpo:tiny", [("env.name", "dispatch_solo"), given])
    assert same.env.args == {"efficiency": 0.1, "wrong_product": 0.25}


# -------------------------------------------------------------------------------------------- envs module:function

SHOWN = """\"""A module of tasks.\"""
from jaxmarl_llm.envs import HostTask, TextTask
from jaxmarl_llm.envs.registry import EnvConfig

ROWS = {"train": [{"q": "1"}, {"q": "2"}], "test": [{"q": "3"}]}
PROMPTS = {"draft": "Draft {q}", "editor": "Edit {q}: {draft}"}

def turns():
    \"""A task in turns.\"""
    def reward(task, texts, rounds):
        return {"draft": len(texts["draft"]) / 8, "editor": {"right": texts["editor"] == "B1", "rounds": len(rounds)}}
    said = {"draft": "A{q}", "editor": "B{q}"}
    more = {"demonstrations": said, "reply": lambda task, rounds: "Again.", "rounds": 2}
    return TextTask(ROWS, PROMPTS, reward, turns=["draft", "editor"], **more)

def unpaid():
    return TextTask(ROWS, PROMPTS, lambda task, texts: {"draft": 1.0, "editor": None}, turns=["draft", "editor"])

def raises():
    made = turns()
    env = made.make()
    def step(seed, state, actions):
        if not any(action.text for action in actions.values()):
            raise ValueError("no text")
        return env.step(seed, state, actions)
    return HostTask(lambda: env._replace(step=step), made.tasks, made.held_out)

def array():
    return EnvConfig("matrix", {"tasks": 24}, eval_tasks=6).environment()
"""


@pytest.fixture
def show(tmp_path, monkeypatch, capsys):
    """A function from the name of an environment to what `envs` prints."""
    (tmp_path / "own_shown.py").write_text(SHOWN)
    monkeypatch.syspath_prepend(tmp_path)

    def shown(name):
        envs.main(argparse.Namespace(name=f"own_shown:{name}"))
        return capsys.readouterr().out

    yield shown
    sys.modules.pop("own_shown", None)


def test_an_own_task_shows_its_tasks_prompts_and_rewards_of_a_trial(show):
    printed = show("turns")
    assert printed.startswith("A task in turns.\n\nhost environment; roles: draft, editor; at most 4 turns\n")
    assert "\ntasks: 2 of training, 1 held out\n" in printed
    assert (
        "--- draft reads\n[user] Draft 1\n--- editor reads\n[user] Edit 1: A1\n" in printed and "Again" not in printed
    )
    assert printed.endswith(
        "paid on this task, by role and component:\n"
        "draft wrote 'A1': reward 0.25\neditor wrote 'B1': right 1.0, rounds 2.0\n"
    )


def test_an_invalid_reward_and_an_error_of_the_trial_are_shown(show):
    printed = show("unpaid")
    assert "draft wrote '': reward 1.0\neditor wrote '': reward None\na reward of None makes the" in printed
    printed = show("raises")
    assert "--- editor reads\nnothing: it does not act in the trial" in printed
    assert printed.endswith(": nothing\nthe trial raised ValueError: no text; such joint actions are invalid\n")


def test_a_function_without_a_docstring_shows_that_of_its_module(show):
    assert show("unpaid").startswith("A module of tasks.\n\nhost environment")


def test_an_own_array_environment_shows_how_many_tasks_it_has(show):
    printed = show("array")
    assert "\ntasks: 24 of training, 6 held out\n" in printed and "first prompt" not in printed


def test_help_of_envs_names_the_form_of_an_own_task(tmp_path):
    shown = command("jaxmarl_llm", "envs", "--help", folder=tmp_path).stdout
    assert "jaxmarl-llm envs module:function " in shown and "package.module, or module:function" in shown


# --------------------------------------------------------------------------------------------- evaluate --env=another

OTHER = """
from jaxmarl_llm import TextTask
SAID = []

def task(roles, pays):
    rows = [{"country": c} for c in ("France", "Japan", "Peru")]
    prompts = {"solver": "Capital of {country}?", "judge": "Is {country} fine?"}
    def reward(task, texts):
        SAID.append((task["country"], dict(texts)))
        return pays
    shown = {role: prompts.get(role, "{country}") for role in roles}
    return TextTask({"train": rows[:1], "test": rows[1:]}, shown, reward)

def own_roles(): return task(("solver", "judge"), {"accuracy": 0.5, "style": 2.0})
def swapped(): return task(("judge", "solver"), {"accuracy": 0.5, "style": 2.0})
def alone(): return task(("judge",), {"style": 2.0})
def stranger(): return task(("judge", "critic"), {"style": 2.0})
"""


@pytest.fixture
def elsewhere(capitals, tmp_path):
    """A module of environments with the roles of `own_capitals`, and an untrained run on it."""
    (tmp_path / "own_other.py").write_text(OTHER)
    yield tiny_run(capitals, reward={"accuracy": 3.0, "length": 1.0})
    sys.modules.pop("own_other", None)


def said(run, name):
    """Figures of the run on an environment, and who wrote what of each held-out country: first sampled, then greedy."""
    sys.modules.pop("own_other", None)
    figures = evaluate.another_environment(*run, f"own_other:{name}", "gs://none")
    return figures, [(country, texts) for country, texts in sys.modules["own_other"].SAID if country != "France"]


def test_a_team_plays_another_environment_and_each_role_keeps_its_model(elsewhere):
    figures, texts = said(elsewhere, "own_roles")
    assert figures["env"] == "own_other:own_roles"
    assert [country for country, _ in texts] == ["Japan", "Peru"] * 2
    for suffix in ("", "_greedy"):  # accuracy has the weight of the run, and style has none there
        assert figures[f"eval/accuracy{suffix}"] == 0.5 and figures[f"eval/return{suffix}"] == 3.0 * 0.5 + 2.0
    greedy = dict(texts[2:])
    _, other = said(elsewhere, "swapped")
    assert dict(other[2:]) == greedy
    assert len({text[role] for text in greedy.values() for role in text}) > 1
    figures, lone = said(elsewhere, "alone")
    assert {country: text["judge"] for country, text in lone[2:]} == {c: t["judge"] for c, t in greedy.items()}
    assert figures["eval/return_greedy"] == 2.0


@pytest.mark.parametrize(
    "name, message",
    [
        ("own_other:stranger", "its role 'critic' is no role of the run, whose roles are solver, judge"),
        ("own_other:nothing", "config.env.name: module 'own_other' has no attribute 'nothing'"),
        ("duett", "config.env.name: no environment 'duett'; did you mean 'duet'"),
    ],
)
def test_an_environment_that_the_team_cannot_play_is_one_line(elsewhere, name, message):
    with pytest.raises(ConfigError, match=f"^--env={name}: {message}") as error:
        evaluate.another_environment(*elsewhere, name, "gs://none")
    assert "\n" not in str(error.value)


def test_a_memory_of_an_array_environment_is_not_read_elsewhere(elsewhere):
    run = tiny_run("dispatch", recipe="joyagents_r1", batch=2, team={"max_new_tokens": 7, "backbone": SHAPE})
    judge = [dataclasses.replace(role, name=name) for role, name in zip(run[1].team.roles, ("solver", "judge"))]
    run[1].team = dataclasses.replace(run[1].team, roles=tuple(judge))
    with pytest.raises(ConfigError, match="the run has a memory, which only text environments may read elsewhere"):
        evaluate.another_environment(*run, "own_other:alone", "gs://none")


def test_the_command_evaluates_another_environment(elsewhere, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(evaluate, "open_run", lambda *_, **__: elsewhere)
    given = {"env": "own_other:own_roles", "out": str(tmp_path / "out.json"), "mesh": ["1"] * 3, "best": False}
    with pytest.raises(ConfigError, match=r"^--env: expected no --partner: mixed teams play"):
        evaluate.main(None, "run", Given(given, partner="runs/other"))
    evaluate.main(None, str(tmp_path / "run"), Given(given))
    assert "eval/return                  3.5000" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["env"] == given["env"]


class Given(dict):
    """What absl gives: ``flags.relay``, and ``flags["relay"].value``."""

    def __init__(self, given, **more):
        values = {"partner": None, "solo": None, "relay": 0, "eval_tasks": None, **given, **more}
        super().__init__({name: SimpleNamespace(value=value) for name, value in values.items()})
        self.__dict__.update(values)


# ------------------------------------------------------------------------------------------------ RUN as an argument


def test_the_run_is_an_argument_of_evaluate_and_export(tmp_path):
    (tmp_path / "run").mkdir()
    for words, says in {
        "export nowhere --export_to=x": "error: --workdir: nowhere holds no checkpoints; train first",
        "evaluate run --workdir=run": "error: RUN: 'run' and --workdir=run are given; expected one of the two",
        "evaluate": "error: --workdir: required but not given (Folder of a trained run, which is also",
    }.items():
        done = command("jaxmarl_llm", *words.split(), folder=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1) and done.stderr.startswith(says), done.stderr
    assert not (tmp_path / "nowhere").exists()  # a mistyped name makes no folder


def test_help_of_evaluate_does_not_speak_of_resuming(tmp_path):
    shown = command("jaxmarl_llm", "evaluate", "--help", folder=tmp_path).stdout
    assert "--workdir: Folder of a trained run, which is also taken as the argument RUN." in shown
    assert "Resumed" not in shown
    assert "Resumed when it has any." in command("jaxmarl_llm", "train", "--help", folder=tmp_path).stdout


def test_the_version_is_shown(tmp_path):
    from jaxmarl_llm import __version__

    done = command("jaxmarl_llm", "--version", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"jaxmarl_llm {__version__}\n")


def test_play_takes_a_run_or_an_environment_as_its_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "chain"):
        (tmp_path / name).mkdir()
    assert play._is_run("run") and play._is_run("runs/nowhere")
    assert not play._is_run("chain") and not play._is_run("capitals:make") and not play._is_run("nothing")
    asked = argparse.Namespace(env="runs/none", workdir=None, greedy=False, temperature=None, best=False)
    with pytest.raises(ConfigError, match=r"^--workdir: runs/none holds no checkpoints"):
        play.main(asked)
