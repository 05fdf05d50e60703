"""Advantage Alignment: golden numbers, the coupling against a slow twin, past policies, the tabular game."""

import dataclasses
import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.claims import advantage_alignment as claims
from experiments.configs.advantage_alignment import VARIANTS, get_config, tiny
from jaxmarl_llm.agents import snapshots
from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.agents.snapshots import Past
from jaxmarl_llm.agents.team import TeamConfig, make_team, with_past
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.credit import advantages
from jaxmarl_llm.credit import returns as return_rules
from jaxmarl_llm.credit.assign import assign
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.envs.matrix import array as matrix
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.recipes import advantage_alignment as recipe_of
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings, play
from jaxmarl_llm.rollout.plans import flat
from jaxmarl_llm.runs import loop
from jaxmarl_llm.runs.phases import make_recipe
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.types import FROZEN, POLICY
from tests import reference, toys

pytestmark = pytest.mark.usefixtures("numpy_tables")

KEY = jax.random.key(3)
PRISONERS = matrix.Config(game="prisoners", rewards="individual", rounds=2)
quick = settings(max_examples=40, deadline=None, database=None)
seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)


align = jax.jit(advantages.advantage_alignment, static_argnames=("max_turns", "beta", "discount", "fade"))
joint_values = jax.jit(advantages.joint_values, static_argnames=("num_roles",))
step_returns = jax.jit(return_rules.step_returns, static_argnames=("num_steps", "reduce"))


def twin(advantage, parent, turn, valid, beta, discount, fade):
    """By walking back from each transition to its root."""
    advantage = np.asarray(advantage, np.float64)
    out = np.zeros_like(advantage)
    for j in range(len(parent)):
        if not valid[j]:
            continue
        for i in range(advantage.shape[1]):
            sum_, k, away = 0.0, parent[j], 1
            while k >= 0:
                sum_ += discount**away * advantage[k, i] if valid[k] else 0.0
                k, away = parent[k], away + 1
            others = sum(advantage[j, o] for o in range(advantage.shape[1]) if o != i)
            out[j, i] = (advantage[j, i] + beta * sum_ * others) * (discount ** turn[j] if fade else 1.0)
    return out


# The rule


def credited(payoff, **changes):
    """Advantage [T n 2] of matches of one task, rewards [T n 2]."""
    rule = recipe_of.algorithm(recipe_of.Config(**changes)).credit
    tree = claims.tree_of(jnp.asarray(payoff, jnp.float32))
    got = assign(rule, tree, weights=(("payoff", 1.0),), sizes=Sizes(len(payoff), 1, 2))
    return np.asarray(got.advantage).reshape(np.shape(payoff))


FIRST, SECOND = [[3, 3, 1], [5, 1, 1]], [[3, 3, 1], [0, 1, 1]]
PAIR = np.stack([np.transpose(FIRST), np.transpose(SECOND)], -1)  # [T n 2]


def test_golden_credit():
    alone, both = credited(PAIR, beta=0.0), credited(PAIR)
    a1, a2 = np.array([-0.08, 2, 0]), np.array([4.92, 2, 0])
    np.testing.assert_allclose(alone, np.stack([np.stack([a1, -a1], 1), np.stack([a2, -a2], 1)], -1), atol=1e-6)
    np.testing.assert_allclose(both[:, 0, 0], [-0.08, 1.6928, 0], atol=1e-6)
    np.testing.assert_allclose(both[:, 1, 0], [0.08, -2.3072, 0], atol=1e-6)
    other = 2 * 0.96 * 4.92 * 2  # of the second player: its past times the first one's advantage
    np.testing.assert_allclose(both[1, :, 1], [2 + other, -2 + other], rtol=1e-6)
    shipped = credited(PAIR, extra_discount=True)  # one more discount on the product alone
    np.testing.assert_allclose(shipped, alone + 0.96 * (both - alone), atol=1e-5)
    assert shipped[1, 0, 0] == pytest.approx(1.7051, abs=5e-5)
    faded = credited(PAIR, fade=True)
    np.testing.assert_allclose(faded, both * 0.96 ** np.arange(3)[:, None, None], rtol=1e-5)


@quick
@given(
    rng=seeds,
    roles=st.integers(1, 4),
    beta=st.sampled_from([0.0, 2.0, -0.7]),
    discount=st.sampled_from([0.0, 0.96, 1.0]),
    fade=st.booleans(),
)
def test_coupling_equals_the_slow_twin(rng, roles, beta, discount, fade):
    advantage, parent, turn, valid = toys.random_forest(rng, turns=5, roles=roles)
    got = align(advantage, parent, turn, valid, max_turns=5, beta=beta, discount=discount, fade=fade)
    np.testing.assert_allclose(got, twin(advantage, parent, turn, valid, beta, discount, fade), atol=1e-4, rtol=1e-5)


