"""The first steps of a recipe, as tests of text forms look at them."""

import jax

from jaxmarl_llm.telemetry.logger import Logger


def first_steps(recipe, folder, steps):
    """States before and after each of ``steps`` steps, and the metrics of each; ``folder`` takes the logs."""
    with Logger(folder, resume_step=None, total_steps=steps, tensorboard=False) as log:
        states, rows = [recipe.init(0)], []
        for _ in range(steps):
            state, metrics = recipe.step(jax.tree.map(jax.numpy.copy, states[-1]), log)
            states, rows = [*states, state], [*rows, metrics]
    recipe.env_runner.close()
    return states, rows
