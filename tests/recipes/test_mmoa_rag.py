"""MMOA-RAG: golden rewards and advantages, a slow twin on random teams, who learns, bad input."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents.team import make_team
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs.mmoa_rag import VARIANTS, generator, get_config, tiny
from jaxmarl_llm.envs.facts import pipeline
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import mmoa_rag
from tests.recipes.test_fidelity import ROLES, ROWS, TURNS, Table, td_advantages

pytestmark = pytest.mark.usefixtures("numpy_tables")

CONFIG = mmoa_rag.Config()


def table_of(episodes):
    """Episodes (F1, penalty of each role) as tables, as the pipeline of facts pays them."""
    table = Table(pipeline.COMPONENTS)
    for task, (f1, penalties) in enumerate(episodes):
        parent = -1
        for role, penalty in enumerate(penalties):
            table.nodes.append((role, task, role, parent))
            table.steps.append(len(table.nodes) - 1)
            paid = {"penalty": {role: penalty}}
            if role == len(penalties) - 1:
                paid["f1"] = dict.fromkeys(range(len(penalties)), f1)
            parent = table.move([len(table.steps) - 1], task, role, parent, paid)
    return table


def advantages(cfg, episodes, values):
    """Advantages and value targets, one for each role of each episode, by the functions that the critic calls."""
    padded = jnp.zeros(ROWS).at[: len(values)].set(jnp.array(values))
    gain, has, target, known = td_advantages(
        table_of(episodes).tree(),
        padded,
        dict(cfg.reward),
        roles=ROLES,
        max_turns=TURNS,
        discount=cfg.credit.discount,
        gae_lambda=cfg.gae_lambda,
        whiten=cfg.whiten,
    )
    n = len(values)
    assert np.asarray(has[:n]).all() and np.asarray(known[:n]).all() and not np.asarray(has[n:]).any()
    return np.asarray(gain[:n]), np.asarray(target[:n])


GOLDEN = [(0.6, (-0.5, -1.0, -1.0))]  # five queries, a repeated id, an answer that is too long


def test_golden_rewards():
    """F1 = .6 leaves .1, -.4 and -.4. Without penalties all have .6."""
    returns, _ = table_of(GOLDEN).credit(mmoa_rag.algorithm(CONFIG).credit, **CONFIG.reward)
    np.testing.assert_allclose(returns, [0.1, -0.4, -0.4], atol=1e-6)
    returns, _ = table_of(GOLDEN).credit(mmoa_rag.algorithm(CONFIG).credit, f1=1.0)
    np.testing.assert_allclose(returns, [0.6] * 3, atol=1e-6)


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_golden_advantages(gae_lambda):
    """Values .2, .3 and .5 give -.1, -.7 and -.9 for any lambda; the target of a value is the role's own return."""
    cfg = dataclasses.replace(CONFIG, gae_lambda=gae_lambda, whiten=False)
    gain, target = advantages(cfg, GOLDEN, [0.2, 0.3, 0.5])
    np.testing.assert_allclose(gain, [-0.1, -0.7, -0.9], atol=1e-6)
    np.testing.assert_allclose(target, [0.1, -0.4, -0.4], atol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_whitened_advantages_of_random_episodes_are_those_of_a_slow_twin(seed):
    rng = np.random.default_rng(seed)
    some = [(float(rng.random()), (-0.5 * rng.integers(2), -1.0 * rng.integers(2), 0.0)) for _ in range(8)]
    values = rng.normal(size=3 * len(some))
    raw = np.array([[f1 + penalty for penalty in own] for f1, own in some]) - values.reshape(-1, 3)
    want = (raw - raw.mean(0)) / raw.std(0)
    np.testing.assert_allclose(advantages(CONFIG, some, values)[0].reshape(-1, 3), want, atol=1e-4)


def test_ppo_with_a_fixed_coefficient_of_the_kl():
    loss = CONFIG.loss
    assert (loss.clip_low, loss.clip_high, loss.kl_coef, loss.kl_kind) == (0.2, 0.2, 0.05, "k3")
    assert loss.value_coef > 0 and CONFIG.credit.discount == 1.0


def test_the_generator_alone_learns_where_it_has_a_model_of_its_own():
    assert mmoa_rag.algorithm(CONFIG).trainable_roles is None
    cfg = generator()
    assert mmoa_rag.algorithm(cfg).trainable_roles(0).tolist() == [False, False, True]
    team = make_team(cfg.team, pipeline.ROLES)
    assert [role.players[: role.learning] for role in team.roles] == [("reader",), ("reader",), ("generator",)]
    assert len({role.players[0] for role in make_team(tiny().team, pipeline.ROLES).roles}) == 1


LEARNS = r"^config\.trained_roles: expected rewriter, selector, generator with config\.team\.parameter_sharing='shared'"
BAD = [
    ({"trained_roles": ("generator",)}, LEARNS),
    ({"trained_roles": ()}, r"^config\.trained_roles: expected one or several of rewriter, selector, generator, got"),
    ({"trained_roles": ("reranker",)}, r"^config\.trained_roles: .*reranker"),
    ({"team": dataclasses.replace(CONFIG.team, critic="none")}, r"^config\.team\.critic: expected head or separate"),
    ({"loss": dataclasses.replace(CONFIG.loss, value_coef=0.0)}, r"^config\.loss\.value_coef: expected > 0 \(nothing"),
    ({"env": EnvConfig("chain")}, r"^config\.env: no role 'rewriter' in environment 'chain', whose roles are solver"),
    ({"gae_lambda": 1.5}, r"^config\.gae_lambda: expected"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        dataclasses.replace(CONFIG, **change).check("config")
    assert "\n" not in str(error.value)


def test_a_reward_that_the_environment_does_not_pay():
    with pytest.raises(ConfigError, match=r"^config\.reward: environment 'facts' pays no 'bleu'; it pays f1") as error:
        mmoa_rag.make(dataclasses.replace(CONFIG, reward={"bleu": 1.0}))
    assert "\n" not in str(error.value)


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(mmoa_rag.Config, get_config(variant).to_dict())
        assert ("penalty" in cfg.reward) == (variant != "free")
        assert (cfg.trained_roles == mmoa_rag.NEEDED) == (variant != "generator")
