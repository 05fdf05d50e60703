"""Prefixes that are cached on a mesh: the samples and the prefilled tokens of one device, wherever rows are placed."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.generation import prefix_cache, prefix_pool
from jaxmarl_llm.generation.blocks import Blocks, stacked
from jaxmarl_llm.generation.generate import TOGETHER
from jaxmarl_llm.generation.placement import in_order
from jaxmarl_llm.generation.prefix_pool import NO_SLOT, Cut
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.batch_invariant import invariant
from jaxmarl_llm.rollout import plans, scheduler
from jaxmarl_llm.rollout.block_sampler import BlockSampler, sampler_of
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings, play
from jaxmarl_llm.rollout.launches import TeamSampler
from jaxmarl_llm.types import Model, Team
from tests.distributed import test_layouts as layouts
from tests.generation.test_prefix_cache import (
    assert_same_samples,
    beginnings,
    make_team,
    model,
    params_of,
    variables_of,
)
from tests.toys import conversation

pytestmark = pytest.mark.usefixtures("numpy_tables")

TASKS = [f"{word} " * 6 for word in ("apples", "rivers", "four seas", "many", "which", "how far", "x", "old", "a b c")]
PLANS = {"flat": plans.flat(3), "node_wise": plans.node_wise(2)}

# sizes of data, fsdp, tensor; rollout_tensor, rollout_blocks
MESHES = {
    "8x1x1": MeshConfig(8, 1, 1),
    "1x8x1": MeshConfig(1, 8, 1),
    "2x2x2": MeshConfig(2, 2, 2),
    "2x1x4": MeshConfig(2, 1, 4),  # two key/value heads are copied
    "attn_dp": MeshConfig(2, 2, 2, rollout_tensor=4),
    "blocks": MeshConfig(8, 1, 1, rollout_tensor=2, rollout_blocks=2),  # a block has two parts of rows
}


def go(team, plan, turns, name=None, params=None, lanes=0):
    """(tree, caches) of a rollout: of one device, or of a mesh and its layout; with ``lanes`` by the scheduler."""
    grid = None if name is None else make_mesh(MESHES[name])
    settings = HostSettings(PLANS[plan], Sampling(), max_prompt=512)
    layout = meshes.layout_of(MESHES[name], grid, [2]) if name is not None and MESHES[name].has_layout else None
    if layout is not None:
        settings = settings._replace(sampler=sampler_of(layout))
    made, inner = [], settings.sampler
    params = params_of(team) if params is None else params

    def factory(*args):
        made.append(inner(*args))
        return made[0]

    with EnvPool(lambda: conversation(turns, together=True), workers=0) as pool, meshes.use_mesh(grid):
        placed = params if grid is None else {kind: sharding.place(grid, trees) for kind, trees in params.items()}
        asked = team, placed, pool, TASKS, jax.random.key(5)
        if lanes:
            return scheduler.play(*asked, settings, lanes, layout).tree
        tree = play(*asked, settings._replace(sampler=factory)).tree
    cached = made[0]._cached
    return tree, list(cached.values()) if isinstance(cached, dict) else [cached]


@functools.cache
def alone(team, plan, turns):
    return go(team, plan, turns)[0]


def check(got, one):
    """Equal samples, and as many prefilled tokens, of which few had been through a model."""
    at_once = int(one.counts.launches) // int(got.counts.launches)  # models that sample at once have one launch
    assert_same_samples(got.replace(counts=got.counts.replace(launches=got.counts.launches * at_once)), one)
    assert got.counts.prompt_tokens == one.counts.prompt_tokens
    needed, _ = beginnings(got)
    assert needed <= int(got.counts.prompt_tokens) <= 1.05 * needed


# Fast: rows over all devices, and a layout that divides rows and heads; a model, and adapters in blocks.
FAST = [("8x1x1", "shared", "flat", 3), ("attn_dp", "separate", "flat", 2), ("blocks", "lora", "node_wise", 2)]
SLOW = [(name, kind, plan, 3) for name in MESHES for kind in ("shared", "separate", "lora") for plan in PLANS]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in FAST]


@pytest.fixture
def caches_of_launches(monkeypatch):
    """Where caches lie that are written to the pool: on the devices that have the slots, or they would be sent."""
    found = []

    def put(pool, prefix, suffix, *tables, cut, original=prefix_pool.put):
        for cache, between in ((prefix, 1), (suffix, 2)) if sharding.meshed() else ():
            where = jax.sharding.NamedSharding(sharding.current(), cut.cache(between))
            found.extend(x.sharding.is_equivalent_to(where, x.ndim) for x in jax.tree.leaves(cache))
        return original(pool, prefix, suffix, *tables, cut=cut)

    monkeypatch.setattr(prefix_pool, "put", put)
    return found


@pytest.mark.parametrize("name,kind,plan,turns", FAST + SLOW)
def test_a_mesh_samples_and_prefills_what_one_device_does(name, kind, plan, turns, caches_of_launches):
    team = make_team(kind)
    got, caches = go(team, plan, turns, name)
    assert caches_of_launches and all(caches_of_launches)
    check(got, alone(team, plan, turns))
    full = int(got.nodes.length[got.nodes.valid].sum())
    reused = full - int(got.counts.prompt_tokens)
    assert reused > full / 4
    moved = sum(cache.moved_tokens for cache in caches)
    assert moved < reused / 4
    print(f"{name} {kind} {plan}: {full} tokens, {full - reused} prefilled, {moved} moved")


@pytest.mark.parametrize("name", ["8x1x1", *(pytest.param(m, marks=pytest.mark.slow) for m in ("attn_dp", "blocks"))])
def test_samples_do_not_depend_on_where_rows_are(name, monkeypatch):
    """Rows at random: most of their prefixes are sent to other parts, and none is prefilled again."""
    rng = np.random.default_rng(0)

    def anywhere(known, capacity):
        places = np.repeat(np.arange(known.shape[1]), capacity)
        return rng.permutation(places)[: len(known)]

    def ordered(known, capacity):
        return in_order(len(known), capacity)

    team = make_team("shared")
    near = go(team, "flat", 3, name)[1][0].moved_tokens
    monkeypatch.setattr(prefix_cache, "place_rows", ordered)
    in_turn = go(team, "flat", 3, name)[1][0].moved_tokens
    assert near <= in_turn and (name != "8x1x1" or 0 < near < in_turn / 2)
    monkeypatch.setattr(prefix_cache, "place_rows", anywhere)
    monkeypatch.setattr(prefix_cache, "MOVED_TOKENS", 8 * 64)  # several exchanges
    got, (cache,) = go(team, "flat", 3, name)
    check(got, alone(team, "flat", 3))
    assert cache.moved_tokens > 5 * near


def test_a_model_takes_its_prefixes_to_other_blocks():
    """First each model has two of four blocks, then the second one has three: samples and tokens of one device."""
    team, (mesh, chosen) = layouts.team(), layouts.layout(4, 2)
    params = layouts.toys.params(team)
    turns = layouts.requests((0, 0, 1, 1), (1,) * 4), layouts.requests((0, 1, 1, 1, 1, 1), (1,) * 6)
    sampled = []
    for sampler, grid in ((TeamSampler(team, params, Sampling()), None), (None, mesh)):
        with meshes.use_mesh(grid):
            made = sampler or BlockSampler(team, sharding.place(mesh, params), Sampling(), chosen)
            begun = [r._replace(task=0, prompt_ids=[*range(20 + k), *r.prompt_ids]) for k, r in enumerate(turns[0])]
            first = made.sample(begun, more=True)
            said = {r.model: [*r.prompt_ids, *samples[0].action.ids] for r, samples in zip(begun, first)}
            asked = [r._replace(task=0, prompt_ids=said[r.model] + r.prompt_ids) for r in turns[1]]
            sampled.append((first + made.sample(asked, more=True), made.prompt_tokens))
    (one, prefilled), (got, of_blocks) = sampled
    layouts.same(got, one)
    assert of_blocks == prefilled < sum(len(r.prompt_ids) for r in begun + asked)
    assert made._cached.moved_tokens > 0


# What the devices exchange


def exchanged(function, *args, **fixed):
    """Numbers of entries of what collectives of the compiled program result in, by kind."""
    text, found = function.lower(*args, **fixed).compile().as_text(), {}
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    for result, kind in re.findall(rf"^.*? = (.*?) ({kinds})(?:-start)?\(", text, re.MULTILINE):
        sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w+\[([\d,]+)\]", result)]
        found.setdefault(kind, []).append(sum(sizes))
    return found


def pool_of(mesh, cut, slots, heads=4, size=8):
    """A pool of one layer whose entries all differ."""
    parts = sharding.row_parts()
    x = np.arange(parts * slots * heads * size, dtype=np.float32).reshape(parts * slots, heads, size)
    where = jax.sharding.NamedSharding(mesh, cut.pool)
    return ((sharding.put(x, where), sharding.put(-x, where)),), x.reshape(parts, slots, heads, size)


@pytest.mark.parametrize("name", ["8x1x1", "2x2x2"])
def test_only_moves_leave_a_device(name):
    mesh, rng = make_mesh(MESHES[name]), np.random.default_rng(0)
    with meshes.use_mesh(mesh):
        cut, parts = Cut(TOGETHER.axes(), "tensor"), sharding.row_parts()
        pool, host = pool_of(mesh, cut, 16)
        slot = rng.integers(0, 16, (2 * parts, 5)).astype(np.int32)
        rows = sharding.put_rows(slot)
        assert not exchanged(prefix_pool.take, pool, rows, cut=cut)
        ((taken, negative),) = prefix_pool.take(pool, rows, cut=cut)
        np.testing.assert_array_equal(taken, host[np.arange(2 * parts)[:, None] // 2, slot])
        np.testing.assert_array_equal(negative, -np.asarray(taken))

        to = np.stack([rng.permutation(16)[:5] for _ in range(parts)]).astype(np.int32)  # each second row is dropped
        to = np.stack([to, np.full_like(to, NO_SLOT)], axis=1).reshape(2 * parts, 5)
        args = ((taken + 0.5, negative),), None, sharding.put_rows(to), None
        assert not exchanged(prefix_pool.put, pool, *args, cut=cut)
        assert not exchanged(prefix_pool.grow, pool, more=8, cut=cut)
        ((written, _),) = prefix_pool.grow(prefix_pool.put(pool, *args, cut=cut), more=8, cut=cut)
        for part in range(parts):
            host[part, to[2 * part]] = np.asarray(taken)[2 * part] + 0.5
        np.testing.assert_array_equal(np.asarray(written).reshape(parts, 24, 4, 8)[:, :16], host)

        pool, host = pool_of(mesh, cut, 16)
        sent, to = rng.integers(0, 16, (2, parts, parts, 3)).astype(np.int32)
        to[:] = NO_SLOT
        to[parts - 1, 0, 1], to[0, 1, :2] = 7, (2, 5)  # [to, from]
        found = exchanged(prefix_pool.move, pool, sent, to, cut=cut)
        on_device = parts * 3 * 4 // mesh.shape["tensor"] * 8  # entries of keys, or of values
        assert found.keys() == {"all-to-all"} and sum(found["all-to-all"]) == 2 * on_device
        ((moved, _),) = prefix_pool.move(pool, sent, to, cut=cut)
        expected = host.copy()
        expected[parts - 1, 7] = host[0, sent[0, parts - 1, 1]]
        expected[0, [2, 5]] = host[1, sent[1, 0, :2]]
        np.testing.assert_array_equal(np.asarray(moved).reshape(host.shape), expected)


@pytest.mark.parametrize("name", ["8x1x1", "2x2x2", "attn_dp", "blocks"])
def test_extending_a_prompt_sends_no_cache(name):
    """Without cut weights nothing is sent. Where tensor alone cuts them, sums of activations are."""
    policy, grid = model(layers=1), make_mesh(MESHES[name])
    chosen = meshes.layout_of(MESHES[name], grid, [2])
    variables, mesh = sharding.place(grid, variables_of(policy)), chosen.mesh if MESHES[name].has_layout else grid
    applied = Blocks(("params",)) if name == "blocks" else TOGETHER
    placed = stacked(mesh, [variables] * 2) if name == "blocks" else sharding.to_rollout(mesh, variables)
    with meshes.use_mesh(mesh):
        cut, parts = Cut(applied.axes(), "tensor"), sharding.row_parts()
        tables = applied.put((np.ones((16, 4), np.int32), np.full(16, 4, np.int32), np.full(16, 9, np.int32)))
        shape = (16, 512, 2, 8) if name != "blocks" else (2, 8, 512, 2, 8)
        zeros = sharding.put(np.zeros(shape, np.float32), jax.sharding.NamedSharding(mesh, cut.cache(1)))
        found = exchanged(jax.jit(applied.over(policy.extend)), placed, *tables, ((zeros, jnp.copy(zeros)),))
    rows = 16 // parts
    assert max((max(sizes) for sizes in found.values()), default=0) < rows * 512 * 8 / 4  # keys of a head, or less
    # Sums behind the embedding, attention and the feed-forward layer; along attn_dp weights are gathered.
    assert found.get("all-reduce", []) == ([] if name == "8x1x1" else [rows * 4 * 16] * 3)
    assert found.keys() <= {"all-reduce"} or name == "attn_dp"


@pytest.mark.slow
def test_invariant_generation_keeps_its_bits():
    """Log-probs of a mesh are those of one device to the bit, also where prefixes are cached and moved.

    Two layers: the keys of the first one are of no sum over heads.
    """
    team = make_team("shared")
    policy = invariant(model(layers=2))
    team = Team(team.roles, tuple(Model(m.name, policy, m.tokenizer) for m in team.models))
    params = {"shared": {}, "agents": {"m": variables_of(model(layers=2))}}
    one, _ = go(team, "flat", 2, params=params)
    got, (cache,) = go(team, "flat", 2, "2x2x2", params)
    check(got, one)
    np.testing.assert_array_equal(got.steps.logprobs, one.steps.logprobs)
    assert cache.moved_tokens > 0
