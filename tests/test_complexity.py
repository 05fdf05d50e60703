"""Predicted = measured: real trees, engines' counters, what generation allocates, and the field's closed forms."""

import dataclasses
import functools
import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm import complexity as cx
from jaxmarl_llm import rollout_host
from jaxmarl_llm.generate import Completions
from jaxmarl_llm.plans import flat, handoff, node_wise, product, single
from jaxmarl_llm.qwen import Config, make_policy
from jaxmarl_llm.rollout import layout, make_rollout
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.text import ConfigError, HostEnv, Message
from jaxmarl_llm.types import Model, Role, Team
from jaxmarl_llm.workers import EnvPool

pytestmark = pytest.mark.usefixtures("numpy_tables")

TINY = toys.policy().config


def workload(k=2, seats=1, *, tasks=1, prompt=5, response=3, engine="host", **extra):
    """k turns; seat w is role w, which has a model of its own."""
    speaker = lambda m: cx.Speaker(m, ({prompt: 1.0},), {response: 1.0}, response)
    turns = (cx.Turn(tuple({w: 1.0} for w in range(seats))),) * k
    return cx.Workload(
        turns, tuple(map(speaker, range(seats))), (cx.Weights(TINY),) * seats, tasks, engine, prompt, seats, **extra
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
    """Stands for rollout_host.generate: every completion of a role has its length; notes what would be allocated."""

    def __init__(self, lengths):
        self.lengths, self.launches = lengths, []

    def __call__(self, policy, variables, tokens, length, keys, active, *, max_new, stop_ids, pad_id, sampling):
        n, g = keys
        self.launches.append((n, g, tokens.shape[1], max_new))
        said = np.zeros((n, g), np.int32)
        for row in np.flatnonzero(active):
            said[row] = self.lengths[tokens[row, 0]]  # the first token of a prompt names its role
        self.steps = getattr(self, "steps", 0) + int(said.max())
        shape = (n, g, max_new)
        return Completions(np.full(shape, 65, np.int32), said, np.zeros(shape, np.float32), said == max_new)

    def cache_bytes(self, cfg):
        """As `generate` allocates it: shapes from the policy itself."""
        policy, size = make_policy(cfg), 0
        variables = jax.eval_shape(lambda: {"params": policy.init(jax.random.key(0))})
        for n, g, p, r in set(self.launches):
            ints = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
            _, prefix = jax.eval_shape(policy.prefill, variables, ints(n, p), ints(n))
            suffix = jax.eval_shape(lambda x, g=g, r=r: policy.init_suffix(x, g, max(r - 1, 1)), prefix)
            held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((prefix, suffix)))
            size = max(size, held + 4 * n * g * cfg.vocab_size)
        return size


def host_tree(monkeypatch, plan, work, ends_at=None):
    """The tree of a real host rollout of ``work`` (certain lengths), the recorder, and the tree's counts."""
    names = [f"r{i}" for i in range(len(work.speakers))]
    recorder = Recorded({i: max(s.response) for i, s in enumerate(work.speakers)})
    keys = lambda data, role, *, group: (len(data), group)
    zeros = lambda n, g: (np.zeros((n, g, 2), np.uint32),) * 2
    monkeypatch.setattr(rollout_host, "generate", recorder)
    monkeypatch.setattr(rollout_host, "_sample_keys", keys)
    monkeypatch.setattr(rollout_host, "_branch_keys", lambda data, *, group: zeros(len(data), group))
    monkeypatch.setattr(rollout_host, "_root_keys", lambda key, tasks: (np.zeros((len(tasks), 2), np.uint32),) * 2)

    def observe(turn):
        out = {}
        for seat in work.turns[turn].seats:
            (role,) = (r for r, p in seat.items() if p)
            (size,) = work.speakers[role].prompt_at(turn)
            out[names[role]] = (Message("raw", "", (role,) + (65,) * (size - 1)),)
        return out

    def step(seed, turn, actions):
        return turn + 1, {r: {"pay": 1.0} for r in actions}, turn + 1 >= len(work.turns) or turn == ends_at

    env = HostEnv(
        "toy", tuple(names), len(work.turns), ("pay",), lambda s, t: 0, observe, step, lambda s: {"r0": {"pay": 1.0}}
    )
    models = tuple(Model(f"m{i}", toys.policy(), toys.TOKENIZER) for i in range(len(work.models)))
    team = Team(tuple(Role(n, f"m{s.model}", s.max_new) for n, s in zip(names, work.speakers)), models)
    params = {"shared": {}, "agents": {m.name: {"params": {}} for m in models}}
    with EnvPool(lambda: env, workers=0) as pool:
        played = rollout_host.play(
            team, params, pool, list(range(work.tasks)), plan, jax.random.key(0), Sampling(), max_prompt=512
        )
    return played.tree, recorder


