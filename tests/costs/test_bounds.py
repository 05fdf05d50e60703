"""Lower bounds against compiled programs, and counts of completions that a model really sampled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.costs import counts as cx
from jaxmarl_llm.costs import hlo
from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.envs.matrix import array as matrix
from jaxmarl_llm.generation.generate import generate_launch
from jaxmarl_llm.generation.sampling import Sampling, sample_hidden
from jaxmarl_llm.messages import HostEnv, Message
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.rollout import launches
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings, play
from jaxmarl_llm.rollout.plans import flat, node_wise, product
from jaxmarl_llm.types import Model, Role, Team
from tests import toys

TINY = toys.policy().config
EOS = toys.TOKENIZER.EOS
CALLED = ("a", "b", "c")  # one of them acts in a turn


@functools.cache
def policy(stops: float | None):
    """A random model. stops: logit added to the end of a completion; None: no completion ends before its limit."""
    base = make_policy(dataclasses.replace(TINY, used_vocab=256 if stops is None else None), remat=False)
    if stops is None:
        return base
    extra = np.zeros(264, np.float32)
    extra[EOS] = stops
    return base._replace(unembed=lambda variables, hidden: base.unembed(variables, hidden) + extra)


def team_of(roles, limits, models=None, stops=None):
    """Team of random models. models: the model of each role (None: each has its own)."""
    models = models or roles
    own = tuple(Model(name, policy(stops), toys.TOKENIZER) for name in dict.fromkeys(models))
    return Team(tuple(Role(r, m, n) for r, m, n in zip(roles, models, limits, strict=True)), own)


def dispatch(turns, prompts):
    """Host environment: in each turn one of CALLED acts, whichever the task and the turn say.

    prompts: tokens of each role's prompt. No two prompts begin alike.
    """
    seen = iter(range(10**6))

    def observe(state):
        task, turn = state
        role = (task + turn) % len(CALLED)
        number = next(seen)
        ids = (number % 200, number // 200, role, *(65,) * 80)
        return {CALLED[role]: (Message("raw", "", ids[: prompts[role]]),)}

    def step(seed, state, actions):
        return (state[0], state[1] + 1), {r: {"pay": 1.0} for r in actions}, state[1] + 1 == turns

    return HostEnv("dispatch", CALLED, turns, ("pay",), lambda seed, task: (task, 0), observe, step)


def host_tree(plan, team, turns, prompts, tasks=6):
    """Real host rollout of `dispatch`; every role has the same share of the nodes of a turn."""
    params = toys.params(team)
    with EnvPool(lambda: dispatch(turns, prompts), workers=0) as pool:
        return play(team, params, pool, list(range(tasks)), jax.random.key(0), HostSettings(plan, Sampling(), 512)).tree


def host_work(team, turns, prompts, responses, tasks=6):
    """Workload of `host_tree`: who acts is uncertain. responses: length distribution of each role's completions."""
    speakers = tuple(
        cx.RoleLengths(team.model_index(i), ({n: 1.0},), lengths, role.max_new_tokens)
        for i, (role, n, lengths) in enumerate(zip(team.roles, prompts, responses, strict=True))
    )
    turn = cx.Turn((cx.uniform(*range(len(CALLED))),))
    return cx.Workload((turn,) * turns, speakers, (cx.ModelSize(TINY),) * len(team.models), tasks)


def array_work(env, team, tasks, prompt):
    """Workload of an array environment whose seats are always taken, with prompts of ``prompt`` tokens."""
    certain = lambda a: tuple({r: 1.0} for r in a) if len(a) == env.seats else (cx.uniform(*a),) * env.seats
    speakers = tuple(
        cx.RoleLengths(team.model_index(i), ({prompt: 1.0},), {r.max_new_tokens: 1.0}, r.max_new_tokens)
        for i, r in enumerate(team.roles)
    )
    width = jax.eval_shape(lambda t: env.observe(env.reset(jax.random.key(0), t)), tasks).tokens.shape[-1]
    models = (cx.ModelSize(TINY),) * len(team.models)
    turns = tuple(cx.Turn(certain(a)) for a in env.actors)
    return cx.Workload(turns, speakers, models, 1, "array", width, env.seats)


def rollout_flops(plan, work):
    """Lower bound of the FLOPs of a rollout: with cached prompts, and with every prompt in full."""
    done = [costs.least_work(x, work.models[x.model]) for x in cx.launches(plan, work)]
    decode = sum(w.decode for w in done)
    return sum(w.prefill for w in done) + decode, sum(w.uncached_prefill for w in done) + decode


