"""How often a run plays each task: paper configurations left with sample data are refused."""

import dataclasses
import functools

import pytest

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.runs import preflight
from jaxmarl_llm.training.config import BaseConfig, RunConfig


def config(**changes):
    return dataclasses.replace(BaseConfig("grpo", steps=30, batch=4), **changes)


def test_the_passes_over_the_tasks_are_counted():
    assert preflight.epochs(config(), 60) == "60 training tasks; 30 steps of 4 tasks play each one 2 times"
    assert preflight.epochs(config(steps=0), 60) is None  # stage 0 alone
    most = RunConfig(max_epochs=1.99)
    with pytest.raises(ConfigError, match=r"^config\.run\.max_epochs=1\.99: 60 training tasks; .* 2 times; give all"):
        preflight.epochs(config(run=most), 60)
    preflight.epochs(config(run=dataclasses.replace(most, max_epochs=0)), 60)  # told to take any number


@functools.cache
def training_tasks(spec):
    cfg = config_flags.load(f"experiments/configs/{spec}")
    return cfg, len(cfg.env.environment(cfg.seed).tasks)


@pytest.mark.parametrize("spec", ["joyagents_r1.py:qwen2_5_3b", "magrpo.py:humaneval"])
def test_a_paper_configuration_refuses_the_samples_of_the_package(spec):
    cfg, tasks = training_tasks(spec)
    with pytest.raises(ConfigError, match=rf"{tasks} training tasks; {cfg.steps} steps of {cfg.batch} tasks"):
        preflight.epochs(cfg, tasks)


@pytest.mark.parametrize(
    "spec", ["joyagents_r1.py:smollm2", "joyagents_r1.py:mixed", "joyagents_r1.py:call_team", "magrpo.py:smollm2"]
)
def test_small_configurations_take_the_samples(spec):
    preflight.epochs(*training_tasks(spec))