def test_laws_of_the_coupling():
    """Without a past, without another player, without beta, without differences: the plain advantage."""
    rng = np.random.default_rng(0)
    advantage, parent, turn, valid = toys.random_forest(rng, turns=5, roles=3)
    plain = np.where(valid[:, None], advantage, 0.0)
    run = partial(align, max_turns=5, discount=0.9)
    np.testing.assert_array_equal(run(advantage, parent, turn, valid, beta=0.0), plain)
    np.testing.assert_array_equal(run(advantage[:, :1], parent, turn, valid, beta=2.0), plain[:, :1])
    flat_ = run(advantage, np.full_like(parent, -1), np.zeros_like(turn), valid, beta=2.0)  # ends at its first turn
    np.testing.assert_array_equal(flat_, plain)
    assert not credited(np.full((4, 8, 2), 3.0)).any()  # all rewards equal
    assert not credited(PAIR[:, :1]).any()  # a group of one
    np.testing.assert_allclose(credited(PAIR[:1]), credited(PAIR[:1], beta=0.0))


@quick
@given(rng=seeds)
def test_joint_values_are_taken_back_by_step_returns(rng):
    moves, seats, roles = 9, 2, 3
    steps = rng.permutation(moves * seats).reshape(moves, seats).astype(np.int32)
    role = np.zeros(moves * seats, np.int32)
    for pair in steps:  # two different roles a transition
        role[pair] = rng.permutation(roles)[:seats]
    steps[rng.random(steps.shape) < 0.2] = -1
    valid, values = rng.random(moves * seats) < 0.8, rng.normal(size=moves * seats).astype(np.float32)
    got = np.asarray(joint_values(steps, role, values, valid, num_roles=roles))
    want = np.zeros((moves, roles), np.float32)
    for j, pair in enumerate(steps):
        for c in pair[pair >= 0]:
            want[j, role[c]] = values[c] if valid[c] else 0.0
    np.testing.assert_array_equal(got, want)
    back, has = step_returns(steps, role, got, np.ones(moves, bool), num_steps=len(role))
    np.testing.assert_array_equal(back, np.where(has & valid, values, 0.0))


@quick
@given(rng=seeds, beta=st.sampled_from([0.5, 2.0]))
def test_credit_of_ragged_matches_equals_the_slow_twin(rng, beta):
    """Matches that end early or whose rewards are lost: returns, leave-one-out, coupling, all by loops."""
    turns, n = 4, 6
    payoff = rng.normal(size=(turns, n, 2)).astype(np.float32)
    tree = jax.device_get(claims.tree_of(jnp.asarray(payoff)))
    moves = tree.transitions
    ends = rng.integers(1, turns + 1, n)
    played = moves.turn < ends[np.arange(turns * n) % n]
    valid = played & (rng.random(turns * n) < 0.9)
    steps = np.where(played[:, None], moves.steps, -1)
    parent = np.where(played, moves.parent, -1)
    spoken = np.repeat(played, 2)
    tree = tree.replace(
        transitions=moves.replace(valid=valid, played=played, steps=steps, parent=parent),
        steps=tree.steps.replace(valid=spoken),
    )
    rule = recipe_of.algorithm(recipe_of.Config(beta=beta)).credit
    got = assign(rule, tree, weights=(("payoff", 1.0),), sizes=Sizes(turns, 1, 2))
    returns, ok = reference.returns_to_go(payoff.reshape(-1, 2), parent, valid, 0.96)
    role, turn = tree.nodes.role, tree.nodes.turn
    value, has = reference.step_returns(steps, role, returns, ok, "mean")
    plain, _ = reference.group_advantage(value, role * turns + turn, has, 2 * turns, "loo", "none")
    want = twin(plain.reshape(-1, 2), parent, moves.turn, ok, beta, 0.96, False).reshape(-1)
    np.testing.assert_array_equal(got.valid, has)
    np.testing.assert_allclose(got.advantage, np.where(has, want, 0.0), atol=1e-4)


# Past policies


def agents(value):
    return {"a": {"params": {"w": jnp.full(2, float(value))}}, "b": {"params": {"w": jnp.full(3, -float(value))}}}


