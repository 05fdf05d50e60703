"""Predicted = measured: real trees, engines' counters, what generation allocates, and the field's closed forms."""

import dataclasses
import functools
import itertools
import math
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tpu import compile_ahead
from jaxmarl_llm.agents.team import init_params, make_team
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.costs import counts as cx
from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.costs.chips import CHIPS
from jaxmarl_llm.costs.workload import workload_of
from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation import prefix_pool
from jaxmarl_llm.generation.decoding import Completions
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import HostEnv, Message
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.rollout import host, host_keys, launches
from jaxmarl_llm.rollout.array import layout, make_rollout
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.plans import flat, handoff, node_wise, product, single
from jaxmarl_llm.training.optimizers import Optimizer, make_optimizer
from jaxmarl_llm.types import Model, Role, Team
from tests import toys
from tests.distributed import test_sharded_runs as runs

pytestmark = pytest.mark.usefixtures("numpy_tables")

TINY = toys.policy().config
SMALL = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
}


def workload(k=2, seats=1, *, tasks=1, prompt=5, response=3, engine="host", **extra):
    """k turns; seat w is role w, which has a model of its own."""
    speaker = lambda m: cx.RoleLengths(m, ({prompt: 1.0},), {response: 1.0}, response)
    turns = (cx.Turn(tuple({w: 1.0} for w in range(seats))),) * k
    return cx.Workload(
        turns, tuple(map(speaker, range(seats))), (cx.ModelSize(TINY),) * seats, tasks, engine, prompt, seats, **extra
    )


def random_plan(rng, k):
    g, joint = int(rng.integers(1, 4)), str(rng.choice(["aligned", "cross"]))
    sizes = tuple(int(x) for x in rng.integers(1, 5, rng.integers(1, k + 1)))
    kinds = [
        lambda: flat(g),
        lambda: product(g, joint),
        lambda: handoff(g, joint, best=False),
        lambda: node_wise(sizes),
        lambda: node_wise(sizes, "local"),
        lambda: node_wise(g + 1),
        single,
    ]
    return kinds[rng.integers(len(kinds))]()


# ---- host rollouts, with a generator that says what it is asked for and compiles nothing -----------------------------


class Recorded:
    """Stands for launches.generate_launch; notes what would be allocated.

    A completion of role i would have ``natural[i]`` tokens, and ends before at the limit that generation was asked for.
    Real completions are in `test_lengths_of_real_completions`.
    """

    def __init__(self, natural):
        self.natural, self.launches, self.steps = natural, [], 0

    def __call__(
        self,
        policy,
        variables,
        parts,
        *,
        max_new_tokens,
        stop_ids,
        pad_id,
        sampling,
        keep,
        layers,
    ):
        assert keep and layers is None
        (prompt,) = {part.tokens.shape[1] for part in parts}
        self.launches.append((tuple(part.keys for part in parts), prompt, max_new_tokens))
        made, steps = zip(*(self.part(part, max_new_tokens) for part in parts), strict=True)
        self.steps += max(steps)
        return made

    def part(self, part, max_new_tokens):
        """What one part gives, and the tokens of its longest completion."""
        tokens, _, keys, active, prefix, start, limit, _ = part
        assert prefix is None and start is None  # no prompt begins as another
        n, g = keys
        said, limit = np.zeros((n, g), np.int32), np.full((n,), max_new_tokens) if limit is None else limit
        for row in np.flatnonzero(active):
            said[row] = min(self.natural[tokens[row, 0]], limit[row])  # the first token of a prompt names its role
        shape = (n, g, max_new_tokens)
        out = Completions(np.full(shape, 65, np.int32), said, np.zeros(shape, np.float32), said == limit[:, None])
        cache = lambda *slots: ((np.zeros((*slots, 1, 1), np.float32),) * 2,)
        return (out, cache(*tokens.shape), cache(n, g, max(max_new_tokens - 1, 1))), int(said.max())

    def cache_bytes(self, cfg):
        """As `generate` allocates it: shapes from the policy itself."""
        policy, size = make_policy(cfg), 0
        variables = jax.eval_shape(lambda: {"params": policy.init(jax.random.key(0))})
        for parts, p, r in set(self.launches):
            held = 0
            for n, g in parts:
                ints = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
                _, prefix = jax.eval_shape(policy.prefill, variables, ints(n, p), ints(n))
                suffix = jax.eval_shape(lambda x, g=g, r=r: policy.init_suffix(x, g, max(r - 1, 1)), prefix)
                held += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((prefix, suffix)))
                held += 4 * n * g * cfg.vocab_size
            size = max(size, held)
        return size


