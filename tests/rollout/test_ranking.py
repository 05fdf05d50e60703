"""Ranking of joint actions: a slow twin, and equal results for NumPy and JAX arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.rollout.plans import handoff
from jaxmarl_llm.rollout.ranking import best_first, stops, team_value

PLAN = handoff(3)._replace(reward=(("speed", 0.5), ("style", -2.0)), stop_above=0.5)


def test_team_value_is_weighted_and_averaged_over_roles():
    rewards = {"style": np.float32([[[1, 3]], [[0, 2]]]), "speed": np.float32([[[4, 0]], [[8, 8]]]), "rest": None}
    value = team_value(PLAN, rewards)
    assert value.tolist() == [[0.5 * 2 - 2 * 2], [0.5 * 8 - 2 * 1]] and value.dtype == np.float32


@given(st.lists(st.tuples(st.sampled_from([-1.0, 0.25, 0.5, 0.75, 1.0]), st.booleans()), min_size=1, max_size=6))
def test_order_and_stop_against_a_slow_twin(joint):
    value, valid = np.float32([v for v, _ in joint]), np.array([ok for _, ok in joint])
    known = [v for v, ok in joint if ok]
    order = sorted(range(len(joint)), key=lambda i: (not joint[i][1], -joint[i][0] if joint[i][1] else 0.0))
    assert best_first(value, valid).tolist() == order
    assert bool(stops(PLAN, value, valid)) == bool(known and sum(known) / len(known) > 0.5)
    assert not stops(PLAN._replace(stop_above=None), value, valid)
    # a batch of states on the leading axis, compiled
    states = jnp.stack([value, value[::-1]]), jnp.stack([valid, valid[::-1]])
    both = best_first(*states)
    assert both[0].tolist() == order and both[1].tolist() == best_first(value[::-1], valid[::-1]).tolist()
    assert stops(PLAN, *states).tolist() == [bool(stops(PLAN, value, valid))] * 2


@pytest.mark.parametrize("rule", [best_first, lambda *x: stops(PLAN, *x)])
def test_rules_compile(rule):
    value, valid = np.float32([[1, 2, 2], [0, 3, 1]]), np.array([[True, True, True], [True, False, True]])
    np.testing.assert_array_equal(jax.jit(rule)(value, valid), rule(value, valid))
