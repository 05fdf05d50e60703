"""ReMA: the turn-level ratio, its cap and its average, trajectories of a real tree, who learns when.

The loss against a slow twin of the authors' formula: tests/recipes/test_fidelity.py.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs.rema import VARIANTS, get_config
from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.recipes import rema
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.plans import flat
from jaxmarl_llm.runs.compiled import make_evaluation, make_program
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training import losses
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.drivers import HostDriver
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.training.packing import pack
from tests import toys

LOSS = rema.Config().loss
TOKENS = 4


@functools.partial(jax.jit, static_argnames="loss")
def loss_of(new, old, advantages, mask, trajectory, loss=LOSS):
    weights = losses.aggregation_weights(mask, jnp.ones(len(mask)), loss.aggregation, None, trajectory)
    new, old = jnp.asarray(new, jnp.float32), jnp.asarray(old, jnp.float32)
    advantages = jnp.broadcast_to(advantages[:, None], new.shape)
    data = losses.RowData(weights, advantages, jnp.zeros_like(new), old, None)
    return loss.function(loss, new, jnp.zeros_like(new), data)


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
    # one trajectory: both turns alike, the second one clipped for a negative advantage
    value, metrics = loss_of(new, old, jnp.array([1.0, -1.0]), mask, jnp.zeros(2, int))
    assert value == pytest.approx(-(math.sqrt(1.32) - 0.8) / 2, abs=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(0.5)


def test_a_long_turn_counts_as_a_short_one():
    """Turns of 3 and 1 tokens in one trajectory, of 2 in another: turns weigh 1/4, 1/4 and 1/2."""
    mask, trajectory = jnp.arange(3) < jnp.array([[3], [2], [1]]), jnp.array([2, 0, 2])
    weigh = lambda rule, counted: rule(mask, jnp.array(counted), trajectory)
    turns = weigh(rema.mean_over_turns, [1.0, 1, 1])
    np.testing.assert_allclose(turns, [[1 / 12] * 3, [1 / 4, 1 / 4, 0], [1 / 4, 0, 0]], rtol=1e-6)
    tokens = weigh(rema.mean_over_tokens, [1.0, 1, 1])
    np.testing.assert_allclose(tokens, [[1 / 8] * 3, [1 / 4, 1 / 4, 0], [1 / 8, 0, 0]], rtol=1e-6)
    for rule in (rema.mean_over_turns, rema.mean_over_tokens):
        np.testing.assert_allclose(weigh(rule, [1.0, 0, 0]), [[1 / 3] * 3, [0] * 3, [0] * 3], rtol=1e-6)
        assert not np.any(weigh(rule, [0.0, 0, 0]))
        np.testing.assert_allclose(  # one turn each: the mean over sequences
            rule(mask, jnp.ones(3), jnp.arange(3)), losses.aggregation_weights(mask, jnp.ones(3), "sequence"), rtol=1e-6
        )


def test_log_ratios_are_capped_from_above_alone():
    """At 3 with a flat gradient; below there is no cap that matters. The loss is not clipped for these signs."""
    old, mask = jnp.zeros((1, TOKENS)), jnp.ones((1, TOKENS), bool)
    ratio = lambda shift: loss_of(old + shift, old, -jnp.ones(1), mask, jnp.zeros(1, int))[1]["ratio"]
    np.testing.assert_allclose([ratio(x) for x in (2.9, 3.5, -4.0)], np.exp([2.9, 3.0, -4.0]), rtol=1e-5)


def test_trajectories_of_a_tree_are_averaged_alike():
    """Four turns, two a role: each turn of a role weighs 1 / (2 episodes), however long it is."""
    team, tasks = toys.team(), 3
    rollout = jax.jit(make_rollout(team, toys.relay(4), flat(2), Sampling()))
    tree = jax.device_get(rollout(toys.params(team), {}, toys.relay_tasks(tasks), jax.random.key(0), 0))
    short = np.arange(tree.steps.tokens.shape[1]) < 1 + np.arange(len(tree.steps.node))[:, None] // 5 % 3
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
    assert any(a[1] != b[1] for a, b in total.values())
    assert len(total) == 2 * tasks and all(len(x) == 2 for x in total.values())
    for parts in total.values():
        assert [w for w, _ in parts] == pytest.approx([1 / (2 * len(total))] * 2, rel=1e-5)


# Whose turn it is

TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def config(**changes):
    base = rema.Config(
        steps=4,
        batch=8,
        switch=1,
        team=TeamConfig(backbone=TINY, max_new_tokens=5, remat=False),
        env=EnvConfig("chain", {"protocol": "meta", "rounds": 2}, eval_tasks=4),
        reward={"accuracy": 1.0, "invalid": 1.0},
        optimizer=Optimizer(learning_rate=3e-2, max_grad_norm=0.0),
        sft=SFT(steps=12, batch=64, samples=256, optimizer=Optimizer(learning_rate=2e-2)),
    )
    return dataclasses.replace(base, **changes)


def test_roles_learn_in_turn():
    who = lambda cfg, steps: [np.flatnonzero(rema.trainable_roles(cfg)(t)).tolist() for t in steps]
    assert who(config(switch=2), range(6)) == [[0], [0], [1], [1], [0], [0]]
    assert who(config(switch=0), range(2)) == [[0, 1], [0, 1]]
    assert who(config(learner="reasoner"), range(2)) == [[1], [1]]
    traced = jax.jit(jax.vmap(rema.trainable_roles(config(switch=10))))(jnp.arange(40))
    np.testing.assert_array_equal(traced[:, 0], (np.arange(40) // 10) % 2 == 0)
    np.testing.assert_array_equal(traced[:, 0], ~traced[:, 1])


@pytest.mark.parametrize("share", ["separate", "shared"])
def test_only_steps_of_the_role_in_turn_are_trained(share, tmp_path, monkeypatch):
    seen = []

    def lay_out(driver, step, tree, played, advantage, trained, targets, imitation):
        seen.append((tree.nodes.role[tree.steps.node], trained, tree.steps.valid))
        return {}  # nothing is updated

    monkeypatch.setattr(HostDriver, "lay_out", lay_out)
    cfg = config(sft=SFT(), team=dataclasses.replace(config().team, parameter_sharing=share))
    recipe = rema.make(cfg)
    state = recipe.init(0)
    with Logger(tmp_path, resume_step=None, total_steps=4, tensorboard=False) as logger:
        for _ in range(3):
            state, _ = recipe.step(state, logger)
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
            state, metrics = recipe.step(state, logger)
            if before is not None:
                after, turn = copy(state), (step - cfg.sft.steps) % 2
                frozen, learner = rema.ROLES[1 - turn], rema.ROLES[turn]
                assert digests(before[frozen]) == digests(after[frozen])
                moved.append(digests(before[learner]) != digests(after[learner]))
                assert metrics[f"agent/{frozen}/updated"] == 0 and metrics[f"agent/{learner}/updated"] == 1
    assert moved == [True, True]


def test_the_compiled_run_freezes_and_repeats_epochs():
    cfg = config(steps=2, learner="meta", switch=0)

    def program(c):
        state, seen = jax.jit(make_program(rema.make(c)).run)(jnp.int32(0))
        return state.params, seen

    start, none = program(dataclasses.replace(cfg, steps=0))
    params, seen = program(cfg)
    assert not none and seen["accuracy"].shape == (2,)
    # Two programs may compile the same stage 0 to results an ulp apart, which Adam enlarges. It moves what learns by
    # some 3e-2 a step.
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), start["agents"], params["agents"])
    assert max(jax.tree.leaves(moved["reasoner"])) < 1e-4 and min(jax.tree.leaves(moved["meta"])) > 1e-2
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
    with pytest.raises(ConfigError, match="has no attribute 'mean_over_turn'; did you mean 'mean_over_turns'"):
        dataclasses.replace(LOSS, aggregation="jaxmarl_llm.recipes.rema:mean_over_turn").check("config.loss")


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(rema.Config, get_config(variant).to_dict())
        assert cfg.loss.reads_episodes and cfg.loss.function is rema.turn_loss
        assert cfg.loss.aggregation.endswith("mean_over_tokens") == (variant == "tokens")