# ---- completions that were sampled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("models", [("m", "m", "m"), ("m", "n", "m"), CALLED], ids="-".join)
@pytest.mark.parametrize("plan", [node_wise((3, 1, 4)), flat(3), product(2)], ids=lambda p: p.name)
def test_lengths_of_real_completions(plan, models):
    """Every completion has the limit of its role, which is predicted, whatever else is in its launch."""
    limits, prompts, turns = (2, 5, 3), (7, 20, 40), 3
    team = team_of(CALLED, limits, models)
    tree = host_tree(plan, team, turns, prompts)
    said = cx.counts(plan, host_work(team, turns, prompts, [{n: 1.0} for n in limits]))
    assert tree.steps.length[tree.steps.valid].tolist() == [
        limits[r] for r in tree.nodes.role[tree.steps.node[tree.steps.valid]]
    ]
    for name in ("sequences", "branch_sequences", "prompt_tokens", "completion_tokens", "env_calls"):
        assert getattr(said, name) == pytest.approx(int(getattr(tree.counts, name))), name
    assert said.launches >= int(tree.counts.launches)  # the largest possible number


def test_lengths_that_end_by_a_stop_id_are_predicted_from_the_lengths_of_a_run():
    """Mean lengths by role, as metrics.jsonl has them, give the tokens of the run."""
    from jaxmarl_llm.costs.workload import lengths_of_run

    limits, prompts, turns, plan = (2, 6, 4), (7, 20, 40), 3, flat(4)
    team = team_of(CALLED, limits, stops=3.0)
    tree = host_tree(plan, team, turns, prompts)
    role = tree.nodes.role[tree.steps.node]
    row = {}
    for i, name in enumerate(CALLED):
        mine = tree.steps.valid & (role == i)
        row[f"agent/{name}/length"] = float(tree.steps.length[mine].mean())
        assert 1 < row[f"agent/{name}/length"] < limits[i]
    found = lengths_of_run([{"step": 1, "sft/nll": 1.0}, {"step": 2, **row, "reward/total": 0.5}], "run")
    responses = [found[name].response for name in CALLED]
    said = cx.counts(plan, host_work(team, turns, prompts, responses))
    assert said.completion_tokens == pytest.approx(int(tree.counts.completion_tokens))
    assert all(said.sequences == x for x in (int(tree.counts.sequences), tree.steps.valid.sum()))


@pytest.mark.parametrize("models", [("m", "m"), matrix.ROLES], ids="-".join)
def test_array_rollouts_of_different_limits_are_counted(models):
    env, limits, plan = matrix.make(matrix.Config(rounds=2)), (2, 4), product(2, "cross")
    team = team_of(matrix.ROLES, limits, models)
    tasks = jax.tree.map(lambda x: x[:1], matrix.make_tasks(matrix.Config(rounds=2)))
    tree = jax.jit(make_rollout(team, env, plan, Sampling()))(toys.params(team), {}, tasks, jax.random.key(0), 0)
    said = cx.counts(plan, array_work(env, team, jax.tree.map(lambda x: x[0], tasks), 1))
    for name in ("sequences", "completion_tokens", "env_calls", "launches"):
        assert getattr(said, name) == int(getattr(tree.counts, name)), name


# ---- every row once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["host", "array"])
@pytest.mark.parametrize("plan", [flat(4), node_wise(3), product(2)], ids=lambda p: p.name)
def test_separate_models_compute_what_one_shared_model_computes(plan, engine):
    """Which of the models plays a node changes no FLOPs; several models only read more weights."""
    limits, prompts = (4, 4, 4), (32, 32, 32)
    same = lambda models: host_work(team_of(CALLED, limits, models), 3, prompts, [{4: 1.0}] * 3)._replace(
        engine=engine, width=32
    )
    shared, apart = same(("m", "m", "m")), same(CALLED)
    assert rollout_flops(plan, shared)[1] == pytest.approx(rollout_flops(plan, apart)[1])
    for work in (shared, apart):
        nodes = sum(part.nodes for x in cx.launches(plan, work) for _, part in x.members)
        assert nodes == pytest.approx(cx.counts(plan, work).nodes)
        least, full = rollout_flops(plan, work)
        assert least == pytest.approx(full) if engine == "array" else least < full
    update = lambda work: costs.update_size(plan, work._replace(engine="array")).flops
    assert update(shared) == pytest.approx(update(apart))


def test_a_host_launch_that_is_shared_by_models_computes_its_expected_rows():
    """Three models that are equally likely: each computes a third, not everything."""
    works = [host_work(team_of(CALLED, (4,) * 3, m), 2, (32,) * 3, [{4: 1.0}] * 3) for m in (("m",) * 3, CALLED)]
    prefill = [costs.features(flat(4), work)[3] for work in works]
    assert prefill[1] == pytest.approx(prefill[0])