def host_tree(monkeypatch, plan, work, natural, ends_at=None):
    """The tree of a real host rollout of ``work``, and the recorder. ``natural``: as for `Recorded`."""
    names = [f"r{i}" for i in range(len(work.roles))]
    recorder = Recorded(natural)
    keys = lambda data, role, earlier, *, group: (len(data), group)
    zeros = lambda n, g: (np.zeros((n, g, 2), np.uint32),) * 2
    monkeypatch.setattr(launches, "generate_launch", recorder)
    monkeypatch.setattr(launches, "unstacked", lambda policy, variables: None)  # there are no parameters
    slots = lambda size: ((np.zeros((size, 1, 1)),) * 2,)
    monkeypatch.setattr(prefix_pool, "make", lambda cache, *, size, cut: slots(size))
    monkeypatch.setattr(prefix_pool, "put", lambda pool, *_, cut: pool)
    monkeypatch.setattr(prefix_pool, "grow", lambda pool, *, more, cut: slots(len(pool[0][0]) + more))
    monkeypatch.setattr(launches, "sample_keys", keys)
    monkeypatch.setattr(host_keys, "branch_keys", lambda data, earlier, *, group: zeros(len(data), group))
    monkeypatch.setattr(host, "root_keys", lambda key, tasks: (np.zeros((len(tasks), 2), np.uint32),) * 2)

    seen = itertools.count()

    def observe(turn):
        out = {}
        for seat in work.turns[turn].seats:
            (role,) = (r for r, p in seat.items() if p)
            (size,) = work.roles[role].prompt_at(turn)
            number = divmod(next(seen), 200)  # no two prompts begin alike, or rollouts would not prefill them in full
            out[names[role]] = (Message("raw", "", (role, *number, *(65,) * 80)[:size]),)
        return out

    def step(seed, turn, actions):
        return turn + 1, {r: {"pay": 1.0} for r in actions}, turn + 1 >= len(work.turns) or turn == ends_at

    env = HostEnv(
        "toy", tuple(names), len(work.turns), ("pay",), lambda s, t: 0, observe, step, lambda s: {"r0": {"pay": 1.0}}
    )
    base, own = ("base", "lora") if work.join_adapters else (None, "params")
    models = tuple(Model(f"m{i}", toys.policy(), toys.TOKENIZER, base) for i in range(len(work.models)))
    team = Team(tuple(Role(n, f"m{s.model}", s.max_new_tokens) for n, s in zip(names, work.roles)), models)
    params = {"shared": {"base": {}}, "agents": {m.name: {own: {}} for m in models}}
    with EnvPool(lambda: env, workers=0) as pool:
        settings = host.HostSettings(plan, Sampling(), max_prompt=512)
        played = host.play(team, params, pool, list(range(work.tasks)), jax.random.key(0), settings)
    return played.tree, recorder


def random_work(rng):
    k, roles, models = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    draw = lambda low, high: {int(rng.integers(low, high)): 1.0}
    speakers, natural = [], []
    for _ in range(roles):
        limit = int(rng.integers(1, 7))
        natural.append(int(rng.integers(1, 9)))  # without a limit; often more than the limit
        prompts = tuple(draw(1, 80) for _ in range(rng.integers(1, k + 1)))
        speakers.append(cx.RoleLengths(int(rng.integers(models)), prompts, {min(natural[-1], limit): 1.0}, limit))
    turns = []
    for _ in range(k):
        acting = np.sort(rng.permutation(roles)[: rng.integers(1, min(roles, 2) + 1)])
        turns.append(cx.Turn(tuple({int(r): 1.0} for r in acting)))
    ends_at = int(rng.integers(k)) if rng.random() < 0.3 else None
    if ends_at is not None:
        turns[ends_at] = turns[ends_at]._replace(ends=1.0)
    work = cx.Workload(tuple(turns), tuple(speakers), (cx.ModelSize(TINY),) * models, int(rng.integers(1, 4)))
    return work._replace(join_adapters=rng.random() < 0.4), natural, ends_at


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_predictions_equal_a_real_host_rollout_on_200_random_configurations(monkeypatch, start):
    """Agents that are never called, sizes that differ by turn, groups of one and early ends are all among them."""
    for seed in range(start, start + 20):
        rng = np.random.default_rng([7, seed])
        work, natural, ends_at = random_work(rng)
        plan = random_plan(rng, len(work.turns))
        tree, recorder = host_tree(monkeypatch, plan, work, natural, ends_at)
        said, nodes, steps = cx.counts(plan, work), tree.nodes, tree.steps
        where = f"seed {seed}, {plan.name}, {work}"
        for name in tree.counts.__dataclass_fields__:
            if name != "invalid":
                assert getattr(said, name) == int(getattr(tree.counts, name)), (name, where)
        members = [member for launch in cx.launches(plan, work) for _, member in launch.members]
        assert said.nodes == nodes.valid.sum() == sum(member.nodes for member in members), where
        limits = np.array([role.max_new_tokens for role in work.roles])[nodes.role[steps.node]]
        assert (steps.truncated == (steps.valid & (steps.length == limits))).all(), where
        assert said.decode_steps == pytest.approx(recorder.steps), where
        owner = steps.node[steps.valid]
        assert said.unshared_prompt_tokens == nodes.length[owner].sum(), where
        # What an update goes through, counted on the tables.
        size = np.bincount(owner, minlength=len(nodes.valid))
        for groups in (False, True):
            kept = size > (1 if groups else 0)
            update = costs.update_size(plan, work, groups=groups)
            assert update.sequences == size[kept].sum(), where
            assert update.prompt_tokens == nodes.length[kept & nodes.valid].sum(), where
            mine = steps.valid & kept[steps.node]
            assert update.completion_tokens == steps.length[mine].sum(), where
        # What generation allocates.
        shapes = [(tuple((p.rows, p.group) for p in x.parts), x.prompt, x.response) for x in cx.launches(plan, work)]
        assert sorted(shapes) == sorted(recorder.launches), where
        if seed % 10 == 0:
            held = costs.memory(plan, work)
            assert held.cache + held.logits == recorder.cache_bytes(TINY), where


