"""Dr. MAS: golden numbers on trees of chains, the slow twin on ragged ones, the lemma, the control, a step in whole."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.credit.assign import Credit, assign
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import dr_mas
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.types import Counts, Nodes, Retrieval, Steps, Transitions, Tree
from tests import reference

SOLVER, VERIFIER, TURNS, A = 0, 1, 6, 2
NORM = dr_mas.Config().credit


def tree_of(episodes):
    """Chains (task, roles in order, team reward at the end, penalties by turn) as a tree with a row of padding."""
    task, role, turn, parent, reward = [], [], [], [], []
    for where, acts, final, penalties in episodes:
        for t, who in enumerate(acts):
            parent.append(len(task) - 1 if t else -1)
            pay = np.full(A, final if t == len(acts) - 1 else 0.0)
            pay[who] -= penalties[t]
            task.append(where), role.append(who), turn.append(t), reward.append(pay)
    c = len(task) + 1
    pad = lambda x, fill: np.array([*x, fill])
    row, valid = np.arange(c), np.arange(c) < c - 1
    nodes = Nodes(
        tokens=np.zeros((c, 1), np.int32),
        length=np.ones(c, np.int32),
        role=pad(role, 0),
        model=pad(role, 0),
        task=pad(task, 0),
        turn=pad(turn, 0),
        parent=pad(parent, -1),
        retrieved=Retrieval.empty(c),
        valid=valid,
    )
    one = np.ones((c, 1))
    steps = Steps(
        node=row,
        tokens=np.zeros((c, 1), np.int32),
        length=np.ones(c, np.int32),
        loss_mask=one > 0,
        logprobs=0 * one,
        truncated=~valid & False,
        source=0 * row,
        version=0 * row,
        valid=valid,
    )
    moves = Transitions(
        steps=np.where(valid, row, -1)[:, None],
        parent=nodes.parent,
        task=nodes.task,
        turn=nodes.turn,
        rewards={"accuracy": np.array([*reward, np.zeros(A)], np.float32)},
        done=valid,
        played=valid,
        valid=valid,
    )
    return Tree(nodes, steps, moves, Counts(*[np.int32(0)] * 7))


def credited(settings, tree, tasks=1):
    rule = dr_mas.algorithm(dr_mas.Config(credit=settings)).credit
    got = assign(rule, tree, weights=(("accuracy", 1.0),), sizes=Sizes(TURNS, tasks, A))
    return jax.device_get(got)


def golden_tree():
    """R = [0, 1, 0, 1]; the solver acts [2, 1, 2, 1] times, the verifier [1, 1, 1, 0]."""
    S, V = SOLVER, VERIFIER
    acts = [(S, V, S), (S, V), (S, V, S), (S,)]
    return tree_of([(0, a, r, [0.0] * len(a)) for a, r in zip(acts, [0, 1, 0, 1])])


def of(tree, role):
    return np.flatnonzero(tree.steps.valid & (tree.nodes.role[tree.steps.node] == role))


def test_golden_agent_wise():
    tree = golden_tree()
    got = credited(NORM, tree)
    np.testing.assert_array_equal(got.returns[of(tree, SOLVER)], [0, 0, 1, 0, 0, 1])
    low, high = -0.6454960, 1.2909918  # (0 - 1/3) / (sqrt(4/15) + 1e-6), (1 - 1/3) / (...)
    np.testing.assert_allclose(got.advantage[of(tree, SOLVER)], [low, low, high, low, low, high], atol=1e-5)
    np.testing.assert_allclose(got.advantage[of(tree, VERIFIER)], [-0.5773493, 1.1546985, -0.5773493], atol=1e-5)
    std = np.sqrt(4 / 15) + 1e-6
    np.testing.assert_allclose(got.advantage[of(tree, SOLVER)][[0, 2]], [-1 / 3 / std, 2 / 3 / std], atol=1e-6)


def test_golden_over_trajectories():
    """Statistics of the prompt's four trajectories, copied to their steps: -+.8660."""
    tree = golden_tree()
    rule = dataclasses.replace(NORM, group="task", stats_over="episodes")
    got = credited(rule, tree)
    size = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    np.testing.assert_allclose(got.advantage[:-1], np.where(got.returns[:-1] > 0, size, -size), atol=1e-6)
    assert size == pytest.approx(0.8660, abs=1e-4) and got.stats.count[0] == 4
    agent = credited(dataclasses.replace(NORM, stats_over="episodes"), tree)
    assert agent.stats.count.tolist() == [4, 3]
    np.testing.assert_allclose(agent.advantage[of(tree, SOLVER)][[0, 2]], [-size, size], atol=1e-6)


def test_golden_lemma():
    """R = [0, 0, 0, 1], an agent that is active in the last two trajectories: (1/4 + 1/16) / (3/16) = 5/3."""
    returns = jnp.array([0.0, 0.0, 0.0, 1.0])
    factor = dr_mas.inflation(returns, jnp.array([False, False, True, True]))
    assert factor == pytest.approx(1.6667, abs=1e-4) and factor == pytest.approx(5 / 3, abs=1e-6)


