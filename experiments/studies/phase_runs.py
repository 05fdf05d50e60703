"""One phase of a recipe as a program of its own: its steps are scanned, and seeds are mapped over.

Arms of a claim that share a phase run it once, and go on from its states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxmarl_llm.runs.phases import Phase, Recipe
from jaxmarl_llm.training.drivers import TracedDriver
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
