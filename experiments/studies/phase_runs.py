"""One phase of a recipe as a program of its own: its steps are scanned, and seeds are mapped over.

Arms of a claim that share a phase run it once, and go on from its states. A run of an hour keeps its states
(`played_in_parts`), and goes on from the newest one when it is started again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.studies.common import origin
from jaxmarl_llm.config import to_dict
from jaxmarl_llm.runs.compiled import task_data
from jaxmarl_llm.runs.phases import Phase, Recipe
from jaxmarl_llm.training.algorithm import StepResult
from jaxmarl_llm.training.drivers import RunData, TracedDriver
from jaxmarl_llm.types import Params, TrainState


def stage(recipe: Recipe, phase: Phase) -> Callable[..., TrainState]:
    """(seeds, data, states, steps) -> states after those steps of a phase of the recipe.

    The steps are those of a compiled run (`runs.compiled`).
    """
    run = _scanned(phase, lambda result: None)
    return jax.jit(jax.vmap(lambda *inputs: run(*inputs)[0], in_axes=(0, 0, 0, None)))


def read_stage(phase: Phase, read: Callable[[StepResult], Any]) -> Callable[..., tuple[TrainState, Any]]:
    """(seeds, data, states, steps) -> states as of `stage`, and what ``read`` returns for each step [seeds steps ...].

    Args:
        phase: The phase that is played.
        read: Function of what a step played and trained. It is traced.
    """
    return jax.jit(jax.vmap(_scanned(phase, read), in_axes=(0, 0, 0, None)))


def _scanned(phase: Phase, read: Callable[[StepResult], Any]) -> Callable[..., tuple[TrainState, Any]]:
    def run(seed: jax.Array, data: Any, state: TrainState, steps: jax.Array) -> tuple[TrainState, Any]:
        driver = TracedDriver(seed, data)

        def step(state: TrainState, i: jax.Array) -> tuple[TrainState, Any]:
            state, result = phase.step(driver, state, i)
            return state.replace(step=state.step + 1), read(result)

        return jax.lax.scan(step, state, steps)

    return run


def _initial(recipe: Recipe, seeds: jax.Array) -> TrainState:
    """States before the first step."""
    return jax.jit(jax.vmap(lambda seed: recipe.initial(seed, 0)))(seeds)


def begun(recipe: Recipe, phase: Phase, states: TrainState) -> TrainState:
    """States at the first step of a phase."""
    return jax.jit(jax.vmap(lambda state: recipe.begin(phase, state)))(states)


def after_stage_0(recipe: Recipe, seeds: Sequence[int], data: RunData | None = None) -> tuple[TrainState, RunData]:
    """States at the begin of RL, after stage 0, and the data of the seeds.

    Args:
        recipe: A recipe of stage 0 and one phase of RL.
        seeds: Lanes of one program.
        data: Tasks and demonstrations of the seeds; None: those of the recipe.
    """
    which, data = jnp.array(seeds), task_data(recipe, seeds) if data is None else data
    taught = stage(recipe, recipe.phases[0])(which, data, _initial(recipe, which), jnp.arange(recipe.cfg.sft.steps))
    return begun(recipe, recipe.phases[-1], taught), data


def begun_as(recipe: Recipe, states: TrainState, agents: Params) -> TrainState:
    """States at the begin of RL of a recipe, with other parameters: arms of other teams begin alike.

    Args:
        recipe: A recipe whose roles and stage 0 are those of the run that led to ``states``.
        states: States after that stage 0, with a leading axis of seeds.
        agents: Parameters by model of ``recipe``, with the same axis.
    """
    given = states.replace(params={"shared": states.params["shared"], "agents": agents})
    return begun(recipe, recipe.phases[-1], given)


def played_in_parts(
    recipe: Recipe, seeds: Sequence[int], data: RunData, folder: Path, part: int = 100
) -> list[TrainState]:
    """States of the seeds after each phase of a recipe. They are the states of a run in one piece.

    After every ``part`` steps the states are written to ``folder``. The same call with the same commit goes on from
    there.

    Args:
        recipe: Recipe whose phases are played one after the other.
        seeds: Lanes of one program.
        data: Tasks and demonstrations of the seeds.
        folder: States are in a folder of it, named by commit, configuration and seeds.
        part: Number of steps.
    """
    which = jnp.array(seeds)
    identity = repr((origin()["commit"], to_dict(recipe.cfg), list(seeds)))
    folder = folder / hashlib.sha256(identity.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    state, after = _initial(recipe, which), []
    for number, phase in enumerate(recipe.phases):
        if phase.steps:
            if number:
                state = begun(recipe, phase, state)
            run, file = stage(recipe, phase), folder / f"phase_{number}.npz"
            done, state = _read_states(file, state)
            for first in range(done, phase.steps, part):
                end = min(first + part, phase.steps)
                state = run(which, data, state, jnp.arange(first, end))
                _write_states(file, end, state)
        after.append(state)
    return after


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _write_states(file: Path, done: int, state: TrainState) -> None:
    """Write the states after ``done`` steps of a phase. A process that ends meanwhile leaves the file as it was."""
    arrays = [jax.random.key_data(x) if _is_key(x) else x for x in jax.tree.leaves(state)]
    with open(file.with_suffix(".new"), "wb") as out:
        np.savez(out, *map(np.asarray, arrays), done=done)
    os.replace(file.with_suffix(".new"), file)


def _read_states(file: Path, state: TrainState) -> tuple[int, TrainState]:
    """Steps done and the states after them. Without a file they are 0 and ``state``, which also gives the structure."""
    if not file.exists():
        return 0, state
    leaves, structure = jax.tree.flatten(state)
    with np.load(file) as kept:
        arrays = [jnp.asarray(kept[f"arr_{i}"]) for i in range(len(leaves))]
        done = int(kept["done"])
    of_key = lambda x, like: jax.random.wrap_key_data(x) if _is_key(like) else x
    return done, jax.tree.unflatten(structure, map(of_key, arrays, leaves))
