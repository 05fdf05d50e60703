"""Advantage Alignment of language-model players in social dilemmas (arXiv 2511.19405; the rule is of arXiv 2406.14662).

Every player is paid its own reward. G matches of each task, with the same draws in all (common random numbers), give
each player's advantage at each turn. A player's credit then also counts what the other gains, as far as the moves
before were good for itself:

    A_t^i      = R_t^i - mean over the other G - 1 matches of R_t^i,   R_t = r_t + discount R_(t+1)   (leave-one-out)
    credit_t^i = A_t^i + beta (sum over k < t of discount^(t-k) A_k^i) sum over j != i of A_t^j

``beta`` 0 is naive independent learning. The loss is minus credit times the summed token log-probs, plus
``loss.kl_coef`` times the KL to the policy that stage 0 ends with.

The configurations that the authors ship multiply the sum by one more discount: beta discount (sum over k < t of
discount^(t-k) A_k^i). ``extra_discount`` does that. It is off by default, because the paper and the docstring of the
authors' code state the formula above. The difference equals a beta of ``credit.discount`` times its value.

One model plays both seats (self-play). With ``past.size``, an earlier snapshot of the model plays one seat in a share
of the tasks (agents/snapshots.py). Moves of a snapshot are not trained on, but count as the other's advantages.

Kept: the above, G = 8, KL 1e-3, a ratio of 1. Discount 0.96 and beta 2 are the authors' values for Trust-and-Split and
the defaults for every game. Their prisoner's dilemma has discount 0.9, beta 0.5 and an entropy bonus of 0.01 (variant
``shipped`` of experiments/configs/advantage_alignment.py). Rewards are scaled by their weight, as the authors' are
(1/100 for Trust-and-Split, 1/5 for the prisoner's dilemma). Changed: snapshots are taken every ``past.every`` steps,
and one of them, drawn anew, plays in each step. Where a round has a turn for messages, t counts turns, so that a
message has an advantage of its own. Where one match of a group alone is valid, its advantage is 0; the authors keep
its return. ``fade`` multiplies credit_t by discount^t (optional in the authors' code).
Chosen where the paper is silent: tokens of a completion are summed, tasks share one update.

Expected: on the iterated prisoner's dilemma beta 2 learns to cooperate with cooperators and to answer defection, and
beta 0 defects (experiments/claims/advantage_alignment.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.rules import AlignAdvantages, chain
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of Advantage Alignment."""

    recipe: str = "advantage_alignment"
    group: int = 8  # G matches of each task
    beta: float = 2.0  # weight of own past advantages times the others' present ones; 0: independent learning
    fade: bool = False  # multiply an advantage by discount^t (optional in the authors' code)
    extra_discount: bool = False  # multiply beta by the discount (the authors' shipped configurations)
    team: TeamConfig = TeamConfig(parameter_sharing="shared")
    env: EnvConfig = EnvConfig("dilemma")
    reward: dict[str, float] = field(default_factory=lambda: {"payoff": 0.2})
    credit: Credit = Credit(discount=0.96, group="task_role_turn", baseline="loo", normalise="none")
    loss: Loss = Loss(clip_low=None, aggregation="sum", kl_coef=1e-3)
    optimizer: Optimizer = Optimizer(learning_rate=1e-4)

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (a group compares matches), got {self.group}")
        if self.credit.group != "task_role_turn":
            raise ConfigError(f"{path}.credit.group: expected 'task_role_turn', got {self.credit.group!r}")
        if not math.isfinite(self.beta):
            raise ConfigError(f"{path}.beta: expected a finite number, got {self.beta}")
        if self.credit.normalise != "none":
            raise ConfigError(f"{path}.credit.normalise: expected 'none': sizes count in a product of advantages")


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` matches of each task."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Group-relative advantages of ``cfg.credit``, then Advantage Alignment."""
    beta = cfg.beta * cfg.credit.discount if cfg.extra_discount else cfg.beta
    align = AlignAdvantages(beta, cfg.credit.discount, cfg.fade)
    return Algorithm(chain(*standard_rule(cfg.credit).rules, align), cfg.reward)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
