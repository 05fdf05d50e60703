"""ReMA: the turn-level ratio and its loss against a slow twin, trajectories of a real tree, who learns when."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm import losses, phases
from jaxmarl_llm.arena import EnvConfig
from jaxmarl_llm.checkpoint import digests
from jaxmarl_llm.compiled import make_evaluation, make_program
from jaxmarl_llm.metrics import Logger
from jaxmarl_llm.optimizers import Optimizer
from jaxmarl_llm.packing import pack
from jaxmarl_llm.plans import flat
from jaxmarl_llm.recipes import rema
from jaxmarl_llm.rollout import make_rollout
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.stages import SFT
from jaxmarl_llm.team import Backbone, TeamConfig
from jaxmarl_llm.text import ConfigError

LOSS = rema.Config().loss
TOKENS = 4


@functools.partial(jax.jit, static_argnames="loss")
def loss_of(new, old, advantages, mask, trajectory, loss=LOSS):
    weights = losses.aggregation_weights(mask, jnp.ones(len(mask)), loss.aggregate, None, trajectory)
    return losses.policy_loss(
        new,
        old_logprobs=old,
        advantages=advantages,
        weights=weights,
        clip=loss.clip,
        dual_clip=loss.dual_clip,
        level=loss.level,
        max_log_ratio=loss.max_log_ratio,
    )


def padded(rows):
    out = np.zeros((len(rows), TOKENS))
    for row, values in zip(out, rows):
        row[: len(values)] = values
    return jnp.asarray(out, jnp.float32)


def test_golden_turn_ratios():
    """old p = [.5 .4 | .9 .2], new = [.6 .44 | .9 .1]: sqrt(1.2 1.1) and sqrt(.5)."""
    old, new = padded(np.log([[0.5, 0.4], [0.9, 0.2]])), padded(np.log([[0.6, 0.44], [0.9, 0.1]]))
    mask = jnp.arange(TOKENS) < jnp.array([[2], [2]])
    for turn, ratio in enumerate((math.sqrt(1.32), math.sqrt(0.5))):
        alone = mask & (jnp.arange(2) == turn)[:, None]
        _, metrics = loss_of(new, old, jnp.ones(2), alone, jnp.zeros(2, int))
        assert metrics["ratio"] == pytest.approx(ratio, abs=1e-6)
    assert (round(math.sqrt(1.32), 5), round(math.sqrt(0.5), 5)) == (1.14891, 0.70711)
    # one trajectory: both turns alike (two tokens each), the second one clipped for a negative advantage
    value, metrics = loss_of(new, old, jnp.array([1.0, -1.0]), mask, jnp.zeros(2, int))
    assert value == pytest.approx(-(math.sqrt(1.32) - 0.8) / 2, abs=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(0.5)


def slow(conversations, loss):
    """By trajectories, turns and tokens: (advantage, turns of (old, new) log-probs)."""
    total, clipped = 0.0, 0.0
    tokens = sum(len(old) for _, turns in conversations for old, _ in turns)
    count = sum(len(turns) for _, turns in conversations)
    for advantage, turns in conversations:
        size = sum(len(old) for old, _ in turns)
        for old, new in turns:
            mean = sum(b - a for a, b in zip(old, new)) / len(old)
            ratio = math.exp(min(max(mean, -3.0), 3.0))
            value = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            if advantage < 0:
                value = max(value, 3.0 * advantage)
            weight = {
                "trajectory": len(old) / size / len(conversations),
                "sequence": 1 / count,
                "token": len(old) / tokens,
            }[loss.aggregate]
            total -= weight * value
            clipped += weight * (abs(value - ratio * advantage) > 1e-9)
    return total, clipped


logs = st.lists(st.tuples(st.floats(-5, -0.1), st.floats(-4, 4)), min_size=1, max_size=TOKENS)
conversation = st.tuples(st.floats(-2, 2), st.lists(logs, min_size=1, max_size=3))


@pytest.mark.parametrize("aggregate", ["trajectory", "sequence", "token"])
@settings(max_examples=40, deadline=None, database=None)
@given(data=st.lists(conversation, min_size=1, max_size=4))
def test_the_loss_equals_the_slow_twin(aggregate, data):
    """Ragged conversations in any order of turns; one of a single turn; shifts beyond the caps."""
    loss = dataclasses.replace(LOSS, aggregate=aggregate)
    talks = [(a, [([x for x, _ in turn], [x + d for x, d in turn]) for turn in turns]) for a, turns in data]
    rows = [(k, a, old, new) for k, (a, turns) in enumerate(talks) for old, new in turns][::-1]
    rows += [(0, 0.0, [], [])] * (12 - len(rows))  # one shape
    ids, advantage, old, new = zip(*rows)
    mask = jnp.arange(TOKENS) < jnp.array([[len(o)] for o in old])
    arrays = padded(new), padded(old), jnp.array(advantage, jnp.float32), mask, jnp.array(ids)
    value, metrics = loss_of(*arrays, loss=loss)
    want, clipped = slow(talks, loss)
    assert value == pytest.approx(want, rel=1e-4, abs=1e-5)
    if all(abs(a) > 1e-3 for a, _ in talks):
        near = [abs(math.exp(np.mean([d for _, d in t])) - e) for _, ts in data for t in ts for e in (0.8, 1.2, 3.0)]
        if min(near) > 1e-3:
            assert metrics["clip_fraction"] == pytest.approx(clipped, abs=1e-4)


def test_trajectories_of_a_tree_are_averaged_alike():
    """Four turns, two a role: weights of a role's tokens in an episode add up to 1 / episodes."""
    team, tasks = toys.team(), 3
    rollout = jax.jit(make_rollout(team, toys.relay(4), flat(2), Sampling()))
    tree = jax.device_get(rollout(toys.params(team), {}, toys.relay_tasks(tasks), jax.random.key(0), 0))
    short = np.arange(tree.steps.tokens.shape[1]) < 1 + np.arange(len(tree.steps.node))[:, None] % 3
    tree = tree.replace(steps=tree.steps.replace(loss_mask=tree.steps.loss_mask & short))
    advantages = np.arange(len(tree.steps.node), dtype=np.float32)  # to know a row again
    trained = tree.steps.valid.copy()
    batches = pack(tree, 1, advantages, trained, LOSS, micro_tokens=4096)
    share = {}
    for batch in batches:
        for weights, rows in zip(batch.weights.reshape(-1, batch.weights.shape[-1]), batch.advantages[..., 0].ravel()):
            if weights.any():
                share[int(rows)] = weights.sum()
    moves, total = tree.transitions, {}
    for j in np.flatnonzero(moves.valid):
        root, step = int(j), int(moves.steps[j, 0])
        while moves.parent[root] >= 0:
            root = int(moves.parent[root])
        if step in share:
            lengths = total.setdefault(root, [])
            lengths.append((share[step], int(tree.steps.loss_mask[step].sum())))
    assert len(total) == 2 * tasks and all(len(x) == 2 for x in total.values())
    for parts in total.values():
        assert sum(w for w, _ in parts) == pytest.approx(1 / len(total), rel=1e-5)
        assert parts[0][0] / parts[0][1] == pytest.approx(parts[1][0] / parts[1][1], rel=1e-5)  # a token is a token


