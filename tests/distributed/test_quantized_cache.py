"""Quantized caches on a mesh: each device has its part of values and scales, and samples are those of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.generation import prefix_cache
from jaxmarl_llm.generation.generate import generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.kernels.quantized import VALUES, ScaledVectors
from jaxmarl_llm.models.batch_invariant import invariant
from jaxmarl_llm.models.rollout_cache import FORMS, with_caches
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.rollout.block_sampler import sampler_of
from jaxmarl_llm.rollout.launches import TeamSampler
from tests import toys
from tests.distributed import test_layouts as layouts
from tests.distributed import test_sharded_runs as runs
from tests.kernels.test_quantized import forms

is_quantized = lambda x: isinstance(x, ScaledVectors)


def close(got, expected):
    """Equal tokens. A number between two steps may be rounded otherwise by a sum in another order."""
    off = []
    for samples, wanted in zip(got, expected, strict=True):
        assert [x.action for x in samples] == [x.action for x in wanted]
        off += [np.abs(x.logprobs - y.logprobs) for x, y in zip(samples, wanted, strict=True)]
    every = np.concatenate(off)
    assert np.median(every) < 1e-5 and every.max() < 5e-3


def turns(sampler):
    """Samples of two turns of a host rollout, and the tokens of all prompts. Five prompts continue a sample."""
    first = layouts.requests((0, 1, 2, 1), (2,) * 4)
    said = sampler.sample(first, more=True)
    again = [
        r._replace(prompt_ids=[*r.prompt_ids, *samples[0].action.ids, 65, 66, 67], group=1, key=r.key + k)
        for r, samples in zip(first, said, strict=True)
        for k in range(5)
    ]
    tokens = sum(len(r.prompt_ids) for r in [*first, *again])
    return said + sampler.sample(again, more=False), tokens


@pytest.mark.parametrize("cut", [(4, 2), (1, 4)], ids=["blocks", "attention of other rows"])
@forms
def test_samples_on_a_mesh_are_those_of_one_device(form, cut, monkeypatch):
    monkeypatch.setattr(prefix_cache, "MIN_REUSED_TOKENS", 2)  # the prompts of this test are short
    team = with_caches(layouts.team(), FORMS[form])
    params = toys.params(team)
    one = TeamSampler(team, params, Sampling())
    expected, tokens = turns(one)
    mesh, chosen = layouts.layout(*cut)
    with meshes.use_mesh(mesh):
        placed = {kind: sharding.place(mesh, trees) for kind, trees in params.items()}
        many = sampler_of(chosen)(team, placed, Sampling(), 0)
        close(turns(many)[0], expected)
    assert many.prompt_tokens == one.prompt_tokens < tokens  # what is cached is not read again
    prefixes = [many._cached] if cut == (4, 2) else list(many._cached.values())
    # Some of it was sent to other devices, where a model has several.
    assert sum(x.moved_tokens for x in prefixes) > 0 or cut == (4, 2)
    pool = jax.tree.leaves([x._pool for x in prefixes], is_leaf=is_quantized)
    assert pool and all(map(is_quantized, pool)) and {x.values.dtype for x in pool} == {jnp.dtype(VALUES[form])}


@pytest.mark.parametrize("made", [lambda policy: policy, invariant], ids=["plain", "invariant"])
@forms
def test_a_device_has_its_rows_and_heads_of_values_and_scales(form, made):
    policy = FORMS[form](made(toys.policy()))
    variables = runs.variables(policy)
    rng = np.random.default_rng(0)
    keys = jax.random.split(jax.random.key(1), (8, 2))
    given = rng.integers(0, 256, (8, 9)).astype(np.int32), rng.integers(1, 10, 8).astype(np.int32), keys
    more = {"max_new_tokens": 4, "stop_ids": (1,), "pad_id": 0, "sampling": Sampling(), "keep": True}
    one, *_ = generate(policy, variables, *given, np.ones(8, bool), **more)
    mesh = meshes.make_mesh(meshes.MeshConfig(2, 2, 2))
    with meshes.use_mesh(mesh):
        rows = [jax.device_put(x, sharding.rows(mesh)) for x in (*given, np.ones(8, bool))]
        placed = sharding.to_rollout(mesh, sharding.place(mesh, variables))
        many, prefix, suffix = generate(policy, placed, *rows, **more)
    np.testing.assert_array_equal(many.tokens, one.tokens)
    assert np.median(np.abs(many.logprobs - one.logprobs)) < 1e-5
    heads = 1 if policy.draw is None else 2  # the invariant form computes all heads on every device
    for cache, columns in ((prefix, (9,)), (suffix, (2, 3))):
        for x in jax.tree.leaves(cache, is_leaf=is_quantized):
            assert x.values.addressable_shards[0].data.shape == (2, *columns, heads, 4)
            assert x.scales.addressable_shards[0].data.shape == (2, *columns, heads, 1)


@pytest.mark.parametrize("form, weights", [("int8", "same"), ("int8", "int8"), ("fp8", "fp8")])
def test_a_step_in_a_layout_is_that_of_one_device(form, weights, tmp_path):
    settings = {"rollout_cache": form, "rollout_weights": weights, "loss": {"tis_clip": 2.0}}
    mesh = {"data": 2, "fsdp": 2, "tensor": 2, "rollout_tensor": 8}
    found = []
    for name, more in (("one", {}), ("many", {"mesh": mesh})):
        made = magrpo.make(runs.config(magrpo, None, **settings, **more))
        found.append(runs.step_of(made, tmp_path / name, pay=toys.paid))
    one, many = found
    np.testing.assert_array_equal(one.tree.steps.tokens, many.tree.steps.tokens)
    off = np.abs(one.tree.steps.logprobs - many.tree.steps.logprobs)
    assert np.median(off) < 1e-5 and off.max() < 5e-3
    assert runs.parameters_apart(many.state, one.state) < 1e-4 and runs.distance(one.state.params, one.before) > 3e-4
    assert one.metrics["logprob_diff"] > 1e-5