@settings(max_examples=30, deadline=None, database=None)
@given(rng=st.integers(0, 2**32 - 1).map(np.random.default_rng))
def test_the_lemma_by_enumeration(rng):
    """E|A z|^2 with global statistics is E|z|^2 times the factor when z is independent of R; 1 agent by agent."""
    returns, mine = rng.normal(size=12), rng.random(12) < 0.5
    mine[0] = True
    z = rng.normal(size=(5, 3))  # scores; every pair (return, score) is equally likely
    a = (returns - returns.mean()) / returns.std()
    own = (returns[mine] - returns[mine].mean()) / max(returns[mine].std(), 1e-12)
    square = lambda x: np.mean([(x_i * z_i) @ (x_i * z_i) for x_i in x for z_i in z])
    base = np.mean([z_i @ z_i for z_i in z])
    factor = dr_mas.inflation(jnp.asarray(returns, jnp.float32), jnp.asarray(mine))
    assert square(a[mine]) / base == pytest.approx(float(factor), rel=1e-4)
    if mine.sum() > 1:
        assert square(own) / base == pytest.approx(1.0, rel=1e-6)


roles_played = st.lists(st.integers(0, 1), min_size=1, max_size=TURNS)
episode = st.tuples(st.integers(0, 2), roles_played, st.sampled_from([0.0, 1.0, 0.5]), st.integers(0, 2**TURNS - 1))


@pytest.mark.parametrize("by", dr_mas.GROUPS)
@pytest.mark.parametrize("over", ["steps", "episodes"])
@settings(max_examples=25, deadline=None, database=None)
@given(episodes=st.lists(episode, min_size=8, max_size=8))
def test_ragged_teams_equal_the_slow_twin(by, over, episodes):
    """By lists: every agent's returns with its penalties to go, its statistics, groups of one, equal rewards."""
    played = [(t, a, r, [0.1 * (bits >> i & 1) for i in range(len(a))]) for t, a, r, bits in episodes]
    rule = dataclasses.replace(NORM, group=by, stats_over=over)
    tree = tree_of(played)
    rows = 1 + 8 * TURNS - len(tree.steps.node)
    extra = tree_of([*played, (0, [0] * rows, 0.0, [0.0] * rows)]) if rows else tree  # one shape, one program
    keep = np.arange(len(extra.steps.node)) < len(tree.steps.node) - 1
    tree = extra.replace(
        steps=extra.steps.replace(valid=extra.steps.valid & keep),
        transitions=extra.transitions.replace(valid=extra.transitions.valid & keep),
    )
    got = credited(rule, tree, tasks=3)
    value, group, counted = [], [], []
    for task, acts, final, penalties in played:
        met = set()
        for t, who in enumerate(acts):
            value.append(final - sum(p for p, w in zip(penalties[t:], acts[t:]) if w == who))
            group.append(2 * task + who if by == "task_role" else task)
            counted.append(over == "steps" or group[-1] not in met)
            met.add(group[-1])
    value, group = np.array(value, np.float32), np.array(group)
    n = len(value)
    want, stats = reference.group_advantage(
        value, group, np.ones(n, bool), 6, "mean", "std", 1, singleton="raw", counted=counted
    )
    assert got.valid[:n].all() and not got.valid[n:].any()
    np.testing.assert_allclose(got.returns[:n], value, atol=1e-6)
    np.testing.assert_allclose(got.advantage[:n], want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(got.stats.count, stats[2][: len(got.stats.count)])


def test_groups_of_one_equal_rewards_and_episodes_of_one_turn():
    """An agent that acted once keeps its value; equal rewards give exactly 0; the verifier that never acts, nothing."""
    alone = tree_of([(0, (SOLVER, VERIFIER), 1.0, (0, 0)), (0, (SOLVER,), 0.0, (0,))])
    got = credited(NORM, alone)
    assert got.advantage[of(alone, VERIFIER)].tolist() == [1.0]
    assert got.advantage[of(alone, SOLVER)] == pytest.approx([0.70710578, -0.70710578], abs=2e-6)
    equal = tree_of([(0, (SOLVER,), 1.0, (0,))] * 4)
    got = credited(NORM, equal)
    assert got.advantage.tolist() == [0.0] * 5 and got.stats.count.tolist() == [4, 0]


TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def config(**changes):
    base = dr_mas.Config(
        steps=2,
        batch=4,
        team=TeamConfig(backbone=TINY, max_new_tokens=2, remat=False),
        env=EnvConfig("chain", {"protocol": "verify"}, eval_tasks=4),
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize("by", dr_mas.GROUPS)
def test_a_step_of_the_recipe_is_normalised_as_it_says(by, tmp_path):
    """A whole step on random models: every malformed action is penalised, so returns differ; advantages by the twin."""
    cfg = config(credit=dataclasses.replace(NORM, group=by))
    cfg.check("config")
    recipe = dr_mas.make(cfg)
    with Logger(tmp_path, resume_step=None, total_steps=1, tensorboard=False) as logger:
        _, metrics = recipe.step(recipe.init(0), logger)
    lines = [line for lines in recipe.episodes() for line in lines]
    assert {line["role"] for line in lines} == {"solver", "verifier"}
    for role in ("solver", "verifier"):
        assert metrics[f"agent/{role}/grad_norm"] >= 0 and metrics[f"agent/{role}/updated"] == 1
    if by == "task_role":  # both attempts of the solver are alike malformed, or not at all
        assert {"agent/solver/variance", "agent/verifier/variance"} <= set(metrics)


BAD = [
    ({"group": 1}, "config.group: expected >= 2"),
    ({"credit": Credit(group="node")}, "config.credit.group: unknown value 'node'"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message):
        config(**change).check("config")


def test_statistics_are_over_steps_or_episodes():
    with pytest.raises(ConfigError, match=r"config\.credit\.stats_over: unknown value"):
        Credit(stats_over="turns").check("config.credit")