def test_adapters_are_joined_where_the_workload_says_so():
    """By sharing, critic and form, on one device and on a mesh; not where a block samples for one model."""
    seen = set()
    for sharing, critic, invariant in itertools.product(
        ("separate", "shared", "lora"), ("none", "head", "separate"), (False, True)
    ):
        changed = {"parameter_sharing": sharing, "critic": critic, "batch_invariant": invariant}
        cfg = from_dict(magrpo.Config, {"team": {"backbone": SMALL, **changed}, "env": {"name": "dilemma_text"}})
        work, _ = workload_of(cfg)
        team = make_team(cfg.team, cfg.env.environment().make().roles)
        params = jax.eval_shape(lambda cfg=cfg, team=team: init_params(cfg.team, team, jax.random.key(0)))
        together = launches.launched_together(team, params)
        players = [team.model_index(role) for role in range(len(team.roles))]
        several = len({together[m] for m in players}) < len(set(players))
        assert work.join_adapters == several or len(set(players)) == 1, changed
        assert work.engine == "host" and (work.join_adapters or sharing != "lora" or critic == "head" or invariant)
        with meshes.use_mesh(meshes.make_mesh(meshes.MeshConfig(data=2), jax.devices()[:2])):
            assert launches.launched_together(team, params) == together
        for changes, joined in (({"data": 2}, work.join_adapters), ({"rollout_blocks": 2}, False)):
            on_mesh = dataclasses.replace(cfg, mesh=meshes.MeshConfig(**changes))
            assert workload_of(on_mesh)[0].join_adapters == joined
        seen.add(work.join_adapters)
    assert seen == {False, True}


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
def test_joined_adapters_that_are_compiled_ahead_are_those_of_a_run(shape):
    """Arrays of all adapters, and bytes of a chip, also where a run has a copy of the backbone to play with."""
    cfg = runs.config(magrpo, None)
    cfg = dataclasses.replace(cfg, team=dataclasses.replace(cfg.team, parameter_sharing="lora", lora_rank=2))
    mesh, (work, _) = meshes.make_mesh(meshes.MeshConfig(*shape), jax.devices()), workload_of(cfg)
    compiled = compile_ahead.team_of(cfg, mesh, work.models, 0, "host")
    team = make_team(cfg.team, ("a", "b"))
    params = init_params(cfg.team, team, jax.random.key(0))
    params = {kind: {name: sharding.place(mesh, tree) for name, tree in of.items()} for kind, of in params.items()}
    with meshes.use_mesh(mesh):
        variables, layers = launches.RolloutWeights(params).joined(team.models)
    alike = lambda x: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), x)
    assert compiled.joined and layers is None and alike(variables) == alike(compiled.playing)
    on_chip = lambda tree: sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))
    assert compile_ahead.chip_bytes(compiled.playing) == on_chip(variables)
    assert compiled.playing_bytes == (on_chip(variables) if shape[1] > 1 else 0)
    blocks = dataclasses.replace(cfg, mesh=meshes.MeshConfig(rollout_blocks=2))
    layout = meshes.layout_of(blocks.mesh, mesh, [8, 8])
    assert not compile_ahead.team_of(blocks, mesh, work.models, 0, "host", layout).joined


# ---- array rollouts -------------------------------------------------------------------------------------------------


def noted(policy, log):
    """The policy, and a note of every cache that it is asked for."""

    def init_suffix(prefix, group, response):
        suffix = policy.init_suffix(prefix, group, response)
        log.append((sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((prefix, suffix))), prefix[0][0].shape[0]))
        return suffix

    return policy._replace(init_suffix=init_suffix)


def of_env(env, team, tasks, prompt, batch_models=False):
    """The workload of an array environment in which every seat is always taken and prompts have ``prompt`` tokens."""
    width = jax.eval_shape(jax.vmap(env.observe), jax.eval_shape(jax.vmap(env.reset), *tasks)).tokens.shape[-1]
    speakers = tuple(
        cx.RoleLengths(team.model_index(i), ({prompt: 1.0},), {r.max_new_tokens: 1.0}, r.max_new_tokens)
        for i, r in enumerate(team.roles)
    )
    turns = tuple(
        cx.Turn(tuple({r: 1.0} for r in a) if len(a) == env.seats else (cx.uniform(*a),) * env.seats)
        for a in env.actors
    )
    batch = len(jax.tree.leaves(tasks[1])[0])
    models = (cx.ModelSize(TINY),) * len(team.models)
    return cx.Workload(turns, speakers, models, batch, "array", width, env.seats, batch_models)


@functools.cache
def endless():
    """A tiny policy that never samples a stop id, so that every completion has its full length."""
    return make_policy(dataclasses.replace(TINY, used_vocab=256), remat=False)


def endless_team(roles, max_new_tokens=3, log=None):
    policy = endless() if log is None else noted(endless(), log)
    models = tuple(Model(r, policy, toys.TOKENIZER) for r in roles)
    return Team(tuple(Role(r, r, max_new_tokens) for r in roles), models)


def relay_work(turns, batch, batch_models=False):
    env, team = toys.relay(turns), endless_team(("a", "b"))
    keys = jax.vmap(jax.random.key)(jnp.arange(batch))
    return of_env(env, team, (keys, toys.relay_tasks(batch)), 3, batch_models)


@pytest.mark.parametrize("seed", range(0, 200, 50))
def test_slots_are_the_layout_of_array_rollouts(seed):
    for i in range(seed, seed + 50):
        rng = np.random.default_rng([8, i])
        k, w, batch = (int(x) for x in rng.integers(1, 4, 3))
        plan, env = random_plan(rng, k), toys.relay(k)._replace(seats=w)
        blocks = layout(plan, env, batch)
        work = workload(k, w, tasks=batch, engine="array")
        ours = cx.turn_states(plan, work)
        assert [(b.branch, b.nodes, b.group) for b in blocks] == [(x.branch, x.slots * w, x.group) for x in ours]
        assert cx.counts(plan, work).sequences == sum(b.nodes * b.group for b in blocks)


