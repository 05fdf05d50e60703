"""CoRe-Code: a planner paid for the programs of its plans, a coder paid for tests and brevity (arXiv 2605.24812).

For each task the planner writes P plans, and the coder writes M programs of each plan (``plans`` and ``programs``).
`rollout.plans.product` plays them, with the widths (P, M). Two stages follow stage 0:

    stage 1    the planner learns, for ``stage_one`` RL steps; the coder is frozen
               R(plan) = mean over its M programs of the share of tests passed
    stage 2    the coder learns; the planner is frozen
               R(program) = share of tests passed - 0.02 (operations beyond those of the shortest program known)

The frozen role's model and its optimizer state stay as they are. Advantages are (R - mean) / std, with the population's
standard deviation. Plans are compared with those of the same task, programs with those of the same plan. The weights of
``reward`` are those of both stages: `programs` pays ``excess`` to the coder alone, so a plan is paid for tests. The
value of a plan is the mean over its valid programs.

Kept: two roles with models of their own, several programs of each plan, a stage for each role, and group-relative
advantages. The planner learns first. The paper's weights of rewards could not be recovered. Inferred instead: the plain
mean as the planner's reward without a reward of time, the weight 0.02, and operations as the measure of size.

``programs=1`` with 4 P plans is a control: as many programs, one of each plan. A coder without siblings has nothing to
be compared with, so stage 2 needs two programs of a plan. Claims are stated in `experiments.claims.core_code`,
and what holds of them is in docs/systems.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import at_least
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.envs.contract import Environment, need_roles
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, product
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig

ROLES = ("planner", "coder")  # in the order of their turns


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of CoRe-Code."""

    recipe: str = "core_code"
    plans: int = 4  # P, of each task
    programs: int = 4  # M, of each plan
    stage_one: int = 100  # RL steps of stage 1; the rest of ``steps`` is stage 2
    team: TeamConfig = TeamConfig(max_new_tokens=5)
    env: EnvConfig = EnvConfig("programs")
    reward: dict[str, float] = field(default_factory=lambda: {"tests": 1.0, "excess": -0.02})
    credit: Credit = Credit(group="node")

    def check(self, path: str) -> None:
        super().check(path)
        at_least(f"{path}.stage_one", self.stage_one, 0)
        learns = {"plans": min(self.stage_one, self.steps), "programs": self.steps - self.stage_one}
        for name, steps in learns.items():
            least = 2 if steps > 0 else 1
            if getattr(self, name) < least:
                why = " in a stage that compares them" if least == 2 else ""
                raise ConfigError(f"{path}.{name}: expected >= {least}{why}, got {getattr(self, name)}")
        if self.team.parameter_sharing == "shared":
            raise ConfigError(f"{path}.team.parameter_sharing: expected separate or lora: one role is always frozen")
        need_roles(f"{path}.env", self.env.name, self.env.roles(), ROLES)


def trainable_roles(cfg: Config) -> Callable[[Any], Any]:
    """RL step -> which of ROLES learn at it [2]: the planner in stage 1 of ``cfg``, then the coder."""
    return lambda step: jnp.arange(len(ROLES)) == (step >= cfg.stage_one)


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.plans`` plans of each task, ``cfg.programs`` programs of each plan."""
    return product((cfg.plans, cfg.programs))


def algorithm(cfg: Config) -> Algorithm:
    """Group-relative advantages of ``cfg.credit``, and a stage for each role."""
    return Algorithm(standard_rule(cfg.credit), cfg.reward, trainable_roles=trainable_roles(cfg))


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    recipe = phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
    if recipe.env_runner.env.roles != ROLES:
        raise ConfigError(f"config.env: expected an environment with the roles {', '.join(ROLES)}")
    return recipe
