"""The study of real text: a tiny team from the base model to RL, its record, its page, and what is refused."""

import dataclasses
import json
import types

import jax
import numpy as np
import pytest

from experiments.claims import FAILS, HOLDS, OPEN
from experiments.studies import common, real_text, text_teams
from experiments.studies.text_teams import Arm, TextTeam
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import grpo, magrpo
from tests.cli.tiny_runs import SHAPE

TASKS = 20


def tiny():
    made = {
        "steps": 1, "batch": 2, "group": 2, "micro_tokens": 256,
        "team": {"parameter_sharing": "lora", "lora_rank": 2, "backbone": SHAPE, "max_new_tokens": 3},
        "env": {"name": "chain_text", "workers": 0, "max_prompt": 256, "eval_tasks": TASKS},
        "sft": {"steps": 1, "batch": 2, "samples": 4, "min_fitting": 0.0},
        "reward": {"accuracy": 1.0, "format": 0.5},
        "run": {"eval_every": 0, "checkpoint_every": 1, "tensorboard": False},
    }  # fmt: skip
    return from_dict(grpo.Config, made)


TEAM = TextTeam(
    tiny,
    "return",
    text_teams._claim("return", 0.02),
    {"team": Arm(), "two steps": Arm({"steps": 2}), "other stage 0": Arm(start={"sft.samples": 6})},
    shown=("accuracy",),
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real_text")
    done, saved = {}, []
    real_text.run(TEAM, ["team", "two steps"], 1, done, folder / "work", saved.append)
    return folder, done, saved


@pytest.mark.slow
def test_a_team_goes_from_the_base_model_to_rl_once(recorded):
    """Arms share stage 0, what is recorded is not run again, and episodes are of the arm `team` alone."""
    folder, done, saved = recorded
    assert [*done["starts"]] == ["start"] and [*done["arms"]] == ["team", "two steps"]
    start = done["starts"]["start"]["0"]
    assert len(start["base"]["return"]) == len(start["stage 0"]["return"]) == TASKS
    assert [{place: len(played) for place, played in part.items()} for part in saved] == [
        {"base": TASKS, "stage 0": TASKS}, {"RL": TASKS}, {},
    ]  # fmt: skip
    assert {turn["role"] for episode in saved[1]["RL"] for turn in episode} >= {"verifier"}
    one, two = (done["arms"][name]["0"] for name in ("team", "two steps"))
    assert (one["steps"], two["steps"]) == (1, 2) and two["tokens"] > one["tokens"] > 0
    before = json.dumps(done)
    real_text.run(TEAM, ["team", "two steps"], 1, done, folder / "none", pytest.fail)
    assert json.dumps(done) == before and not (folder / "none").exists()
    real_text.check(TEAM, done, "here")


@pytest.mark.slow
def test_a_run_whose_measurement_was_lost_is_only_read(recorded):
    folder, done, _ = recorded
    again = {"starts": done["starts"], "arms": {"team": {}}}
    real_text.run(TEAM, ["team"], 1, again, folder / "work", lambda episodes: None)
    kept = ("RL", "steps", "tokens")
    one, other = (d["arms"]["team"]["0"] for d in (done, again))
    assert {key: one[key] for key in kept} == {key: other[key] for key in kept}


def record(base, taught, trained):
    """A record of one arm: what each task brought [seeds n]."""
    made = {"minutes": 1.0, "tokens": 10.0, "date": "2026-11-28", "commit": "abc", "machine": "cpu"}
    as_rows = lambda row: {"return": list(row), "accuracy": list(row), "part": [1.0] + [0.0] * (len(row) - 1)}
    starts = {str(s): {"base": as_rows(b), "stage 0": as_rows(t), **made} for s, (b, t) in enumerate(zip(base, taught))}
    settings = lambda s: real_text.fingerprint(text_teams.configuration(TEAM, Arm(), s))
    arms = {str(s): {"RL": as_rows(t), "steps": 1, "settings": settings(s), **made} for s, t in enumerate(trained)}
    return {"starts": {"start": starts}, "arms": {"team": arms}}


def test_effects_pair_the_tasks_of_a_seed():
    """Tasks differ much and the gain is the same for each of them: the interval is that of the gain."""
    rng = np.random.default_rng(0)
    taught = rng.normal(0, 10, (3, 50))
    done = record(taught - 1, taught, taught + 0.5 + rng.normal(0, 0.01, (3, 50)))
    before = real_text.values(done["starts"]["start"], "stage 0", "return")
    after = real_text.values(done["arms"]["team"], "RL", "return")
    mean, low, high = real_text.effect(after, before)
    assert mean == pytest.approx(0.5, abs=0.01) and 0.48 < low < high < 0.52
    assert real_text.effect({"5": after["0"]}, before) is None
    only = real_text.values(done["arms"]["team"], "RL", "return", "part")
    assert all(np.isfinite(row).tolist() == [True] + [False] * 49 for row in only.values())
    text = real_text.section("tiny", dataclasses.replace(TEAM, parts={"part": "first"}), done, "there.md")
    assert "by more than 0.02: **holds**" in text and "| two steps, RL | not recorded yet |" in text
    gained = next(line for line in text.split("\n") if line.startswith("| team, RL |"))
    assert f"{mean:.3f} ({low:.3f} to {high:.3f}) | 3 | 1 | 10 | 1 |" in gained
    changes = next(line.split(" | ") for line in text.split("\n") if line.startswith("| return |"))
    levels = (done["starts"]["start"], "base"), (done["starts"]["start"], "stage 0"), (done["arms"]["team"], "RL")
    for cell, (parts, place) in zip(changes[1:4], levels, strict=True):
        assert float(cell.split()[0]) == pytest.approx(np.mean([p[place]["return"] for p in parts.values()]), abs=1e-3)
    assert changes[4] == f"{mean:.3f} ({low:.3f} to {high:.3f}) |"


def test_a_component_that_an_environment_does_not_pay_is_an_empty_cell():
    """The other columns keep their places. A part needs the component that marks it."""
    team = dataclasses.replace(TEAM, shown=("accuracy", "routed"), parts={"part": "first", "strange": "none"})
    text = real_text.section("tiny", team, record(np.zeros((2, 4)), np.ones((2, 4)), np.full((2, 4), 3.0)), "there.md")
    lines = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in text.split("\n") if line.startswith("|")}
    assert [cell.strip() for cell in lines["arm"][:5]] == ["return", "first", "none", "accuracy", "routed"]
    for label, mean in (("team, base", 0), ("team, stage 0", 1), ("team, RL", 3)):
        cells = [cell.strip() for cell in lines[label]]
        assert cells[:5] == [real_text.shown((mean,) * 3), f"{mean:.3f}", "", f"{mean:.3f}", ""] and len(cells) == 10
    assert "accuracy" in lines and "routed" not in lines


