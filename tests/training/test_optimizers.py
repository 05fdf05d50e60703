"""Float32 masters against the same optimizer on float32 parameters; optimizer states in the host's memory."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.runs import loop
from jaxmarl_llm.storage.checkpoint import Checkpointer
from jaxmarl_llm.training.learner import Batch, make_learner, update
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Masters, Optimizer, make_optimizer, to_memory
from tests import toys


def mixed(rng):
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {"low": draw(7, 5).astype(jnp.bfloat16), "full": draw(4)}


def run(tx, params, gradients):
    step, state = jax.jit(tx.update), tx.init(params)
    for g in gradients:
        updates, state = step(g, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor"])
def test_masters_take_the_steps_of_float32_parameters(name):
    rng = np.random.default_rng(0)
    params, cfg = mixed(rng), Optimizer(name=name, learning_rate=1e-4, max_grad_norm=1.0)
    gradients = [jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params) for _ in range(30)]
    full = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    expected, _ = run(make_optimizer(cfg), full, gradients)
    got, state = run(make_optimizer(cfg), params, gradients)
    np.testing.assert_allclose(state.copies["low"], expected["low"], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(got["full"], expected["full"], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(got["low"], state.copies["low"].astype(jnp.bfloat16))


def test_small_steps_add_up_only_with_masters():
    """Steps of 1e-5 are below half a unit in the last place of bfloat16 at 1 (0.004): 1000 are 0.01, or nothing."""
    params, gradients = {"w": jnp.ones(8, jnp.bfloat16)}, [{"w": jnp.ones(8)}] * 1000
    plain = Optimizer(name="adam", learning_rate=1e-5, max_grad_norm=0.0, float32_master_weights=False)
    assert np.all(run(make_optimizer(plain), params, gradients)[0]["w"] == 1)
    with_copies, state = run(
        make_optimizer(Optimizer(**{**plain.__dict__, "float32_master_weights": True})), params, gradients
    )
    np.testing.assert_allclose(state.copies["w"], 0.99, rtol=1e-4)
    np.testing.assert_array_equal(with_copies["w"], jnp.full(8, 0.99, jnp.bfloat16))


def test_float32_parameters_have_no_masters():
    params = {"w": jnp.ones(3)}
    with_, without = (make_optimizer(Optimizer(float32_master_weights=m)).init(params) for m in (True, False))
    assert jax.tree.structure(with_) == jax.tree.structure(without)


def test_masters_and_their_moments_lie_as_their_parameters():
    policy, mesh = make_policy(Config(64, 16, 32, 1, 4, 2, 4, dtype="bfloat16")), meshes.make_mesh(MeshConfig(2, 2, 2))
    with meshes.use_mesh(mesh):
        own = sharding.place(mesh, {"params": policy.init(jax.random.key(0))})
        state = make_learner(policy, Loss(clip_low=None), Optimizer(), Sampling()).init(own)
    assert isinstance(state, Masters)
    assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype(jnp.float32)}
    by_path = lambda tree: {
        "/".join(sharding.names_of(path)): x for path, x in jax.tree_util.tree_leaves_with_path(tree) if x.ndim
    }
    found = by_path(state)
    assert len(found) == 3 * len(by_path(own))  # copies and both moments
    for path, leaf in by_path(own).items():
        mirrors = [x for key, x in found.items() if key.endswith(f"/{path}")]
        assert len(mirrors) == 3 and all(x.sharding.is_equivalent_to(leaf.sharding, x.ndim) for x in mirrors), path
    cut = found["copies/params/layers/self_attn/q_proj/kernel"]
    assert cut.addressable_shards[0].data.shape == (1, 8, 8)


def learn(optimizer, steps=3, mesh=None):
    """(parameters, optimizer state) after a few updates of a tiny model on one batch."""
    learner = make_learner(toys.policy(), Loss(clip_low=None), optimizer, Sampling())
    rng = np.random.default_rng(1)
    tokens, said = rng.integers(1, 40, (8, 4)).astype(np.int32), rng.integers(1, 40, (8, 2, 3)).astype(np.int32)
    weights = np.full(said.shape, 1 / said.size, np.float32)
    gain = rng.normal(size=said.shape).astype(np.float32)
    batch = Batch(tokens, np.full(8, 4, np.int32), said, weights, gain, np.zeros_like(weights))
    with meshes.use_mesh(mesh):
        own = {"params": toys.policy().init(jax.random.key(0))}
        own = own if mesh is None else sharding.place(mesh, own)
        state = learner.init(own)
        for _ in range(steps):
            own, state, metrics, _ = update(learner, Loss(clip_low=None), own, None, state, [batch])
            state = state if mesh is None else sharding.place(mesh, state)
            assert metrics["ok"]
    return own, state


def kinds(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


@pytest.mark.parametrize("shape", [None, MeshConfig(2, 2, 2)])
def test_offloaded_states_take_the_same_steps(shape):
    mesh = None if shape is None else meshes.make_mesh(shape)
    own, state = learn(Optimizer(learning_rate=1e-2), mesh=mesh)
    same, away = learn(Optimizer(learning_rate=1e-2, offload=True), mesh=mesh)
    assert kinds(away) == {"pinned_host"} and kinds(state) == kinds(same) == {"device"}
    for a, b in zip(jax.tree.leaves((own, state)), jax.tree.leaves((same, to_memory(away, "device"))), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_offloaded_states_are_away_from_the_start_and_when_they_are_read_again(mesh, tmp_path):
    """Those of stage 0 and of RL, before any model's first update."""
    cfg = from_dict(
        magrpo.Config,
        {
            "steps": 1,
            "env": {"name": "matrix", "eval_tasks": 4},
            "reward": {"payoff": 1.0},
            "team": {
                "max_new_tokens": 1,
                "remat": False,
                "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4},
            },
            "optimizer": {"offload": True},
            "sft": {"steps": 1, "samples": 8, "batch": 4, "optimizer": {"offload": True, "b1": 0.8}},
            **({"mesh": mesh} if mesh else {}),
        },
    )
    recipe = magrpo.make(cfg)
    for step in (0, 2):
        state = recipe.init(step)
        assert kinds(state.opt_state) == {"pinned_host"} and kinds(state.params) == {"device"}
        assert len(jax.tree.leaves(state.opt_state)) > 4
    saver = Checkpointer(tmp_path)
    saver.save(2, loop.without_shared(state), loop._meta(cfg, 2, loop.fingerprint_of(state.params["shared"])))
    saver.wait()
    again, _ = loop.restore(saver, recipe, saver.read_meta())
    saver.close()
    assert kinds(again.opt_state) == {"pinned_host"} and kinds(again.params) == {"device"}


def test_an_offloaded_state_is_saved_and_restored_where_it_was(tmp_path):
    own, away = learn(Optimizer(learning_rate=1e-2, offload=True))
    saver = Checkpointer(tmp_path)
    saver.save(1, {"own": own, "state": away}, {})
    saver.wait()
    state = saver.restore({"own": own, "state": away})[0]["state"]
    saver.close()
    assert kinds(state) == {"pinned_host"}
    chex.assert_trees_all_equal(away, state)
