"""Tokens of a row cut over devices: attention, gradients of an update and generation are those of one device."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.config import fingerprint, from_dict, to_dict
from jaxmarl_llm.distributed import context, meshes, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.kernels.attention.tree import tree_attention
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.recipes import joyagents_r1, magrpo
from jaxmarl_llm.training.learner import make_learner
from jaxmarl_llm.training.optimizers import Optimizer
from tests import toys
from tests.distributed import test_forests as forests
from tests.distributed import test_prefixes as prefixes
from tests.distributed import test_sharded_runs as runs
from tests.kernels import test_tree_attention as trees
from tests.training.test_packing import own, policy

pytestmark = pytest.mark.usefixtures("numpy_tables")

# (data, fsdp, tensor, context)
MESHES = {
    "context=2": (1, 1, 1, 2),
    "context=4": (1, 1, 1, 4),
    "2x2x1 context=2": (2, 2, 1, 2),
    "tensor=2": (1, 1, 2, 4),
}


def mesh_of(name):
    data, fsdp, tensor, size = MESHES[name]
    cfg = MeshConfig(data, fsdp, tensor, context=size)
    return make_mesh(cfg, jax.devices()[: data * fsdp * tensor * size])


@pytest.mark.parametrize("name", ["context=4", "tensor=2"])
def test_attention_in_parts_is_dense_attention_over_ancestors(name):
    """Forests of two rows with padding: outputs and gradients of real tokens."""
    (q, k, v), parents, end, real = trees.of_shape(5, 2, 31, 1, 4, 2, 8)
    pull = np.random.default_rng(1).normal(size=q.shape).astype(np.float32) * real[..., None, None]
    whole = lambda q, k, v: tree_attention(q, k, v, end)
    cut = lambda q, k, v: context.attend_in_parts(tree_attention, q, k, v, jnp.asarray(end))
    both = lambda f: jax.jit(lambda *x: (f(*x), jax.grad(lambda *x: jnp.sum(f(*x) * pull), (0, 1, 2))(*x)))
    want = both(whole)(q, k, v)
    with meshes.use_mesh(mesh_of(name)):
        got = both(cut)(q, k, v)
    np.testing.assert_allclose(np.asarray(got[0])[real], trees.dense64(q, k, v, parents)[real], atol=1e-5)
    for a, b in zip(got[1], want[1], strict=True):
        assert np.abs(np.asarray(b)).max() > 0.1
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5)


@pytest.mark.parametrize(
    "name,adapters", [("context=4", False), ("2x2x1 context=2", False), ("tensor=2", False), ("2x2x1 context=2", True)]
)
def test_an_update_of_forests_is_that_of_separate_nodes_on_one_device(name, adapters):
    """With a value head; with adapters over a frozen backbone too."""
    mesh, (variables, shared) = mesh_of(name), forests.with_a_head(adapters)
    with meshes.use_mesh(mesh):
        parts = sharding.row_parts()
    packed = forests.batches(parts)
    assert all(b.forest is not None for b in packed)
    loss, gradient, text = forests.on(mesh, packed, variables, shared)
    want_loss, want, _ = forests.on(None, forests.batches(1, trees=False), variables, shared)
    apart = max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(want)))
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(want))
    print(f"{name}: loss {abs(loss - want_loss):.1e}, gradient {apart:.1e} of at most {scale:.1e}")
    assert scale > 1e-2 and abs(loss - want_loss) < 1e-6 and apart < 1e-6 * max(1, scale)


@pytest.mark.parametrize("name", MESHES)
def test_loss_and_gradient_of_groups_are_those_of_one_device(name):
    """Rows of six prompt tokens with two completions of five: fourteen tokens, which four parts do not divide."""
    loss, gap, grad, _ = runs.reference_gradient()
    mesh = mesh_of(name)
    placed = sharding.place(mesh, runs.variables(make_policy(runs.arch())))
    got_loss, got_gap, got, text = runs.gradient(placed, None, mesh)
    apart = runs.distance(got, grad)
    print(f"{name}: loss {abs(got_loss - loss):.1e}, gradient {apart:.1e}")
    assert abs(got_loss - loss) < 1e-6 and abs(got_gap - gap) < 2e-6 and apart < 1e-6
    for path, want in runs.by_path(sharding.shardings(mesh, grad)).items():
        assert runs.by_path(got)[path].sharding.is_equivalent_to(want, runs.by_path(grad)[path].ndim), path


def test_a_critic_reads_prompts_as_on_one_device():
    """Values at the last token of prompts of seven, which two parts do not divide."""
    learner = make_learner(policy(), forests.LOSS, Optimizer(), Sampling(0.8))
    rng, mesh = np.random.default_rng(0), mesh_of("2x2x1 context=2")
    read = rng.integers(0, 9, (8, 7)).astype(np.int32), rng.integers(1, 8, 8).astype(np.int32)
    want = learner.value(own(head=True), None, *read)
    with meshes.use_mesh(mesh):
        got = learner.value(sharding.place(mesh, own(head=True)), None, *sharding.put_rows(read))
    assert np.abs(np.asarray(want)).max() > 1e-3
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=1e-7)


def test_what_is_computed_for_a_token_is_cut_and_parameters_too():
    """Of the MLP's units [rows tokens 128] a device has a quarter of the tokens; of a kernel an eighth."""
    mesh = make_mesh(MeshConfig(1, 2, 1, context=4))
    placed = sharding.place(mesh, runs.variables(make_policy(runs.arch())))
    shard = {k: v.addressable_shards[0].data.shape for k, v in runs.by_path(placed).items()}
    assert shard["params/layers/self_attn/q_proj/kernel"] == (1, 64 // 8, 64)
    *_, text = runs.gradient(placed, None, mesh)
    assert re.search(r"f32\[3,4,128\]", text)  # three of six rows
    assert not re.search(r"f32\[\d+,16,128\]", text) and not re.search(r"f32\[48,128\]", text)


@pytest.mark.parametrize("kind,plan", [("shared", "flat"), ("lora", "node_wise")])
def test_prompts_that_are_cut_give_the_samples_of_one_device(kind, plan, monkeypatch):
    """Prompts and what is appended to cached prompts are cut over four devices; equal tokens, float32."""
    monkeypatch.setitem(prefixes.MESHES, "context", MeshConfig(2, 1, 1, context=4))
    cut = []
    for name in ("attend_in_parts", "extend_in_parts"):
        original = getattr(context, name)
        monkeypatch.setattr(context, name, lambda *x, f=original, name=name: cut.append(name) or f(*x))
    team = prefixes.make_team(kind)
    got, _ = prefixes.go(team, plan, 2, "context")
    prefixes.check(got, prefixes.alone(team, plan, 2))
    assert {*cut} == {"attend_in_parts", "extend_in_parts"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.mark.parametrize(
    "recipe,mesh",
    [
        (magrpo, {"data": 2, "fsdp": 2, "context": 2}),
        (magrpo, {"data": 1, "tensor": 2, "context": 4, "rollout_tensor": 2}),  # rollouts: rows in place of tokens
        pytest.param(joyagents_r1, {"data": 2, "context": 4}, marks=pytest.mark.slow),
    ],
    ids=["magrpo", "rollout_tensor", "joyagents_r1"],
)
def test_a_step_is_that_of_one_device(recipe, mesh, folder):
    """Array environments: equal tokens; parameters within 1e-5, as on other meshes."""
    one = runs.stepped(recipe, None, folder)
    made = recipe.make(runs.config(recipe, None, mesh=mesh))
    got = runs.step_of(made, folder / "-".join(map(str, mesh.values())), pay=toys.paid)
    assert "context" in made.mesh.axis_names and (made.env_runner.layout is not None) == ("rollout_tensor" in mesh)
    np.testing.assert_array_equal(got.tree.steps.tokens, one.tree.steps.tokens)
    np.testing.assert_allclose(got.tree.steps.logprobs, one.tree.steps.logprobs, rtol=0, atol=1e-5)
    assert runs.distance(one.state.params, one.before) > 3e-4
    assert runs.parameters_apart(got.state, one.state) < 1e-5


@pytest.mark.parametrize(
    "mesh,message",
    [
        ({"context": 0}, r"config\.mesh\.context: expected >= 1, got 0"),
        (
            {"context": 3},
            r"config\.mesh: 8 devices cannot be data=8 x fsdp=1 x context=3 x tensor=1; expected a product",
        ),
        (
            {"data": 2, "context": 2, "models": "split"},
            r"config\.mesh\.context: expected 1 with config\.mesh\.models=split",
        ),
        (
            {"context": 2, "rollout_blocks": 2},
            r"config\.mesh\.context: expected 1 with config\.mesh\.rollout_blocks=2, got 2",
        ),
        (
            {"context": 2, "rollout_devices": 4},
            r"config\.mesh\.context: expected 1 with config\.mesh\.rollout_devices=4",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_key(mesh, message):
    sizes = {"data": 8, **mesh}
    with pytest.raises(ConfigError, match=message):
        magrpo.make(runs.config(magrpo, None, mesh=sizes))


def test_more_that_is_refused():
    team = {"max_new_tokens": 1, "remat": False, "backbone": {**runs.BACKBONE, "head_dim": 8}, "batch_invariant": True}
    cut = {"data": 4, "context": 2}
    with pytest.raises(
        ConfigError, match=r"config\.mesh\.context: expected 1 with config\.team\.batch_invariant, got 2"
    ):
        magrpo.make(runs.config(magrpo, None, mesh=cut, team=team))
    with pytest.raises(
        ConfigError, match=r"embedding \(264, 64\): 64 does not divide into the 6 parts .* fsdp x context"
    ):
        mesh = make_mesh(MeshConfig(1, 2, 1, context=3), jax.devices()[:6])
        sharding.shardings(mesh, runs.variables(make_policy(runs.arch())))


def test_without_the_axis_a_configuration_and_its_mesh_are_what_they_were():
    cfg = runs.config(magrpo, "2x2x2")
    assert make_mesh(cfg.mesh).axis_names == sharding.AXES
    values = to_dict(cfg)
    assert values["mesh"].pop("context") == 1
    assert fingerprint(cfg) == fingerprint(from_dict(magrpo.Config, values))
    cut = from_dict(magrpo.Config, {**values, "mesh": {**values["mesh"], "data": 1, "context": 2}})
    assert fingerprint(cut) != fingerprint(cfg)
    assert dict(make_mesh(cut.mesh).shape) == {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}
