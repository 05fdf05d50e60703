"""SCMA: golden rewards, a slow twin on ragged groups, why the scorer is not paid the shared reward, bad input."""

import dataclasses

import numpy as np
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs.scma import VARIANTS, get_config, shared, tiny, uniform
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.segments import array as segments
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import scma
from tests.envs.test_segments import play
from tests.recipes.test_fidelity import Table

pytestmark = pytest.mark.usefixtures("numpy_tables")

CONFIG = scma.Config()


def credited(cfg, episodes):
    """Returns and advantages [episodes, roles]. ``episodes``: (question, rewards of all, malformed of each role)."""
    table = Table(segments.COMPONENTS)
    for question, paid, malformed in episodes:
        parent = -1
        for role, bad in enumerate(malformed):
            table.nodes.append((role, question, role, parent))
            table.steps.append(len(table.nodes) - 1)
            pay = {"malformed": {role: bad}}
            if role == len(malformed) - 1:
                pay |= {name: dict.fromkeys(range(len(malformed)), value) for name, value in paid.items()}
            parent = table.move([len(table.steps) - 1], question, role, parent, pay)
    columns = table.credit(scma.algorithm(cfg).credit, **cfg.reward)
    return [np.asarray(column).reshape(-1, len(segments.ROLES)) for column in columns]


FACTS = {"accuracy": 1.0, "penalty": 0.32, "follows": 1.0, "left_out": 0.2, "length": 10.0}


def test_golden_rewards():
    """Accuracy 1, penalty .32 and alpha .5 give the reasoner .84. The others have 1 + .2, less .2 if malformed."""
    np.testing.assert_allclose(credited(CONFIG, [(0, FACTS, (0, 0, 0))])[0], [[0.84, 1.2, 1.2]], atol=1e-6)
    np.testing.assert_allclose(credited(CONFIG, [(0, FACTS, (1, 0, 1))])[0], [[0.64, 1.2, 1.0]], atol=1e-6)


def test_the_shared_form_pays_all_roles_the_reward_of_the_reasoner():
    np.testing.assert_allclose(credited(shared(), [(0, FACTS, (0, 1, 0))])[0], [[0.84, 0.64, 0.84]], atol=1e-6)


def test_the_uniform_penalty_counts_tokens():
    paid = credited(uniform(), [(0, FACTS, (0, 0, 0))])[0]
    weight = uniform().role_reward["reasoner"]["length"]
    assert weight < 0 and "penalty" not in uniform().role_reward["reasoner"]
    np.testing.assert_allclose(paid, [[1 + 10 * weight, 1.2, 1.2]], atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_advantages_of_ragged_groups_are_those_of_a_slow_twin(seed):
    """Each role is compared with itself over the episodes of its question."""
    rng = np.random.default_rng(seed)
    own = {role: {k: float(rng.normal()) for k in FACTS if rng.random() < 0.6} for role in segments.ROLES[:2]}
    cfg = dataclasses.replace(CONFIG, reward={"malformed": -0.3, "segments": 0.1}, role_reward=own)
    draw = lambda: {k: float(rng.integers(3)) for k in (*FACTS, "segments")}
    some = [
        (question, draw(), tuple(int(x) for x in rng.integers(2, size=3)))
        for question in range(4)
        for _ in range(rng.integers(1, 7))
    ]
    returns, advantage = credited(cfg, some)
    for k, role in enumerate(segments.ROLES):
        value = np.array(
            [sum(w * paid[c] for c, w in own.get(role, {}).items()) + 0.1 * paid["segments"] - 0.3 * bad[k]
             for _, paid, bad in some]
        )  # fmt: skip
        np.testing.assert_allclose(returns[:, k], value, atol=1e-5)
        for e, (question, *_) in enumerate(some):
            group = value[[other[0] == question for other in some]]
            want = 0.0 if np.ptp(group) < 1e-9 else (value[e] - group.mean()) / group.std()
            np.testing.assert_allclose(advantage[e, k], want, atol=1e-4)


# -- what a scorer learns ----------------------------------------------------------------------------------------------


TEXT = "gh;+4=7;xyz;-2=5", "ABC"  # filler, step, filler, step


def learned(cfg, table, updates=300, rate=2.0):
    """Mean weights of steps and of filler after exact gradient ascent on the scorer's expected reward.

    The scorer has a distribution over 1 to 5 for steps and one for filler. ``table``: rewards by [step, filler].
    """
    keep = ("accuracy", "penalty", "follows", "left_out")
    rows = [(0, {name: paid[name] for name in keep}, (0, 0, 0)) for paid in table]
    reward = credited(cfg, rows)[0][:, segments.SCORER].reshape(5, 5)
    logits, softmax = np.zeros((2, 5)), lambda row: np.exp(row) / np.exp(row).sum()
    for _ in range(updates):
        steps, filler = map(softmax, logits)
        of_steps, of_filler, mean = reward @ filler, steps @ reward, steps @ reward @ filler
        logits += rate * np.stack([steps * (of_steps - mean), filler * (of_filler - mean)])
    return [float(softmax(row) @ np.arange(1, 6)) for row in logits]


@pytest.fixture(scope="module")
def table():
    """Rewards of the environment for every pair of weights of steps and of filler, on one right text."""
    scripts = [(*TEXT, f"A{f}B{s}C{f}D{s}") for s in range(1, 6) for f in range(1, 6)]
    return play(scripts, ["3+4-2"] * 25)[0]


def test_a_scorer_that_is_paid_the_shared_reward_gives_every_segment_weight_5(table):
    """Then the penalty is gone."""
    steps, filler = learned(shared(), table)
    assert steps > 4.9 and filler > 4.9


def test_with_rewards_of_its_own_the_scorer_leaves_filler_out_and_keeps_steps(table):
    steps, filler = learned(tiny(), table)
    assert steps > 3.5 and filler < 2
    assert learned(tiny(), table, updates=0) == [3.0, 3.0]


# -- configuration -----------------------------------------------------------------------------------------------------


BAD = [
    ({"group": 1}, r"^config\.group: expected >= 2 \(a group compares samples\), got 1$"),
    (
        {"role_reward": {"scorer": {"follows": float("nan")}}},
        r"^config\.role_reward\.scorer\.follows: expected a finite number, got nan$",
    ),
    (
        {"role_reward": {"judge": {"follows": 1.0}}},
        r"^config\.role_reward: no role 'judge' in environment 'segments', whose roles are reasoner, segmenter, scorer",
    ),
    ({"env": EnvConfig("build")}, r"^config\.role_reward: no role 'reasoner' in environment 'build', whose roles are"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIG, **change).check("config")


def test_a_reward_that_the_environment_does_not_pay():
    message = r"^config\.role_reward\.scorer: the environment pays no 'advice'; it pays accuracy, "
    with pytest.raises(ConfigError, match=message) as error:
        scma.make(dataclasses.replace(CONFIG, role_reward={"scorer": {"advice": 1.0}}))
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"^config\.reward: environment 'segments' pays no 'advice'"):
        scma.make(dataclasses.replace(CONFIG, reward={"advice": 1.0}))


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(scma.Config, get_config(variant).to_dict())
        cfg.check("config")
        assert cfg.group == 8 and cfg.credit.group == "task_role"
        assert cfg.team.max_new_tokens >= cfg.env.build().max_new_tokens
        assert (not cfg.role_reward) == (variant == "shared")
        if variant not in ("shared", "tiny"):
            assert cfg.role_reward["scorer"] == tiny().role_reward["scorer"]
    assert from_dict(scma.Config, get_config().to_dict()) == tiny()
