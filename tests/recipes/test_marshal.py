"""MARSHAL: turn-level returns normalised by role, the code's form, the compiled run's reference and frozen roles.

The code's form against a slow twin: tests/recipes/test_fidelity.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.credit import advantages
from jaxmarl_llm.credit import returns as return_rules
from jaxmarl_llm.credit.assign import Credit, assign
from jaxmarl_llm.credit.rules import Sizes, chain
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import marshal
from jaxmarl_llm.runs import phases
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.types import Counts, Nodes, Retrieval, Steps, Transitions, Tree

pytestmark = pytest.mark.usefixtures("numpy_tables")

TURNS, ROWS = 5, 32
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def table(episodes):
    """A tree of chains. An episode is a list of turns (role, rewards of (first, second), valid)."""
    rows = [(e, t, *turn) for e, episode in enumerate(episodes) for t, turn in enumerate(episode)]
    n, pad = len(rows), ROWS - len(rows)
    column = lambda i, fill=0: np.array([r[i] for r in rows] + [fill] * pad)
    role, turn, valid = column(2), column(1), column(4, False).astype(bool)
    parent = np.array([i - 1 if r[1] else -1 for i, r in enumerate(rows)] + [-1] * pad)
    pay = np.array([r[3] for r in rows] + [(9.0, 9.0)] * pad, np.float32)
    zero, there = np.zeros(ROWS, np.int32), np.arange(ROWS) < n
    nodes = Nodes(
        tokens=np.zeros((ROWS, 1), np.int32),
        length=zero,
        role=role,
        model=zero,
        task=column(0),
        turn=turn,
        parent=parent,
        retrieved=Retrieval.empty(ROWS),
        valid=there,
    )
    one = np.zeros((ROWS, 1), np.int32)
    steps = Steps(
        node=np.arange(ROWS),
        tokens=one,
        length=zero + 1,
        loss_mask=there[:, None],
        logprobs=one.astype(np.float32),
        truncated=~there,
        source=zero,
        version=zero,
        valid=there,
    )
    moves = Transitions(
        steps=np.where(there, np.arange(ROWS), -1)[:, None],
        parent=parent,
        task=column(0),
        turn=turn,
        rewards={"payoff": pay},
        done=there,
        played=there,
        valid=valid,
    )
    return Tree(nodes, steps, moves, Counts(*[np.int32(0)] * 7))


TEXT = marshal.text_rule(marshal.Config())
CODE = marshal.code_rule(marshal.Config())


def credit(episodes, rule=TEXT):
    """Advantages and validity of the turns, in the order of the episodes."""
    got = assign(
        rule,
        table(episodes),
        weights=(("payoff", 1.0),),
        sizes=Sizes(TURNS, max(len(episodes), 1), 2),
    )
    n = sum(map(len, episodes))
    return np.asarray(got.advantage[:n]), np.asarray(got.valid[:n])


def solo(*rewards, role=0):
    """An episode in which one player alone moves."""
    return [(role, (r, -r) if role == 0 else (-r, r), True) for r in rewards]


def twin(episodes):
    """From the paper's text: loops over players, their turns and the turns behind."""
    flat = [(e, t) for e, episode in enumerate(episodes) for t in range(len(episode))]
    out = {place: 0.0 for place in flat}
    ok = {(e, t): all(turn[2] for turn in episodes[e][t:]) for e, t in flat}
    for player in range(2):
        to_go = {
            (e, t): sum(pay[player] for _, pay, _ in episodes[e][t:])
            for e, t in flat
            if ok[e, t] and episodes[e][t][0] == player
        }
        for k, v in to_go.items():
            out[k] = v - np.mean(sorted(to_go.values())) if len(to_go) > 1 else 0.0
    return np.array([out[k] for k in flat]), np.array([ok[k] for k in flat])


def games(rng, whole=True):
    """Games of one to five moves, players in turn or not; rewards are quarters, so that sums are exact."""
    episodes = []
    for _ in range(rng.integers(1, 7)):
        length = rng.integers(1, TURNS + 1)
        who = np.arange(length) % 2 if rng.random() < 0.7 else rng.integers(0, 2, length)
        pay = rng.integers(-8, 9, (length, 2)) / 4 * (rng.random((length, 1)) < 0.5)
        fine = np.ones(length, bool) if whole else rng.random(length) < 0.9
        episodes.append([(int(r), (float(a), float(b)), bool(v)) for r, (a, b), v in zip(who, pay, fine)])
    return episodes