@pytest.mark.parametrize("plan", [flat(3), node_wise((2, 1, 3)), product(2), handoff(3, best=False)])
def test_array_launches_and_caches_are_what_is_traced(plan):
    """Without compiling: a traced rollout asks its policies for exactly the caches that were predicted."""
    log, batch = [], 2
    env, team = toys.relay(3), endless_team(("a", "b"), log=log)
    params = jax.eval_shape(lambda: toys.params(team))
    tasks = toys.relay_tasks(batch)
    jax.eval_shape(make_rollout(team, env, plan, Sampling()), params, {}, tasks, jax.random.key(0), 0)
    work = relay_work(3, batch)
    expected = [(costs.cache_bytes(x, cx.ModelSize(TINY)), x.rows) for x in cx.launches(plan, work)]
    assert log == expected and cx.counts(plan, work).launches == len(log)


@pytest.mark.parametrize("shared", [False, True])
def test_a_model_decodes_only_the_seats_that_it_may_take(shared):
    """Two seats at once: each of two models has the rows of its own, one model of both roles has them all."""
    from jaxmarl_llm.envs.matrix import array as matrix

    log, config = [], matrix.Config(rounds=2)
    env, plan = matrix.make(config), product(2, "cross")
    apart = endless_team(env.roles, log=log)
    models = apart.models[:1] if shared else apart.models
    team = Team(tuple(Role(r, env.roles[0] if shared else r, 3) for r in env.roles), models)
    params = jax.eval_shape(lambda: toys.params(team))
    tasks = jax.tree.map(lambda x: x[:3], matrix.make_tasks(config))
    tree = jax.eval_shape(make_rollout(team, env, plan, Sampling()), params, {}, tasks, jax.random.key(0), 0)
    rows = [n for _, n in log]
    assert sum(rows) == len(tree.nodes.role) and rows == ([6, 24] if shared else [3, 3, 12, 12])
    keys = jax.vmap(jax.random.key)(jnp.arange(3))
    assert rows == [x.rows for x in cx.launches(plan, of_env(env, team, (keys, tasks), 2))]


def test_counters_of_array_rollouts():
    plan, env, team, batch = node_wise(2), toys.relay(2), endless_team(("a", "b")), 3
    rollout = jax.jit(make_rollout(team, env, plan, Sampling()))
    tree = rollout(toys.params(team), {}, toys.relay_tasks(batch), jax.random.key(1), 0)
    said = cx.counts(plan, relay_work(2, batch))
    for name in ("sequences", "branch_sequences", "prompt_tokens", "completion_tokens", "env_calls", "launches"):
        assert getattr(said, name) == int(getattr(tree.counts, name)), name


def test_a_stacked_rollout_is_the_same_tree_in_fewer_launches():
    """Adapters over one base, two seats at once: tokens as with a launch a model, log-probs to rounding."""
    from jaxmarl_llm.envs.matrix import array as matrix
    from jaxmarl_llm.models.lora import init_lora

    env = matrix.make(matrix.Config(rounds=1))
    models = tuple(Model(r, endless(), toys.TOKENIZER, "base") for r in env.roles)
    team = Team(tuple(Role(r, r, 3) for r in env.roles), models)
    base = endless().init(jax.random.key(0))
    adapters = {}
    for i, r in enumerate(env.roles):
        fresh = init_lora(jax.random.key(i), base, 2)
        adapters[r] = {"lora": jax.tree.map(lambda x, i=i: x + 0.1 * (i + 1), fresh)}
    params = {"shared": {"base": base}, "agents": adapters}
    tasks = jax.tree.map(lambda x: x[:2], matrix.make_tasks(matrix.Config(rounds=1)))
    trees = []
    for batched in (False, True):
        rollout = make_rollout(dataclasses.replace(team, batch_models=batched), env, product(2, "cross"), Sampling())
        trees.append(jax.device_get(jax.jit(rollout)(params, {}, tasks, jax.random.key(1), 0)))
    alone, together = trees
    assert (alone.steps.tokens == together.steps.tokens).all()
    np.testing.assert_allclose(alone.steps.logprobs, together.steps.logprobs, atol=1e-5)
    assert (int(alone.counts.launches), int(together.counts.launches)) == (2, 1)
    assert (alone.steps.tokens[0] != alone.steps.tokens[2]).any()  # the adapters differ
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    for batched, tree in zip((False, True), trees):
        said = cx.counts(product(2, "cross"), of_env(env, team, (keys, tasks), int(tree.nodes.length[0]), batched))
        for name in ("sequences", "prompt_tokens", "completion_tokens", "env_calls", "launches"):
            assert getattr(said, name) == int(getattr(tree.counts, name)), name


def test_models_that_differ_are_not_stacked():
    team = Team((Role("a", "a", 3), Role("b", "b", 3)), (toys.team().models[0], endless_team(("b",)).models[0]))
    with pytest.raises(ConfigError, match=r"batch_models: .*'b' is not as 'a'"):
        make_rollout(dataclasses.replace(team, batch_models=True), toys.relay(2), flat(2), Sampling())


# ---- closed forms, expectations, the model --------------------------------------------------------------------------


def summed(plan, work):
    """What the closed forms say, from the walk: leaves are the joint actions that are not played on."""
    steps = cx.turn_states(plan, work)
    k, w = len(work.turns), len(work.turns[0].seats)
    on = [sum(cx.branch_counts(plan, x.branch, x.actions).values()) if x.branch.turn < k - 1 else 0 for x in steps]
    leaves = sum(x.states * (x.actions - n) for x, n in zip(steps, on))
    c = cx.counts(plan, work)
    return cx.ClosedFormCounts(c.sequences, c.branch_sequences, sum(x.states * w for x in steps), c.env_calls, leaves)


