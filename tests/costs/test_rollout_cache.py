"""Costs of rollouts with quantized caches: bytes are those of real caches, of one device and of a device of a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from experiments.tpu import compile_ahead
from jaxmarl_llm.costs import meshes as sizes
from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.costs.counts import Launch, LaunchPart, ModelSize
from jaxmarl_llm.costs.workload import workload_of
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.generation import generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.rollout_cache import FORMS
from jaxmarl_llm.recipes import magrpo
from tests import toys
from tests.costs.test_meshes import HEAD, KV, LAYERS, found, joy  # noqa: F401
from tests.distributed import test_sharded_runs as runs
from tests.kernels.test_quantized import forms


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_caches_of_a_launch(dtype, form):
    policy = toys.policy(layers=3, dtype=dtype)
    weights = ModelSize(policy.config, rollout_cache=form)
    made = policy if FORMS[form] is None else FORMS[form](policy)
    shapes, response = ((4, 1), (2, 3)), 6
    width = jax.random.key_data(jax.random.key(0)).shape

    def launch(params):
        rows = [
            generate.PromptRows(
                jnp.zeros((n, 9), jnp.int32),
                jnp.ones(n, jnp.int32),
                jax.random.wrap_key_data(jnp.zeros((n, g, *width), jnp.uint32)),
                jnp.ones(n, bool),
            )
            for n, g in shapes
        ]
        more = {"max_new_tokens": response, "stop_ids": (1,), "pad_id": 0, "sampling": Sampling(), "keep": True}
        return [caches for _, *caches in generate.sample_launch(made, {"params": params}, rows, **more)]

    params = jax.eval_shape(policy.init, jax.random.key(0))
    parts = tuple(LaunchPart(g, n, n, ()) for n, g in shapes)
    asked = Launch(**{**dict.fromkeys(Launch._fields), "parts": parts, "prompt": 9, "response": response})
    assert costs.cache_bytes(asked, weights) == size(jax.eval_shape(launch, params)) > 0
    per_token = {"float32": 4, "bfloat16": 2}[dtype] * 4 if form == "same" else 4 + 4
    assert costs.cache_slot_bytes(weights) == 2 * 3 * 2 * per_token


@forms
def test_a_chip_has_a_smaller_cache_and_reads_less(joy, form):  # noqa: F811
    _, plan, work = joy
    smaller = work._replace(models=tuple(m._replace(rollout_cache=form) for m in work.models))
    plain, vector = 2 * HEAD, HEAD + 4  # bytes of a key or a value; the model is bfloat16
    for mesh in ((2, 4, 2), (8, 1, 2)):
        before, after = found(joy, mesh), found((joy[0], plan, smaller), mesh)
        assert after.memory.cache == pytest.approx(before.memory.cache * vector / plain)
        assert after.memory._replace(cache=0) == before.memory._replace(cache=0)
    held, less = costs.memory(plan, work), costs.memory(plan, smaller)
    assert less.cache * plain == held.cache * vector and less.updating == held.updating
    launch = sizes.largest_launch(plan, work)
    one, other = (costs.least_work(launch, w.models[launch.model]) for w in (work, smaller))
    saved = 2 * LAYERS * KV * (plain - vector)  # of a token
    written = sum(x.fresh for _, x in launch.members) * 2048
    assert one.prefill_bytes - other.prefill_bytes == pytest.approx(written * saved)
    # A sample reads the prompt with its node, and its own tokens, at each of 511 tokens.
    read = sum(x.nodes * (511 * 2048 + g * 511 * 510 / 2) for g, x in launch.members)
    assert one.decode_bytes - other.decode_bytes == pytest.approx(read * saved)
    assert one.decode == other.decode and one.prefill == other.prefill


def test_what_is_compiled_has_the_cache_of_the_setting(monkeypatch):
    """The program of generation that `plan_pod` compiles carries such keys and values, and has the planner's bytes."""
    found = {}
    for form in FORMS:
        cfg = runs.config(magrpo, None, rollout_cache=form, loss={"tis_clip": 2.0})
        work, _ = workload_of(cfg)
        assert {m.rollout_cache for m in work.models} == {form}
        mesh = make_mesh(MeshConfig(2, 2, 2))
        team = compile_ahead.team_of(cfg, mesh, work.models, 0, "host")
        shape = compile_ahead.shape_of(cfg, mesh, magrpo.make_plan(cfg), work)
        texts = []

        def keep(lowered, texts=texts):
            texts.append(lowered.as_text())
            raise jax.errors.JaxRuntimeError("Used 1G of 1G hbm")

        monkeypatch.setattr(compile_ahead, "compile_text", keep)
        compile_ahead.compile_stages(cfg, mesh, team, shape, ("rollout",))
        found[form] = ["xi8>" in texts[0], "xf8E4M3FN>" in texts[0]]
    assert found == {"same": [False, False], "int8": [True, False], "fp8": [False, True]}
