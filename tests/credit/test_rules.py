"""Credit rules of a user's own: composed with the standard chain, or refused with what is missing."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.rules import chain
from jaxmarl_llm.errors import ConfigError
from tests.recipes.test_fidelity import Table


def signs(tree, signal):
    return signal.replace(advantage=jnp.sign(signal.advantage))


def unchanged(tree, signal):
    return signal


def table():
    out = Table()
    for task, pay in ((0, 1.0), (0, 4.0), (1, 2.0), (1, -1.0)):
        out.act(0, task, 0, pay=pay)
    return out


def test_a_rule_is_composed_with_the_standard_chain():
    standard = standard_rule(Credit(group="task_role", normalise="none"))
    np.testing.assert_allclose(table().credit(standard)[1], [-1.5, 1.5, 1.5, -1.5])
    np.testing.assert_allclose(table().credit(chain(*standard.rules, signs))[1], [-1, 1, 1, -1])


def test_a_rule_that_is_alone_is_told_that_it_replaces_the_chain():
    with pytest.raises(ConfigError, match=r"^config.credit.rule: <function signs.*TypeError: .*whole chain") as caught:
        table().credit(signs)  # the sign of no advantage
    assert isinstance(caught.value.__cause__, TypeError) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"expected value, advantage and valid .* replaces the whole"):
        table().credit(unchanged)
