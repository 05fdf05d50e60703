"""Credit of other papers: GDPO and DAPO's treatment of long completions, against loops over the formulas."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.decoupled import Decoupled
from jaxmarl_llm.credit.overlong import SoftOverlong, complete_steps, soft_overlong
from jaxmarl_llm.credit.rules import Whiten, chain
from tests.recipes.test_fidelity import Table

STANDARD = standard_rule(Credit(group="task_role"))
WEIGHTS = {"accuracy": 1.0, "format": 0.5}


def table(rewards):
    """One turn of one role: task -> pairs of (accuracy, format)."""
    out = Table(tuple(WEIGHTS))
    for task, pairs in enumerate(rewards):
        for accuracy, form in pairs:
            out.act(0, task, 0, accuracy=accuracy, format=form)
    return out


def gdpo(rewards):
    """Advantages by loops: each component within its group, the weighted sum, then the whole batch."""
    out = []
    for pairs in rewards:
        parts = []
        for k in (0, 1):
            values = [float(pair[k]) for pair in pairs]
            mean = sum(values) / len(values)
            std = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
            parts.append([(v - mean) / std if std else 0.0 for v in values])
        out += [WEIGHTS["accuracy"] * a + WEIGHTS["format"] * b for a, b in zip(*parts)]
    mean = sum(out) / len(out)
    std = (sum((v - mean) ** 2 for v in out) / len(out)) ** 0.5
    return [(v - mean) / std for v in out]


@pytest.mark.parametrize("seed", range(5))
def test_gdpo_equals_the_loop(seed):
    rng = np.random.default_rng(seed)
    rewards = [rng.integers(0, 3, (rng.integers(2, 6), 2)).tolist() for _ in range(4)]
    rule = chain(Decoupled(STANDARD, tuple(WEIGHTS.items())), Whiten())
    returns, got = table(rewards).credit(rule, **WEIGHTS)
    np.testing.assert_allclose(got, gdpo(rewards), atol=2e-4)
    np.testing.assert_allclose(returns, [a + 0.5 * b for pairs in rewards for a, b in pairs])


def test_equal_sums_of_different_components_keep_a_difference():
    """The example of the paper: two completions of one sum have one advantage in GRPO, and two in GDPO."""
    rewards = [[(0, 0), (0, 2), (1, 0), (1, 2)]]
    _, plain = table(rewards).credit(STANDARD, **WEIGHTS)
    assert plain[1] == plain[2]  # 0 + 0.5 * 2 = 1 + 0
    _, own = table(rewards).credit(Decoupled(STANDARD, tuple(WEIGHTS.items())), **WEIGHTS)
    np.testing.assert_allclose(own, [-1.5, -0.5, 0.5, 1.5], atol=1e-4)


def test_one_component_is_the_rule_itself():
    rewards = [[(0, 1), (3, 1), (1, 1)]]
    _, plain = table(rewards).credit(STANDARD, accuracy=1.0)
    _, own = table(rewards).credit(Decoupled(STANDARD, (("accuracy", 1.0),)), accuracy=1.0)
    np.testing.assert_array_equal(plain, own)


def test_soft_overlong_golden_numbers():
    """DAPO's own lengths: 16,384 expected tokens and a margin of 4,096."""
    got = soft_overlong(jnp.array([0, 16_384, 16_385, 18_432, 20_480, 20_481, 90_000]), 20_480, 4_096)
    np.testing.assert_allclose(got, [0, 0, -1 / 4_096, -0.5, -1, -1, -1])


def test_the_penalty_is_added_before_the_comparison_and_truncated_ones_are_left_out():
    made = table([[(1, 0)] * 4])
    tree = made.tree()
    length = np.asarray(tree.steps.length).copy()
    length[:4] = [4, 8, 10, 12]
    tree = tree.replace(steps=tree.steps.replace(length=length))
    made.tree = lambda: tree
    back_up, per_completion, compare = STANDARD.rules
    rule = chain(back_up, per_completion, SoftOverlong(12, 4, weight=2.0), compare)
    returns, advantage = made.credit(rule, accuracy=1.0)
    np.testing.assert_allclose(returns, [1, 1, 0, -1])
    values = np.array([1, 1, 0, -1.0])
    np.testing.assert_allclose(advantage, (values - values.mean()) / values.std(), atol=1e-4)

    trained = np.arange(len(length)) < 3
    cut = np.arange(len(length)) == 1
    left = complete_steps(None, tree.replace(steps=tree.steps.replace(truncated=cut)), trained)
    assert np.flatnonzero(left).tolist() == [0, 2]
