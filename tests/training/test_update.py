"""An update function of a user's own, from a module in a scratch folder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import magrpo, malt
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from tests.docs.test_open_doors import FILE, page

SMALL = Backbone(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
WRONG = """
def nothing(step, driver, state, batches):
    return None


def other(step, driver, state, batches):
    return state, {"nobody": {}}
"""


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    (tmp_path / "half_steps.py").write_text(dict(FILE.findall(page("write_a_recipe")))["half_steps.py"])
    (tmp_path / "wrong_updates.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def one_step(folder, update):
    """Parameters before and after one step of RL."""
    cfg = magrpo.Config(
        steps=1,
        batch=8,
        team=TeamConfig(backbone=SMALL, max_new_tokens=1, remat=False),
        env=EnvConfig("matrix", {"rounds": 1}, eval_tasks=4),
        reward={"payoff": 1.0},
        loss=Loss(clip_low=None, entropy_coef=1.0),  # few random tokens are moves: the entropy has a gradient anyway
        optimizer=Optimizer(learning_rate=0.01),
        sft=SFT(steps=0),
        update=update,
    )
    cfg.check("config")
    recipe = magrpo.make(cfg)
    state = recipe.init(0)
    before = jax.tree.map(jnp.copy, state.params["agents"])
    with Logger(folder, resume_step=None, total_steps=1, primary=False) as logger:
        state, _ = recipe.step(state, logger)
    return before, state.params["agents"]


def test_half_an_update_is_half_of_the_way(scratch):
    start, whole = one_step(scratch / "whole", None)
    _, half = one_step(scratch / "half", "half_steps:half")
    moved = [np.abs(b - a).max() for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(whole), strict=True)]
    assert max(moved) > 1e-3
    for a, b, c in zip(*map(jax.tree.leaves, (start, whole, half)), strict=True):
        np.testing.assert_allclose(c - a, (b - a) / 2, atol=1e-6)


def test_a_wrong_result_or_a_recipe_without_such_a_step_is_refused(scratch):
    with pytest.raises(ConfigError, match=r"config\.update: wrong_updates:nothing: expected \(state, .* NoneType$"):
        one_step(scratch / "a", "wrong_updates:nothing")
    with pytest.raises(ConfigError, match=r"config\.update: wrong_updates:other: .* metrics of \{'nobody': \{\}\}$"):
        one_step(scratch / "b", "wrong_updates:other")
    cfg = malt.Config(update="half_steps:half", env=EnvConfig("chain", {"protocol": "refine"}))
    with pytest.raises(ConfigError, match=r"config\.update: expected None: recipe malt updates by phases of its own"):
        malt.make(cfg)
