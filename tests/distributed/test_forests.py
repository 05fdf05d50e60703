"""Forests on a mesh: a device has forests of its own, and an update is that of separate nodes on one device."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.training import drivers, packing
from jaxmarl_llm.training.learner import NodeTargets, make_learner, pad_rows
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from tests.distributed import test_sharded_runs as runs
from tests.training.test_packing import array, own, policy, rollout

pytestmark = pytest.mark.usefixtures("numpy_tables")

MESHES = {"8x1x1": (8, 1, 1), "1x8x1": (1, 8, 1), "2x2x2": (2, 2, 2)}
LOSS = Loss(tis_clip=2.0, entropy_coef=0.1, value_coef=0.5)

lines = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=9)), min_size=1, max_size=20
)


@given(lines, st.integers(1, 40), st.integers(1, 8))
def test_devices_have_one_forest_each_and_a_sequence_is_in_one(lines, most, parts):
    batches, tokens = packing.share_sequences([(task, array(ids)) for task, ids in lines], most, parts)
    forests = [one for some in batches for one in some]
    assert sorted(i for one in forests for i, _ in one.paths) == list(range(len(lines)))
    assert all(1 <= len(some) <= parts for some in batches)
    assert tokens == sum(parts * max(len(one.tokens) for one in some) for some in batches)
    whole = [len(one.tokens) for one in packing.pack_sequences([(t, array(ids)) for t, ids in lines], most)]
    assert all(len(one.tokens) <= max(most, *(len(ids) for _, ids in lines)) for one in forests)
    assert parts > 1 or tokens == sum(whole)
    for one in forests:  # what the numbers of a path name are the tokens of its sequence
        assert all([one.tokens[j] for j in path] == lines[i][1] for i, path in one.paths)
        assert all(one.position[j] == t for _, path in one.paths for t, j in enumerate(path))
        assert all(j < one.end[j] <= len(one.tokens) for j in range(len(one.tokens)))


def test_conversations_of_as_many_tasks_as_devices_are_sent_once():
    """Eight tasks with sixteen conversations each: a token of a task is on one device alone."""
    rng = np.random.default_rng(0)
    told = [rng.integers(0, 9, 300) for _ in range(8)]
    said = [(task, np.concatenate([told[task], rng.integers(0, 9, 20)])) for task in range(8) for _ in range(16)]
    ((batch,), tokens) = packing.share_sequences(said, 2048, 8)
    unique = len({(task, *ids[: t + 1].tolist()) for task, ids in said for t in range(len(ids))})
    assert sum(len(one.tokens) for one in batch) == unique and tokens <= 1.05 * unique


def on(mesh, batches, variables, shared=None):
    """Loss, gradient of all micro-batches, and the text of the first one's program."""
    learner = make_learner(policy(), LOSS, Optimizer(), Sampling(0.8))
    with meshes.use_mesh(mesh):
        if mesh is not None:
            variables = sharding.place(mesh, variables)
            shared = None if shared is None else sharding.place(mesh, shared)
        total, loss, text = None, 0.0, ""
        for batch in batches:
            rows = sharding.put_rows(pad_rows(batch, sharding.row_parts()))
            program = learner.accumulate.lower(variables, shared, rows, total).compile()
            total, metrics, _ = program(variables, shared, rows, total)
            loss, text = loss + float(metrics["loss"]), text or program.as_text()
        return loss, jax.tree.map(np.asarray, total), text


def batches(parts, trees=True):
    """Micro-batches of a product plan with a value target at each node."""
    tree, advantages, trained = rollout("product")
    rng, n = np.random.default_rng(0), len(tree.nodes.role)
    values = NodeTargets(*(np.abs(rng.normal(size=n)).astype(np.float32) for _ in range(3)))
    smallest = (64, 8) if trees else (512, 8)
    settings = {"micro_tokens": 600, "smallest": smallest, "values": values, "trees": trees, "parts": parts}
    return packing.pack(tree, 0, advantages, trained, LOSS, **settings)


def with_a_head(adapters):
    """Variables of a model with a value head, and its frozen backbone: None, or with adapters the backbone."""
    variables = own(head=True)
    if not adapters:
        return variables, None
    lora = jax.tree.map(lambda x: x + 0.05, init_lora(jax.random.key(2), variables["params"], 4))  # B is not 0
    return {"lora": lora, "value": variables["value"]}, variables["params"]


@pytest.mark.parametrize(
    "name,adapters", [("8x1x1", False), ("1x8x1", False), ("2x2x2", False), ("2x2x2", True)], ids=str
)
def test_an_update_on_a_mesh_is_that_of_separate_nodes_on_one_device(name, adapters):
    mesh, (variables, shared) = make_mesh(MeshConfig(*MESHES[name])), with_a_head(adapters)
    with meshes.use_mesh(mesh):
        parts = sharding.row_parts()
    forests = batches(parts)
    assert all(b.forest is not None and len(b.forest.end) == parts for b in forests)
    loss, gradient, text = on(mesh, forests, variables, shared)
    want_loss, want, _ = on(None, batches(1, trees=False), variables, shared)
    apart = max(float(np.abs(a - b).max()) for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(want)))
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(want))
    print(f"{name}: loss {abs(loss - want_loss):.1e}, gradient {apart:.1e} of at most {scale:.1e}")
    assert scale > 1e-2 and abs(loss - want_loss) < 1e-5 and apart < 1e-6
    assert bool(re.search(r"all-gather", text)) == (MESHES[name][1] > 1)  # of weights, never of hidden states


@pytest.mark.parametrize("parts", [1, 4])
def test_a_host_driver_makes_forests_with_a_mesh_and_without(parts):
    tree, advantages, trained = rollout("product")
    team = SimpleNamespace(models=(SimpleNamespace(name="all", policy=policy()),), roles=())
    step = SimpleNamespace(cfg=SimpleNamespace(micro_tokens=600, loss=LOSS), team=team)
    with meshes.use_mesh(make_mesh(MeshConfig(2, 2, 2)) if parts > 1 else None):
        played = SimpleNamespace(records=())  # of a host environment
        laid = drivers.HostDriver(0, None).lay_out(step, tree, played, advantages, trained, {})
    assert {b.forest is not None and len(b.forest.end) for b in laid["all"]} == {parts}


@pytest.mark.slow
def test_a_step_of_conversations_on_a_mesh_is_that_of_one_device(tmp_path, monkeypatch):
    args = {"game": "split", "rounds": 2}
    env = {"name": "dilemma_text", "args": args, "eval_tasks": 2, "max_prompt": 512, "workers": 0}
    team = {"max_new_tokens": 7, "remat": False, "backbone": {**runs.BACKBONE, "head_dim": 8}}
    more = {"env": env, "batch": 2, "reward": {"payoff": 0.1}, "team": {**team, "parameter_sharing": "shared"}}
    one, got = (runs.step_of(magrpo.make(runs.config(magrpo, name, **more)), tmp_path) for name in (None, "2x2x2"))
    np.testing.assert_array_equal(got.tree.steps.tokens, one.tree.steps.tokens)
    assert runs.distance(one.state.params, one.before) > 3e-2
    assert runs.parameters_apart(got.state, one.state) < 1e-5
