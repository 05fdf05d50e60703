"""The reference policy follows the policy, on the host and in a compiled run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.reference_sync import synced_reference

CONFIG = {
    "steps": 4,
    "batch": 4,
    "group": 4,
    "reward": {"payoff": 1.0},
    "sft": {"steps": 16, "batch": 32, "samples": 128, "optimizer": {"name": "adam", "learning_rate": 2e-2}},
    "loss": {"kl_coef": 0.01},
    "optimizer": {"name": "sgd", "learning_rate": 0.3, "max_grad_norm": 0.0},
    "env": {"name": "matrix", "eval_tasks": 2},
    "team": {"max_new_tokens": 1, "remat": False, "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4}},
}
OURS = "jaxmarl_llm.training.reference_sync:ema_reference"


def every_second(*args):
    return synced_reference(*args, every=2)


def made(update, **changes):
    cfg = from_dict(grpo.Config, CONFIG | {"update": update} | changes)
    return grpo.make(cfg)


def states(recipe, folder):
    """Policy and reference after stage 0 and after each RL step of the host."""
    state, out = recipe.init(0), []
    with Logger(folder, resume_step=None, total_steps=recipe.total_steps, primary=False) as logger:
        for _ in range(recipe.total_steps):
            state, _ = recipe.step(state, logger)
            out.append(jax.tree.map(np.array, (state.params["agents"], state.params.get("reference", {}))))
    return out[-5:]


def leaves(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def test_a_soft_update_is_the_moving_average(tmp_path):
    recipe = made(OURS)
    (taught, _), *after = states(recipe, tmp_path)
    reference = leaves(taught)
    for policy, got in after:
        reference = 0.1 * leaves(policy) + 0.9 * reference
        np.testing.assert_allclose(leaves(got), reference, atol=1e-6)
    assert np.abs(reference - leaves(policy)).max() > 1e-3


def test_a_hard_update_copies_every_second_policy(tmp_path):
    recipe = made(f"{__name__}:every_second")
    (taught, _), (_, one), (second, two), (_, three), (fourth, four) = states(recipe, tmp_path)
    np.testing.assert_array_equal(leaves(one), leaves(taught))
    np.testing.assert_array_equal(leaves(two), leaves(second))
    np.testing.assert_array_equal(leaves(three), leaves(second))
    np.testing.assert_array_equal(leaves(four), leaves(fourth))
    assert np.abs(leaves(fourth) - leaves(second)).max() > 1e-3


@pytest.mark.parametrize("update", [OURS, f"{__name__}:every_second"])
def test_a_compiled_run_has_the_same_reference(update, tmp_path):
    recipe = made(update)
    whole, _ = jax.jit(make_program(recipe).run)(jnp.int32(0))
    _, reference = states(recipe, tmp_path)[-1]
    np.testing.assert_allclose(leaves(whole.params["reference"]), leaves(reference), atol=3e-4)


def test_without_a_reference_one_line_names_the_key(tmp_path):
    with pytest.raises(ConfigError, match=r"^config\.loss\.kl_coef: expected a number above 0"):
        states(made(OURS, loss={"kl_coef": 0.0}), tmp_path)
