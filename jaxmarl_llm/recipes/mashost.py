"""MasHost: a policy builds the graph of a multi-agent system node by node, by HRPO (arXiv 2506.08507).

Stage 0 imitates random constructions (``sft``). Then HRPO, a GRPO with a second credit, plays ``group`` constructions
of each query. Every action of a construction has the advantage

    A = (R - mean) / std + r            R = right - cost of the graph's nodes
                                        r = -.1 for an action that is not possible
                                            +.02 for adding the node that the answer then is of

The mean and the standard deviation are over the constructions of the query, each counted once. R is paid at the end,
so it is the return of every action. The action's own reward r belongs to that action alone, is not compared, and is not
normalised. ``reward`` weighs the components of R, and ``action_reward`` those of r. Without the latter the credit is
that of the trajectory alone.

Kept: one policy for roles, listeners, deletion and exit; a relative reward of the whole construction, and a reward of
each action. Changed: workers are functions with planted accuracy (`build`), in place of language models. The graph
answers once. Inferred: the two weights of r, what each is paid for, and that r is not normalised.

Measured on `build` (docs/systems.md): larger graphs for hard queries than for easy ones, and fewer impossible actions
with r than without. More accuracy minus cost than the best fixed graph is not decided.
`experiments.studies.build_bounds` computes the best graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import finite
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.rules import CreditRule, GroupRelative, PerCompletion, ReturnToGo, chain
from jaxmarl_llm.credit.shaping import Reweigh, SumOfCredits
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of MasHost."""

    recipe: str = "mashost"
    group: int = 8  # constructions of each query
    team: TeamConfig = TeamConfig(max_new_tokens=3)
    env: EnvConfig = EnvConfig("build")
    reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0, "cost": 1.0})
    action_reward: dict[str, float] = field(default_factory=lambda: {"impossible": -0.1, "used": 0.02})  # r; {}: none
    credit: Credit = Credit(group="task_role", stats_over="episodes")

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (a group compares samples), got {self.group}")
        for name, weight in self.action_reward.items():
            finite(f"{path}.action_reward.{name}", weight)


def rule(cfg: Config) -> CreditRule:
    """HRPO: the credit of whole constructions, plus the reward of each action.

    Args:
        cfg: Its ``credit`` compares constructions, and its ``action_reward`` weighs the rewards of actions.
    """
    trajectory = standard_rule(cfg.credit)
    if not cfg.action_reward:
        return trajectory
    alone = GroupRelative(cfg.credit.group, baseline="none", normalise="none")
    paid = Reweigh(tuple(cfg.action_reward.items()), "config.action_reward")
    action = chain(paid, ReturnToGo(discount=0.0), PerCompletion(), alone)
    return SumOfCredits((trajectory, action))


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` constructions of each query."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Advantages of constructions and of their actions, see `rule`. ``cfg``: the configuration."""
    return Algorithm(rule(cfg), cfg.reward)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
