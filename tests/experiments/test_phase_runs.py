"""A training run in parts: it goes on from what it has written, to the states of a run in one piece."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from experiments.studies import phase_runs
from jaxmarl_llm.configs.marshal import tiny
from jaxmarl_llm.recipes.marshal import make
from jaxmarl_llm.runs.compiled import make_program, task_data

pytest.importorskip("pgx")
SEEDS = [3, 4]


class Stopped(Exception):
    pass


def test_a_stopped_run_goes_on_to_the_states_of_a_run_in_one_piece(tmp_path, monkeypatch):
    cfg = tiny()
    cfg = dataclasses.replace(cfg, steps=3, batch=2, sft=dataclasses.replace(cfg.sft, steps=3, batch=2, samples=16))
    recipe, played, whole_stage = make(cfg), [], phase_runs.stage
    data = task_data(recipe, SEEDS)

    def parts_until(most):
        def stage(recipe, phase):
            run = whole_stage(recipe, phase)

            def one(seeds, data, state, steps):
                if len(played) == most:
                    raise Stopped
                played.append(steps.tolist())
                return run(seeds, data, state, steps)

            return one

        monkeypatch.setattr(phase_runs, "stage", stage)
        return lambda seeds: phase_runs.played_in_parts(recipe, seeds, data, tmp_path, part=2)

    with pytest.raises(Stopped):
        parts_until(3)(SEEDS)  # two parts of stage 0, one of RL
    with pytest.raises(Stopped):  # other seeds begin anew
        parts_until(4)(SEEDS[::-1])
    states = parts_until(None)(SEEDS)
    assert played == [[0, 1], [2], [0, 1], [0, 1], [2]]
    assert [state.step.tolist() for state in states] == [[3, 3], [6, 6]]
    assert states[1].params["reference"].keys() == states[0].params["agents"].keys()
    chex.assert_trees_all_equal(states[1].params["reference"], states[0].params["agents"])
    one_piece, _ = jax.jit(jax.vmap(make_program(recipe).run))(jnp.array(SEEDS), data)
    # Adam makes steps of 3e-3 of gradients whose last bits differ.
    chex.assert_trees_all_close(states[-1].params, one_piece.params, atol=1e-4)
    assert parts_until(5)(SEEDS)[-1].step.tolist() == [6, 6]  # nothing is left to play
