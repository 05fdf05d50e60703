"""GRPO: group-relative policy optimisation of one model (DeepSeekMath, arXiv 2402.03300, section 4).

G episodes start from each task's first state. The advantage is (R - mean) / std over the task's episodes, the same for
every turn of an episode. The loss has PPO's clip, and KL to the reference (k3) when ``loss.kl_coef`` is set.

Kept: the above. Changed: tokens of all episodes are averaged alike (``loss.aggregation="token"``, DAPO) instead of
first within each episode (``"sequence"``, the paper's). Groups without a variance are left out: their gradient is zero.
With several roles every role's steps share their episode's group by role, which is the naive extension to a team.

Expected: `experiments/configs/grpo.py:tiny` rises within a minute on CPU; it is the single agent of the ablations.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm, unequal_groups
from jaxmarl_llm.training.config import BaseConfig


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of GRPO."""

    recipe: str = "grpo"
    group: int = 8  # G episodes of each task
    credit: Credit = Credit(group="task_role")

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (a group compares samples), got {self.group}")


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each task."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Group-relative advantages of ``cfg.credit``; groups of equal returns are left out."""
    return Algorithm(standard_rule(cfg.credit), cfg.reward, select=unequal_groups)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
