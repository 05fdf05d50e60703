"""Credit of menus: the formula of HILA, numpy twins, the exact gradient of the policy that chooses, draws by policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.credit.menus import MenuRelative, menu_advantage, menu_shares, policy_choices
from jaxmarl_llm.credit.rules import GroupRelative, Signal
from jaxmarl_llm.types import MENU, POLICY, Counts, Nodes, Retrieval, Steps, Transitions, Tree


def table(rng, nodes=5, most=5):
    """Ragged menus [C]: group, return, log-prob and validity; the first one is all invalid."""
    group = np.repeat(np.arange(nodes), rng.integers(1, most + 1, nodes))
    c = len(group)
    valid = (rng.random(c) < 0.8) & (group > 0)
    value = np.where(valid, rng.normal(size=c), np.nan)
    return group, value.astype(np.float32), (4 * rng.normal(size=c) - 40).astype(np.float32), valid


def twin(group, value, logprob, valid, weights):
    """Shares and advantages by loops in float64."""
    share, advantage = np.zeros(len(group)), np.zeros(len(group))
    for g in set(group.tolist()):
        rows = [i for i in range(len(group)) if group[i] == g and valid[i]]
        if rows:
            mass = [np.exp(float(logprob[i]) + 40) if weights == "by_policy" else 1.0 for i in rows]
            for i, m in zip(rows, mass):
                share[i] = m / sum(mass)
            mean = sum(share[i] * float(value[i]) for i in rows)
            for i in rows:
                advantage[i] = len(rows) * share[i] * (float(value[i]) - mean)
    return share, advantage


@pytest.mark.parametrize("weights", ["alike", "by_policy"])
@pytest.mark.parametrize("seed", range(4))
def test_shares_and_advantages_are_those_of_a_slow_twin(seed, weights):
    group, value, logprob, valid = table(np.random.default_rng(seed))
    share = menu_shares(logprob, group, valid, 5, weights)
    got = menu_advantage(value, share, group, valid, 5)
    for ours, want in zip((share, got), twin(group, value, logprob, valid, weights)):
        np.testing.assert_allclose(ours, want, atol=2e-5)


def test_golden_advantages():
    """R = 1 (right), 0 (wrong), 1 - .1 (create), 1 - .3 (defer): A = R - .65."""
    value, group, valid = np.array([1, 0, 0.9, 0.7], np.float32), np.zeros(4, int), np.ones(4, bool)
    share = menu_shares(np.zeros(4), group, valid, 1, "alike")
    np.testing.assert_allclose(menu_advantage(value, share, group, valid, 1), [0.35, -0.65, 0.25, 0.05], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_weights_of_the_policy_make_the_exact_gradient_of_its_expected_return(seed):
    rng = np.random.default_rng(seed)
    logits, value = jnp.array(rng.normal(size=6)), jnp.array(rng.normal(size=6))
    menu, zero, valid = jnp.array([0, 2, 3, 5]), jnp.zeros(4, int), jnp.ones(4, bool)
    logprob = lambda x: jax.nn.log_softmax(x)[menu]
    share = menu_shares(logprob(logits), zero, valid, 1, "by_policy")
    advantage = menu_advantage(value[menu], share, zero, valid, 1)
    ours = jax.grad(lambda x: (advantage * logprob(x)).mean())(logits)
    exact = jax.grad(lambda x: jax.nn.softmax(logprob(x)) @ value[menu])(logits)
    np.testing.assert_allclose(ours, exact, atol=1e-6)


def tree(source, logprob):
    """One node with one-token completions."""
    c, ones = len(source), jnp.ones(1, jnp.int32)
    nodes = Nodes(ones[None], ones, ones * 0, ones * 0, ones * 0, ones * 0, -ones, Retrieval.empty(1), ones > 0)
    col = jnp.zeros((c, 1), jnp.int32)
    yes, nil = jnp.ones(c, bool), jnp.zeros(c, jnp.int32)
    steps = Steps(nil, col, nil + 1, yes[:, None], jnp.array(logprob)[:, None], ~yes, jnp.array(source), nil, yes)
    moves = Transitions(jnp.arange(c)[:, None], nil - 1, nil, nil, {}, yes, yes, yes)
    return Tree(nodes, steps, moves, Counts(*[nil[0]] * 7))


def test_alike_is_the_mean_over_siblings_and_samples_have_no_advantage():
    value = jnp.array([1.0, 0.0, 0.9, 0.7])
    signal = Signal(jnp.zeros((4, 1)), value=value, valid=jnp.ones(4, bool))
    of = tree([MENU] * 4, [-1.0, -2.0, -3.0, -4.0])
    plain = GroupRelative("node", "mean", "none")(of, signal)
    ours = MenuRelative()(of, signal)
    np.testing.assert_allclose(ours.advantage, plain.advantage, atol=1e-6)
    np.testing.assert_allclose(ours.stats.variance, plain.stats.variance)
    by_policy = MenuRelative("by_policy")(of, signal)
    assert np.abs(by_policy.advantage - plain.advantage).max() > 0.1
    assert not MenuRelative()(tree([POLICY] * 4, [-1.0] * 4), signal).advantage.any()


def test_draws_have_the_probabilities_of_the_policy():
    probability = np.array([0.1, 0.2, 0.05, 0.15])  # half of the policy's mass is outside the menu
    of = tree([MENU] * 4, np.log(probability).astype(np.float32))
    drawn = jax.vmap(lambda key: policy_choices(key, of))(jax.random.split(jax.random.key(0), 4000))
    assert (np.asarray(drawn).sum(1) == 1).all()
    np.testing.assert_allclose(np.asarray(drawn).mean(0), 2 * probability, atol=0.03)
    assert not policy_choices(jax.random.key(0), tree([POLICY] * 4, [-1.0] * 4)).any()
