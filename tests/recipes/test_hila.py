"""HILA: golden advantages, who is trained and who is imitated, an expert without an answer, bad input."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs.hila import VARIANTS, get_config, inner
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import hila
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.types import EXPERT, MENU, POLICY
from tests.recipes.test_fidelity import Table

pytestmark = pytest.mark.usefixtures("numpy_tables")

SMALL = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
B, K = 6, 4
CONFIG = hila.Config(
    batch=B,
    team=TeamConfig(parameter_sharing="shared", backbone=SMALL, max_new_tokens=1, remat=False),
    env=EnvConfig("defer", {"planted": False, "silent": 0.5, "tasks": 32}, eval_tasks=8),
    sft=SFT(0),
)
RIGHT, WRONG, CREATED, DEFERRED = {"accuracy": 1}, {}, {"accuracy": 1, "create": 1}, {"accuracy": 1, "defer": 1}


def test_golden_advantages():
    """R = [1, 0, .9, .7]: A = [.35, -.65, .25, .05]. One menu of four choices, beside another node."""
    table = Table(("accuracy", "create", "defer"))
    table.act(0, 0, 0, **RIGHT)
    for k, pay in enumerate((WRONG, CREATED, DEFERRED), 1):
        table.steps.append(0)
        table.move([k], 0, 0, -1, {name: {0: value} for name, value in pay.items()})
    table.act(0, 1, 0, **RIGHT)
    tree = table.tree()
    source = np.where(np.arange(len(tree.steps.source)) < K, MENU, POLICY)
    table.tree = lambda: tree.replace(steps=tree.steps.replace(source=source))
    returns, advantage = table.credit(hila.rule(CONFIG), **CONFIG.reward)
    np.testing.assert_allclose(returns, [1, 0, 0.9, 0.7, 1], atol=1e-6)
    np.testing.assert_allclose(advantage, [0.35, -0.65, 0.25, 0.05, 0], atol=1e-6)


@pytest.fixture(scope="module")
def step():
    """Recipe, rollout and the parts of a step that are computed from it."""
    recipe = hila.make(CONFIG)
    train, params = recipe.phases[-1].step, recipe.init(0).params
    rollout = jax.jit(make_rollout(recipe.team, recipe.env_runner.env, train.plan, CONFIG.sampling))
    tasks = {k: v[:B] for k, v in recipe.env_runner.tasks.items()}
    tree = jax.device_get(rollout(params, {}, tasks, jax.random.key(3), 0))
    return train, tree, jax.device_get(train.assign(tree, CONFIG.reward))


def test_choices_are_trained_and_experts_imitated_where_the_policy_defers(step):
    train, tree, credited = step
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    expert = np.flatnonzero(steps.source == EXPERT)
    node = steps.node[expert]
    choice = moves.steps[nodes.parent[node], 0]
    assert len(expert) == B and (steps.tokens[choice, 0] == ord("d")).all() and (nodes.role[node] == 1).all()
    silent = steps.length[expert] == 0
    assert silent.any() and not silent.all() and (steps.valid[expert] == ~silent).all()
    assert (credited.valid[choice] == ~silent).all() and tree.counts.invalid == silent.sum()
    selected = hila.menus(credited, B)
    trained = credited.valid & np.asarray(selected)[credited.group] & (steps.source != EXPERT)
    assert set(steps.source[trained]) == {MENU} and (nodes.role[steps.node[trained]] == 0).all()
    menu = credited.valid & (steps.source == MENU)
    for n in np.unique(steps.node[menu]):
        of = menu & (steps.node == n)
        np.testing.assert_allclose(
            credited.advantage[of], credited.returns[of] - credited.returns[of].mean(), atol=1e-6
        )
    rates, imitate = np.zeros(len(steps.node)), train.algorithm.imitate
    every = jax.jit(jax.vmap(lambda key: imitate(key, tree, CONFIG.loss)))(jax.random.split(jax.random.key(0), 400))
    for weights in np.asarray(every):
        drawn = weights.any(1)
        rates += drawn
        assert not drawn.any() or weights.sum() == pytest.approx(CONFIG.imitation)
    assert not rates[steps.source != EXPERT].any() and not rates[expert[silent]].any()
    chance = np.exp(steps.logprobs[:, 0])
    for row, k in zip(expert[~silent], choice[~silent]):
        share = chance[k] / chance[(steps.node == steps.node[k]) & (steps.source == MENU)].sum()
        assert rates[row] / 400 == pytest.approx(share, abs=0.1)


def test_without_imitation_there_is_no_outer_loop():
    assert hila.algorithm(inner()).imitate is None
    assert hila.algorithm(dataclasses.replace(CONFIG, imitation=0.5)).imitate.coef == 0.5
    assert hila.rule(dataclasses.replace(CONFIG, menu_weights="by_policy")) != hila.rule(CONFIG)


BAD = [
    ({"menu": ("1",)}, r"^plan\.menu: expected at least two choices, none of them empty, got \('1',\)$"),
    ({"menu": ("1", "2", "2")}, r"^plan\.menu: expected choices that differ, got '2' twice$"),
    (
        {"menu": ("1", "defer")},
        r"^plan\.menu: expected at most max_new_tokens=1 tokens for role 'chooser', got 'defer'",
    ),
    ({"menu": ("1", "\udcff")}, r"^plan\.menu: expected text in the vocabulary of model 'team', which plays 'chooser'"),
    ({"menu_weights": "best"}, r"^config\.menu_weights: unknown value 'best'; choose from 'alike', 'by_policy'$"),
    ({"imitation": -1.0}, r"^config\.imitation: expected >= 0, got -1\.0$"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        cfg = dataclasses.replace(CONFIG, **change)
        cfg.check("config")
        hila.make(cfg)
    assert "\n" not in str(error.value)


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(hila.Config, get_config(variant).to_dict())
        cfg.check("config")
        assert cfg.loss.kl_coef == 0.02 and cfg.loss.clip_low == 0.2 and cfg.loss.entropy_coef == 0.001
        assert (cfg.imitation == 0) == (variant == "inner")
        assert cfg.env.args.get("planted", True) == (variant == "tiny")
