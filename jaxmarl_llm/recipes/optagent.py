"""OPTAGENT: two meta-roles edit the graph of a debate, by verbal reinforcement without a gradient (arXiv 2510.18032).

Reflect reads the transcript of a debate with its right answer, and says which edge helped or hurt. Act reads the
reflections, and adds, drops or reweights one edge. The next debate has the edited graph. Reflections and edits are a
memory of the episode (`debate`). The vote of the speakers decides every question.

A step plays ``group`` episodes of ``batch`` tasks, and logs what they earned. No role is trained: parameters and
optimizer states stay the same arrays. What is learnt is in the state of an episode: the graph and the memory.

Kept: the two meta-roles, verbal feedback, edits of edges, the vote. Changed: speakers are functions with planted
accuracy (`debate`), in place of language models. Inferred: one edge in a reflection and in an edit, and weights of 1 to
9. Inferred too: how a speaker weighs what it hears, and a memory that ends with its episode.

The meta-roles are the models of ``team``. Rule-following ones are in `envs.debate.scripts`, and the claims are about
them. `experiments.studies.debate_graphs` computes what graphs reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import ROW_LIMIT, at_least
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.envs.contract import Environment, roles_of
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm, Driver, Step, StepParts, Updates
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.learner import Batch
from jaxmarl_llm.types import Array, TrainState


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of OPTAGENT."""

    recipe: str = "optagent"
    steps: int = 8  # batches of episodes; nothing is trained
    group: int = 1  # episodes of each task
    team: TeamConfig = TeamConfig(max_new_tokens=5)
    env: EnvConfig = EnvConfig("debate")
    reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0})
    credit: Credit = Credit(normalise="none")  # for the metrics alone

    def check(self, path: str) -> None:
        super().check(path)
        at_least(f"{path}.group", self.group, 1, ROW_LIMIT)
        if self.update is not None:
            raise ConfigError(f"{path}.update: expected None (OPTAGENT trains no model), got {self.update!r}")
        if self.sft.steps:
            raise ConfigError(f"{path}.sft.steps: expected 0 (OPTAGENT trains no model), got {self.sft.steps}")


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each task."""
    return flat(cfg.group)


def no_update(step: StepParts, driver: Driver, state: TrainState, batches: Mapping[str, list[Batch]]) -> Updates:
    """Leave the state as it is.

    Args:
        step: Parts of the training step, not used.
        driver: Driver that runs the step, not used.
        state: State before the update, which is returned.
        batches: Micro-batches by model, not used.
    """
    return state, {}


def algorithm(cfg: Config, env: Environment | None = None) -> Algorithm:
    """Rewards are logged, and no role learns. ``env``: an environment in place of the one that ``cfg`` names."""
    roles = cfg.env.roles() if env is None else roles_of(env)

    def nobody(rl_step: Step) -> Array:
        return jnp.zeros(len(roles), bool)

    return Algorithm(standard_rule(cfg.credit), cfg.reward, trainable_roles=nobody, update=no_update)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg, env), env=env)
