"""`Role.max_new_tokens` is the limit of the role in every launch, in both engines and with stacked models."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxmarl_llm.envs.matrix import array as matrix
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import Action, HostEnv, Message
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings, play
from jaxmarl_llm.rollout.plans import flat, node_wise, product
from jaxmarl_llm.types import Model, Role, Team, Tree
from tests import toys

LIMITS = (2, 5)
EOS = toys.TOKENIZER.EOS
TASKS = 3


@functools.cache
def policy():
    """A random model that ends about a third of its completions before five tokens."""
    base, extra = toys.policy(), np.zeros(264, np.float32)
    extra[EOS] = 3.0
    return base._replace(unembed=lambda variables, hidden: base.unembed(variables, hidden) + extra)


def team_and_params(how: str, limits=LIMITS):
    """Two roles of limits ``limits``. Every model has the same parameters, so that only launches differ.

    how: shared (one model for both roles), separate or stacked (a model for each role).
    """
    names = ["m", "m"] if how == "shared" else list(matrix.ROLES)
    models = tuple(Model(name, policy(), toys.TOKENIZER) for name in dict.fromkeys(names))
    roles = tuple(Role(role, name, limit) for role, name, limit in zip(matrix.ROLES, names, limits))
    params = {"params": policy().init(jax.random.key(0))}
    return Team(roles, models, batch_models=how == "stacked"), {
        "shared": {},
        "agents": {m.name: params for m in models},
    }


def array_tree(how: str, plan, limits=LIMITS) -> Tree:
    """Rollout of two rounds, in which both roles act at once."""
    config = matrix.Config(rounds=2)
    team, params = team_and_params(how, limits)
    tasks = jax.tree.map(lambda x: x[:TASKS], matrix.make_tasks(config))
    rollout = jax.jit(make_rollout(team, matrix.make(config), plan, Sampling()))
    return jax.device_get(rollout(params, {}, tasks, jax.random.key(1), 0))


def chat(turns: int = 2) -> HostEnv:
    """Both roles act in every turn; a prompt shows all tokens so far, and the role that reads it."""
    roles = matrix.ROLES

    def observe(state):
        heard = [token for turn in state[1] for ids in turn for token in ids]
        return {r: (Message("raw", "", (65 + i, 48 + state[0], *heard)),) for i, r in enumerate(roles)}

    def step(seed, state, actions: dict[str, Action]):
        said = tuple(actions[r].ids for r in roles)
        state = (state[0], (*state[1], said))
        return state, {r: {"accuracy": float(len(a.ids))} for r, a in actions.items()}, len(state[1]) == turns

    return HostEnv("chat", roles, turns, ("accuracy",), lambda seed, task: (task, ()), observe, step)


def host_tree(how: str, plan, limits=LIMITS) -> Tree:
    team, params = team_and_params(how, limits)
    with EnvPool(chat, workers=0) as pool:
        settings = HostSettings(plan, Sampling(), max_prompt=64)
        return play(team, params, pool, list(range(TASKS)), jax.random.key(1), settings).tree


TREES = {"array": array_tree, "host": host_tree}


def assert_same_steps(one: Tree, other: Tree) -> None:
    for name in ("tokens", "length", "truncated", "loss_mask", "node", "valid"):
        np.testing.assert_array_equal(getattr(one.steps, name), getattr(other.steps, name), err_msg=name)
    np.testing.assert_allclose(one.steps.logprobs, other.steps.logprobs, atol=1e-5)


@pytest.mark.parametrize("plan", [flat(4), product(2, "cross"), node_wise(3)], ids=lambda p: p.name)
@pytest.mark.parametrize("engine", TREES)
def test_a_role_ends_at_its_own_limit_in_a_launch_that_it_shares(engine, plan):
    shared, apart = TREES[engine]("shared", plan), TREES[engine]("separate", plan)
    assert int(shared.counts.launches) < int(apart.counts.launches)
    assert_same_steps(shared, apart)
    steps, limit = shared.steps, np.array(LIMITS)[shared.nodes.role[shared.steps.node]]
    length, valid = steps.length, steps.valid
    assert steps.tokens.shape[1] == max(LIMITS)
    assert (length[valid] <= limit[valid]).all()
    last = np.take_along_axis(steps.tokens, np.maximum(length - 1, 0)[:, None], 1)[:, 0]
    np.testing.assert_array_equal(steps.truncated[valid], (last != EOS)[valid])
    assert (length[steps.truncated & valid] == limit[steps.truncated & valid]).all()
    behind = np.arange(max(LIMITS)) >= length[:, None]
    assert (steps.logprobs[behind] == 0).all() and (steps.loss_mask == ~behind).all()
    assert (steps.logprobs[~behind & valid[:, None]] < 0).all()
    assert int(shared.counts.completion_tokens) == length.sum()
    for own in LIMITS:  # both ways to end occur at both limits
        assert steps.truncated[valid & (limit == own)].any() and not steps.truncated[valid & (limit == own)].all()


@pytest.mark.parametrize("limits", [(2, 5), (5, 2)])
def test_stacked_models_keep_the_limits_of_their_roles(limits):
    assert_same_steps(array_tree("stacked", flat(4), limits), array_tree("separate", flat(4), limits))


@pytest.mark.parametrize("engine", TREES)
@pytest.mark.parametrize("how", ["shared", "separate"])
def test_tokens_before_the_limit_are_those_of_a_larger_one(engine, how):
    """The first turn has the same prompts: a role of limit 2 samples the first two tokens of a role of limit 5."""
    plan = flat(4)
    short, long = TREES[engine](how, plan), TREES[engine](how, plan, (5, 5))
    first = np.flatnonzero((short.nodes.turn[short.steps.node] == 0) & short.steps.valid)
    limit = np.array(LIMITS)[short.nodes.role[short.steps.node[first]]]
    np.testing.assert_array_equal(short.steps.length[first], np.minimum(long.steps.length[first], limit))
    for i, n in zip(first, short.steps.length[first], strict=True):
        np.testing.assert_array_equal(short.steps.tokens[i, :n], long.steps.tokens[i, :n])
        np.testing.assert_allclose(short.steps.logprobs[i, :n], long.steps.logprobs[i, :n], atol=1e-5)


def test_roles_of_equal_limits_are_launched_without_limits_by_row(monkeypatch):
    """The program is then the same as that of one role, to the bit."""
    from jaxmarl_llm.generation import generate
    from jaxmarl_llm.rollout import array_turn, launches

    seen = []

    def of_arrays(*args, limit, **more):
        seen.append(limit)
        return generate.sample_completions(*args, limit=limit, **more)

    def of_host(policy, variables, parts, **more):
        seen.extend(part.limit for part in parts)
        return generate.generate_launch(policy, variables, parts, **more)

    monkeypatch.setattr(array_turn, "sample_completions", of_arrays)
    monkeypatch.setattr(launches, "generate_launch", of_host)
    array_tree("shared", flat(2), (3, 3))
    host_tree("shared", flat(2), (3, 3))
    assert len(seen) >= 3 and all(limit is None for limit in seen)
    seen.clear()
    host_tree("shared", flat(2))
    assert seen and all(sorted(set(limit.tolist())) == [2, 5] for limit in seen)


def test_a_role_keeps_its_limit_where_another_model_plays_it():
    """An opponent model in the seat of a role has the role's limit, not that of its own role."""
    config, plan = matrix.Config(rounds=1), flat(4)
    team, params = team_and_params("separate")
    first, second = team.roles
    crossed = dataclasses.replace(first, opponent_models=(second.model,))
    team = dataclasses.replace(team, roles=(crossed, second))
    rollout = jax.jit(make_rollout(team, matrix.make(config), plan, Sampling()))
    tasks = jax.tree.map(lambda x: x[:TASKS], matrix.make_tasks(config))
    assignment = np.zeros((TASKS, 2), np.int32)
    own = rollout(params, {}, tasks, jax.random.key(1), 0, assignment)
    assignment[:, 0] = 1
    other = rollout(params, {}, tasks, jax.random.key(1), 0, assignment)
    assert (np.asarray(other.nodes.model) == 1).all()
    assert_same_steps(own, other)  # the parameters are equal