# Golden numbers, twins


def test_golden():
    """Turn rewards [0, 1] and [0, 0, -1] of one player."""
    advantage, valid = credit([solo(0, 1), solo(0, 0, -1)])
    np.testing.assert_allclose(advantage, [1.2, 1.2, -0.8, -0.8, -0.8], atol=1e-6)
    assert valid.all()


def test_golden_of_the_code():
    """Turn rewards have mean 0 and stay; the mean of the distinct returns {1, -1} is 0; then whitened."""
    whole = chain(*CODE.rules[:-1])  # all but the last rule, which whitens
    advantage, _ = credit([solo(0, 1), solo(0, 0, -1)], whole)
    np.testing.assert_allclose(advantage, [1, 1, -1, -1, -1], atol=1e-6)
    white, _ = credit([solo(0, 1), solo(0, 0, -1)], CODE)
    np.testing.assert_allclose(white, np.array([1.2, 1.2, -0.8, -0.8, -0.8]) / np.sqrt(1.2), atol=1e-5)
    # The baseline of turn rewards is their plain mean 1/4: returns 1/2, 3/4, -1/4, -1/4: distinct mean 1/3.
    advantage, _ = credit([solo(0, 1), solo(0), solo(0)], whole)
    np.testing.assert_allclose(advantage, np.array([2, 5, -7, -7]) / 12, atol=1e-6)


@settings(max_examples=60, deadline=None, database=None)
@given(seeds, st.booleans())
def test_the_text_equals_its_twin(rng, whole):
    episodes = games(rng, whole)
    (advantage, valid), (want, ok) = credit(episodes), twin(episodes)
    np.testing.assert_array_equal(valid, ok)
    np.testing.assert_allclose(advantage, want, atol=2e-6)


def test_each_side_is_compared_with_itself():
    """The first player of a game that it mostly wins: its win is worth little, and the other's loss costs little."""
    wins = [[(0, (0, 0), True), (1, (0, 0), True), (0, (s, -s), True)] for s in (1, 1, 1, -1)]
    advantage, _ = credit(wins)
    np.testing.assert_allclose(advantage.reshape(4, 3)[:, 0], [0.5, 0.5, 0.5, -1.5], atol=1e-6)
    np.testing.assert_allclose(advantage.reshape(4, 3)[:, 1], [-0.5, -0.5, -0.5, 1.5], atol=1e-6)
    shared, _ = credit(wins, Credit(group="batch", normalise="none"))
    mean = (2 * 2 - 2) / 12  # eight turns of the first with 3 - 1 wins each two, four of the second
    np.testing.assert_allclose(shared.reshape(4, 3)[0], np.array([1, -1, 1]) - mean, atol=1e-6)


@pytest.mark.parametrize("rule", [TEXT, CODE], ids=["text", "code"])
def test_nothing_to_compare_is_worth_nothing(rule):
    for episodes in (
        [solo(1)],  # one turn alone, and the end at the first turn
        [solo(1), solo(1), solo(1)],  # all equal
        [[(0, (1, -1), True)], [(1, (-1, 1), True)]],  # one turn of each player
    ):
        advantage, valid = credit(episodes, rule)
        assert valid.all() and not advantage.any()
    advantage, valid = credit([[(0, (1.0, -1.0), False)], solo(1), solo(0)], TEXT)
    np.testing.assert_allclose(advantage, [0, 0.5, -0.5])  # what could not be scored is in no mean
    assert not valid[0]


# The parts in the core


def test_own_turns():
    """The loser's turn holds what it lost at the winner's move; what comes before a first turn is dropped."""
    rewards = jnp.array([[0.0, 5.0], [1.0, 0.0], [2.0, -2.0], [4.0, 8.0]])
    acts = jnp.array([[True, False], [False, True], [True, False], [False, False]])
    got = return_rules.own_turns(rewards, acts, jnp.array([-1, 0, 1, 2]), max_turns=4)
    np.testing.assert_allclose(got, [[1, 0], [0, 6], [6, 0], [0, 0]])