def test_the_ring_keeps_the_newest_and_starts_with_the_current_policy():
    ring = snapshots.init(agents(0), 3)
    got = snapshots.draw(ring, agents(7), KEY)
    assert set(got) == {"a", "b", "a-past", "b-past"} and got["a-past"]["params"]["w"][0] == 7
    for step in range(1, 6):
        ring = snapshots.push(ring, agents(step))
        seen = set()
        for k in range(40):
            got = snapshots.draw(ring, agents(9), jax.random.key(k))
            assert got["a"]["params"]["w"][0] == 9
            assert got["a-past"]["params"]["w"][0] == -got["b-past"]["params"]["w"][0]  # of one moment
            seen.add(int(got["a-past"]["params"]["w"][0]))
        assert seen == set(range(max(1, step - 2), step + 1))


def test_at_most_one_seat_of_a_task_is_cast_anew():
    for share in (0.0, 0.5, 1.0):
        got = np.asarray(snapshots.assignment(KEY, 2000, 3, share))
        assert got.max(initial=0) <= 1 and got.sum(1).max(initial=0) <= 1
        assert abs(got.sum(1).mean() - share) < 0.05
        assert not share or np.ptp(got.mean(0)) < 0.05


def config(**changes):
    small = dict(
        steps=1,
        batch=4,
        group=3,
        env=EnvConfig("dilemma", {"rounds": 1}, eval_tasks=2),
        sft=SFT(steps=0),
        past=Past(size=2, every=1, fraction=0.7),
        run=RunConfig(checkpoint_every=2, eval_every=0, eval_greedy=False, tensorboard=False),
    )
    return dataclasses.replace(tiny(), **{**small, **changes})


@functools.cache
def made(share="shared"):
    cfg = config(team=dataclasses.replace(tiny().team, parameter_sharing=share))
    return cfg, recipe_of.make(cfg)


def logger(path):
    return Logger(path, resume_step=None, total_steps=1, tensorboard=False)


def rolled(recipe, params, assignment, key=KEY):
    team = with_past(recipe.team) if assignment is not None else recipe.team
    out = recipe.env_runner.play(
        team, params, {}, range(4), flat(3), key, Sampling(), None, version=0, assignment=assignment
    )
    return out.tree


def test_opponent_models_play_what_the_assignment_says():
    """Each node's samples are those of the model that speaks there, whoever else is assigned."""
    _, recipe = made("separate")
    now, before = (recipe.init(0).params["agents"], jax.tree.map(lambda x: 1.7 * x, recipe.init(0).params["agents"]))
    params = {"shared": {}, "agents": {**now, **{snapshots.opponent_model(k): v for k, v in before.items()}}}
    assignment = jnp.array([[0, 0], [1, 0], [0, 1], [1, 1]])
    mixed = rolled(recipe, params, assignment)
    alone = {0: rolled(recipe, params, None), 1: rolled(recipe, {"shared": {}, "agents": before}, None)}
    names = [m.name for m in with_past(recipe.team).models]
    of_step = np.asarray(assignment)[mixed.nodes.task, mixed.nodes.role][mixed.steps.node]
    np.testing.assert_array_equal(mixed.steps.source, np.where(of_step > 0, FROZEN, POLICY))
    for n, (task, role) in enumerate(zip(mixed.nodes.task, mixed.nodes.role)):
        name = names[mixed.nodes.model[n]]
        assert name.endswith("-past") == bool(assignment[task, role])
        assert name.split("-")[0] == recipe.team.roles[role].model
    for who, tree in alone.items():
        rows = of_step == who
        np.testing.assert_array_equal(mixed.steps.tokens[rows], tree.steps.tokens[rows])
        np.testing.assert_allclose(mixed.steps.logprobs[rows], tree.steps.logprobs[rows], atol=1e-5)
    assert not np.allclose(alone[0].steps.logprobs, alone[1].steps.logprobs, atol=1e-3)


def test_a_cast_of_nobody_is_the_plain_rollout():
    _, recipe = made()
    own = recipe.init(0).params["agents"]
    params = {"shared": {}, "agents": {**own, "team-past": own["team"]}}
    plain, assignment = rolled(recipe, params, None), rolled(recipe, params, jnp.zeros((4, 2), int))
    for part in ("nodes", "steps", "transitions"):
        assert digests(getattr(plain, part)) == digests(getattr(assignment, part))


