"""Rollouts by the policy of an earlier step, as in a run that samples while it updates (``config.staleness``).

Step i of a phase plays with the parameters and memories that the phase had before step ``max(i - steps, 0)``. The state
keeps what the next steps need: parameters in ``params["stale"]``, memories in ``kept["stale"]``, by age in steps. Both
are saved, so a run that was stopped goes on with the same samples.

Shared arguments: ``state`` is the state of a run, and ``steps`` is ``config.staleness``, at least 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxmarl_llm.types import PyTree, TrainState

NAME = "stale"


def begin(state: TrainState, steps: int) -> TrainState:
    """The state at the begin of a phase: each age has the present parameters and memories."""
    now, ages = _copy(state.params["agents"]), [str(age) for age in range(1, steps + 1)]
    return _with(state, dict.fromkeys(ages, now), dict.fromkeys(ages, state.memory))


def acting(state: TrainState, steps: int, rl_step: Any) -> TrainState:
    """The state that plays: parameters, memories and number of an earlier step.

    ``rl_step`` is the number of the step in its phase; it may be traced.
    """
    oldest = str(steps)
    params = {**state.params, "agents": state.params[NAME][oldest]}
    memory = state.kept[NAME][oldest] if state.memory else state.memory
    return state.replace(step=state.step - jnp.minimum(rl_step, steps), params=params, memory=memory)


def push(state: TrainState, steps: int) -> TrainState:
    """The state with the present parameters and memories as those of age 1. An update may then reuse their arrays."""
    agents, memories = state.params[NAME], state.kept.get(NAME, {})
    older = [(str(age), str(age - 1)) for age in range(2, steps + 1)]
    return _with(
        state,
        {"1": _copy(state.params["agents"]), **{age: agents[younger] for age, younger in older}},
        {"1": state.memory, **{age: memories[younger] for age, younger in older if memories}},
    )


def inputs_of(state: TrainState) -> tuple[int, PyTree]:
    """The inputs of the next rollout, which tell it from others: the number of the step, and the arrays that play."""
    return int(state.step), (state.key, state.params.get(NAME), state.kept.get(NAME))


def _copy(agents: Any) -> Any:
    """A copy in arrays of its own: the update reuses those of the parameters."""
    return jax.tree.map(jnp.copy, agents)


def _with(state: TrainState, agents: Any, memories: Any) -> TrainState:
    state = state.replace(params={**state.params, NAME: agents})
    return state.with_kept({**state.kept, NAME: memories}) if state.memory else state
