"""CoMAM: golden weights on a tree of rewards, a slow twin on ragged episodes, the order of episodes, bad input."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs.comam import VARIANTS, get_config, local, tiny, uniform
from jaxmarl_llm.credit.ranks import WeighByRanks
from jaxmarl_llm.credit.rules import Signal
from jaxmarl_llm.envs.facts import remember
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import comam
from tests.credit.test_ranks import GOLDEN, twin
from tests.recipes.test_fidelity import ROLES, SIZES, Table

pytestmark = pytest.mark.usefixtures("numpy_tables")

CONFIG = comam.Config()
PLAIN = dataclasses.replace(CONFIG, credit=dataclasses.replace(CONFIG.credit, baseline="none", normalise="none"))
EXTRACTOR, PROFILER, RETRIEVER = range(3)


@functools.cache
def credit_of(cfg_name):
    """The rule of a configuration; one object, so that it is compiled once."""
    cfg, weights = cfg_name
    base = {"plain": PLAIN, "compared": CONFIG}[cfg]
    return comam.algorithm(dataclasses.replace(base, weights=weights)).credit


def table_of(episodes):
    """Chains (task, turns of the extractor, {component: reward}) as tables, whose turns alternate between the chains.

    The last turn of a role has its rewards, and the last turn of all the answer, which is paid to all roles.
    """
    table, last, order = Table(remember.COMPONENTS), [-1] * len(episodes), []
    for turn in range(max(reads for _, reads, _ in episodes) + 2):
        for e, (task, reads, pays) in enumerate(episodes):
            role = min(max(turn - reads + 1, 0), RETRIEVER)
            if turn >= reads + 2:
                continue
            own = ("kept_recall", "kept_overlap") if turn == reads - 1 else ()
            own = {PROFILER: ("profile",), RETRIEVER: ("found_recall", "found_overlap")}.get(role, own)
            table.nodes.append((role, task, turn, last[e]))
            table.steps.append(len(table.nodes) - 1)
            pay = {name: {role: pays[name]} for name in own}
            if turn == reads + 1:
                pay["answer"] = dict.fromkeys(range(ROLES), pays["answer"])
            last[e] = table.move([len(table.steps) - 1], task, turn, last[e], pay)
            order.append((e, role))
    return table, order


def credited(kind, weights, episodes):
    """Returns and advantages: for each episode, role -> values of its turns."""
    table, order = table_of(episodes)
    columns = table.credit(credit_of((kind, weights)), **CONFIG.reward)
    out = [[{role: [] for role in range(ROLES)} for _ in episodes] for _ in columns]
    for rows, column in zip(out, columns, strict=True):
        for (e, role), value in zip(order, column, strict=True):
            rows[e][role].append(float(value))
    return out


def pays(kept=(0, 0), profile=0, found=(0, 0), answer=0):
    return dict(zip(remember.COMPONENTS, (answer, *kept, profile, *found), strict=False))


def own(pays):
    """r_n of the three agents, by the formulas of the paper."""
    return [
        0.8 * pays["kept_recall"] + 0.2 * pays["kept_overlap"],
        pays["profile"],
        0.2 * pays["found_recall"] + 0.8 * pays["found_overlap"],
    ]


@functools.cache
def compiled_weights():
    """(tree) -> the weights of the recipe's own rule [tasks, roles]."""
    rule = comam.rule(CONFIG).rules[0]
    assert isinstance(rule, WeighByRanks)

    def weights(tree):
        paid = tree.transitions.rewards
        local = sum(weight * paid[name] for name, weight in CONFIG.local_reward.items())
        return rule.of_tasks(tree, Signal(paid["answer"], sizes=SIZES), local)

    return jax.jit(weights)


def weights_of(episodes):
    return np.asarray(compiled_weights()(table_of(episodes)[0].tree()))


def test_golden_weights():
    """Global rewards .9, .1, .5, .3. The extractor is paid in their order, the retriever in the reverse one.

    Of these two agents alone w would be [.5954, .4046]. The profiler has the order of the extractor."""
    episodes = [(1, 2, pays((x, x), x, (1 - x, 1 - x), x)) for x in GOLDEN]
    w = weights_of(episodes)[1]
    v = np.array([1.0, 1.0, 0.61382733])
    np.testing.assert_allclose(w, np.exp(v) / np.exp(v).sum(), atol=1e-6)
    np.testing.assert_allclose(w[[0, 2]] / w[[0, 2]].sum(), [0.5954, 0.4046], atol=5e-5)
    returns, _ = credited("plain", "ranks", episodes)
    for x, got in zip(GOLDEN, returns, strict=True):
        np.testing.assert_allclose(got[EXTRACTOR], [x + w[EXTRACTOR] * x] * 2, atol=1e-6)
        np.testing.assert_allclose(got[RETRIEVER], [1 - x + w[RETRIEVER] * x], atol=1e-6)


def random_episodes(rng, answers=2):
    """Ragged episodes of four tasks, with ties of either reward."""
    draw = lambda: (rng.integers(3) / 2, rng.integers(3) / 3)
    some = lambda: pays(draw(), float(rng.integers(2)), draw(), rng.integers(answers) / max(answers - 1, 1))
    return [(task, int(rng.choice([1, 2])), some()) for task in range(4) for _ in range(rng.integers(1, 7))]


def twin_weights(episodes, task):
    mine = [pays for other, _, pays in episodes if other == task]
    v = [twin([round(own(p)[n], 5) for p in mine], [p["answer"] for p in mine]) for n in range(3)]
    return np.exp(v) / np.exp(v).sum()