def test_expected_steps_are_a_lower_bound_where_it_is_uncertain_who_acts():
    """Two tasks, one of three roles acts: that a role acts at all has a probability of 5/9, the bound is 1/3."""
    work = host_work(team_of(CALLED, (4,) * 3), 1, (8,) * 3, [{4: 1.0}] * 3, tasks=2)
    found = cx.launches(flat(1), work)
    assert [costs.least_steps(x) for x in found] == pytest.approx([4 / 3] * 3)
    certain = work._replace(turns=(cx.Turn(({0: 1.0},)),))
    assert [costs.least_steps(x) for x in cx.launches(flat(1), certain)] == [4]
    both = {1: 0.5, 4: 0.5}
    rows = lambda n, most: cx.LaunchRows(n, most, {8: 1.0}, both, n)
    of = lambda n, most: cx.Launch(0, 0, 8, 4, (cx.LaunchPart(2, 4, 4, (rows(n, most),)),))
    for n, most in ((1.0, 4), (2.5, 4), (4, 4)):  # against the two-point distribution of the number of nodes
        exact = n / most * cx.longest([(2 * most, both)])
        assert costs.least_steps(of(n, most)) <= exact + 1e-12
        assert costs.least_steps(of(n, most)) <= cx.longest([(2 * n, both)]) + 1e-12


# ---- compiled programs ----------------------------------------------------------------------------------------------


def compiled_flops(function, *args, **kwargs):
    """FLOPs of the matrix products of a compiled program, loops as often as they may run."""
    return hlo.count(jax.jit(function).lower(*args, **kwargs).compile().as_text(), 1).flops


def sampler_flops(draws):
    """FLOPs of ``draws`` tokens beside the output head: cumulative sums over the vocabulary are a matrix product."""
    model, lanes = policy(None), 8
    layers = model.unstack({"params": model.init(jax.random.key(0))})
    hidden, u = jnp.zeros((lanes, 1, TINY.hidden_size)), jnp.zeros((lanes, 1))
    once = compiled_flops(lambda h, v: sample_hidden(h, model.unembed.head(layers), v, Sampling()), hidden, u)
    return draws * (once / lanes - costs.head_flops(TINY))


@pytest.mark.parametrize("models", [("m", "m"), matrix.ROLES], ids="-".join)
@pytest.mark.parametrize("plan", [flat(3), product(2, "cross")], ids=lambda p: p.name)
def test_flops_of_a_compiled_array_rollout(plan, models):
    """Every completion has the length of its limit, every prompt is as wide as the table."""
    config = matrix.Config(rounds=2)
    env, team = matrix.make(config), team_of(matrix.ROLES, (4, 4), models)
    tasks = jax.tree.map(lambda x: x[:1], matrix.make_tasks(config))
    args = (toys.params(team), {}, tasks, jax.random.key(0), 0)
    seen = compiled_flops(make_rollout(team, env, plan, Sampling()), *args)
    tree = jax.eval_shape(make_rollout(team, env, plan, Sampling()), *args)
    work = array_work(env, team, jax.tree.map(lambda x: x[0], tasks), tree.nodes.tokens.shape[1])
    least, full = rollout_flops(plan, work)
    assert least == pytest.approx(full)
    assert least <= seen and 0.6 < least / (seen - sampler_flops(4 * len(tree.steps.node))) < 1.02


def test_flops_of_an_array_rollout_whose_models_take_turns_at_one_seat():
    """The array program computes all rows of a turn for each model that may act; the bound counts them once."""
    env, team, plan = toys.relay(2), team_of(("a", "b"), (3, 3)), flat(4)
    both = env._replace(actors=((0, 1), (0, 1)))  # either role may take the seat
    args = (toys.params(team), {}, toys.relay_tasks(1), jax.random.key(0), 0)
    task = jax.tree.map(lambda x: x[0], toys.relay_tasks(1))
    seen = [compiled_flops(make_rollout(team, e, plan, Sampling()), *args) for e in (env, both)]
    least = [rollout_flops(plan, array_work(e, team, task, 4))[0] for e in (env, both)]
    assert least[0] == pytest.approx(least[1]) and seen[1] > 1.3 * seen[0]
    assert least[0] <= seen[0] and 0.6 < least[0] / (seen[0] - sampler_flops(2 * 4 * 3)) < 1.02


