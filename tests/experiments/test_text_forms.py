"""Text forms played by a model: a record with a tiny one, a metric that is not finite, every configuration."""

import json
import types

import pytest

from experiments.studies import text_forms
from jaxmarl_llm.envs import registry
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.runs import loop
from tests.cli.tiny_runs import SHAPE
from tests.envs.test_coding_rewards import available

NAME = "games_text"  # the shortest prompts


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A configuration, the folder of its run, and the page."""
    folder = tmp_path_factory.mktemp("text_forms")
    page = folder / "page.md"
    page.write_text(f"# Text forms\n\n<!-- {NAME} -->\nNot recorded yet.\n<!-- /{NAME} -->\n\nEnd.\n")
    cfg = text_forms.configuration(NAME, SHAPE, stage_0=0, updates=2, max_prompt=320, max_new_tokens=2)
    text_forms.record(NAME, cfg, folder / "run", page)
    return cfg, folder / "run", page


def test_a_record_has_the_origin_the_returns_and_a_whole_episode(recorded):
    cfg, run, page = recorded
    text, rows = page.read_text(), [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert "Not recorded yet." not in text and text.startswith("# Text forms\n") and text.endswith("\n\nEnd.\n")
    assert (
        "`marshal`. Roles: first, second." in text and "0 of stage 0, then 2 updates of 2 tasks and 4 samples" in text
    )
    first, last = (row["reward/total"] for row in rows)
    assert f"Mean return: {first:.3f} in the first update, {last:.3f} in the last. All metrics are finite." in text
    assert "No claim on its quality." in text and "commit `" in text
    lines = [line for line in text.split("\n") if line.startswith("    ")]
    turns = [line.strip() for line in lines if line.startswith("    -- ")]
    assert turns[:3] == ["-- turn 0, first reads", "-- turn 0, first writes", "-- rewards other than 0"]
    assert any(line.startswith("    [user] Position: ") for line in lines)
    assert all(len(line) <= 4 + text_forms.WIDTH for line in lines)


def test_the_same_command_goes_on_with_a_run(recorded):
    cfg, run, page = recorded
    metrics, text = (run / "metrics.jsonl").read_bytes(), page.read_text()
    text_forms.record(NAME, cfg, run, page)
    assert (run / "metrics.jsonl").read_bytes() == metrics and page.read_text() == text


def test_a_metric_that_is_not_finite_is_refused(tmp_path, monkeypatch):
    """The page keeps its section. A run in which all is finite passes."""
    page, run = tmp_path / "page.md", tmp_path / "run"
    page.write_text(f"<!-- {NAME} -->\nNot recorded yet.\n<!-- /{NAME} -->\n")
    run.mkdir()
    closed: list[bool] = []
    recipe = types.SimpleNamespace(env_runner=types.SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(text_forms, "make", lambda cfg: recipe)

    def writes(*rows):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        monkeypatch.setattr(loop, "fit", lambda cfg, made, workdir: (run / "metrics.jsonl").write_text(lines))

    cfg, first = text_forms.configuration(NAME), ({"step": 1, "loss": 2.0}, {"step": 2, "reward/total": 0.5})
    writes(*first, {"step": 3, "reward/total": 0.75, "agent/first/entropy": None, "loss": None})
    with pytest.raises(ConfigError) as error:
        text_forms.record(NAME, cfg, run, page)
    expected = (
        f"{run}: expected finite metrics, but 'agent/first/entropy' of step 3 is not finite, nor are 1 other values"
    )
    assert str(error.value) == expected and "Not recorded yet." in page.read_text()
    writes(*first, {"step": 3, "reward/total": 0.75})
    assert text_forms.train(cfg, run) == (0.5, 0.75) and closed == [True, True]


def test_every_text_form_has_a_configuration():
    texts = {name for name, module in registry.MODULES.items() if module.endswith(".text")}
    assert set(text_forms.FORMS) == texts
    for name in texts if available() else texts - {"programs_text"}:  # which needs a sandbox
        cfg = text_forms.configuration(name)
        cfg.check("config")
        components, roles = cfg.env.module.make(cfg.env.build()).components, cfg.env.roles()
        assert set(cfg.reward) <= set(components) and cfg.env.name == name and roles
        assert cfg.batch in (1, 2) and (cfg.steps, cfg.group) == (20, 4) and cfg.team.backbone.path == "weights/smollm2"


def test_bad_names_and_pages_are_refused_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(text_forms, "train", lambda cfg, workdir: pytest.fail("a run has begun"))
    page = tmp_path / "page.md"
    page.write_text("# Text forms\n")
    flags = lambda name: types.SimpleNamespace(env=name, page=str(page))
    with pytest.raises(ConfigError, match=r"^--env: no text form 'consult_txt'; did you mean 'consult_text'"):
        text_forms.main(None, None, flags("consult_txt"))
    with pytest.raises(ConfigError, match="no section between <!-- consult_text -->"):
        text_forms.main(None, str(tmp_path / "run"), flags("consult_text"))