@given(st.integers(1, 8), st.integers(1, 5), st.integers(1, 3))
def test_closed_forms_are_what_the_walk_counts(k, g, w):
    work = workload(k, w)
    assert summed(flat(g), work) == cx.flat_counts(k, g, w)
    assert summed(single(), work) == cx.flat_counts(k, 1, w)
    for joint in ("aligned", "cross"):
        crossed = joint == "cross"
        assert summed(product(g, joint), work) == cx.product_counts(k, g, w, crossed=crossed)
        assert summed(handoff(g, joint, best=False), work) == cx.handoff_counts(k, g, w, crossed=crossed)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 2))
def test_closed_forms_of_product_with_a_width_each_turn(sizes, w):
    work = workload(len(sizes), w)
    for joint in ("aligned", "cross"):
        closed = cx.product_counts(len(sizes), sizes, w, crossed=joint == "cross")
        assert summed(product(tuple(sizes), joint), work) == closed
    assert cx.product_counts(2, (4, 3)) == (4 + 12, 16, 1 + 4, 4 + 12, 12)  # four plans of three programs each
    with pytest.raises(ValueError, match="expected 3 sizes, one for each turn, got 2"):
        cx.product_counts(3, (4, 3))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=10), st.integers(1, 3))
def test_closed_forms_of_node_wise(sizes, w):
    work = workload(len(sizes), w)
    for continuation in ("local", "continue"):
        closed = cx.node_wise_counts(sizes, w, local=continuation == "local")
        assert summed(node_wise(tuple(sizes), continuation), work) == closed
        assert closed.leaves == sum(sizes) - len(sizes) + 1


def test_node_wise_is_a_sum_where_product_is_a_product():
    """E1's table: G^T aligned leaves, G^(N T) crossed ones, N sum G^t sequences; local node-wise needs M G, M = N T."""
    for n, t, g, crossed, aligned, sequences in (
        (2, 2, 4, 256, 16, 40),
        (4, 4, 4, 4**16, 256, 1360),
        (5, 4, 8, 8**20, 4096, 23400),
    ):
        assert cx.product_counts(t, g, n, crossed=True).leaves == crossed
        assert cx.product_counts(t, g, n).leaves == aligned
        assert cx.product_counts(t, g, n).sequences == sequences
        assert cx.node_wise_counts([g] * n * t, local=True).sequences == n * t * g
        assert cx.node_wise_counts([g] * n * t).sequences == n * t * g + (g - 1) * n * t * (n * t - 1) // 2


def test_a_hopeless_plan_is_counted_as_fast_as_a_small_one():
    clock = time.perf_counter()
    work = workload(64, 8)
    assert cx.counts(product(64), work).sequences == 8 * sum(64**t for t in range(1, 65))
    with pytest.raises(ConfigError, match=r"more than 10\^200 states at turn 28; lower its group"):
        costs.memory(product(8, "cross"), work)
    costs.features(product(4), work)
    costs.roofline(CHIPS["h200"], node_wise(64), work, costs.update_size(node_wise(64), work))
    assert time.perf_counter() - clock < 3  # on a busy machine; 0.2 s on a free one


@pytest.mark.parametrize("plan", [flat(2), node_wise(2), product(2)], ids=lambda p: p.name)
def test_expectations_are_those_of_all_outcomes(plan):
    """Lengths of 1 or 4, an episode that ends after a joint action with 0.25: every outcome played by hand."""
    lengths, ends = {1: 0.5, 4: 0.5}, 0.25
    speaker = cx.RoleLengths(0, ({2: 0.5, 6: 0.5},), lengths, 4)
    turn = cx.Turn(({0: 1.0},), ends)
    work = cx.Workload((turn, turn), (speaker,), (cx.ModelSize(TINY),))

    def outcomes(branch, left):
        """(probability, sequences, env calls) of what is played from one state on."""
        if not left:
            return [(1.0, 0, 0)]
        g, out = plan.width(branch), [(1.0, plan.width(branch), plan.width(branch))]
        for j in range(g):
            to = plan.follow(branch, j)
            behind = outcomes(to, left - 1) if to is not None else [(1.0, 0, 0)]
            after = [(ends, 0, 0), *(((1 - ends) * p, s, c) for p, s, c in behind)]
            out = [(p * q, s + t, c + d) for p, s, c in out for q, t, d in after]
        return out

    from jaxmarl_llm.rollout.plans import ROOT

    every = outcomes(ROOT, 2)
    assert sum(p for p, _, _ in every) == pytest.approx(1)
    said = cx.counts(plan, work)
    assert said.sequences == pytest.approx(sum(p * s for p, s, _ in every))
    assert said.env_calls == pytest.approx(sum(p * c for p, _, c in every))
    assert said.completion_tokens == pytest.approx(2.5 * said.sequences)
    assert said.prompt_tokens == pytest.approx(4 * said.nodes)


@given(st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=1, max_size=2), st.integers(1, 3))
def test_the_longest_of_n_is_that_of_all_outcomes(rows, n):
    kinds = [{v + 1: c / sum(row) for v, c in enumerate(row)} for row in rows if sum(row)]
    samples = [(n, x) for x in kinds]
    every = itertools.product(*[list(x.items()) for m, x in samples for _ in range(m)])
    slow = sum(math.prod(p for _, p in o) * max(v for v, _ in o) for o in every if o)
    assert cx.longest(samples) == pytest.approx(slow)


