"""Figures of the claims on HILA: counts of types by hand, deferral and accuracy against loops over a rollout."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.claims import hila
from experiments.studies.phase_runs import after_stage_0
from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.configs.hila import outer, tiny
from jaxmarl_llm.envs.defer.array import TYPES
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.hila import make, make_plan
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.optimizers import Optimizer

SMALL = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
SEEDS = [7, 8]
PEERS = ((0.95, 0.3, 0.2, 0.2), (0.3, 0.95, 0.3, 0.2))


def test_types_are_right_where_most_questions_have_the_choice_of_the_oracle():
    """The oracle takes 1 2 c d. Three of four questions of + have 1, and both of * have d."""
    types = np.array([[0, 0, 0, 0, 1, 2, 2, 3], [0, 1, 2, 3, 3, 3, 3, 3]])
    chosen = np.array([[0, 0, 0, 2, 1, 3, 3, 3], [0, 1, 2, 3, 3, 3, 3, 1]])
    right, share = hila.types_right(tiny(), np.eye(4)[chosen], types)
    assert right == [3.0, 4.0] and share == pytest.approx([0.0, 0.8])
    np.testing.assert_allclose(hila.taken_of(chosen, types)[0, 0], [0.75, 0, 0.25, 0])


def test_figures_are_those_of_loops_over_a_rollout():
    team = TeamConfig(parameter_sharing="separate", backbone=SMALL, max_new_tokens=1, remat=False)
    env, sft = EnvConfig("defer", {"planted": False}, eval_tasks=40), SFT(40, 32, Optimizer(learning_rate=1e-2))
    cfg = dataclasses.replace(outer(), team=team, env=env, sft=sft)
    recipe = make(cfg)
    state, data = after_stage_0(recipe, SEEDS)  # some answers are right
    params = state.params
    seen = hila.figures_of(cfg, params, data)
    rollout = jax.jit(make_rollout(recipe.team, recipe.env_runner.env, make_plan(cfg), cfg.sampling))
    for lane in range(len(SEEDS)):
        own, tasks = (jax.tree.map(lambda x, lane=lane: x[lane], tree) for tree in (params, data.held_out))
        tree = jax.device_get(rollout(own, {}, tasks, jax.random.key(0), 0))
        moves, steps, nodes = tree.transitions, tree.steps, tree.nodes
        deferral, accuracy, chosen, hits, created = [], [], [], [], {of: [] for of in range(len(TYPES))}
        for task, of in enumerate(tasks["type"]):
            chance, right = {}, {"1": PEERS[0][of], "2": PEERS[1][of], "d": 1.0}
            for j in np.flatnonzero((moves.task == task) & (moves.turn == 0) & moves.played):
                letter = chr(steps.tokens[moves.steps[j, 0], 0])
                chance[letter] = np.exp(steps.logprobs[moves.steps[j, 0], 0])
                if letter == "c":
                    (behind,) = np.flatnonzero((moves.parent == j) & moves.played)
                    said = chr(steps.tokens[moves.steps[behind, 0], 0])
                    assert nodes.role[steps.node[moves.steps[behind, 0]]] == 1
                    right["c"] = float(said == str(tasks["answer"][task]))
                    created[int(of)].append(right["c"])
            top = max(chance, key=chance.get)
            deferral.append(chance["d"])
            accuracy.append(sum(chance[x] * right[x] for x in "12cd"))
            chosen.append(top == "d")
            hits.append(right[top])
        for name, values in {
            "deferral": deferral, "accuracy": accuracy, "deferral, chosen": chosen, "accuracy, chosen": hits,
        }.items():  # fmt: skip
            assert seen[name][lane] == pytest.approx(np.mean(values), abs=1e-5), name
        np.testing.assert_allclose(seen["created"][lane], [np.mean(created[of]) for of in range(4)], atol=1e-6)
    assert np.ptp(seen["deferral"]) > 0 and 0 < seen["created"].mean() < 1