@pytest.mark.parametrize("seed", range(4))
def test_credit_of_ragged_episodes_is_that_of_a_slow_twin(seed):
    """r = r_n + w_n r_ans, with w of the task; A = (r - mean) / std over one turn of one role of a task."""
    rng = np.random.default_rng(seed)
    episodes = random_episodes(rng, answers=2 + seed % 2)
    returns, advantage = credited("compared", "ranks", episodes)
    of_group, seen = {}, 0
    for e, (task, reads, paid) in enumerate(episodes):
        w = twin_weights(episodes, task)
        for role, turns in enumerate([range(reads), [reads], [reads + 1]]):
            value = own(paid)[role] + w[role] * paid["answer"]
            np.testing.assert_allclose(returns[e][role], [value] * len(turns), atol=1e-5)
            for place, turn in enumerate(turns):
                of_group.setdefault((task, role, turn), []).append((value, advantage[e][role][place]))
    for members in of_group.values():
        values, got = (np.array(column) for column in zip(*members, strict=True))
        want = 0 * values if np.ptp(values) < 1e-6 else (values - values.mean()) / values.std()
        np.testing.assert_allclose(got, want, atol=2e-3)
        seen += len(values) > 1 and np.ptp(values) > 0.1
    assert seen > 8


def test_uniform_weights_and_local_rewards_alone():
    episodes = random_episodes(np.random.default_rng(5))
    for weights, share in {"uniform": 1 / 3, "none": 0.0}.items():
        returns, _ = credited("plain", weights, episodes)
        for (_, _, paid), got in zip(episodes, returns, strict=True):
            for role in range(3):
                np.testing.assert_allclose(got[role], own(paid)[role] + share * paid["answer"], atol=1e-6)


def test_the_order_of_episodes_changes_no_weight():
    """Eight episodes of one task with binary answers, whose local rewards have ties."""
    rng = np.random.default_rng(1)
    episodes = [(2, 1, paid) for _, _, paid in (random_episodes(rng) + random_episodes(rng))[:8]]
    first = weights_of(episodes)
    assert np.ptp(first[2]) > 0.01 and abs(first[2].sum() - 1) < 1e-6
    for _ in range(5):
        np.testing.assert_allclose(weights_of([episodes[i] for i in rng.permutation(8)]), first, atol=1e-6)


def test_weights_are_uniform_where_answers_tell_nothing():
    """All answers right, all wrong, one episode alone, and a task without episodes."""
    right = [(0, 2, pays((x, x), 1, (1 - x, x), 1)) for x in GOLDEN]
    wrong = [(1, 1, {**paid, "answer": 0}) for _, _, paid in right]
    np.testing.assert_allclose(weights_of([*right, *wrong, (2, 2, right[0][2])]), 1 / 3, atol=1e-6)


def test_episodes_that_were_not_played_are_in_no_rank():
    """A reward that could not be computed is invalid. Its episode has no rank, and no weight depends on it."""
    episodes = [(0, 1, pays((x, x), 1 - x, (x, 0), x)) for x in GOLDEN]
    table, _ = table_of([*episodes, (0, 1, pays((5, 5), 5, (5, 5), -9))])
    tree = table.tree()
    moves = tree.transitions
    tree = tree.replace(transitions=moves.replace(valid=moves.valid & (np.arange(len(moves.valid)) % 5 != 4)))
    np.testing.assert_allclose(np.asarray(compiled_weights()(tree)), weights_of(episodes), atol=1e-6)


# -- configurations ----------------------------------------------------------------------------------------------------


def test_grpo_for_each_agent():
    assert (CONFIG.credit.group, CONFIG.credit.normalise, CONFIG.credit.discount) == ("task_role_turn", "std", 1.0)
    assert (CONFIG.loss.clip_low, CONFIG.loss.clip_high, CONFIG.group) == (0.2, 0.2, 8)
    assert CONFIG.team.parameter_sharing == "separate" and comam.make_plan(CONFIG).name == "flat(8)"


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(comam.Config, get_config(variant).to_dict())
        cfg.check("config")
        assert cfg.weights == {"tiny": "ranks", "uniform": "uniform", "local": "none"}[variant]
    assert dataclasses.replace(uniform(), weights="ranks") == dataclasses.replace(local(), weights="ranks") == tiny()
    assert tiny().team.max_new_tokens == 3 * 4 + 1  # the longest right completion: four statements and eos


BAD = [
    ({"group": 1}, r"^config\.group: expected >= 2, got 1$"),
    ({"weights": "ndcg"}, r"^config\.weights: unknown value 'ndcg'; choose from 'ranks', 'uniform', 'none'$"),
    ({"local_reward": {}}, r"^config\.local_reward: expected weights of reward components, got none$"),
    (
        {"local_reward": {"profile": float("nan")}},
        r"^config\.local_reward\.profile: expected a finite number, got nan$",
    ),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        dataclasses.replace(CONFIG, **change).check("config")
    assert "\n" not in str(error.value)


def test_rewards_that_the_environment_does_not_pay():
    with pytest.raises(
        ConfigError, match=r"^config\.local_reward: the environment pays no 'kept_recall'; it pays em, evidence"
    ):
        comam.make(dataclasses.replace(CONFIG, env=EnvConfig("facts"), reward={"em": 1.0}))
    with pytest.raises(ConfigError, match=r"^config\.reward: environment 'facts' pays no 'em'; it pays answer, kept"):
        comam.make(dataclasses.replace(CONFIG, reward={"em": 1.0}))
