"""What is compiled ahead is what the steps then run."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs import joyagents_r1 as shipped
from jaxmarl_llm.generation.buckets import coarse, coarse_sizes
from jaxmarl_llm.recipes import grpo, joyagents_r1
from jaxmarl_llm.runs.phases import with_algorithm
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.algorithm import all_groups
from jaxmarl_llm.training.packing import micro_rows, micro_sizes
from jaxmarl_llm.training.programs import step_programs

GRPO = {
    "steps": 1,
    "batch": 4,
    "group": 2,
    "reward": {"payoff": 1.0},
    "sft": {"steps": 0},
    "env": {"name": "matrix", "eval_tasks": 2},
    "team": {"max_new_tokens": 1, "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4}},
}


def small_joyagents():
    """The demo with small models: several sizes of micro-batches, nodes of one completion, memories."""
    cfg = shipped.tiny()
    small = dataclasses.replace(cfg.team.backbone, hidden_size=16, intermediate_size=16, num_layers=1)
    return dataclasses.replace(
        cfg,
        batch=6,
        team=dataclasses.replace(cfg.team, backbone=small),
        sft=dataclasses.replace(cfg.sft, steps=0),
    )


def copied(state):
    """Bytes of each model's optimizer state."""
    return {n: b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(s)) for n, s in state.opt_state.items()}


def compilers_of(recipe, state):
    step = recipe.phases[-1].step
    runner, cfg = recipe.env_runner, recipe.cfg
    rollout, shapes = runner.program(
        step.players, state.params, state.memory, range(cfg.batch), step.plan, cfg.sampling, step.algorithm.memory
    )
    return step_programs(step, state, jax.eval_shape(rollout, *shapes))


@pytest.mark.parametrize(
    "recipe, programs",
    [
        (lambda: grpo.make(from_dict(grpo.Config, GRPO)), {"accumulate", "apply_gradient"}),
        (
            lambda: joyagents_r1.make(small_joyagents()),
            {"accumulate", "apply_gradient", "lesson_program", "update"},
        ),
    ],
    ids=["grpo", "joyagents_r1"],
)
def test_steps_compile_nothing_that_was_compiled_before(recipe, programs, tmp_path):
    made = recipe()
    algorithm = made.phases[-1].step.algorithm
    made = with_algorithm(made, dataclasses.replace(algorithm, select=all_groups))  # there is an update
    state, seen = made.init(0), []
    listen = lambda event, seconds, fun_name="", **_: (
        seen.append(fun_name[4:-1]) if event.endswith("backend_compile_duration") else None
    )
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        compilers = compilers_of(made, state)
        for compiler in compilers:
            compiler()
        assert set(seen) == programs and len(seen) == len(compilers), "each program once"
        seen.clear()
        with Logger(tmp_path, resume_step=None, total_steps=3, tensorboard=False) as logger:
            for _ in range(3):
                before = copied(state)
                state, _ = made.step(state, logger)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert "rollout" in seen and not programs & set(seen)
    assert any(before[name] != own for name, own in copied(state).items())


def test_other_updates_have_no_compilers():
    """Two epochs and a reference policy have other programs, which are compiled when they are needed."""
    for change in ({"loss": {"epochs": 2}}, {"loss": {"kl_coef": 0.1}}):
        made = grpo.make(from_dict(grpo.Config, GRPO | change))
        assert compilers_of(made, made.init(0)) == []


@pytest.mark.parametrize("most", [1, 3, 9, 100])
def test_micro_sizes_are_those_of_any_number_of_nodes(most):
    for nodes in range(1, 70):
        left, sizes = nodes, []
        while left > 0:
            sizes.append(micro_rows(most, left, 1))
            left -= sizes[-1]
        assert set(sizes) <= set(micro_sizes(most, 70))
    assert micro_sizes(most, 70) == sorted(micro_sizes(most, 70), reverse=True)


def test_coarse_sizes_are_those_of_any_number():
    assert {coarse(n, 3) for n in range(1, 50)} == set(coarse_sizes(49, 3))
    assert np.diff(coarse_sizes(49, 3)).min() > 0
