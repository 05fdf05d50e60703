"""Dr. MAS: advantages normalised agent by agent (arXiv 2602.08847).

A team plays G episodes of a task; roles act a ragged number of times. With R the team's return, every step of agent k
gets

    A = (R - mu_k) / (sigma_k + 1e-6)        statistics over all steps of agent k in the task's group

with torch's sample standard deviation; a group of one keeps its value (mean 0, std 1). ``credit.group="task"`` is the
control, GRPO as it is commonly spread over a team: one mu and sigma for all steps of the task. The paper's lemma says
what that costs: the squared gradient norm of agent k is that of its score times

    (sigma_k^2 + (mu_k - mu)^2) / sigma^2    (`inflation`; population variances)

up to a covariance term, and agent-wise statistics make the factor 1. ``credit.stats_over="episodes"`` counts a
trajectory once in the statistics and copies its advantage to its steps (the authors' baseline mode).

Kept: the above, G = 8, PPO's token-level clip, and a penalty of 0.1 for an invalid action. Also kept: one model a role
or one for all (``team.parameter_sharing``), and models of different sizes (``team.overrides``). Chosen where the paper
is silent, or changed: the penalty reaches the earlier steps of the same role too, by the return-to-go. The authors
subtract it from the step alone. Equal returns give exactly 0. All tokens of a batch are averaged alike. There is no KL
unless ``loss.kl_coef`` is set, and one learning rate for all models.

Expected: on `chain` with a solver and a verifier, both learn; how their gradient norms and successes differ is what
experiments/claims/dr_mas.py measures.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmarl_llm.config import one_of
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig

GROUPS = ("task_role", "task")  # whose steps make the statistics: the agent's (Dr. MAS), or all (the control)


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of Dr. MAS."""

    recipe: str = "dr_mas"
    group: int = 8  # G episodes of each task
    reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0, "invalid": 1.0})
    credit: Credit = Credit(group="task_role", ddof=1)

    def check(self, path: str) -> None:
        super().check(path)
        one_of(f"{path}.credit.group", self.credit.group, GROUPS)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (a group compares samples), got {self.group}")


def inflation(returns: Float[Array, " C"], mine: Bool[Array, " C"]) -> Float[Array, ""]:
    """The lemma's factor ``(var_k + (mu_k - mu)^2) / var`` of one agent's steps among all steps of a group.

    Population variances; 1 with agent-wise statistics. NaN without steps of the agent, or when all returns are equal.

    Args:
        returns: return of each completion [C].
        mine: completions of the agent [C].
    """
    mean = jnp.mean(returns)
    return jnp.mean((returns - mean) ** 2, where=mine) / jnp.mean((returns - mean) ** 2)


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each task."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Group-relative advantages of ``cfg.credit``, with statistics of each agent."""
    return Algorithm(standard_rule(cfg.credit, singleton="raw"), cfg.reward)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
