"""Ranking of the joint actions of a state: one rule for array rollouts (JAX arrays) and host rollouts (NumPy arrays).

Every function takes J joint actions on the last axis of its values; leading axes are states.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxmarl_llm.rollout.plans import Plan
from jaxmarl_llm.types import Array


def team_value(plan: Plan, rewards: Mapping[str, Array]) -> Array:
    """Team reward [..., J]: the weighted sum of components (``plan.reward``), each averaged over roles.

    ``rewards``: by component [..., J, A], float32. Where a reward is invalid the array holds any finite number.
    """
    (first, weight), *others = plan.reward
    value = weight * rewards[first].mean(-1)
    for component, factor in others:
        value = value + factor * rewards[component].mean(-1)
    return value


def stops(plan: Plan, value: Array, valid: Array) -> Array:
    """Whether no joint action of a state [...] is continued, because their mean team reward is above the limit.

    ``value``: team reward [..., J]. ``valid``: [..., J], joint actions whose reward is known; the mean is over these.
    A state without any is continued. The limit is ``plan.stop_above``; None never stops.
    """
    xp = value.__array_namespace__()
    count = valid.sum(-1)
    if plan.stop_above is None:
        return count < 0
    mean = xp.where(valid, value, 0.0).sum(-1) / xp.maximum(count, 1).astype(value.dtype)
    return (count > 0) & (mean > plan.stop_above)


def best_first(value: Array, valid: Array) -> Array:
    """Indices [..., J] of joint actions by team reward, the largest first; equal ones keep their order.

    ``value``: team reward [..., J]. ``valid``: [..., J], joint actions whose reward is known; others come last.
    """
    xp = value.__array_namespace__()
    return xp.argsort(xp.where(valid, -value, xp.inf), axis=-1, stable=True)