def random_work(rng):
    k, roles, models = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    draw = lambda low, high: {int(rng.integers(low, high)): 1.0}
    speakers = []
    for _ in range(roles):
        limit = int(rng.integers(1, 7))
        prompts = tuple(draw(1, 80) for _ in range(rng.integers(1, k + 1)))
        speakers.append(cx.Speaker(int(rng.integers(models)), prompts, draw(1, limit + 1), limit))
    turns = []
    for _ in range(k):
        acting = np.sort(rng.permutation(roles)[: rng.integers(1, min(roles, 2) + 1)])
        turns.append(cx.Turn(tuple({int(r): 1.0} for r in acting)))
    ends_at = int(rng.integers(k)) if rng.random() < 0.3 else None
    if ends_at is not None:
        turns[ends_at] = turns[ends_at]._replace(ends=1.0)
    work = cx.Workload(tuple(turns), tuple(speakers), (cx.Weights(TINY),) * models, int(rng.integers(1, 4)))
    return work, ends_at


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_predictions_equal_a_real_host_rollout_on_200_random_configurations(monkeypatch, start):
    """Agents that are never called, sizes that differ by turn, groups of one and early ends are all among them."""
    for seed in range(start, start + 20):
        rng = np.random.default_rng([7, seed])
        work, ends_at = random_work(rng)
        plan = random_plan(rng, len(work.turns))
        tree, recorder = host_tree(monkeypatch, plan, work, ends_at)
        said, nodes, steps = cx.counts(plan, work), tree.nodes, tree.steps
        where = f"seed {seed}, {plan.name}, {work}"
        for name in tree.counts.__dataclass_fields__:
            if name != "invalid":
                assert getattr(said, name) == int(getattr(tree.counts, name)), (name, where)
        assert said.nodes == nodes.valid.sum(), where
        assert said.decode_steps == pytest.approx(recorder.steps), where
        owner = steps.node[steps.valid]
        assert said.unshared_prompt_tokens == nodes.length[owner].sum(), where
        # What an update goes through, counted on the tables.
        size = np.bincount(owner, minlength=len(nodes.valid))
        for groups in (False, True):
            kept = size > (1 if groups else 0)
            update = cx.trained(plan, work, groups=groups)
            assert update.sequences == size[kept].sum(), where
            assert update.prompt_tokens == nodes.length[kept & nodes.valid].sum(), where
            mine = steps.valid & kept[steps.node]
            assert update.completion_tokens == steps.length[mine].sum(), where
        # What generation allocates.
        shapes = [(x.rows, x.group, x.prompt, x.response) for x in cx.launches(plan, work)]
        assert sorted(shapes) == sorted(recorder.launches), where
        if seed % 10 == 0:
            held = cx.memory(plan, work)
            assert held.cache + held.logits == recorder.cache_bytes(TINY), where


# ---- array rollouts -------------------------------------------------------------------------------------------------


def noted(policy, log):
    """The policy, and a note of every cache that it is asked for."""

    def init_suffix(prefix, group, response):
        suffix = policy.init_suffix(prefix, group, response)
        log.append((sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((prefix, suffix))), prefix[0][0].shape[0]))
        return suffix

    return policy._replace(init_suffix=init_suffix)