CONFIGS = [
    TINY,
    dataclasses.replace(TINY, family="qwen3", attention_bias=False, qk_norm=True, num_layers=2, dtype="bfloat16"),
    dataclasses.replace(TINY, family="llama", attention_bias=False, tie_embeddings=False, intermediate_size=40),
]


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda c: c.family)
def test_parameters_are_those_of_the_model(cfg):
    from jaxmarl_llm.models.lora import init_lora

    shapes = jax.eval_shape(make_policy(cfg).init, jax.random.key(0))
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    assert costs.own_bytes(cx.ModelSize(cfg)) == size(shapes)
    for targets in (cx.TARGETS, ("q_proj", "down_proj")):
        lora = jax.eval_shape(functools.partial(init_lora, rank=3, targets=targets), jax.random.key(0), shapes)
        assert costs.own_bytes(cx.ModelSize(cfg, 3, targets)) == size(lora)
    adapters = (cx.ModelSize(cfg, 3),) * 4
    assert costs.base_bytes(adapters) == size(shapes) and costs.base_bytes((cx.ModelSize(cfg),)) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_bytes_of_optimizer_states(name, masters, dtype):
    cfg = dataclasses.replace(TINY, dtype=dtype)
    params = jax.eval_shape(make_policy(cfg).init, jax.random.key(0))
    tx = make_optimizer(Optimizer(name=name, float32_master_weights=masters))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(tx.init, params)) if x.ndim)
    assert costs.optimizer_bytes(cx.ModelSize(cfg), name, masters) == size


def products(jaxpr):
    """FLOPs of the matrix products of a traced function: 2 m n k each, bodies of scans as often as they run.

    Of an operation with a form for each platform one is run, and all have as many.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "cond":
            (of_each,) = {products(branch.jaxpr) for branch in eqn.params["branches"]}
            total += of_each
            continue
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[i] for i in contract)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                total += times * products(inner)
    return total


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda c: c.family)
def test_flops_are_those_of_the_traced_model(cfg, rank):
    from jaxmarl_llm.models.lora import init_lora

    policy, n, g, p, r = make_policy(cfg), 2, 3, 7, 5
    ints = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
    variables = {"params": jax.eval_shape(policy.init, jax.random.key(0))}
    if rank:
        variables["lora"] = jax.eval_shape(
            functools.partial(init_lora, rank=rank), jax.random.key(0), variables["params"]
        )
    launch = cx.Launch(0, 0, p, r, (cx.LaunchPart(g, n, n, (cx.LaunchRows(n, n, {p: 1.0}, {r: 1.0}, n),)),))
    said = costs.launch_work(launch, cx.ModelSize(cfg, rank))
    assert said.prefill == products(jax.make_jaxpr(policy.prefill)(variables, ints(n, p), ints(n)).jaxpr)

    def one(variables, tokens, length, prefix, suffix):
        layers = policy.unstack(variables)
        (hidden,), _ = policy.decode(layers, (tokens,), (prefix,), (length,), (suffix,), 0)
        return hidden, layers

    _, prefix = jax.eval_shape(policy.prefill, variables, ints(n, p), ints(n))
    suffix = jax.eval_shape(lambda x: policy.init_suffix(x, g, r - 1), prefix)
    step = products(jax.make_jaxpr(one)(variables, ints(n, g), ints(n), prefix, suffix).jaxpr)
    head = lambda v, h: policy.unembed(policy.unstack(v), h)
    hidden = jax.ShapeDtypeStruct((n, g, cfg.hidden_size), jnp.dtype(cfg.dtype))
    drawn = products(jax.make_jaxpr(head)(variables, hidden).jaxpr)
    assert said.decode == r * drawn + (r - 1) * step
    least = costs.least_work(launch, cx.ModelSize(cfg, rank))
    assert 0.8 < least.prefill / said.prefill < 1 and 0.9 < least.decode / said.decode < 1  # masked pairs alone


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("rank", [0, 3])
def test_flops_of_an_update_are_those_of_its_traced_gradient(rank, remat):
    """A lower bound: the traced attention computes masked pairs too. Without attention nothing else is left out."""
    from jaxmarl_llm.models.lora import init_lora
    from jaxmarl_llm.training.learner import Batch, make_learner
    from jaxmarl_llm.training.losses import Loss

    cfg, g, p, r = dataclasses.replace(TINY, num_layers=6), 4, 32, 100  # more layers than are unrolled
    policy = make_policy(cfg, remat=remat)
    learner = make_learner(policy, Loss(), Optimizer(), Sampling())
    params = jax.eval_shape(policy.init, jax.random.key(0))
    own, shared = {"params": params}, None
    if rank:
        adapter = functools.partial(init_lora, rank=rank)
        own, shared = {"lora": jax.eval_shape(adapter, jax.random.key(0), params)}, params
    spec = jax.ShapeDtypeStruct
    ints, floats = (lambda *s: spec(s, jnp.int32)), spec((1, g, r), jnp.float32)
    batch = Batch(ints(1, p), ints(1), ints(1, g, r), floats, floats, floats)
    work = workload(1, prompt=p, response=r)._replace(models=(cx.ModelSize(cfg, rank),))
    work = work._replace(engine="array")  # every prompt in full
    seen = products(jax.make_jaxpr(learner.accumulate)(own, shared, batch, None).jaxpr)
    least = costs.update_size(flat(g), work, remat=remat).flops
    length = lambda n: (n * n - n) / 2  # masked pairs of n queries and n keys
    masked = length(p) + g * (r - 1 and length(r - 1))
    passes = 4 if remat else 3
    assert 0.6 < least / seen <= 1
    assert 0.96 < (least + passes * costs.attention_flops(cfg) * masked) / seen <= 1


# ---- bad input ------------------------------------------------------------------------------------------------------


def bad(message, **changes):
    return pytest.param(changes, message, id=message)


@pytest.mark.parametrize(
    "changes,message",
    [
        bad("turns: expected at least 1", turns=()),
        bad("response: expected values from 1", roles=(cx.RoleLengths(0, ({4: 1.0},), {0: 1.0}, 3),)),
        bad("response: expected values from 1 to 3, got 4", roles=(cx.RoleLengths(0, ({4: 1.0},), {4: 1.0}, 3),)),
        bad("prompt: probabilities add up to 0.5", roles=(cx.RoleLengths(0, ({4: 0.5},), {1: 1.0}, 3),)),
        bad("seat: expected values from 0 to 0, got 7", turns=(cx.Turn(({7: 1.0},)),)),
        bad("ends: expected a probability", turns=(cx.Turn(({0: 1.0},), 2.0),)),
        bad("tasks: expected at least 1", tasks=0),
        bad("engine: expected array or host", engine="pod"),
        bad("model: expected below 1", roles=(cx.RoleLengths(3, ({4: 1.0},), {1: 1.0}, 3),)),
    ],
)
def test_workloads_that_cannot_be(changes, message):
    with pytest.raises(ConfigError, match=message):
        cx.counts(flat(2), workload()._replace(**changes))


def test_sizes_that_cannot_be():
    with pytest.raises(ConfigError, match="expected at least 1 sample at turn 0, got 0"):
        cx.counts(flat(0), workload())
    assert cx.counts(node_wise(1), workload(3)).branch_sequences == 0  # one sample a node: nothing to compare
    assert costs.update_size(node_wise(1), workload(3), groups=True) == (0, 0, 0, 0, 0)


def test_an_agent_that_is_never_called_costs_its_parameters_alone():
    work = workload(2, 1)
    never = work._replace(roles=work.roles * 2, models=work.models * 2, turns=(cx.Turn(({0: 1.0, 1: 0.0},)),) * 2)
    never = never._replace(roles=(work.roles[0], work.roles[0]._replace(model=1)))
    assert cx.counts(product(2), never) == cx.counts(product(2), work)
    assert costs.memory(product(2), never).own == 2 * costs.memory(product(2), work).own
    # An array program has to be able to call it: the launch is there, and idle.
    array = lambda w: cx.counts(product(2), w._replace(engine="array")).launches
    assert array(never) == 2 * array(work)


def test_an_offloaded_optimizer_is_there_in_updates_alone():
    """One model's at a time; whatever generation takes, it takes beside parameters alone."""
    work = workload(2, 2)
    work = work._replace(models=work.models[:1] * 2)
    held, away = (costs.memory(product(2), work, offload=offload) for offload in (False, True))
    assert held.optimizer == 2 * away.optimizer > 0
    assert held.updating - away.updating == away.optimizer
    assert held.generating - away.generating == held.optimizer
    for memory in (held, away):
        assert memory.peak_lower_bound == max(memory.generating, memory.updating)
    much = 10**12
    peak = lambda memory, **changes: memory._replace(**changes).peak_lower_bound
    assert peak(held, cache=much) - peak(away, cache=much) == held.optimizer
    assert peak(held, gradient=much) - peak(away, gradient=much) == away.optimizer


