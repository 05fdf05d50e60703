"""One phase of a recipe as a program of its own: its steps are scanned, and seeds are mapped over.

Arms of a claim that share a phase run it once, and go on from its states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmarl_llm.runs.compiled import task_data
from jaxmarl_llm.runs.phases import Phase, Recipe
from jaxmarl_llm.training.drivers import RunData, TracedDriver
from jaxmarl_llm.types import TrainState


def stage(recipe: Recipe, phase: Phase) -> Callable[..., TrainState]:
    """(seeds, data, states, steps) -> states after those steps of a phase of the recipe.

    The steps are those of a compiled run (`runs.compiled`).
    """

    def run(seed: jax.Array, data: Any, state: TrainState, steps: jax.Array) -> TrainState:
        driver = TracedDriver(seed, data)

        def step(state: TrainState, i: jax.Array) -> tuple[TrainState, None]:
            state, _ = phase.step(driver, state, i)
            return state.replace(step=state.step + 1), None

        return jax.lax.scan(step, state, steps)[0]

    return jax.jit(jax.vmap(run, in_axes=(0, 0, 0, None)))


def after_stage_0(recipe: Recipe, seeds: Sequence[int], data: RunData | None = None) -> tuple[TrainState, RunData]:
    """States at the begin of RL, after stage 0, and the data of the seeds.

    Args:
        recipe: A recipe of stage 0 and one phase of RL.
        seeds: Lanes of one program.
        data: Tasks and demonstrations of the seeds; None: those of the recipe.
    """
    which, data = jnp.array(seeds), task_data(recipe, seeds) if data is None else data
    start = jax.jit(jax.vmap(lambda seed: recipe.initial(seed, 0)))(which)
    start = stage(recipe, recipe.phases[0])(which, data, start, jnp.arange(recipe.cfg.sft.steps))
    return jax.jit(jax.vmap(lambda state: recipe.begin(recipe.phases[-1], state)))(start), data