# Whose turn it is

TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def config(**changes):
    base = rema.Config(
        steps=4,
        batch=8,
        switch=1,
        team=TeamConfig(backbone=TINY, max_new=5, remat=False),
        env=EnvConfig("chain", {"protocol": "meta", "rounds": 2}, eval_tasks=4),
        reward={"accuracy": 1.0, "invalid": 1.0},
        optimizer=Optimizer(learning_rate=3e-2, max_grad_norm=0.0),
        sft=SFT(steps=12, batch=64, samples=256, optimizer=Optimizer(learning_rate=2e-2)),
    )
    return dataclasses.replace(base, **changes)


def test_roles_learn_in_turn():
    who = lambda cfg, steps: [np.flatnonzero(rema.learns(cfg)(t)).tolist() for t in steps]
    assert who(config(switch=2), range(6)) == [[0], [0], [1], [1], [0], [0]]
    assert who(config(switch=0), range(2)) == [[0, 1], [0, 1]]
    assert who(config(learner="reasoner"), range(2)) == [[1], [1]]
    traced = jax.jit(jax.vmap(rema.learns(config(switch=10))))(jnp.arange(40))
    np.testing.assert_array_equal(traced[:, 0], (np.arange(40) // 10) % 2 == 0)
    np.testing.assert_array_equal(traced[:, 0], ~traced[:, 1])


@pytest.mark.parametrize("share", ["separate", "shared"])
def test_only_steps_of_the_role_in_turn_are_trained(share, tmp_path, monkeypatch):
    seen = []

    def learn(team, learners, cfg, state, played, advantages, trained):
        seen.append((played.tree.nodes.role[played.tree.steps.node], trained, played.tree.steps.valid))
        return state, {}

    monkeypatch.setattr(phases, "learn", learn)
    cfg = config(sft=SFT(), team=dataclasses.replace(config().team, share=share))
    recipe = rema.make(cfg)
    state = recipe.init(0)
    with Logger(tmp_path, resume_step=None, total_steps=4, tensorboard=False) as logger:
        for step in range(3):
            state, _ = recipe.step(state.replace(step=jnp.int32(step)), logger)
    assert len(seen) == 3
    for step, (role, trained, valid) in enumerate(seen):
        np.testing.assert_array_equal(trained, valid & (role == step % 2))


def test_the_frozen_role_stays_byte_identical(tmp_path):
    """Optimizer state included, while the other's parameters move; several epochs, of which the later ones clip."""
    cfg = config()
    cfg.check("config")
    recipe = rema.make(cfg)
    state = recipe.init(0)
    copy = lambda s: jax.tree.map(np.array, {r: (s.params["agents"][r], s.opt_state[r]) for r in rema.ROLES})
    moved = []
    with Logger(tmp_path, resume_step=None, total_steps=20, tensorboard=False) as logger:
        for step in range(cfg.sft.steps + 3):
            before = copy(state) if step > cfg.sft.steps else None  # the first RL step starts new optimizers
            state, metrics = recipe.step(state.replace(step=jnp.int32(step)), logger)
            if before is not None:
                after, turn = copy(state), (step - cfg.sft.steps) % 2
                frozen, learner = rema.ROLES[1 - turn], rema.ROLES[turn]
                assert digests(before[frozen]) == digests(after[frozen])
                moved.append(digests(before[learner]) != digests(after[learner]))
                assert metrics[f"agent/{frozen}/updated"] == 0 and metrics[f"agent/{learner}/updated"] == 1
    assert moved == [True, True]


def test_the_compiled_run_freezes_and_repeats_epochs():
    cfg = config(steps=2, learner="meta", switch=0)
    program = lambda c: jax.jit(make_program(c, flat(c.group), rema.learns(c)).run)(jnp.int32(0))
    start, none = program(dataclasses.replace(cfg, steps=0))
    params, seen = program(cfg)
    assert none["accuracy"].shape == (0,) and seen["accuracy"].shape == (2,)
    # Two programs may compile the same stage 0 to results an ulp apart; Adam moves what learns by some 3e-2 a step.
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), start["agents"], params["agents"])
    assert max(jax.tree.leaves(moved["reasoner"])) < 1e-5 and min(jax.tree.leaves(moved["meta"])) > 1e-2
    assert seen["clip_fraction/meta"].max() > 0 and not seen["clip_fraction/reasoner"].any()
    held_out = jax.jit(make_evaluation(cfg))(params, jnp.int32(0))
    assert 0 <= held_out["accuracy"] <= 1 and held_out["accuracy"].shape == ()


BAD = [
    ({"group": 1}, "config.group: expected >= 2"),
    ({"switch": -1}, "config.switch: expected >= 0"),
    ({"learner": "solver"}, "config.learner"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message):
        config(**change).check("config")


def test_bad_environments_and_losses():
    with pytest.raises(ConfigError, match="roles meta, reasoner"):
        rema.make(config(env=EnvConfig("chain", {"protocol": "verify"})))
    for change, message in (({"max_log_ratio": 0.0}, "max_log_ratio"), ({"aggregate": "turn"}, "or trajectory")):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(LOSS, **change).check("config.loss")