def test_a_calibration_finds_the_costs_and_says_when_it_cannot():
    rng = np.random.default_rng(0)
    true, parts = np.array([1e-3, 2e-4, 5e-5, 1e-10, 3e-10]), rng.uniform(1, 9, (12, 5)) * [3, 30, 200, 1e8, 1e7]
    seconds = parts @ true
    calm = costs.calibrate(parts, [[s, s * 1.01, s * 0.99] for s in seconds])
    assert calm.stable and np.allclose([calm.predict(p) for p in parts], seconds, rtol=0.02)
    busy = costs.calibrate(parts, [[s, s * 3, s] for s in seconds])
    assert not busy.stable and busy.spread == pytest.approx(2)
    often = costs.calibrate(parts, [[s * 3, s, s * 9, s * 1.1, s * 1.05, s * 2] for s in seconds])
    assert often.stable and often.spread == pytest.approx(0.1) and np.allclose(often.seconds, calm.seconds, rtol=0.05)
    with pytest.raises(ConfigError, match="calibration: expected 5 settings"):
        costs.calibrate(parts[:4], [[1, 1, 1]] * 4)


def test_an_interrupted_sweep_is_resumed(tmp_path, monkeypatch, capsys):
    """Killed while it writes a row: the torn row is measured again, the whole ones are not. Refused ones are rows."""
    import types

    from experiments.studies import sampling_sweeps

    asked = types.SimpleNamespace(
        sweeps=["group"], plans=["product", "flat"], share=[], k=["1"], group=["2", "64"], agents=["2"],
        out=str(tmp_path / "rows.jsonl"), most=5000, repeats=3, rounds=3, doc=str(tmp_path / "doc.md"),
    )  # fmt: skip
    measured = []

    def measure(s, repeats):
        if len(measured) == 4:
            raise KeyboardInterrupt
        measured.append(s)
        plan, work = sampling_sweeps.workload(s)
        said = cx.counts(plan, work)._asdict()
        base = {"predicted": said, "counted": said, "features": costs.features(plan, work), "load": 0.5}
        slow = 2.0 if s.round == 1 else 1.0 + s.round / 100  # a busy minute
        return dataclasses.asdict(s) | base | {"seconds": [said["sequences"] * slow * x for x in (1.0, 1.1, 1.0)]}

    monkeypatch.setattr(sampling_sweeps, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        sampling_sweeps.run(asked, 2**33)
    file = tmp_path / "rows.jsonl"
    file.write_bytes(file.read_bytes()[:-10])
    first, measured[:] = measured[:], []
    monkeypatch.setattr(sampling_sweeps, "measure", lambda s, repeats: measured.clear() or measure(s, repeats))
    sampling_sweeps.run(asked, 2**33)
    rows = sampling_sweeps.read(file)
    expected = [s.key for s in sampling_sweeps.settings(asked)]
    assert [sampling_sweeps.key_of(r) for r in rows] == expected and len(first) == 4
    assert [r["group"] for r in rows if "refused" in r] == [64] * 3  # the product of 64 in 4 turns
    assert [s.round for s in sampling_sweeps.settings(asked)] == sorted(
        s.round for s in sampling_sweeps.settings(asked)
    )
    one = sampling_sweeps.joined([r for r in rows if "seconds" in r])[0]
    assert len(one["seconds"]) == 9 and np.allclose(np.array(one["rounds"]) / min(one["seconds"]), [1.0, 2.0, 1.02])
    before = file.read_bytes()
    sampling_sweeps.run(asked, 2**33)
    assert file.read_bytes() == before
    sampling_sweeps.report(asked)
    text = (tmp_path / "doc.md").read_text()
    assert "equal to the prediction" in text and "1 settings were refused" in text
    assert "(results/doc.png)" in text and (tmp_path / "results" / "doc.png").exists()
    assert re.search(r"8 other settings: rounds spread by 100%, \*\*unstable", text)
    file.write_text("hello\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: not valid JSON"):
        sampling_sweeps.report(asked)


def command(*args):
    import subprocess
    import sys

    got = subprocess.run(
        [sys.executable, "-m", "experiments.studies.complexity", *args], capture_output=True, text=True, check=False
    )
    return got.returncode, got.stdout, got.stderr.strip().splitlines()[-1:]


def test_a_plan_is_told_before_it_runs_and_refused_when_it_does_not_fit():
    tiny = ("plan", "--config=experiments/configs/joyagents_r1.py:tiny")
    code, said, _ = command(*tiny, "--response=2:0.5,6:0.5")
    assert code == 0 and re.search(r"tokens decoded +2,688\n", said)
    code, _, line = command(*tiny, "--memory=0.01")
    assert (
        code == 2 and "needs at least" in line[0] and line[0].endswith("lower --config.batch to 25 (or raise --memory)")
    ), line
    code, _, line = command("plann")
    assert code == 2 and line == ["error: unknown command 'plann'; did you mean 'plan'?"]


@pytest.mark.parametrize("remat", [True, False])
def test_an_updates_bytes_are_about_what_the_compiler_counts(remat):
    """Long rows, of which scores are the most; without remat every layer keeps its own."""
    from jaxmarl_llm.training.learner import Batch, make_learner
    from jaxmarl_llm.training.losses import Loss

    arch, n, g, p, r = Config(512, 64, 128, 8, 8, 2, 8), 2, 8, 256, 64
    policy = make_policy(arch, remat=remat)
    own = {"params": jax.eval_shape(policy.init, jax.random.key(0))}
    ints, reals = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (np.int32, np.float32))
    batch = Batch(ints((n, p)), ints((n,)), ints((n, g, r)), *(reals((n, g, r)) for _ in range(3)))
    gradient = make_learner(policy, Loss(), Optimizer(), Sampling()).accumulate
    held = gradient.lower(own, None, batch, None).compile().memory_analysis().temp_size_in_bytes
    assert 0.5 <= costs.update_bytes(arch, n, p, g, r, remat) / held <= 1.5


