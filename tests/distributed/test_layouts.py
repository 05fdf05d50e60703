"""Generation in a layout of its own: copied key/value heads, more devices along tensor, several models at once."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.envs.matrix import array as matrix
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.blocks import blocks_of, stacked
from jaxmarl_llm.generation.generate import begin
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.recipes import joyagents_r1, magrpo
from jaxmarl_llm.rollout import env_runner
from jaxmarl_llm.rollout.block_sampler import BlockSampler, sampler_of
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings, play
from jaxmarl_llm.rollout.launches import GenerationRequest, TeamSampler
from jaxmarl_llm.rollout.plans import flat
from jaxmarl_llm.training.learner import make_learner, pad_rows
from jaxmarl_llm.types import Model, Role, Team
from tests import toys
from tests.distributed import test_sharded_runs as runs

NAMES = ("a", "b", "c")
TRAINING = (2, 2, 2)


def layout(blocks, tensor, mesh=TRAINING):
    """A layout and the mesh of training, which has its devices."""
    cfg = MeshConfig(*mesh, rollout_tensor=tensor, rollout_blocks=blocks)
    trained = make_mesh(cfg)
    return trained, meshes.layout_of(cfg, trained, [2])


@functools.cache
def team(limits=(3, 3, 3)):
    models = tuple(Model(name, toys.policy(), toys.TOKENIZER) for name in NAMES)
    return Team(tuple(Role(n, n, limit) for n, limit in zip(NAMES, limits, strict=True)), models)


def requests(models, groups, seed=0):
    """One request for each of ``models``, with prompts of 1 to 40 tokens."""
    rng = np.random.default_rng(seed)
    key = lambda k: np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(seed), k)))
    prompt = lambda: rng.integers(0, 256, rng.integers(1, 41)).tolist()
    pairs = zip(models, groups, strict=True)
    return [GenerationRequest(m, g, k, m, key(k), prompt()) for k, (m, g) in enumerate(pairs)]


def same(got, expected):
    for samples, wanted in zip(got, expected, strict=True):
        assert [x.action for x in samples] == [x.action for x in wanted]
        for x, y in zip(samples, wanted, strict=True):
            np.testing.assert_allclose(x.logprobs, y.logprobs, rtol=0, atol=1e-5)


# (blocks, tensor), models and groups of the requests, limits of the roles
TURNS = {
    "a model in each of four blocks, one in two": ((4, 2), (0, 1, 2, 0, 0, 2), (2,) * 6, (3, 3, 3)),
    "weights of four parts, heads of two": ((2, 4), (0, 1, 1, 1), (1,) * 4, (3, 3, 3)),
    "two groups and two limits": ((4, 2), (0, 1, 2, 2, 1), (3, 1, 3, 1, 1), (3, 5, 2)),
    "one model in all blocks": ((8, 1), (1,) * 11, (2,) * 11, (3, 3, 3)),
    "more models than blocks": ((2, 2), (0, 1, 2, 2), (1,) * 4, (3, 3, 3)),
}


@pytest.mark.parametrize("name", TURNS)
def test_models_that_sample_at_once_sample_what_each_does_alone(name):
    cut, models, groups, limits = TURNS[name]
    asked, players = requests(models, groups), team(limits)
    params = toys.params(players)
    expected = TeamSampler(players, params, Sampling()).sample(asked, more=False)
    mesh, chosen = layout(*cut)
    with meshes.use_mesh(mesh):
        sampler = BlockSampler(players, sharding.place(mesh, params), Sampling(), chosen)
        same(sampler.sample(asked, more=False), expected)
    assert sampler.launches == (2 if name == "more models than blocks" else 1)
    assert sampler.prompt_tokens == sum(len(r.prompt_ids) for r in asked)


def test_adapters_sample_at_once_over_one_backbone():
    base = toys.policy().init(jax.random.key(3))
    models = tuple(Model(name, toys.policy(), toys.TOKENIZER, base="base") for name in NAMES)
    players = Team(tuple(Role(n, n, 4) for n in NAMES), models)
    tuned = lambda k: jax.tree.map(lambda x: x + 0.1 * (k + 1), init_lora(jax.random.key(k), base, 2))
    params = {"shared": {"base": base}, "agents": {name: {"lora": tuned(k)} for k, name in enumerate(NAMES)}}
    asked = requests((0, 1, 2, 1), (2,) * 4)
    expected = TeamSampler(players, params, Sampling()).sample(asked, more=False)
    mesh, chosen = layout(4, 2)
    with meshes.use_mesh(mesh):
        placed = {kind: sharding.place(mesh, trees) for kind, trees in params.items()}
        same(BlockSampler(players, placed, Sampling(), chosen).sample(asked, more=False), expected)


@pytest.mark.parametrize("cut", [(1, 4), (1, 1), (2, 4)])
def test_a_host_rollout_in_a_layout_is_that_of_one_device(cut):
    players = toys.team(matrix.ROLES, max_new_tokens=2)
    params, trees = toys.params(players), []
    mesh, chosen = layout(*cut)
    for factory, placed, here in ((None, params, None), (sampler_of(chosen), sharding.place(mesh, params), mesh)):
        pool = EnvPool(functools.partial(toys.text_game, matrix.Config(rounds=2)), workers=0)
        settings = HostSettings(flat(2), Sampling(), max_prompt=64)
        with meshes.use_mesh(here):
            settings = settings if factory is None else settings._replace(sampler=factory)
            trees.append(play(players, placed, pool, [0, 1, 2], jax.random.key(5), settings).tree)
    one, many = trees
    np.testing.assert_array_equal(one.steps.tokens, many.steps.tokens)
    np.testing.assert_allclose(one.steps.logprobs, many.steps.logprobs, rtol=0, atol=1e-5)
    assert one.steps.valid.sum() == 3 * 2 * 2 * 2
    assert int(many.counts.launches) == int(one.counts.launches) // (2 if cut[0] > 1 else 1)


def test_a_device_has_the_weights_of_its_block_alone():
    mesh, chosen = layout(4, 2)
    params = toys.params(team())["agents"]
    trees = [sharding.place(mesh, params[name]) for name in ("a", "b", "b", "c")]
    found = runs.by_path(stacked(chosen.mesh, trees))
    for path, leaf in found.items():
        for shard in leaf.addressable_shards:
            block = int(np.argwhere(chosen.mesh.devices == shard.device)[0][0])
            assert shard.index[0] == slice(block, block + 1)
            whole = np.asarray(runs.by_path(trees[block])[path])
            np.testing.assert_array_equal(shard.data[0], whole[shard.index[1:]])
    kernel = found["params/layers/self_attn/q_proj/kernel"]
    assert kernel.addressable_shards[0].data.shape == (1, 1, 16, 8)  # whole along fsdp, cut along tensor


# Copied heads


@pytest.mark.parametrize("kv_heads,mesh", [(2, (1, 1, 8)), (2, (2, 1, 4)), (1, (2, 2, 2))])
def test_loss_and_gradient_with_copied_heads_are_those_of_one_device(kv_heads, mesh):
    policy = toys.make_policy(dataclasses.replace(runs.arch(), num_kv_heads=kv_heads))
    learner = make_learner(policy, runs.LOSS, runs.RULE, Sampling())
    own, found = runs.variables(policy), []
    for grid in (None, make_mesh(MeshConfig(*mesh))):
        with meshes.use_mesh(grid):
            rows = sharding.put_rows(pad_rows(runs.batch(6), sharding.row_parts()))
            placed = own if grid is None else sharding.place(grid, own)
            grad, metrics, _ = learner.accumulate(placed, None, rows, None)
            found.append((float(metrics["loss"]), grad))
    (loss, one), (got_loss, got) = found
    assert abs(loss - got_loss) < 1e-6 and runs.distance(got, one) < 1e-6
    assert min(float(jnp.abs(one["params"]["layers"]["self_attn"][f"{x}_proj"]["kernel"]).max()) for x in "kv") > 1e-3


def test_each_device_has_one_copied_head_in_its_cache():
    policy, mesh = toys.policy(), make_mesh(MeshConfig(2, 1, 4))
    variables = sharding.place(mesh, runs.variables(policy))
    with meshes.use_mesh(mesh):
        rows = sharding.put_rows((np.ones((4, 8), np.int32), np.full(4, 8, np.int32)))
        _, ((k, v),) = jax.jit(policy.prefill)(variables, *rows)
    for x in (k, v):
        assert x.shape == (4, 8, 4, 4) and {s.data.shape for s in x.addressable_shards} == {(2, 8, 1, 4)}
        np.testing.assert_array_equal(x[:, :, 0], x[:, :, 1])
        assert np.abs(np.asarray(x[:, :, 1] - x[:, :, 2])).max() > 1e-3


def test_no_head_is_copied_where_attention_divides_rows():
    """Weights in four parts, two key/value heads: a device has one head of a quarter of the rows in its caches."""
    mesh, chosen = layout(1, 4)
    assert chosen.mesh.shape == {"data": 2, "fsdp": 1, "attn_dp": 2, "tensor": 2} and chosen.tensor == 4
    policy = toys.policy()
    variables = sharding.to_rollout(chosen.mesh, sharding.place(mesh, runs.variables(policy)))
    parts = {k: v.addressable_shards[0].data.shape for k, v in runs.by_path(variables).items()}
    assert parts["params/layers/self_attn/q_proj/kernel"] == (1, 16, 4)  # of 16 columns
    assert parts["params/layers/self_attn/k_proj/kernel"] == (1, 16, 4)  # of 8 columns: one of two heads
    assert parts["params/layers/mlp/up_proj/kernel"] == (1, 16, 8)
    with meshes.use_mesh(chosen.mesh):
        rows = np.ones((8, 8), np.int32), np.full(8, 8, np.int32), jax.random.split(jax.random.key(0), (8, 3))
        rows = sharding.put_rows((*rows, np.ones(8, bool)))
        first = functools.partial(begin, policy, max_new_tokens=6, pad_id=0)
        state = jax.jit(first)(variables, *rows)
    assert {s.data.shape for s in state.prefix[0][0].addressable_shards} == {(2, 8, 1, 4)}
    assert {s.data.shape for s in state.suffix[0][0].addressable_shards} == {(2, 3, 5, 1, 4)}
    assert {s.data.shape for s in state.hidden.addressable_shards} == {(4, 3, 16)}  # whole rows beside attention


# Whole runs


@pytest.mark.parametrize("recipe", [magrpo, joyagents_r1], ids=["magrpo", "joyagents_r1"])
def test_a_step_whose_rollout_has_a_layout_is_that_of_one_device(recipe, tmp_path, monkeypatch):
    one = runs.stepped(recipe, None, tmp_path)
    mesh = {"data": 2, "fsdp": 2, "tensor": 2, "rollout_tensor": 8}
    made = recipe.make(runs.config(recipe, None, mesh=mesh))
    assert made.env_runner.layout.mesh.shape == {"data": 1, "fsdp": 1, "attn_dp": 1, "tensor": 8}
    trees, original, moved = [], made.env_runner.play, []

    def to_rollout(mesh, params):
        moved.append((mesh, sharding.to_rollout(mesh, params)))
        return moved[-1][1]

    monkeypatch.setattr(env_runner, "to_rollout", to_rollout)

    def spy(*args, **kwargs):
        played = original(*args, **kwargs)
        trees.append(played.tree)
        return played._replace(tree=toys.paid(played.tree))

    made.env_runner.play = spy
    state, _ = runs.step(made, made.init(0), tmp_path / "layout", 0)
    np.testing.assert_array_equal(trees[0].steps.tokens, one.tree.steps.tokens)
    assert runs.parameters_apart(state, one.state) < 1e-5 and runs.distance(one.state.params, one.before) > 3e-4
    assert {x.sharding.mesh.shape["tensor"] for x in jax.tree.leaves(state.params)} == {2}  # training's layout is kept
    assert [mesh for mesh, _ in moved] == [made.env_runner.layout.mesh]
    kernels = [x for path, x in runs.by_path(moved[0][1]).items() if path.endswith("up_proj/kernel")]
    assert kernels and {x.addressable_shards[0].data.shape[-1] for x in kernels} == {128 // 8}


# Which block plays which model


@given(loads=st.lists(st.integers(1, 50), min_size=1, max_size=8), more=st.integers(0, 8))
def test_no_model_has_many_more_samples_a_block_than_another(loads, more):
    """Taking a block from a model and giving it to the most loaded one would not lower the largest load."""
    blocks = len(loads) + more
    counts = blocks_of(loads, blocks)
    assert sum(counts) == blocks and min(counts) >= 1
    worst = max(load / count for load, count in zip(loads, counts, strict=True))
    for m, count in enumerate(counts):
        if count > 1:
            assert loads[m] / (count - 1) >= worst


# Refusals


SMALL = {**runs.BACKBONE, "head_dim": 8}


def make(mesh, **changes):
    team = {"max_new_tokens": 2, "backbone": SMALL} | changes.pop("team", {})
    env = {"name": "dilemma_text", "args": {"game": "split"}, "eval_tasks": 4, "workers": 0, "max_prompt": 512}
    base = {**runs.SMALL, "reward": {"payoff": 1.0}, "team": team, "env": env, "mesh": mesh, **changes}
    return magrpo.make(runs.from_dict(magrpo.Config, base))


@pytest.mark.parametrize(
    "mesh,changes,message",
    [
        ({"rollout_tensor": -1}, {}, r"config\.mesh\.rollout_tensor: expected >= 0, got -1"),
        ({"rollout_blocks": 0}, {}, r"config\.mesh\.rollout_blocks: expected >= 1, got 0"),
        ({"data": 1, "rollout_tensor": 2}, {}, r"config\.mesh\.rollout_tensor: expected 0 on one device, got 2"),
        ({"rollout_tensor": 3}, {}, r"8 devices are no 1 blocks \(rollout_blocks\) of parts of 3 devices"),
        ({"rollout_blocks": 3}, {}, r"8 devices are no 3 blocks"),
        (
            {"rollout_blocks": 2, "models": "split", "data": 4},
            {},
            r"rollout_blocks: expected 1 with config\.mesh\.models=split",
        ),
        (
            {"rollout_tensor": 8},
            {"team": {"backbone": {**SMALL, "num_heads": 4, "num_kv_heads": 4}}},
            r"config\.mesh\.rollout_tensor: 4 query heads of \w+ do not divide into 8 parts",
        ),
        (
            {"rollout_blocks": 2},
            {"team": {"overrides": {"second": {**SMALL, "num_layers": 2}}}},
            r"config\.mesh\.rollout_blocks: expected 1 unless .*; 'second' is not as 'first'",
        ),
        ({"rollout_blocks": 2}, {"team": {"batch_invariant": True}}, r"expected 1 with config\.team\.batch_invariant"),
        (
            {"rollout_blocks": 2},
            {"engine": {"urls": {"first": "http://127.0.0.1:1"}, "weights": "shared"}},
            r"config\.mesh\.rollout_blocks: expected 1 with config\.engine\.urls",
        ),
        ({"rollout_blocks": 2}, {"env": {"name": "matrix", "eval_tasks": 4}}, r"expected 1 with the array environment"),
        ({"rollout_devices": 8}, {}, r"config\.mesh\.rollout_devices: expected <= 7, because one of 8 devices trains"),
        ({"rollout_devices": 4, "models": "split"}, {}, r"rollout_devices: expected 0 with config\.mesh\.models=split"),
    ],
)
def test_what_has_no_layout_says_so(mesh, changes, message):
    with pytest.raises(ConfigError, match=message):
        make({"data": -1, **mesh}, **changes)
