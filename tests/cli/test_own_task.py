"""The door of an own task: `--config=magrpo:task --config.env.name=capitals:make`, and the commands around it."""

from __future__ import annotations

import pytest

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.envs.registry import EnvConfig

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
