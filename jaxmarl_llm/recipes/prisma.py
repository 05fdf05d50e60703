"""PRISMA: a planner and a solver learn, then an inspector who may have their work done again (arXiv 2601.05465).

The planner writes queries for a question, and the solver answers from what they find. The inspector reads the question,
the queries, what they found, and the answer. It passes the answer, or asks for other queries, for more queries, or for
another answer (`envs/facts/inspection.py`). Two stages follow stage 0:

    stage I     planner and solver learn, for ``stage_one`` RL steps; the inspector is frozen
                R = EM of the first answer: what the team reaches with an inspector that passes everything
    stage II    the inspector learns; planner and solver are frozen
                R = EM_after - EM_before - .05 for each of its interventions

These are the components ``before``, ``change`` and ``interventions`` of `facts`, and one set of weights serves both
stages. The first answer is paid when it is given. So its reward is no part of an inspector's return, and what follows
it is no part of a planner's or a solver's. The models and optimizer states of frozen roles stay as they are, to the
bit.

The team plays a tree: ``plans`` of each task, ``answers`` to each plan, and ``verdicts`` on each answer. Everything
behind a first verdict is played once. So siblings share what they read. Plans are compared on one question, answers on
the same facts, and verdicts on the same trace. With whole episodes as a group, an inspector would be compared on traces
that it did not choose. Advantages are (R - mean) / std over siblings, with PPO's clip. Groups of equal returns are left
out. What has no siblings is not trained: later queries and answers, and a second inspection. A second inspection has
the prompt form and the parameters of the first.

Kept: GRPO of planner and solver with the inspector frozen, then of the inspector alone on question and trace; its four
actions. Inferred: the inspector's reward, because the paper's weights could not be recovered. Chosen: exact match as
the reward of stage I, the tree, and the lengths of the stages. Dropped: the memory of solved questions. In stage I the
inspector's interventions are played, and nobody is paid for what they lead to.

``env.args.inspect.trace=False`` is the control: the inspector reads the question alone. Claims are stated
in `experiments.claims.prisma`, and what holds of them is in docs/systems.md.
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
from jaxmarl_llm.training.algorithm import Algorithm, unequal_groups
from jaxmarl_llm.training.config import BaseConfig

ROLES = ("planner", "solver", "inspector")  # in the order of their first turns
INSPECTOR = ROLES.index("inspector")


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of PRISMA."""

    recipe: str = "prisma"
    plans: int = 4  # of each task
    answers: int = 2  # to each plan
    verdicts: int = 4  # on each answer
    stage_one: int = 100  # RL steps of stage I; the rest of ``steps`` is stage II
    team: TeamConfig = TeamConfig(max_new_tokens=12)
    env: EnvConfig = EnvConfig("facts", {"protocol": "inspect"})
    reward: dict[str, float] = field(default_factory=lambda: {"before": 1.0, "change": 1.0, "interventions": -0.05})
    credit: Credit = Credit(group="node")

    def check(self, path: str) -> None:
        super().check(path)
        at_least(f"{path}.stage_one", self.stage_one, 0)
        first = min(self.stage_one, self.steps)
        for name, steps in {"plans": first, "answers": first, "verdicts": self.steps - first}.items():
            least = 2 if steps else 1
            if getattr(self, name) < least:
                why = " in a stage that compares them" if steps else ""
                raise ConfigError(f"{path}.{name}: expected >= {least}{why}, got {getattr(self, name)}")
        if self.team.parameter_sharing == "shared":
            raise ConfigError(f"{path}.team.parameter_sharing: expected separate or lora: a stage freezes some roles")
        need_roles(f"{path}.env", self.env.name, self.env.roles(), ROLES)


def trainable_roles(cfg: Config) -> Callable[[Any], Any]:
    """RL step -> which of ROLES learn at it [3]: planner and solver in stage I of ``cfg``, then the inspector."""
    return lambda step: (jnp.arange(len(ROLES)) == INSPECTOR) == (step >= cfg.stage_one)


def make_plan(cfg: Config) -> Plan:
    """Plan: plans, answers and verdicts of ``cfg``, and one sample at each turn behind them."""
    return product((cfg.plans, cfg.answers, cfg.verdicts), behind=True)


def algorithm(cfg: Config) -> Algorithm:
    """Group-relative advantages of ``cfg.credit``, and the two stages."""
    return Algorithm(standard_rule(cfg.credit), cfg.reward, select=unequal_groups, trainable_roles=trainable_roles(cfg))


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    recipe = phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
    if recipe.env_runner.env.roles != ROLES:
        raise ConfigError(f"config.env: expected an environment with the roles {', '.join(ROLES)}")
    return recipe
