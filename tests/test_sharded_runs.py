"""A run on a mesh is the run on one device: gradients, whole steps of two recipes, checkpoints across meshes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm import sharding
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.metrics import Logger
from jaxmarl_llm.qwen import Config, make_policy
from jaxmarl_llm.recipes import joyagents_r1, magrpo
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.sharding import MeshConfig, make_mesh
from jaxmarl_llm.train import Batch, Loss, Optimizer, make_learner, update

MESHES = {"8x1x1": (8, 1, 1), "1x8x1": (1, 8, 1), "2x2x2": (2, 2, 2)}
BACKBONE = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 1, "num_heads": 8, "num_kv_heads": 8}
SMALL = {
    "steps": 3,
    "batch": 8,
    "group": 2,
    "sft": {"steps": 0},
    "team": {"share": "shared", "max_new": 7, "remat": False, "backbone": {**BACKBONE, "head_dim": 8}},
    "run": {"eval_every": 0, "log_every": 100, "tensorboard": False, "checkpoint_every": 2},
}
# Adam divides by the root of what may be nearly nothing: rounding in a gradient of 1e-9 is a full step. SGD does not.
PLAIN = {"optimizer": {"name": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}}


def on_mesh(name):
    return {} if name is None else {"mesh": dict(zip(sharding.AXES, MESHES[name]))}


def config(recipe, name, **more):
    if recipe is magrpo:
        own = {"env": {"name": "matrix", "eval_tasks": 8}, "reward": {"payoff": 1.0}}
        own["team"] = {**SMALL["team"], "max_new": 1, "share": "separate"}
    else:
        own = {"env": {"name": "dispatch", "eval_tasks": 8}, "memory": {"capacity": 8, "retrieve": 1, "warmup": 4}}
    return from_dict(recipe.Config, {**SMALL, **PLAIN, **own, **on_mesh(name), **more})


def leaves_of(tree):
    return {"/".join(sharding.names_of(p)): x for p, x in jax.tree_util.tree_leaves_with_path(tree)}


def assert_close(got, expected, atol):
    got, expected = leaves_of(got), leaves_of(expected)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        if not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(np.asarray(got[key]), np.asarray(value), rtol=0, atol=atol, err_msg=key)


def paid(tree):
    """``tree`` with rewards that differ: the untrained teams of these runs earn nothing."""
    moves = tree.transitions
    said = np.where(moves.steps[..., None] >= 0, tree.steps.tokens[np.maximum(moves.steps, 0)], 0)
    worth = (said.sum((1, 2)) % 7 / 7).astype(np.float32)[:, None]
    rewards = {c: np.where(moves.played[:, None], worth, 0) * np.ones_like(r) for c, r in moves.rewards.items()}
    return tree.replace(transitions=moves.replace(rewards=rewards))


@functools.cache
def stepped(recipe, name, tmp):
    """(trees sampled, states before and after each of two steps, metrics) of one run."""
    made = recipe.make(config(recipe, name))
    trees, play = [], made.arena.play

    def spy(*args, **kwargs):
        played = play(*args, **kwargs)
        trees.append(played.tree)
        return played._replace(tree=paid(played.tree))

    made.arena.play = spy
    state = made.init(0)
    states, metrics = [jax.device_get(state.params)], []
    with Logger(tmp / f"{recipe.__name__}-{name}", resume_step=None, total_steps=3, interval=100) as logger:
        for step in range(1):
            state, seen = made.step(state.replace(step=jnp.int32(step)), logger)
            states.append(jax.device_get(state.params))
            metrics.append(seen)
    return trees, states, metrics, state


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("recipe", [magrpo, joyagents_r1], ids=["magrpo", "joyagents_r1"])
def test_a_step_is_that_of_one_device(recipe, name, folder):
    trees, states, metrics, last = stepped(recipe, name, folder)
    trees_1, states_1, metrics_1, _ = stepped(recipe, None, folder)
    assert_close(states[0], states_1[0], 1e-6)
    np.testing.assert_array_equal(trees[0].steps.tokens, trees_1[0].steps.tokens)
    np.testing.assert_allclose(trees[0].steps.logprobs, trees_1[0].steps.logprobs, rtol=0, atol=1e-5)
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(states_1[1]), jax.tree.leaves(states_1[0]))]
    assert max(moved) > 1e-3  # or there is nothing to compare
    assert_close(states[1], states_1[1], 1e-5)
    assert metrics[0].keys() == metrics_1[0].keys()
    timed = ("time/", "speed/")
    for key, value in metrics_1[0].items():
        if not key.startswith(timed):
            assert metrics[0][key] == pytest.approx(value, abs=1e-5), key
    print("max", recipe.__name__, name, max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(states[1]), jax.tree.leaves(states_1[1]))), np.abs(trees[0].steps.logprobs- trees_1[0].steps.logprobs).max())
    _, fsdp, tensor = MESHES[name]
    kernel = next(v for k, v in leaves_of(last.params).items() if k.endswith("q_proj/kernel"))
    assert kernel.addressable_shards[0].data.shape == (1, 64 // fsdp, 64 // tensor)
