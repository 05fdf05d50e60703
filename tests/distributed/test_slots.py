"""Decoding loops that nodes enter and leave, on a mesh: the samples of turns on one device, and no lane that moves."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation import prefix_cache, slots
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.rollout.launches import GenerationRequest, TeamSampler
from jaxmarl_llm.rollout.slot_sampler import SlotSampler
from tests.distributed.test_prefixes import MESHES, PLANS, alone, assert_same_samples, caches_of_launches, go
from tests.generation.test_prefix_cache import beginnings, make_team, params_of

__all__ = ["caches_of_launches"]  # a fixture

pytestmark = pytest.mark.usefixtures("numpy_tables")

# With 8 lanes requests wait, and tables have one slot in each part; with 192 tables shrink and grow.
FAST = [("8x1x1", "shared", "flat", 192), ("2x2x2", "lora", "node_wise", 8), ("attn_dp", "separate", "flat", 8)]
SLOW = [
    pytest.param(name, kind, plan, lanes, marks=pytest.mark.slow)
    for name in MESHES
    if name != "blocks"
    for kind in ("shared", "separate", "lora")
    for plan, lanes in zip(PLANS, (8, 192), strict=True)
    if (name, kind, plan, lanes) not in FAST
]


@pytest.mark.parametrize("name,kind,plan,lanes", FAST + SLOW)
def test_a_mesh_samples_what_turns_on_one_device_do(name, kind, plan, lanes, caches_of_launches):
    team = make_team(kind)
    got, one = go(team, plan, 3, name, lanes=lanes), alone(team, plan, 3)
    assert caches_of_launches and all(caches_of_launches)
    assert int(got.counts.launches) > int(one.counts.launches)
    read = int(got.counts.prompt_tokens)
    assert_same_samples(got.replace(counts=one.counts), one)
    needed, full = beginnings(got)[0], int(got.nodes.length[got.nodes.valid].sum())
    assert needed <= read < full


def requests(count, group, seed=0):
    rng = np.random.default_rng(seed)
    key = lambda k: np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(seed), k)))
    prompt = lambda: rng.integers(0, 256, rng.integers(1, 41)).tolist()
    return [GenerationRequest(0, group, k % 5, 0, key(k), prompt()) for k in range(count)]


def test_nodes_enter_the_parts_that_have_room(monkeypatch):
    """Nodes that leave do so from some parts alone. Those that follow go there, whatever their part would be."""
    team, asked, rooms = make_team("shared"), requests(40, 1), []
    params = params_of(team)

    def noted(known, capacity, original=prefix_cache.place_rows):
        rooms.append(capacity.tolist())
        return original(known, capacity)

    monkeypatch.setattr(prefix_cache, "place_rows", noted)
    wanted = TeamSampler(team, params, Sampling()).sample(asked, more=True)
    rooms.clear()
    grid = make_mesh(MeshConfig(4, 1, 2))
    with meshes.use_mesh(grid):
        sampler = SlotSampler(team, {k: sharding.place(grid, trees) for k, trees in params.items()}, Sampling(), 12)
        for number, request in enumerate(asked):
            sampler.submit(number, request, more=True)
        found = {}
        while sampler.busy:
            for number, samples in sampler.work():
                assert number not in found
                found[number] = samples
    assert any(len(set(room)) > 1 for room in rooms) and all(sum(room) > 0 for room in rooms)
    for number, samples in enumerate(wanted):
        assert [x.action for x in samples] == [x.action for x in found[number]]


SENT = r"= (\S+) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\("


def programs(name, monkeypatch):
    """Compiled text of each program of the loop, and the first table that nodes were written to, on a mesh."""
    seen, tables = {}, []

    def spied(name):
        program = getattr(slots, name)

        def call(*args, **options):
            if name not in seen:
                seen[name] = program.lower(*args, **options).compile().as_text()
            out = program(*args, **options)
            if name == "_write":
                tables.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), out))
            return out

        monkeypatch.setattr(slots, name, call)

    for program in ("_write", "_gather", "_advance", "_leave"):
        spied(program)
    init = slots.SlotLoop.__init__

    def after_a_lull(loop, *args, **options):
        init(loop, *args, **options)
        loop._few = 2  # so the first table is a quarter, and grows

    monkeypatch.setattr(slots.SlotLoop, "__init__", after_a_lull)
    go(make_team("shared"), "flat", 2, name, lanes=192)
    assert len(seen) == 4
    return {program: set(re.findall(SENT, text)) for program, text in seen.items()}, tables[0]


def test_no_lane_moves_between_devices(monkeypatch):
    """Programs of the loop exchange whether nodes are finished, and nothing else."""
    sent, _ = programs("8x1x1", monkeypatch)
    assert not sent["_write"] | sent["_gather"] | sent["_leave"]
    assert sent["_advance"]
    assert all(re.fullmatch(r"(s32|pred)\[\]", of) and what == "all-reduce" for of, what in sent["_advance"])


def test_caches_stay_where_they_are(monkeypatch):
    """Rows of attention are cut further than others. Tables are cut as attention is, and no step gathers a cache."""
    sent, table = programs("attn_dp", monkeypatch)
    for x in jax.tree.leaves(table):
        assert x.sharding.shard_shape(x.shape)[0] == x.shape[0] // 4, x
    columns = table.rows.prefix[0][0].shape[1]
    assert columns >= 32
    for shape, what in sent["_advance"]:
        assert str(columns) not in re.findall(r"\d+", shape), (shape, what)


@pytest.mark.parametrize(
    ("mesh", "said"), [(MeshConfig(rollout_blocks=2), "rollout_blocks=2"), (MeshConfig(models="split"), "models=split")]
)
def test_models_at_once_go_turn_by_turn(mesh, said):
    cfg = grpo.Config(reward={"accuracy": 1.0}, mesh=mesh)
    env = dataclasses.replace(cfg.env, name="chain_text", lanes=4)
    with pytest.raises(ConfigError, match=rf"config\.env\.lanes: expected 0 with config\.mesh\.{said}, got 4"):
        dataclasses.replace(cfg, env=env).check("config")
