"""Runs of GRPO on the relay game, which tests of training tools take apart."""

import dataclasses

import jax.numpy as jnp

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.envs.contract import ArrayTask
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.runs import phases
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.config import SFT, RunConfig
from tests import toys

BATCH, GROUP, TASKS = 4, 2, 12
SMALL = Backbone(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
RUN = RunConfig(checkpoint_every=1, eval_every=1, eval_greedy=False, tensorboard=False, max_logprob_diff=0)


def make(parts=None, **changes):
    """A recipe of 4 steps with ``parts`` in its algorithm."""
    team = TeamConfig(backbone=SMALL, max_new_tokens=2, remat=False)
    base = {"steps": 4, "batch": BATCH, "group": GROUP, "team": team, "sft": SFT(steps=0), "run": RUN}
    cfg = grpo.Config(**{**base, "env": EnvConfig("matrix"), "reward": {"accuracy": 1.0}, **changes})
    env = ArrayTask(toys.relay(2), toys.relay_tasks(TASKS), {"start": jnp.arange(100, 104)})
    algorithm = dataclasses.replace(grpo.algorithm(cfg), **(parts or {}))
    return phases.make_recipe(cfg, grpo.make_plan(cfg), algorithm, env=env)


def steps(recipe, folder, count=1, state=None):
    """RL steps: the state after them, and the result and metrics of each."""
    results, metrics, state = [], [], recipe.init(0) if state is None else state
    recipe.recorder = lambda *of: results.append(of[-1])
    with Logger(folder, resume_step=None, total_steps=count, primary=False) as logger:
        for _ in range(count):
            state, seen = recipe.step(state, logger)
            metrics.append(seen)
    return state, results, metrics
