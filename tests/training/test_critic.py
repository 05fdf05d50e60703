"""Value heads and critics: GAE against a slow twin, what each critic reads, the update, IAC and MAAC on a game."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.agents import team as team_lib
from jaxmarl_llm.agents.team import Backbone, TeamConfig, init_params, make_team
from jaxmarl_llm.credit import returns as return_rules
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models import value_head
from jaxmarl_llm.recipes import iac, maac
from jaxmarl_llm.rollout.plans import flat
from jaxmarl_llm.runs import loop
from jaxmarl_llm.storage.checkpoint import Checkpointer
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training import losses
from jaxmarl_llm.training.actor_critic import CriticAdvantage, CriticTargets, _fit_of
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.critic import CriticInputs, _chunks, critic_inputs
from jaxmarl_llm.training.drivers import HostDriver
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from tests import reference

seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)
gae = jax.jit(return_rules.generalised_advantage, static_argnames=("max_turns", "discount", "gae_lambda"))
KINDS = {"head": iac, "separate": iac, "joint": maac}
TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def forest(rng, rows=20, turns=4, roles=2):
    """A random forest with unplayed and invalid rows; roles act at random, the siblings of a state alike."""
    turn, parent = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
    for j in range(1, rows):
        candidates = [i for i in range(j) if turn[i] < turns - 1]
        if candidates and rng.random() < 0.8:
            parent[j] = rng.choice(candidates)
            turn[j] = turn[parent[j]] + 1
    played = rng.random(rows) < 0.9
    valid = played & (rng.random(rows) < 0.85)
    state = {k: (rng.normal(size=roles), rng.random(roles) < 0.7) for k in np.unique(parent)}
    values = np.stack([state[p][0] for p in parent]).astype(np.float32)
    acts = np.stack([state[p][1] for p in parent])
    return (
        rng.normal(size=(rows, roles)).astype(np.float32),
        np.where(acts, values, 0.0),
        acts,
        parent,
        turn,
        played,
        valid,
    )


@pytest.mark.parametrize("discount, gae_lambda", [(1.0, 0.0), (0.9, 0.0), (0.9, 0.8), (1.0, 1.0)])
@settings(max_examples=40, deadline=None, database=None)
@given(rng=seeds)
def test_gae_equals_the_recursion(discount, gae_lambda, rng):
    rewards, values, acts, parent, turn, played, valid = forest(rng)
    got = gae(rewards, values, acts, parent, turn, played, valid, max_turns=4, discount=discount, gae_lambda=gae_lambda)
    want = reference.generalised_advantage(rewards, values, acts, parent, played, valid, discount, gae_lambda)
    chex.assert_trees_all_close(tuple(got), tuple(want), rtol=1e-7, atol=2e-5)


@settings(max_examples=20, deadline=None, database=None)
@given(rng=seeds)
def test_gae_of_rewards_that_are_known_to_some_roles(rng):
    """A role with unknown rewards of its own is as in a tree where they are unknown to all."""
    rewards, values, acts, parent, turn, played, valid = forest(rng)
    known = valid[:, None] & (rng.random(values.shape) < 0.7)
    rest = {"max_turns": 4, "discount": 0.9, "gae_lambda": 0.8}
    got = gae(rewards, values, acts, parent, turn, played, known, **rest)
    for role in range(values.shape[1]):
        want = gae(rewards, values, acts, parent, turn, played, known[:, role], **rest)
        for mine, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(mine[:, role], theirs[:, role], atol=1e-6)


def test_gae_of_a_chain_by_hand():
    """Three turns of one agent: r = 1, 2, 3, V = 1, 1, 1, discount 0.5."""
    one, valid = np.ones((3, 1), np.float32), np.ones(3, bool)
    rewards, parent, turn = np.array([[1.0], [2.0], [3.0]], np.float32), np.array([-1, 0, 1]), np.arange(3)
    for gae_lambda, want in ((0.0, [0.5, 1.5, 2.0]), (1.0, [1.75, 2.5, 2.0])):
        advantage, target = gae(
            rewards, one, one > 0, parent, turn, valid, valid, max_turns=3, discount=0.5, gae_lambda=gae_lambda
        )
        np.testing.assert_allclose(advantage[:, 0], want)
        np.testing.assert_allclose(target, advantage + 1)


@settings(max_examples=30, deadline=None, database=None)
@given(rng=seeds)
def test_lambda_one_is_the_monte_carlo_return(rng):
    rewards, values, _, parent, turn, _, _ = forest(rng)
    every, acts = np.ones(len(parent), bool), np.ones(values.shape, bool)
    advantage, target = gae(
        rewards, values, acts, parent, turn, every, every, max_turns=4, discount=0.9, gae_lambda=1.0
    )
    returns, _ = return_rules.returns_to_go(
        jnp.asarray(rewards), jnp.asarray(parent), jnp.asarray(turn), jnp.asarray(every), max_turns=4, discount=0.9
    )
    np.testing.assert_allclose(target, returns, atol=2e-5)
    np.testing.assert_allclose(advantage, returns - values, atol=2e-5)


def test_the_share_of_variance_that_a_critic_explains():
    value, target = np.float32([0.1, 0.9, 0.4, 5.0]), np.float32([0.0, 1.0, 0.5, -3.0])
    there = np.array([True, True, True, False])
    left, spread = np.var((target - value)[:3]), np.var(target[:3])
    for xp in (np, jnp):
        fit = _fit_of(xp, *map(xp.asarray, (value, target, there)))
        np.testing.assert_allclose(fit["value"], value[:3].mean(), rtol=1e-6)
        np.testing.assert_allclose(fit["explained_variance"], 1 - left / spread, rtol=1e-5)
    # Equal targets: the share is 0 / 0. A line of metrics leaves it out, and a traced value has to be there.
    for known in (there, np.zeros(4, bool)):
        equal = value, np.full(4, 0.5, np.float32), known
        assert set(_fit_of(np, *equal)) == {"value"}
        assert np.isnan(_fit_of(jnp, *map(jnp.asarray, equal))["explained_variance"])


def test_value_loss():
    value, target = jnp.array([1.0, 4.0, jnp.nan]), jnp.array([0.0, 1.0, 5.0])
    weights, old = jnp.array([0.5, 0.25, 0.0]), jnp.array([1.0, 1.5, 0.0])
    assert float(losses.value_loss(value, target, weights)) == pytest.approx(0.5 * 1 + 0.25 * 9)
    # moved from 1.5 to 4: clipped to 2, but the worse of the two counts
    assert float(losses.value_loss(value, target, weights, old, 0.5)) == pytest.approx(2.75)
    near = jnp.array(
        [1.0, 0.0, jnp.nan]
    )  # moved from 1.5 towards the target 1 and past it: clipped to 1, error stays 1
    assert float(losses.value_loss(near, target, weights, old, 0.5)) == pytest.approx(0.5 + 0.25)
    gradient = jax.grad(lambda v: losses.value_loss(v, target, weights))(value)
    np.testing.assert_allclose(gradient, [1.0, 1.5, 0.0])
    with pytest.raises(ValueError, match="old values"):
        losses.value_loss(value, target, weights, clip=0.5)


@pytest.mark.parametrize("hidden", [0, 5])
def test_head(hidden):
    head = value_head.init_head(jax.random.key(0), 8, hidden)
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    inner = np.tanh(x @ np.asarray(head["inner"]) + np.asarray(head["inner_bias"])) if hidden else x
    np.testing.assert_allclose(
        value_head.head_value(head, jnp.asarray(x)), inner @ np.asarray(head["kernel"]), rtol=1e-5
    )


def config(critic, **changes):
    base = KINDS[critic].Config(
        steps=60,
        batch=32,
        group=4,
        env=EnvConfig("matrix", {"rounds": 2}),
        team=TeamConfig(backbone=TINY, max_new_tokens=1, remat=False, critic=critic),
        reward={"payoff": 0.1},
        optimizer=Optimizer(learning_rate=3e-3, max_grad_norm=0.5),
        critic_optimizer=Optimizer(learning_rate=1e-2, max_grad_norm=0.5),
        sft=SFT(steps=60, batch=32, samples=256, optimizer=Optimizer(learning_rate=1e-2)),
        run=RunConfig(eval_every=0, eval_greedy=False, checkpoint_every=100, tensorboard=False, log_every=1000),
    )
    return dataclasses.replace(base, **changes)


def started(critic, **changes):
    cfg = config(critic, sft=SFT(), batch=4, **changes)
    recipe = KINDS[critic].make(cfg)
    return cfg, recipe, recipe.init(0)


def played_by(cfg, recipe, state):
    key = jax.random.key(1)
    return recipe.env_runner.play(
        recipe.team, state.params, {}, range(4), flat(cfg.group), key, Sampling(), None, version=0
    )


def test_an_agents_critic_reads_its_own_prompt_and_the_joint_one_all():
    encode = started("joint")[1].team.models[0].tokenizer.encode
    for critic in KINDS:
        cfg, recipe, state = started(critic)
        team, tree = recipe.team, played_by(cfg, recipe, state).tree
        index = [m.name for m in team.models].index(team.critics[0])
        read = critic_inputs(team, tree, index)
        nodes = tree.nodes
        text = lambda n, nodes=nodes: nodes.tokens[n, : nodes.length[n]].tolist()
        for n in np.flatnonzero(nodes.valid):
            m = read.of_node[n]
            if critic == "joint":
                twins = (nodes.task == nodes.task[n]) & (nodes.parent == nodes.parent[n]) & nodes.valid
                first, second = np.flatnonzero(twins)
                want = [*encode("[first]"), *text(first), *encode("[second]"), *text(second)]
            elif nodes.role[n] == 1:
                assert m == -1
                continue
            else:
                want = text(n)
            assert read.tokens[m, : read.length[m]].tolist() == want
        sizes = [len(rows) for rows, _, _ in _chunks(read, 64)]
        assert sum(sizes) == len(read.length) and all(t.size <= 64 for _, t, _ in _chunks(read, 64))


@pytest.mark.parametrize("critic", KINDS)
def test_estimates_are_the_head_on_the_last_prompt_token(critic):
    cfg, recipe, state = started(critic)
    team, played = recipe.team, played_by(cfg, recipe, state)
    _, has, appraisals, _ = advantages_of(cfg, recipe, state, played.tree)
    assert has.sum() == played.tree.steps.valid.sum()
    for name, a in appraisals.items():
        model = next(m for m in team.models if m.name == name)
        own = state.params["agents"][name]
        hidden, _ = model.policy.prefill(own, a.read.tokens, a.read.length)
        np.testing.assert_allclose(a.value, value_head.head_value(own["value"], hidden), atol=2e-6)
        assert a.weight.sum() == pytest.approx(1.0)


def advantages_of(cfg, recipe, state, tree):
    driver = HostDriver(cfg.seed, Logger(".", resume_step=None, total_steps=0, primary=False))
    return CriticAdvantage(cfg)(recipe.phases[-1].step, driver, state, tree)


@pytest.mark.parametrize("critic", KINDS)
def test_targets_are_rewards_at_the_last_turn_and_bootstrapped_before(critic):
    cfg, recipe, state = started(critic, whiten=False)
    played = played_by(cfg, recipe, state)
    gain, _, appraisals, _ = advantages_of(cfg, recipe, state, played.tree)
    tree = played.tree
    moves, nodes = tree.transitions, tree.nodes
    value = np.zeros(len(nodes.role))
    for a in appraisals.values():
        value = np.where(a.read.of_node >= 0, a.value[a.read.of_node], value)
    for j in np.flatnonzero(moves.valid):
        for s in moves.steps[j]:
            n = tree.steps.node[s]
            reward = 0.1 * moves.rewards["payoff"][j, nodes.role[n]]
            behind = np.flatnonzero((nodes.parent == j) & nodes.valid & (nodes.role == nodes.role[n]))
            target = reward + 0.9 * (value[behind[0]] if len(behind) else 0.0)
            assert len(behind) == (moves.turn[j] == 0)
            assert gain[s] == pytest.approx(target - value[n], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("critic", ["head", "joint"])
def test_actor_critics_solve_the_iterated_game(critic, tmp_path):
    """Chicken twice over with the joint return: social sum 20 of 20; the critic explains the returns."""
    cfg = config(critic)
    cfg.check("config")
    recipe = KINDS[critic].make(cfg)
    state, seen = recipe.init(0), []
    with Logger(tmp_path, resume_step=None, total_steps=recipe.total_steps, interval=1000, tensorboard=False) as log:
        while int(state.step) < recipe.total_steps:
            state, metrics = recipe.step(state, log)
            seen.append(metrics)
    rl = [m for m in seen if "reward/social" in m]
    assert rl[0]["reward/social"] < 15 and np.mean([m["reward/social"] for m in rl[-10:]]) > 19
    name = recipe.team.critics[0]
    assert rl[-1][f"critic/{name}/loss"] < 0.1 * rl[0][f"critic/{name}/loss"]


@pytest.mark.parametrize("critic", ["head", "joint"])
def test_a_critic_is_saved_and_goes_on_to_the_bit(critic, tmp_path):
    cfg, recipe, state = started(critic, steps=4)
    with Logger(tmp_path, resume_step=None, total_steps=4, interval=99, tensorboard=False) as log:
        state = recipe.step(state, log)[0]
        saver = Checkpointer(tmp_path)
        saver.save(1, loop.without_shared(state), {"step": 1})
        saver.wait()
        straight, _ = recipe.step(jax.tree.map(jnp.copy, state), log)  # a step donates what it updates
        restored, *_ = saver.restore(loop.without_shared(recipe.init(1)))
        saver.close()
        resumed, _ = recipe.step(restored.replace(params={**restored.params, "shared": {}}), log)
    same = lambda s: digests((s.params["agents"], s.opt_state))
    assert same(straight) == same(resumed) and same(straight) != same(state)


@pytest.mark.parametrize(
    "rows, micro_tokens, shapes", [(10, 24, [(5, 2)]), (7, 18, [(1, 3), (2, 2)]), (4, 99, [(1, 4)])]
)
def test_a_compiled_run_cuts_the_prompts_of_a_critic_into_micro_batches(rows, micro_tokens, shapes):
    """Stacks [K rows], of at most ``micro_tokens`` prompt tokens a micro-batch; before, all prompts were one batch."""
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(1, 9, (rows, 6)))
    column = lambda: jnp.asarray(rng.random(rows).astype(np.float32))
    read = CriticInputs(tokens, jnp.full(rows, 6), jnp.arange(rows))
    targets = CriticTargets(read, column(), column(), column())
    stacks = targets.batches(micro_tokens)
    assert [batch.length.shape for batch in stacks] == shapes
    flat = lambda leaves: np.concatenate([np.asarray(x).reshape(-1, *x.shape[2:]) for x in leaves])
    np.testing.assert_array_equal(flat([batch.tokens for batch in stacks]), tokens)
    for name in ("target", "weight"):
        got = flat([getattr(batch.values, name) for batch in stacks])
        np.testing.assert_array_equal(got, getattr(targets, name))
    assert all(batch.completions.shape == (*batch.length.shape, 1, 1) for batch in stacks)


BAD = [
    ("head", {"team": TeamConfig(critic="none")}, "config.team.critic: expected head or separate, got 'none'"),
    ("joint", {"team": TeamConfig(critic="head")}, "config.team.critic: expected joint, got 'head'"),
    ("head", {"gae_lambda": 1.5}, r"config\.gae_lambda: expected in \[0, 1\], got 1.5"),
]


@pytest.mark.parametrize("critic, change, message", BAD)
def test_bad_configurations(critic, change, message):
    with pytest.raises(ConfigError, match=message):
        config(critic, **change).check("config")


def test_a_team_says_what_is_wrong_with_its_critic():
    with pytest.raises(ConfigError, match="'none', 'head', 'separate', 'joint'"):
        TeamConfig(critic="central").check("config.team")
    with pytest.raises(ConfigError, match="another than 'joint' with overrides"):
        TeamConfig(critic="joint", overrides={"first": TINY}).check("config.team")
    with pytest.raises(ConfigError, match="'first-critic' has the name of a critic"):
        make_team(TeamConfig(critic="separate"), ("first", "first-critic"))


def test_a_separate_critic_starts_as_a_copy_of_its_own_policys_backbone(monkeypatch):
    """Roles may end in "-critic" too; an override is of the role itself, and its critic follows it."""
    small = dataclasses.replace(TINY, hidden_size=32)
    cfg = TeamConfig(backbone=TINY, overrides={"film-critic": small}, critic="separate", max_new_tokens=1)
    asked, init = [], team_lib.init_backbone
    recorded = lambda backbone, *rest: asked.append(backbone) or init(backbone, *rest)
    monkeypatch.setattr(team_lib, "init_backbone", recorded)
    team = make_team(cfg, ("author", "film-critic"))
    init_params(cfg, team, jax.random.key(0))
    of = dict(zip([m.name for m in team.models], asked, strict=True))
    assert of == {"author": TINY, "author-critic": TINY, "film-critic": small, "film-critic-critic": small}


def test_the_clipped_value_loss_reaches_every_kind_of_critic(tmp_path):
    for critic in KINDS:
        clipped = Loss(clip_low=None, aggregation="sum", value_coef=0.6, value_clip=0.2)
        cfg, recipe, state = started(critic, steps=1, loss=clipped)
        with Logger(tmp_path / critic, resume_step=None, total_steps=1, interval=9, tensorboard=False) as log:
            after, metrics = recipe.step(state, log)
        assert metrics["bad"] == 0 and np.isfinite(metrics[f"critic/{recipe.team.critics[0]}/loss"])
