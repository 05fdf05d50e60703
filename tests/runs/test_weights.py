"""The weight ``others``: every component without a weight of its own, from the opened environment to the saved run."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jaxmarl_llm.envs import TextTask
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.runs import loop, phases
from jaxmarl_llm.training.config import weights_of
from tests.cli.tiny_runs import SHAPE

ROWS = [{"q": f"{a}+{b}"} for a in range(4) for b in range(4)]
WRITTEN_OUT = {"long": -0.5, "even": 1.0, "seen": 1.0}


def pays(task, texts):
    text = texts["solver"]
    return {"long": len(text), "even": float(len(text) % 2 == 0), "seen": float("a" in text)}


def make():
    return TextTask(ROWS, {"solver": "{q}"}, pays)


def config(reward, recipe="magrpo", **changes):
    import importlib

    from jaxmarl_llm.config import from_dict

    base = {
        "env": {"name": f"{__name__}:make", "workers": 0}, "steps": 2, "batch": 2, "reward": reward,
        "team": {"max_new_tokens": 3, "backbone": SHAPE},
        "run": {"tensorboard": False, "eval_every": 0, "episodes": 0},
    }  # fmt: skip
    module = importlib.import_module(f"jaxmarl_llm.recipes.{recipe}")
    return module, from_dict(module.Config, {**base, **changes})


def test_others_are_written_out_by_the_components():
    assert weights_of({"others": 2.0, "a": 0.0}, ("a", "b", "c")) == {"a": 0.0, "b": 2.0, "c": 2.0}
    assert weights_of({"a": 0.5}, ("a", "b")) == {"a": 0.5}
    assert weights_of({"others": 2.0}, ("others", "b")) == {"others": 2.0, "b": 2.0}  # a component of that name


CHOSEN = {"tree_mode": "best", "joint": "cross", "credit": {"group": "node", "discount": 0.0}}


def test_an_opened_environment_writes_the_weights_out_for_step_plan_and_evaluation():
    module, cfg = config({"others": 1.0, "long": -0.5}, **CHOSEN)
    recipe = module.make(cfg)
    step = recipe.phases[-1].step
    assert recipe.cfg.reward == step.cfg.reward == step.algorithm.reward == dict(step.plan.reward) == WRITTEN_OUT
    written = module.make(config(WRITTEN_OUT, **CHOSEN)[1])
    assert written.phases[-1].step.plan == step.plan and written.cfg == recipe.cfg


def test_a_schedule_of_weights_has_others_too():
    from jaxmarl_llm.credit.assign import standard_rule
    from jaxmarl_llm.recipes import magrpo
    from jaxmarl_llm.training.algorithm import Algorithm

    _, cfg = config({"others": 1.0})
    scheduled = Algorithm(standard_rule(cfg.credit), lambda step: {"others": 1.0, "long": -0.5 * (step > 2)})
    step = phases.make_recipe(cfg, magrpo.make_plan(cfg), scheduled).phases[-1].step
    assert step.algorithm.reward(3) == WRITTEN_OUT and step.algorithm.reward(0)["long"] == 0.0


def test_an_unknown_component_is_refused_beside_others():
    module, cfg = config({"others": 1.0, "shrt": 1.0})
    with pytest.raises(
        ConfigError, match=r"pays no 'shrt'; it pays long, even, seen; --config.reward=\"{'others': 1.0}\""
    ):
        module.make(cfg)


def test_a_run_is_saved_with_the_weights_written_out(tmp_path, monkeypatch):
    seen = []

    def stopped(cfg, *_):
        seen.append(cfg)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_fit", stopped)
    _, cfg = config({"others": 1.0, "long": -0.5})
    runner = SimpleNamespace(env=make().make())
    with pytest.raises(KeyboardInterrupt):
        loop.fit(cfg, SimpleNamespace(env_runner=runner), tmp_path)  # type: ignore[arg-type]
    assert seen[0].reward == WRITTEN_OUT


@pytest.mark.slow
@pytest.mark.parametrize("recipe, changes", [("magrpo", CHOSEN), ("iac", {}), ("grpo", {"group": 4})])
def test_a_run_with_others_is_the_run_with_the_weights_written_out(recipe, changes, tmp_path, monkeypatch):
    """Equal metrics of every step and of the evaluations, up to times."""
    monkeypatch.setattr(loop, "report", lambda workdir: None)
    if recipe == "iac":
        changes = {"team": {"max_new_tokens": 3, "backbone": SHAPE, "critic": "head"}}
    rows = {}
    for name, reward in {"others": {"others": 1.0, "long": -0.5}, "written": WRITTEN_OUT}.items():
        module, cfg = config(reward, recipe, **changes)
        loop.fit(cfg, module.make(cfg), tmp_path / name)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        kept = ("reward/", "eval/", "advantage", "agent/")
        rows[name] = [{k: v for k, v in json.loads(line).items() if k.startswith(kept)} for line in lines]
        assert json.loads((tmp_path / name / "config.json").read_text())["reward"] == WRITTEN_OUT
    assert rows["others"] == rows["written"] and rows["others"][-1]["reward/total"] != 0
