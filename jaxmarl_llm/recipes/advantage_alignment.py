"""Advantage Alignment of language-model players in social dilemmas (arXiv 2511.19405; the rule is of arXiv 2406.14662).

Every player is paid its own reward. G matches of each task, with the same draws in all (common random numbers), give
each player's advantage at each turn; a player's credit then also counts what the other gains, as far as the moves
before were good for itself:

    A_t^i      = R_t^i - mean over the other G - 1 matches of R_t^i,   R_t = r_t + discount R_(t+1)   (leave-one-out)
    credit_t^i = A_t^i + beta (sum over k < t of discount^(t-k) A_k^i) sum over j != i of A_t^j

    beta = ``credit.coupling``, 0 is naive independent learning; loss: minus credit times the summed token log-probs,
    plus ``loss.kl_coef`` times the KL to the policy that stage 0 ends with.

One model plays both seats (self-play); with ``past.size`` a share of the tasks has one seat played by an earlier
snapshot of it, whose moves are not trained on but count as the other's advantages (past.py).

Kept: the above, discount 0.96, beta 2, G = 8, KL 1e-3, a ratio of 1. Rewards are scaled by their weight (1/100 for
Trust-and-Split, 1/5 for the prisoner's dilemma). Changed: snapshots are taken every ``past.every`` steps, and one of
them, drawn anew, plays in each step; where a round has a turn for messages, t counts turns, so that a message has an
advantage of its own. ``credit.coupling_fade`` multiplies credit_t by discount^t (optional in the authors' code).
Chosen where the paper is silent: tokens of a completion are summed, tasks share one update.

Expected: on the iterated prisoner's dilemma beta 2 learns to cooperate with cooperators and to answer defection, and
beta 0 defects (experiments/claims/advantage_alignment.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxmarl_llm import phases
from jaxmarl_llm.arena import EnvConfig
from jaxmarl_llm.credit import Credit
from jaxmarl_llm.losses import Loss
from jaxmarl_llm.optimizers import Optimizer
from jaxmarl_llm.plans import Plan, flat
from jaxmarl_llm.stages import BaseConfig
from jaxmarl_llm.team import TeamConfig
from jaxmarl_llm.text import ConfigError


@dataclass(frozen=True)
class Config(BaseConfig):
    recipe: str = "advantage_alignment"
    group: int = 8  # G matches of each task
    team: TeamConfig = TeamConfig(share="shared")
    env: EnvConfig = EnvConfig("dilemma")
    reward: dict[str, float] = field(default_factory=lambda: {"payoff": 0.2})
    credit: Credit = Credit(discount=0.96, group="task_role_turn", centre="loo", scale="none", coupling=2.0)
    loss: Loss = Loss(clip_low=None, aggregate="sum", kl_coef=1e-3)
    optimizer: Optimizer = Optimizer(learning_rate=1e-4)

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (a group compares matches), got {self.group}")
        if self.credit.group != "task_role_turn":
            raise ConfigError(f"{path}.credit.group: expected 'task_role_turn', got {self.credit.group!r}")
        if self.credit.scale != "none":
            raise ConfigError(f"{path}.credit.scale: expected 'none': sizes count in a product of advantages")


def make_plan(cfg: Config) -> Plan:
    return flat(cfg.group)


def make(cfg: Config) -> phases.Recipe:
    return phases.make_recipe(cfg, make_plan(cfg), phases.improve_groups(cfg))
