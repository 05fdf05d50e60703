"""MasHost: golden advantages, a slow twin on ragged constructions, who is paid for an action, bad input."""

import dataclasses

import numpy as np
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs.mashost import VARIANTS, get_config, trajectory
from jaxmarl_llm.envs.build import array as build
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import mashost
from tests.recipes.test_fidelity import Table

pytestmark = pytest.mark.usefixtures("numpy_tables")

CONFIG = mashost.Config()
BUILDER = 0


def table_of(constructions):
    """Chains (query, [{component: reward} of each action]) as tables, whose actions alternate between the chains."""
    table, last, order = Table(build.COMPONENTS), [-1] * len(constructions), []
    for turn in range(max(len(pays) for _, pays in constructions)):
        for e, (query, pays) in enumerate(constructions):
            if turn < len(pays):
                last[e] = table.act(BUILDER, query, turn, last[e], **pays[turn])
                order.append((e, turn))
    return table, order


def credited(cfg, constructions):
    """Returns and advantages as lists of actions, one list for each construction."""
    table, order = table_of(constructions)
    columns = table.credit(mashost.algorithm(cfg).credit, **cfg.reward)
    out = [[[0.0] * len(pays) for _, pays in constructions] for _ in columns]
    for rows, column in zip(out, columns, strict=True):
        for (e, turn), value in zip(order, column, strict=True):
            rows[e][turn] = float(value)
    return out


RIGHT = [{}, {"impossible": 1, "accuracy": 1}]
WRONG = [{"nodes": 4, "chance": 0.5}]


def test_golden_advantages():
    """R = [1, 0] and rewards of actions [[0, -.1], [0]]: [[1, .9], [-1]], to the 1e-6 that is added to the std."""
    returns, advantage = credited(CONFIG, [(0, RIGHT), (0, WRONG)])
    assert returns == [[1.0, 1.0], [0.0]]
    np.testing.assert_allclose(advantage[0], [1.0, 0.9], atol=4e-6)
    np.testing.assert_allclose(advantage[1], [-1.0], atol=4e-6)


def test_a_construction_counts_once_however_long_it_is():
    """Six actions beside one: the mean is that of the two constructions. Costs and the node in use are paid."""
    long = [{"used": 1}, {}, {"impossible": 1}, {"used": 1}, {}, {"accuracy": 1, "cost": -0.2}]
    returns, advantage = credited(CONFIG, [(1, long), (1, [{"cost": -0.1}])])
    np.testing.assert_allclose(returns[0], [0.8] * 6, atol=1e-6)
    np.testing.assert_allclose(advantage[0], [1.02, 1.0, 0.9, 1.02, 1.0, 1.0], atol=1e-5)
    np.testing.assert_allclose(advantage[1], [-1.0], atol=1e-5)


def test_without_rewards_of_actions_every_action_has_the_advantage_of_its_construction():
    _, advantage = credited(trajectory(), [(0, RIGHT), (0, WRONG)])
    np.testing.assert_allclose([*advantage[0], *advantage[1]], [1.0, 1.0, -1.0], atol=4e-6)


def test_rewards_of_actions_are_there_where_all_constructions_are_equal():
    _, advantage = credited(CONFIG, [(0, RIGHT), (0, [{"used": 1}, {"accuracy": 1}])])
    np.testing.assert_allclose(advantage, [[0.0, -0.1], [0.02, 0.0]], atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_advantages_of_ragged_constructions_are_those_of_a_slow_twin(seed):
    rng = np.random.default_rng(seed)
    weights = {"impossible": -0.7, "used": 0.3, "actions": 0.5}
    cfg = dataclasses.replace(CONFIG, action_reward=weights)
    action, end = list(weights), ["accuracy", "cost"]
    draw = lambda names: {name: float(rng.integers(-2, 3)) for name in names}
    chain = lambda: [draw(action) for _ in range(rng.integers(4))] + [draw(action + end)]
    some = [(query, chain()) for query in range(4) for _ in range(rng.integers(1, 7))]
    returns, advantage = credited(cfg, some)
    whole = [pays[-1]["accuracy"] + pays[-1]["cost"] for _, pays in some]
    for e, (query, pays) in enumerate(some):
        group = np.array([whole[other] for other in range(len(some)) if some[other][0] == query])
        relative = 0.0 if np.ptp(group) == 0 else (whole[e] - group.mean()) / group.std()
        own = [sum(weight * pay[name] for name, weight in weights.items()) for pay in pays]
        assert returns[e] == [whole[e]] * len(pays)
        np.testing.assert_allclose(advantage[e], relative + np.array(own), atol=1e-4)


BAD = [
    ({"group": 1}, r"^config\.group: expected >= 2 \(a group compares samples\), got 1$"),
    ({"action_reward": {"used": float("nan")}}, r"^config\.action_reward\.used: expected a finite number, got nan$"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **change).check("config")


def test_a_reward_that_the_environment_does_not_pay():
    message = r"^config\.action_reward: the environment pays no 'advice'; it pays accuracy, actions, .*, used\b"
    with pytest.raises(ConfigError, match=message) as error:
        mashost.make(dataclasses.replace(CONFIG, action_reward={"used": 0.02, "advice": 1.0}))
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"^config\.reward: environment 'build' pays no 'advice'"):
        mashost.make(dataclasses.replace(CONFIG, reward={"advice": 1.0}))
    with pytest.raises(ConfigError, match=r"^config\.action_reward: the environment pays no 'impossible'; it pays"):
        mashost.make(dataclasses.replace(CONFIG, env=EnvConfig("consult"), reward={"accuracy": 1.0}))


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(mashost.Config, get_config(variant).to_dict())
        cfg.check("config")
        assert cfg.group == 8 and cfg.credit.stats_over == "episodes"
        assert (not cfg.action_reward) == (variant == "trajectory")