@settings(max_examples=60, deadline=None, database=None)
@given(seeds)
def test_the_mean_of_distinct_values(rng):
    values = rng.integers(-3, 4, 24).astype(np.float32)
    group, valid = rng.integers(0, 4, 24), rng.random(24) < 0.8
    got, _ = advantages.group_advantage(
        jnp.asarray(values), jnp.asarray(group), jnp.asarray(valid), num_groups=5, baseline="unique", normalise="none"
    )
    for i in range(24):
        members = values[valid & (group == group[i])]
        want = values[i] - np.mean(sorted(set(members))) if valid[i] and len(members) > 1 else 0.0
        assert got[i] == pytest.approx(want, abs=1e-5)


# Runs

TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def config(**changes):
    base = marshal.Config(
        steps=3,
        batch=8,
        team=TeamConfig(parameter_sharing="shared", backbone=TINY, max_new_tokens=1, remat=False),
        env=EnvConfig("games", {"tasks": 8}),
        optimizer=Optimizer(learning_rate=1e-2),
        sft=SFT(steps=12, batch=16, samples=64, optimizer=Optimizer(learning_rate=3e-2)),
    )
    return dataclasses.replace(base, **changes)


def distance(a, b):
    return float(sum(jnp.sum((x - y) ** 2) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)))


def test_a_step_of_self_play(tmp_path):
    """Twelve supervised steps, then RL in the loop: one model for both roles, the reference kept."""
    cfg = config()
    cfg.check("config")
    recipe = marshal.make(cfg)
    assert len(recipe.team.models) == 1 and recipe.env_runner.env.roles == ("first", "second")
    state = recipe.init(0)
    with Logger(tmp_path, resume_step=None, total_steps=14, tensorboard=False) as logger:
        for _ in range(14):
            state, metrics = recipe.step(state, logger)
    assert metrics["agent/first/grad_norm"] > 0 and metrics["agent/first/kl"] > 0
    assert metrics["reward/payoff"] == pytest.approx(0)  # zero-sum
    assert metrics["logprob_diff"] < 1e-4
    assert distance(state.params["agents"], state.params["reference"]) > 0
    # Games end after one turn (illegal), two or three; every turn that was played is credited.
    tree = recipe.env_runner.play(
        recipe.team, state.params, {}, range(8), marshal.make_plan(cfg), jax.random.key(1), cfg.sampling, None
    ).tree
    sizes = Sizes(recipe.env_runner.env.max_turns, 8, 2)
    got = jax.device_get(assign(marshal.text_rule(cfg), tree, weights=cfg.reward, sizes=sizes))
    np.testing.assert_array_equal(got.valid, tree.steps.valid)
    turns = np.bincount(tree.transitions.task[tree.transitions.played])
    assert len(set(turns)) > 1 and got.advantage.any()
    for role in range(2):
        mine = got.valid & (got.group == role)
        assert got.advantage[mine].sum() == pytest.approx(0, abs=1e-3)


@pytest.mark.slow
def test_a_frozen_role_and_the_reference_in_a_compiled_run():
    """The model of a frozen role is as the supervised stage left it; the other's KL to the reference starts at 0."""
    cfg = config(team=dataclasses.replace(config().team, parameter_sharing="separate"))
    first = dataclasses.replace(marshal.algorithm(cfg), trainable_roles=lambda step: np.array([True, False]))
    program = make_program(phases.with_algorithm(marshal.make(cfg), first))
    state, seen = jax.jit(program.run)(jnp.int32(0))
    params = state.params
    agents, reference = params["agents"], params["reference"]
    assert distance(agents["second"], reference["second"]) == 0
    assert distance(agents["first"], reference["first"]) > 0
    assert abs(seen["kl/first"][0]) < 1e-6 < seen["kl/first"][-1] and not seen["kl/second"].any()


def test_bad_configurations():
    with pytest.raises(ConfigError, match=r"config\.credit\.group: expected role"):
        config(credit=Credit(group="task_role", normalise="none")).check("config")
    with pytest.raises(ConfigError, match="two games in a batch"):
        config(batch=1).check("config")
    with pytest.raises(ConfigError, match=r"config\.form: unknown value 'paper'"):
        config(form="paper").check("config")
