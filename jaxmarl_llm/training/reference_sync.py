"""A reference policy that follows the policy (TR-DPO, arXiv 2404.09656, section 3): functions for ``config.update``.

A function of one's own binds other constants, and is named in their place::

    def slow(step, driver, state, batches):
        return ema_reference(step, driver, state, batches, share=0.01)
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.training.algorithm import Driver, StepParts, Updates
from jaxmarl_llm.training.learner import Batch
from jaxmarl_llm.training.train_step import policy_update
from jaxmarl_llm.types import TrainState


def ema_reference(
    step: StepParts, driver: Driver, state: TrainState, batches: Mapping[str, list[Batch]], *, share: float = 0.1
) -> Updates:
    """Update the policy, then move the reference towards the policy: ``ref <- share * policy + (1 - share) * ref``.

    A soft update after every step. Other arguments as in `train_step.policy_update`.

    Args:
        step: Parts of the training step.
        driver: Driver that runs the step.
        state: State before the update.
        batches: Micro-batches by model.
        share: Share of the policy in the new reference, from 0 to 1.

    Raises:
        ConfigError: The loss refers to no other policy.
    """
    _check(state)
    state, metrics = policy_update(step, driver, state, batches)
    old, new = state.params["reference"], state.params["agents"]
    moved = jax.tree.map(lambda r, a: (r + share * (a.astype(jnp.float32) - r)).astype(r.dtype), old, new)
    return state.replace(params={**state.params, "reference": moved}), metrics


def synced_reference(
    step: StepParts, driver: Driver, state: TrainState, batches: Mapping[str, list[Batch]], *, every: int = 100
) -> Updates:
    """Update the policy. After every ``every``-th step of the run the reference is the policy: a hard update.

    Args:
        step: Parts of the training step.
        driver: Driver that runs the step.
        state: State before the update.
        batches: Micro-batches by model.
        every: Steps between two updates of the reference. Steps of stage 0 count.

    Raises:
        ConfigError: The loss refers to no other policy.
    """
    _check(state)
    due = (jnp.asarray(state.step) + 1) % every == 0
    state, metrics = policy_update(step, driver, state, batches)
    copy = lambda tree: jax.tree.map(jnp.copy, tree)  # the next step reuses the memory of the policy
    new, old = state.params["agents"], state.params["reference"]
    chosen = jax.lax.cond(due, lambda new, old: copy(new), lambda new, old: copy(old), new, old)
    return state.replace(params={**state.params, "reference": chosen}), metrics


def _check(state: TrainState) -> None:
    if "reference" not in state.params:
        raise ConfigError("config.loss.kl_coef: expected a number above 0 with an update of the reference policy")
