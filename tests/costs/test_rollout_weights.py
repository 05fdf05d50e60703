"""Costs of rollouts with quantized weights: bytes are those of real trees, of one device and of a device of a mesh."""

import dataclasses

import jax
import pytest

from experiments.tpu import compile_ahead
from jaxmarl_llm.costs import meshes as sizes
from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.costs.counts import ModelSize
from jaxmarl_llm.costs.workload import workload_of
from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.kernels.quantized import ScaledMatrix
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.models.rollout_weights import FORMS
from jaxmarl_llm.recipes import magrpo
from tests import toys
from tests.costs.test_meshes import HEAD, HEADS, HIDDEN, KV, LAYERS, NUMBERS, UNITS, found, joy  # noqa: F401
from tests.distributed import test_sharded_runs as runs
from tests.kernels.test_quantized import forms

is_matrix = lambda x: isinstance(x, ScaledMatrix)


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def matrices(tree):
    return [x for x in jax.tree.leaves(tree, is_leaf=is_matrix) if is_matrix(x)]


@forms
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_tree(dtype, rank, form):
    policy = toys.policy(layers=3, dtype=dtype, tie_embeddings=False)
    params = jax.eval_shape(policy.init, jax.random.key(0))
    formed = jax.eval_shape(FORMS[form], params)
    adapter = jax.eval_shape(lambda: init_lora(jax.random.key(0), params, rank)) if rank else {}
    weights = ModelSize(policy.config, rank, rollout_weights=form)
    assert costs.formed_bytes(weights) == size(matrices(formed)) > 0
    assert costs.rollout_bytes([weights]) == size(formed) + size(adapter)
    tables = {k: formed[k] for k in ("embed", "lm_head")}
    assert costs.layer_bytes(weights) == size(formed) - size(tables) + size(adapter)
    # Two adapters read one backbone, two models their own.
    copies = 1 if rank else 2
    assert costs.rollout_bytes([weights] * 2) == copies * size(formed) + 2 * size(adapter)
    plain = weights._replace(rollout_weights="same")
    assert costs.formed_bytes(plain) == 0 and costs.rollout_bytes([plain]) == size(params) + size(adapter)


@forms
def test_a_chip_has_the_matrices_of_all_models_and_a_smaller_copy(joy, form):  # noqa: F811
    bare, plan, work = joy
    halved = work._replace(models=tuple(m._replace(rollout_weights=form) for m in work.models))
    shapes = [(HIDDEN, HEADS * HEAD), *[(HIDDEN, KV * HEAD)] * 2, (HEADS * HEAD, HIDDEN)]
    shapes += [*[(HIDDEN, UNITS)] * 2, (UNITS, HIDDEN)]
    entries, scales = (LAYERS * sum(of(*s) for s in shapes) for of in (lambda a, b: a * b, lambda a, b: 4 * b))
    for mesh, copy in (((2, 4, 2), 2 * NUMBERS - entries + scales), ((8, 1, 2), 0)):
        before, after = found(joy, mesh), found((bare, plan, halved), mesh)
        assert after.memory.rollout_copy == 5 * (entries + scales) / (mesh[1] * mesh[2]) + copy / 2
        assert after.memory.updating == before.memory.updating and after.seconds < before.seconds
    launch = sizes.largest_launch(plan, work)
    one, other = (costs.least_work(launch, w.models[launch.model]) for w in (work, halved))
    # Layers run for 511 tokens of a launch, and a model plays a fifth of the launches.
    assert one.decode_bytes - other.decode_bytes == pytest.approx(511 / 5 * (entries - scales), rel=1e-9)
    held, less = costs.memory(plan, work), costs.memory(plan, halved)
    assert less.generating - held.generating == 5 * (entries + scales) and less.updating == held.updating


@forms
@pytest.mark.parametrize("shape, rollout_tensor", [((2, 2, 2), 8), ((2, 2, 2), 0), ((4, 1, 2), 0)])
def test_shapes_that_are_compiled_are_those_of_a_run(shape, rollout_tensor, form):
    """Bytes beside the parameters of a chip, as arrays of a run take them."""
    parts = {"rollout_tensor": rollout_tensor}
    cfg = runs.config(magrpo, None, rollout_weights=form, loss={"tis_clip": 2.0}, mesh=parts)
    work, _ = workload_of(cfg)
    assert {m.rollout_weights for m in work.models} == {form}
    mesh = make_mesh(MeshConfig(*shape))
    layout = meshes.layout_of(cfg.mesh, mesh, [8]) if rollout_tensor else None
    team = compile_ahead.team_of(cfg, mesh, work.models, 0, "host", layout)
    params = {"params": toys.make_policy(work.models[0].config).init(jax.random.key(0))}
    own = FORMS[form](sharding.place(mesh, params))
    read = sharding.to_rollout(mesh if layout is None else layout.mesh, own)
    on_chip = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    assert compile_ahead.chip_bytes(team.playing) == on_chip(read)
    copy = on_chip(read) if rollout_tensor or shape[1] > 1 else 0
    assert team.playing_bytes == 2 * on_chip(matrices(own)) + copy
    plain = compile_ahead.team_of(
        dataclasses.replace(cfg, rollout_weights="same"), mesh, work.models, 0, "host", layout
    )
    assert plain.parameter_bytes == team.parameter_bytes and plain.optimizer_bytes == team.optimizer_bytes
    assert plain.playing_bytes != team.playing_bytes