def test_the_team_pays_all_columns_and_one_model_its_primary_figure():
    """A misspelt column would be empty for all arms."""
    for name, team in text_teams.TEAMS.items():
        paid = {}
        for arm, setting in team.arms.items():
            env = text_teams.configuration(team, setting, 0).env
            paid[arm] = {"return", *env.module.make(env.build()).components}
            assert team.metric in paid[arm] and set(text_teams.configuration(team, setting, 0).reward) <= paid[arm]
        assert {*team.shown, *team.parts} <= paid["team"], name
        (alone,) = [arm for arm in team.arms if arm.startswith("one model")]
        assert {*team.shown, *team.parts} - paid[alone], name


def test_one_model_samples_as_many_tokens_as_its_team():
    """Of the writers the words of demonstrations of the sample stand for tokens."""
    for name, factor in (
        ("call_team", text_teams.CALL_TOKENS),
        ("two_writers", text_teams.WRITER_TOKENS),
        ("reference_game", text_teams.GAME_TOKENS),
    ):
        team = text_teams.TEAMS[name]
        (arm,) = [arm for key, arm in team.arms.items() if key.startswith("one model")]
        assert arm.start == {"env.name": f"{name}_solo"} and arm.changes == {
            "steps": round(factor * team.config().steps)
        }
    words = {"proposer": [], "editor": [], "solo": []}
    for env in (EnvConfig(name).environment(0) for name in ("two_writers", "two_writers_solo")):
        for role, _, text in env.demonstrations(env.tasks):
            words[role].append(len(text.split()) + 1)
    proposer, editor, solo = (np.mean(row) for row in words.values())
    assert (proposer + editor) / solo == pytest.approx(text_teams.WRITER_TOKENS, rel=0.1)


def test_an_arm_with_a_frozen_role_trains_the_other_one():
    team = text_teams.TEAMS["reference_game"]
    for frozen, learns in (("listener", [True, False]), ("speaker", [False, True])):
        arm = team.arms[f"frozen {frozen}"]
        assert real_text.start_name(arm) == real_text.start_name(team.arms["team"])  # they share stage 0
        rule = magrpo.algorithm(text_teams.configuration(team, arm, 0)).trainable_roles
        assert np.asarray(rule(0)).tolist() == learns
    assert magrpo.algorithm(text_teams.configuration(team, team.arms["team"], 0)).trainable_roles is None