def of_env(env, team, tasks, prompt, stacked=False):
    """The workload of an array environment in which every seat is always taken and prompts have ``prompt`` tokens."""
    width = jax.eval_shape(jax.vmap(env.observe), jax.eval_shape(jax.vmap(env.reset), *tasks)).tokens.shape[-1]
    speakers = tuple(
        cx.Speaker(team.model_index(i), ({prompt: 1.0},), {r.max_new: 1.0}, r.max_new) for i, r in enumerate(team.roles)
    )
    turns = tuple(
        cx.Turn(tuple({r: 1.0} for r in a) if len(a) == env.seats else (cx.uniform(*a),) * env.seats)
        for a in env.actors
    )
    batch = len(jax.tree.leaves(tasks[1])[0])
    models = (cx.Weights(TINY),) * len(team.models)
    return cx.Workload(turns, speakers, models, batch, "array", width, env.seats, stacked)


@functools.cache
def endless():
    """A tiny policy that never samples a stop id, so that every completion has its full length."""
    return make_policy(dataclasses.replace(TINY, used_vocab=256), remat=False)


def endless_team(roles, max_new=3, log=None):
    policy = endless() if log is None else noted(endless(), log)
    models = tuple(Model(r, policy, toys.TOKENIZER) for r in roles)
    return Team(tuple(Role(r, r, max_new) for r in roles), models)


def relay_work(turns, batch, stacked=False):
    env, team = toys.relay(turns), endless_team(("a", "b"))
    keys = jax.vmap(jax.random.key)(jnp.arange(batch))
    return of_env(env, team, (keys, toys.relay_tasks(batch)), 3, stacked)


@pytest.mark.parametrize("seed", range(0, 200, 50))
def test_slots_are_the_layout_of_array_rollouts(seed):
    for i in range(seed, seed + 50):
        rng = np.random.default_rng([8, i])
        k, w, batch = (int(x) for x in rng.integers(1, 4, 3))
        plan, env = random_plan(rng, k), toys.relay(k)._replace(seats=w)
        blocks = layout(plan, env, batch)
        work = workload(k, w, tasks=batch, engine="array")
        ours = cx.levels(plan, work)
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
    expected = [(cx.cache_bytes(x, TINY), x.rows) for x in cx.launches(plan, work)]
    assert log == expected and cx.counts(plan, work).launches == len(log)


@pytest.mark.parametrize("plan", [node_wise(2), product(2)], ids=lambda p: p.name)
def test_counters_of_array_rollouts(plan):
    env, team, batch = toys.relay(2), endless_team(("a", "b")), 3
    rollout = jax.jit(make_rollout(team, env, plan, Sampling()))
    tree = rollout(toys.params(team), {}, toys.relay_tasks(batch), jax.random.key(1), 0)
    said = cx.counts(plan, relay_work(2, batch))
    for name in ("sequences", "branch_sequences", "prompt_tokens", "completion_tokens", "env_calls", "launches"):
        assert getattr(said, name) == int(getattr(tree.counts, name)), name


def test_a_stacked_rollout_is_the_same_tree_in_fewer_launches():
    """Adapters over one base, two seats at once: tokens as with a launch a model, log-probs to rounding."""
    from jaxmarl_llm.envs import matrix
    from jaxmarl_llm.lora import init_lora

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
    for stacked in (False, True):
        rollout = make_rollout(team, env, product(2, "cross"), Sampling(), stacked=stacked)
        trees.append(jax.device_get(jax.jit(rollout)(params, {}, tasks, jax.random.key(1), 0)))
    alone, together = trees
    assert (alone.steps.tokens == together.steps.tokens).all()
    np.testing.assert_allclose(alone.steps.logprobs, together.steps.logprobs, atol=1e-5)
    assert (int(alone.counts.launches), int(together.counts.launches)) == (2, 1)
    assert (alone.steps.tokens[0] != alone.steps.tokens[2]).any()  # the adapters differ
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    for stacked, tree in zip((False, True), trees):
        said = cx.counts(product(2, "cross"), of_env(env, team, (keys, tasks), int(tree.nodes.length[0]), stacked))
        for name in ("sequences", "prompt_tokens", "completion_tokens", "env_calls", "launches"):
            assert getattr(said, name) == int(getattr(tree.counts, name)), name


def test_models_that_differ_are_not_stacked():
    team = Team((Role("a", "a", 3), Role("b", "b", 3)), (toys.team().models[0], endless_team(("b",)).models[0]))
    with pytest.raises(ConfigError, match="stacked: .*'b' is not as 'a'"):
        make_rollout(team, toys.relay(2), flat(2), Sampling(), stacked=True)
