"""OPTAGENT: `fit` and a compiled run train nothing, what a step logs, bad input, shipped configurations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs.optagent import VARIANTS, get_config, tiny
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import optagent
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.runs.loop import fit
from jaxmarl_llm.training.config import SFT

pytestmark = pytest.mark.usefixtures("numpy_tables")

SMALL = Backbone(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
ENV = EnvConfig("debate", {"practice": 1, "trials": 4, "tasks": 8}, eval_tasks=8)
CONFIG = dataclasses.replace(
    tiny(), steps=2, batch=8, team=TeamConfig(backbone=SMALL, max_new_tokens=5, remat=False), env=ENV
)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_a_run_trains_nothing(tmp_path):
    """Parameters and optimizer states are the same bytes after two steps of `fit`, which logs the votes."""
    recipe = optagent.make(CONFIG)
    before = recipe.init(0)
    kept = bits(before.params), bits(before.opt_state)
    logged = []
    step = recipe.step

    def watched(state, logger):
        state, metrics = step(state, logger)
        logged.append(metrics)
        return state, metrics

    recipe.step = watched  # type: ignore[method-assign]
    after = fit(CONFIG, recipe, tmp_path)
    assert int(after.step) == 2 == len(logged)
    assert (bits(after.params), bits(after.opt_state)) == kept
    for metrics in logged:
        shown = {name: value for name, value in metrics.items() if "accuracy" in name or "impossible" in name}
        assert shown and all(0 <= value <= 1 for value in shown.values()), metrics
        assert not [name for name in metrics if "grad_norm" in name or "kl" in name]


def test_a_compiled_run_trains_nothing_either():
    recipe = optagent.make(CONFIG)
    before = recipe.initial(3, 0)
    after, figures = jax.jit(make_program(recipe).run)(jnp.int32(3))
    assert int(after.step) == 2
    assert (bits(after.params), bits(after.opt_state)) == (bits(before.params), bits(before.opt_state))
    assert figures["accuracy"].shape == (2,) and ((figures["accuracy"] >= 0) & (figures["accuracy"] <= 1)).all()
    assert not [name for name in figures if "grad_norm" in name]


BAD = [
    ({"group": 0}, r"^config\.group: expected"),
    (
        {"update": "jaxmarl_llm.recipes.optagent:no_update"},
        r"^config\.update: expected None \(OPTAGENT trains no model",
    ),
    ({"sft": SFT(steps=3)}, r"^config\.sft\.steps: expected 0 \(OPTAGENT trains no model\), got 3$"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        dataclasses.replace(CONFIG, **change).check("config")
    assert "\n" not in str(error.value)


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(optagent.Config, get_config(variant).to_dict())
        cfg.check("config")
        assert cfg.sft.steps == 0 and cfg.env.args.get("withhold", False) == (variant == "withhold")