def test_an_update_that_is_too_large_names_the_flag():
    from jaxmarl_llm.cli import config_flags
    from jaxmarl_llm.recipes import joyagents_r1
    from jaxmarl_llm.runs import preflight

    cfg = config_flags.load("experiments/configs/joyagents_r1.py:tiny")
    plan, (work, _) = joyagents_r1.make_plan(cfg), workload_of(cfg)
    said = lambda cfg, size: preflight.micro_batch(cfg, plan, work, size, "chip")
    assert said(cfg, 10**10) is None
    line = said(cfg, 50_000_000)
    assert line is not None and "chip has 50,000,000" in line
    fewer = int(re.search(r"lower --config\.micro_tokens to (\d+)", line).group(1))
    assert fewer < cfg.micro_tokens and said(dataclasses.replace(cfg, micro_tokens=fewer), 50_000_000) is None
    assert "team.remat=true" in said(cfg, 1000)
    rematted = dataclasses.replace(cfg, team=dataclasses.replace(cfg.team, remat=True))
    assert "--config.group" in said(rematted, 1000)
    with pytest.raises(
        ConfigError, match=r"chip has 1,000; its parameters alone .* --config\.team\.parameter_sharing$"
    ):
        preflight.check_memory(cfg, plan, work, 1000, "chip")


def test_freed_memory_is_kept_where_an_update_takes_a_third_of_the_machine_at_most(monkeypatch):
    from jaxmarl_llm.cli import config_flags
    from jaxmarl_llm.recipes import joyagents_r1
    from jaxmarl_llm.runs import allocator, preflight

    cfg = config_flags.load("experiments/configs/joyagents_r1.py:tiny")
    plan, (work, _) = joyagents_r1.make_plan(cfg), workload_of(cfg)
    said = preflight.micro_batch(cfg, plan, work, 1000, "chip")
    needs = int(re.search(r"takes about ([\d,]+)", said).group(1).replace(",", ""))
    given_back = []
    monkeypatch.setattr(allocator, "release", lambda: given_back.append(True))
    for size, expected in ((3 * needs + 3, []), (3 * needs - 3, [True])):
        monkeypatch.setattr(preflight, "device_memory", lambda size=size: (size, "this machine"))
        preflight.check(cfg, plan)
        assert given_back == expected
