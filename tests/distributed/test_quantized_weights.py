"""Quantized weights on a mesh: each device has its part of values and scales, and samples are those of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.kernels.quantized import VALUES
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.models.rollout_weights import FORMS
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.rollout.block_sampler import sampler_of
from jaxmarl_llm.rollout.launches import TeamSampler
from jaxmarl_llm.types import Model, Role, Team
from tests import toys
from tests.distributed import test_layouts as layouts
from tests.distributed import test_rollout_devices as apart
from tests.distributed import test_sharded_runs as runs
from tests.distributed import test_split
from tests.kernels.test_quantized import forms

NAMES = layouts.NAMES


def formed(params, form):
    return {kind: {name: FORMS[form](tree) for name, tree in trees.items()} for kind, trees in params.items()}


def separate():
    return layouts.team(), toys.params(layouts.team())


def adapters():
    base = toys.policy().init(jax.random.key(3))
    models = tuple(Model(name, toys.policy(), toys.TOKENIZER, base="base") for name in NAMES)
    tuned = lambda k: jax.tree.map(lambda x: x + 0.1 * (k + 1), init_lora(jax.random.key(k), base, 2))
    params = {"shared": {"base": base}, "agents": {name: {"lora": tuned(k)} for k, name in enumerate(NAMES)}}
    return Team(tuple(Role(n, n, 3) for n in NAMES), models), params


@pytest.mark.parametrize("cut", [(4, 2), (1, 4)], ids=["blocks", "attention of other rows"])
@pytest.mark.parametrize("made, form", [(separate, "int8"), (adapters, "int8"), (adapters, "fp8")])
def test_samples_on_a_mesh_are_those_of_one_device(made, form, cut):
    team, params = made()
    asked = layouts.requests((0, 1, 2, 1), (2,) * 4)
    expected = TeamSampler(team, formed(params, form), Sampling()).sample(asked, more=False)
    mesh, chosen = layouts.layout(*cut)
    with meshes.use_mesh(mesh):
        placed = {kind: sharding.place(mesh, trees) for kind, trees in params.items()}
        layouts.same(sampler_of(chosen)(team, formed(placed, form), Sampling(), 0).sample(asked, more=False), expected)


@forms
def test_a_device_has_its_part_of_values_and_scales(form):
    mesh, chosen = layouts.layout(1, 4)
    policy = toys.policy()
    whole = runs.variables(policy)
    one, placed = FORMS[form](whole), FORMS[form](sharding.place(mesh, whole))
    moved = sharding.to_rollout(chosen.mesh, placed)
    assert runs.distance(moved, one) == 0.0
    # Trained on 2 x 2 x 2 devices; sampled with weights in 4 parts, of which 2 cut heads of keys and values.
    shapes = lambda tree: {k: x.addressable_shards[0].data.shape for k, x in runs.by_path(tree).items()}
    before, after, layers = shapes(placed), shapes(moved), "params/layers/"
    for name, in_training, in_rollout, scales in (
        ("self_attn/q_proj", (1, 8, 8), (1, 16, 4), (1, 4)),
        ("self_attn/k_proj", (1, 8, 4), (1, 16, 4), (1, 4)),
        ("self_attn/o_proj", (1, 8, 8), (1, 4, 16), (1, 16)),
        ("mlp/up_proj", (1, 8, 16), (1, 16, 8), (1, 8)),
        ("mlp/down_proj", (1, 16, 8), (1, 8, 16), (1, 16)),
    ):
        assert before[f"{layers}{name}/kernel/values"] == in_training
        assert after[f"{layers}{name}/kernel/values"] == in_rollout
        assert after[f"{layers}{name}/kernel/scales"] == scales
    assert {x.dtype for k, x in runs.by_path(moved).items() if k.endswith("values")} == {jnp.dtype(VALUES[form])}


@forms
def test_a_step_in_a_layout_is_that_of_one_device(form, tmp_path):
    settings = {"rollout_weights": form, "loss": {"tis_clip": 2.0}}
    mesh = {"data": 2, "fsdp": 2, "tensor": 2, "rollout_tensor": 8}
    found = []
    for name, more in (("one", {}), ("many", {"mesh": mesh})):
        made = magrpo.make(runs.config(magrpo, None, **settings, **more))
        found.append(runs.step_of(made, tmp_path / name, pay=toys.paid))
    one, many = found
    np.testing.assert_array_equal(one.tree.steps.tokens, many.tree.steps.tokens)
    np.testing.assert_allclose(one.tree.steps.logprobs, many.tree.steps.logprobs, rtol=0, atol=1e-5)
    assert runs.parameters_apart(many.state, one.state) < 1e-5 and runs.distance(one.state.params, one.before) > 3e-4
    assert many.metrics["logprob_diff"] == pytest.approx(one.metrics["logprob_diff"], abs=1e-5)
    assert one.metrics["logprob_diff"] > 1e-4


def test_devices_that_only_sample_quantize_what_they_got(tmp_path):
    """The parameters move first: a program on devices that train could meet one of the update there."""
    expected, wanted, _ = apart.played(apart.make("array", rollout_weights="fp8"), tmp_path / "one")
    made = apart.make("array", rollout_weights="fp8", mesh=apart.CUTS["4 train, 4 sample"])
    own, where = set(jax.devices()[-4:]), []
    form = made.env_runner.form

    def seen(tree):
        where.extend(d for x in jax.tree.leaves(tree) for d in x.devices())
        return form(tree)

    made.env_runner.form = seen
    tokens, learned, _ = apart.played(made, tmp_path / "many")
    assert set(where) == own
    for a, b in zip(tokens, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), learned[0], wanted[0])


@pytest.mark.parametrize("setting, form", [("rollout_weights", "fp8"), ("rollout_cache", "int8")])
def test_a_split_team_samples_with_a_form_on_its_parts(setting, form, tmp_path):
    made = []
    for name, mesh in (("one", {}), ("many", {"mesh": test_split.SPLIT})):
        cfg = test_split.config(**{setting: form}, loss={"tis_clip": 2.0}, sft={"steps": 0}, **mesh)
        recipe, _ = test_split.paid(magrpo.make(cfg))
        result = []
        recipe.recorder = lambda *of, result=result: result.append(of[-1].tree.steps.tokens)
        state, seen = runs.step(recipe, recipe.init(0), tmp_path / name, 0)
        made.append((result[0], state, seen))
        recipe.env_runner.close()
    (one, before, _), (many, after, seen) = made
    np.testing.assert_array_equal(one, many)
    apart_at_most = {"rollout_weights": 2e-5, "rollout_cache": 1e-4}[setting]  # a number between two steps may move
    assert test_split.distance(after.params["agents"], before.params["agents"]) < apart_at_most
    assert seen["logprob_diff"] > 1e-5