@pytest.mark.parametrize(
    ("found", "seeds", "said"),
    [
        ((0.5, 0.03, 0.9), 3, HOLDS), ((0.5, 0.01, 0.9), 3, OPEN), ((-0.5, -0.9, 0.01), 3, FAILS),
        ((0.5, 0.03, 0.9), 2, OPEN), (None, 3, OPEN), ((-0.5, -0.9, 0.03), 3, OPEN),
    ],
)  # fmt: skip
def test_the_whole_interval_decides(found, seeds, said):
    assert real_text.verdict(found, 0.02, seeds) == said


def test_records_of_other_configurations_are_refused():
    done = record(np.zeros((1, 2)), np.zeros((1, 2)), np.ones((1, 2)))
    real_text.check(TEAM, done, "here.json")
    other = dataclasses.replace(TEAM, config=lambda: dataclasses.replace(tiny(), batch=3))
    with pytest.raises(ConfigError, match=r"^here\.json: team, seed 0: recorded with another configuration"):
        real_text.check(other, done, "here.json")
    done["arms"]["strange"] = {}
    with pytest.raises(ConfigError, match=r"^here\.json: no arm 'strange'"):
        real_text.check(TEAM, done, "here.json")


def test_bad_names_and_pages_are_refused_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(real_text, "run", lambda *given: pytest.fail("a run has begun"))
    monkeypatch.setattr(real_text, "TEAMS", {"tiny": TEAM})
    page = tmp_path / "page.md"
    page.write_text("# Real text\n")
    files = {
        "records": str(tmp_path / "records.json"),
        "page": str(page),
        "seeds": 3,
        "work": str(tmp_path / "work"),
        "data": None,
    }
    flags = lambda team, run: types.SimpleNamespace(team=team, run=run, **files)
    for team, run, said in (
        ("tyny", [], "--team: no team 'tyny'; did you mean 'tiny'"),
        ("tiny", ["two"], "--run: no arm 'two'; expected all or one of team, two steps, other stage 0"),
        ("tiny", ["all"], "no section between <!-- tiny -->"),
    ):
        with pytest.raises(ConfigError) as error:
            real_text.main(None, None, flags(team, run))
        assert str(error.value).startswith(said)
    page.write_text("# Real text\n\n<!-- tiny -->\nold\n<!-- /tiny -->\n")
    real_text.main(None, None, flags("tiny", []))
    assert "old" not in page.read_text() and page.read_text().count("not recorded yet") == 3


def test_a_page_that_is_not_there_begins_with_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(real_text, "TEAMS", {"tiny": TEAM})
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    monkeypatch.setattr(real_text, "stated_in", lambda *files: "abc")

    def run(team, names, seeds, done, work, save, data):
        assert (names, seeds, work, data) == (["team"], 1, tmp_path / "work" / "tiny", None)
        done |= record(np.zeros((1, 4)), np.ones((1, 4)), np.full((1, 4), 3.0))
        save({"base": []})

    monkeypatch.setattr(real_text, "run", run)
    place = {"records": str(tmp_path / "new" / "record.json"), "page": str(tmp_path / "page" / "table.md")}
    asked = {"team": "tiny", "run": ["team"], "seeds": 1, "work": str(tmp_path / "work"), "data": None}
    for again in range(2):
        real_text.main(None, None, types.SimpleNamespace(**asked, **place))
        text = (tmp_path / "page" / "table.md").read_text()
        assert text.startswith("<!-- tiny -->") and text.count("| team, RL |") == 1, again
        assert (tmp_path / "page" / "../new/record/tiny.md").exists() and "(../new/record/tiny.md)" in text


def test_every_team_has_arms_that_can_be_made():
    for name, team in text_teams.TEAMS.items():
        assert next(iter(team.arms)) == "team" and team.claim.delta > 0, name
        for arm in team.arms.values():
            text_teams.configuration(team, arm, 0).check("config")


def test_a_task_that_was_not_played_has_no_episode(monkeypatch):
    monkeypatch.setattr(real_text, "episodes_of", lambda team, played, tasks: [[task] for task in tasks if task != 1])
    watch = real_text.Watch(None, [10, 11, 13])
    watch.batch(None, "", range(10, 14), None)
    assert watch.episodes == {10: [0], 13: [3]}


def test_a_recorded_command_has_no_folder_of_the_machine(monkeypatch):
    arguments = ["--run=team", "--data=/a/b/data", "/c/d", "--out=docs/x.json", "--text=1/2"]
    monkeypatch.setattr("sys.argv", ["study.py", *arguments])
    assert common.origin()["command"].endswith(" --run=team --data=data d --out=docs/x.json --text=1/2")