def test_what_past_policies_played_is_not_trained(tmp_path):
    """With every first seat past, the first model stays as it was, the second is updated."""
    cfg, recipe = made("separate")
    state = recipe.init(0)
    play_, seen = recipe.env_runner.play, []

    def first(*args, assignment, **kwargs):
        seen.append(play_(*args, assignment=jnp.array([[1, 0]] * 4), **kwargs))
        return seen[-1]

    recipe.env_runner.play = first
    try:
        before = digests(state.params["agents"]), digests(state.opt_state)
        with logger(tmp_path) as log:
            after, _ = recipe.step(state, log)
    finally:
        recipe.env_runner.play = play_
    changed = {
        name
        for old, new in zip(before, (digests(after.params["agents"]), digests(after.opt_state)))
        for name in ("first", "second")
        if any(old[k] != new[k] for k in old if f"['{name}']" in k)
    }
    assert changed == {"second"} and (seen[0].tree.steps.source == FROZEN).any()
    ring = after.params["past"]
    assert int(ring["count"]) == 1  # the snapshot is of the policy after the step
    np.testing.assert_array_equal(
        jax.tree.leaves(ring["ring"]["second"])[0][0], jax.tree.leaves(after.params["agents"]["second"])[0]
    )


@pytest.mark.slow
def test_runs_with_past_policies_resume_to_the_bit(tmp_path):
    cfg = config(steps=4)
    straight = loop.fit(cfg, recipe_of.make(cfg), tmp_path / "straight")
    part = dataclasses.replace(cfg, steps=2)
    loop.fit(part, recipe_of.make(part), tmp_path / "parts")
    again = loop.fit(cfg, recipe_of.make(cfg), tmp_path / "parts")
    assert digests(again) == digests(straight) and int(again.params["past"]["count"]) == 4
    assert set(again.params) == {"shared", "agents", "reference", "past"}


def test_both_engines_cast_alike():
    recipe = recipe_of.make(config(env=EnvConfig("dilemma", {"rounds": 2})))
    own = recipe.init(0).params["agents"]["team"]
    params = {"shared": {}, "agents": {"team": own, "team-past": jax.tree.map(lambda x: 1.7 * x, own)}}
    assignment = jnp.array([[0, 0], [1, 0], [0, 1], [1, 1]])
    array = rolled(recipe, params, assignment)
    with EnvPool(functools.partial(toys.text_game, PRISONERS), workers=0) as pool:
        team = with_past(recipe.team)
        settings = HostSettings(flat(3), Sampling(), max_prompt=16, assignment=np.asarray(assignment))
        host = play(team, params, pool, range(4), KEY, settings).tree

    def table(tree):
        rows = np.flatnonzero(tree.steps.valid)
        n, s = tree.nodes, tree.steps
        prompt = lambda c: tuple(n.tokens[s.node[c], : n.length[s.node[c]]].tolist())
        return sorted(
            (*map(int, (n.task[s.node[c]], n.turn[s.node[c]], n.model[s.node[c]], s.source[c])), prompt(c),
             s.tokens[c, : s.length[c]].tolist())
            for c in rows
        )  # fmt: skip

    assert table(array) == table(host) and len(table(host)) == 4 * 3 * 2 * 2


# The recipe


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"group": 1}, "config.group"),
        ({"credit": {"group": "node"}}, "config.credit.group"),
        ({"credit": {"group": "task_role_turn", "normalise": "std"}}, "config.credit.normalise"),
        ({"beta": float("inf")}, "config.beta"),
        ({"past": {"size": -1}}, "config.past"),
        ({"past": {"size": 2}, "team": {"critic": "head"}}, "config.past.size"),
    ],
)
def test_bad_configurations_name_the_key(changes, message):
    with pytest.raises(ConfigError) as error:
        from_dict(recipe_of.Config, changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_past_policies_are_refused_where_there_are_none():
    cfg = config(loss=dataclasses.replace(tiny().loss, kl_coef=0.0))
    cfg = dataclasses.replace(cfg, past=Past(size=2))
    memory = dataclasses.replace(recipe_of.algorithm(cfg), memory=MemoryConfig())
    with pytest.raises(ConfigError, match=r"config\.past\.size"):
        make_recipe(cfg, recipe_of.make_plan(cfg), memory)
    with pytest.raises(ConfigError, match="'a-past'"):
        with_past(make_team(TeamConfig(), ("a", "a-past")))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_configurations(variant):
    cfg = from_dict(recipe_of.Config, get_config(variant).to_dict())
    assert (cfg.beta == 0) == (variant == "naive") and cfg.team.max_new_tokens >= cfg.env.build().max_new_tokens


def test_the_tabular_game_needs_the_coupling():
    """A short form of the claim: 250 updates of two seeds."""
    rule = lambda **changes: recipe_of.algorithm(recipe_of.Config(**changes)).credit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claims, "UPDATES", 250)
        on, off = (claims.tabular(jnp.arange(2), r) for r in (rule(), rule(beta=0.0)))
    assert min(on["cooperation"]) > 0.4 > 0.1 > max(off["cooperation"])