@pytest.mark.parametrize("plan", [flat(4), node_wise(3)], ids=lambda p: p.name)
def test_flops_of_the_compiled_launches_of_a_host_rollout(plan, monkeypatch):
    """All launches of a real rollout, each compiled and counted. No prompt begins as another: nothing is cached."""
    ran = []

    def recorded(policy, variables, parts, **fixed):
        ended = {name: fixed[name] for name in ("max_new_tokens", "stop_ids", "pad_id", "sampling")}
        whole = compiled_flops(functools.partial(generate_launch, policy, **ended), variables, parts)
        ran.append((whole, sampler_flops(sum(part.keys.size for part in parts) * fixed["max_new_tokens"])))
        assert all(part.prefix is None for part in parts)
        return generate_launch(policy, variables, parts, **fixed)

    limits, prompts, turns, tasks = (4, 4, 4), (32, 32, 32), 3, 12
    team = team_of(CALLED, limits)
    monkeypatch.setattr(launches, "generate_launch", recorded)
    tree = host_tree(plan, team, turns, prompts, tasks)
    assert len(ran) == int(tree.counts.launches)
    least, full = rollout_flops(plan, host_work(team, turns, prompts, [{4: 1.0}] * 3, tasks))
    whole, sampler = (sum(x) for x in zip(*ran, strict=True))
    assert least < full <= whole and 0.5 < full / (whole - sampler) < 1.02


@pytest.mark.parametrize("remat", [True, False])
@pytest.mark.parametrize("rank", [0, 3])
def test_flops_of_a_compiled_update(rank, remat):
    from jaxmarl_llm.models.lora import init_lora
    from jaxmarl_llm.training.learner import Batch, make_learner
    from jaxmarl_llm.training.losses import Loss
    from jaxmarl_llm.training.optimizers import Optimizer

    arch, (n, g, p, r) = dataclasses.replace(TINY, num_layers=6), (2, 4, 32, 12)
    model = make_policy(arch, remat=remat)
    params = jax.eval_shape(model.init, jax.random.key(0))
    own, shared = {"params": params}, None
    if rank:
        adapter = functools.partial(init_lora, rank=rank)
        own, shared = {"lora": jax.eval_shape(adapter, jax.random.key(0), params)}, params
    ints, reals = (functools.partial(jax.ShapeDtypeStruct, dtype=dtype) for dtype in (jnp.int32, jnp.float32))
    batch = Batch(ints((n, p)), ints((n,)), ints((n, g, r)), *(reals((n, g, r)) for _ in range(3)))
    seen = compiled_flops(make_learner(model, Loss(), Optimizer(), Sampling()).accumulate, own, shared, batch, None)
    role = cx.RoleLengths(0, ({p: 1.0},), {r: 1.0}, r)
    work = cx.Workload((cx.Turn(({0: 1.0},)),), (role,), (cx.ModelSize(arch, rank),), n, "array", p)
    assert 0.7 < costs.update_size(flat(g), work, remat=remat).flops / seen <= 1


def test_an_update_of_a_share_of_the_completions():
    """Roles that learn in turn, and one of a role's steps in each episode."""
    from jaxmarl_llm.cli import config_flags
    from jaxmarl_llm.costs.workload import trained_shares, workload_of
    from jaxmarl_llm.credit.shaping import complete_steps

    def shares(spec, of_algorithm=(), **changes):
        cfg = dataclasses.replace(config_flags.load(spec), **changes)
        module = config_flags.recipe_module(cfg.recipe)
        plan, work = module.make_plan(cfg), workload_of(cfg)[0]
        algorithm = dataclasses.replace(module.algorithm(cfg), **dict(of_algorithm))
        return trained_shares(cfg, algorithm, plan, work), plan, work

    found, plan, work = shares("experiments/configs/rema.py:tiny", switch=2)
    assert sorted(found) == [(0.0, 1.0), (1.0, 0.0)]
    whole = costs.update_size(plan, work).completion_tokens
    parts = [costs.update_size(plan, work, shares=share) for share in found]
    assert sum(part.completion_tokens for part in parts) == whole
    assert costs.update_size(plan, work, shares=(1.0, 1.0)) == costs.update_size(plan, work)
    found, plan, work = shares("experiments/configs/waltzrl.py:tiny")
    conversation, feedback = found[-1]
    trained = costs.update_size(plan, work, shares=found[-1]).sequences
    assert 0 < conversation < 1 and trained == pytest.approx(2 * work.tasks * cx.turn_states(plan, work)[0].group)
    assert feedback > conversation and found[0][0] == 0
    found, _, _ = shares("experiments/configs/waltzrl.py:tiny", {"select_steps": complete_steps})
    assert found[-1] == (1.0, 1.0)  # none may be cut off
    found, _, _ = shares("experiments/configs/advantage_alignment.py:past")
    assert found == [pytest.approx((0.75, 0.75))]
