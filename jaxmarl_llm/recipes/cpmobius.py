"""CPMobius: a coach writes questions, a player answers; neither sees a label (arXiv 2602.02979).

Stage 0 imitates random questions and imperfect answers (``sft``). In a step the coach writes ``batch`` questions, and
the player answers each ``answers`` times (n = 16). The label of a question is the answer of the majority, and its solve
rate the share that agrees. Of equally frequent answers the smaller one is the label.

    player    reward +1 where the answer is the label, else -1, also for a malformed answer; GRPO within the question
    coach     solve rate x change, REINFORCE without a baseline; no update where the change is 0

The change is the player's accuracy on questions of validation after its update, minus the accuracy before. It is the
only place where labels count, as in the paper. Questions whose solve rate is outside ``band`` are left out, and others
are played in their place. After ``patience`` changes in a row below 0 the best player is put back.

A malformed question is answered by nobody. The coach pays ``malformed`` for it, whatever the change is. The question
keeps its place in the batch. A step in which no question is in the band trains nobody (`training.pay_by_change`).

Kept: majority labels, the two rewards, the band and its refill, the coach's reward and the return to the best player.
Changed: questions are chains of small numbers (`chain_coach`), in place of competition mathematics. Plays are limited
to 1 + ``extra_plays``. Inferred: the penalty of a malformed question. Left out: a moving average of the change.

Measured by experiments/claims/cpmobius.py. `experiments.studies.coach_bounds` computes what can be won.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import at_least
from jaxmarl_llm.credit.agreement import Agreement
from jaxmarl_llm.credit.assign import Credited
from jaxmarl_llm.credit.rules import CreditRule, GroupRelative, chain
from jaxmarl_llm.envs.contract import Environment, need_roles, roles_of
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, product
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm, Step, StepParts, StepResult
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.dynamic_sampling import DynamicSampling
from jaxmarl_llm.training.pay_by_change import History, PayByChange
from jaxmarl_llm.types import Array

ROLES = COACH, PLAYER = "coach", "player"


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of CPMobius."""

    recipe: str = "cpmobius"
    answers: int = 16  # of the player to each question
    outcomes: int = 10  # different answers
    band: tuple[float, float] = (0.2, 0.8)  # solve rates of questions that are trained on; (0, 1): all
    extra_plays: int = 4  # of a batch of questions, at most, to fill the batch
    patience: int = 15  # changes in a row below 0, before the best player is put back
    malformed: float = 0.01  # what the coach pays for a malformed question
    train_coach: bool = True  # False: the coach stays as stage 0 left it
    team: TeamConfig = TeamConfig(max_new_tokens=12)
    env: EnvConfig = EnvConfig("chain_coach")
    reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0})  # for reports; credit reads none of it

    def check(self, path: str) -> None:
        super().check(path)
        if self.answers < 2:
            raise ConfigError(f"{path}.answers: expected >= 2 (a majority compares answers), got {self.answers}")
        low, high = self.band
        if not 0 <= low <= high <= 1:
            raise ConfigError(f"{path}.band: expected 0 <= low <= high <= 1, got {self.band}")
        at_least(f"{path}.outcomes", self.outcomes, 2)
        at_least(f"{path}.extra_plays", self.extra_plays, 0)
        at_least(f"{path}.patience", self.patience, 1)
        at_least(f"{path}.malformed", self.malformed, 0)
        need_roles(f"{path}.env", self.env.name, self.env.roles(), ROLES)


def make_plan(cfg: Config) -> Plan:
    """Plan: one question of each task, and ``cfg.answers`` answers to it."""
    return product((1, cfg.answers))


def rule(cfg: Config) -> CreditRule:
    """Agreement with the majority, compared within a question. A question has its worth as it is.

    Args:
        cfg: The configuration.
    """
    return chain(Agreement(outcomes=cfg.outcomes, cost=cfg.malformed), GroupRelative("node", singleton="raw"))


def solve_rates(credited: Credited) -> Float[Array, " K"]:
    """Solve rate of each group: of a question, and of the answers to it; below 0 for a malformed question.

    Args:
        credited: Result of `rule`.
    """
    mean = credited.stats.mean
    return jnp.where(credited.stats.count > 1, (mean + 1) / 2, mean)


@dataclass(frozen=True)
class InBand:
    """Select questions with a solve rate in the band, the answers to them, and malformed questions.

    Attributes:
        low: Smallest solve rate.
        high: Largest solve rate.
    """

    low: float
    high: float

    def __call__(self, credited: Credited, num_tasks: int) -> Bool[Array, " K"]:
        """Select groups.

        Args:
            credited: Result of `rule`.
            num_tasks: Not read.
        """
        rate = solve_rates(credited)
        inside = (rate >= self.low - 1e-6) & (rate <= self.high + 1e-6)  # rates are sums of rounded numbers
        return (credited.stats.count > 0) & (inside | (rate < 0))


def coach_pay(change: float, worth: Array) -> Array:
    """Advantages of the coach: solve rate times change, and the penalty of a malformed question as it is.

    Args:
        change: Validation accuracy after the player's update, minus that before.
        worth: Solve rate of each question, or minus its penalty.
    """
    return np.where(worth > 0, change * worth, worth)


@dataclass(frozen=True)
class CoachByChange(PayByChange):
    """`PayByChange` that also reports how far majority labels are the truth.

    Metrics, of the questions that are trained on:

    - ``majority/agreement``: the mean share of the majority.
    - ``majority/right``: the share of questions whose label is the right answer.
    - ``majority/agreement_wrong``: the mean share of the majority where the label is wrong.
    """

    def keep(self, step: StepParts, kept: History, result: StepResult) -> tuple[History, Mapping[str, Any]]:
        """The history, its metrics, and those of majority labels.

        Args:
            step: Parts of the training step.
            kept: The history after the update.
            result: Result of the step.
        """
        history, seen = super().keep(step, kept, result)
        return history, {**seen, **label_metrics(result)}


def label_metrics(result: StepResult) -> dict[str, float]:
    """Metrics of majority labels, as `CoachByChange` names them; none where no answer was trained on.

    Args:
        result: Result of a step.
    """
    tree, credited = result.tree, result.credited
    steps, moves = tree.steps, tree.transitions
    accuracy = np.zeros(len(steps.node))
    played = np.flatnonzero(moves.valid & (moves.steps[:, 0] >= 0))
    accuracy[moves.steps[played, 0]] = moves.rewards["accuracy"][played].mean(1)
    votes = np.flatnonzero(np.asarray(result.selected) & (credited.stats.count > 1))
    if not len(votes):
        return {}
    share = np.asarray(solve_rates(credited))[votes]
    agrees = credited.valid & (credited.returns > 0)
    right = np.array([accuracy[agrees & (credited.group == k)].any() for k in votes])
    out = {"majority/agreement": float(share.mean()), "majority/right": float(right.mean())}
    return out if right.all() else {**out, "majority/agreement_wrong": float(share[~right].mean())}


def algorithm(cfg: Config, env: Environment | None = None) -> Algorithm:
    """Credit, selection, refill and the two updates, see the top of this file.

    Args:
        cfg: The configuration.
        env: An environment in place of the one that ``cfg.env`` names.
    """
    roles = cfg.env.roles() if env is None else roles_of(env)

    def without_coach(rl_step: Step) -> Array:
        return jnp.array([role != COACH for role in roles])

    return Algorithm(
        rule(cfg),
        cfg.reward,
        select=InBand(*cfg.band),
        trainable_roles=None if cfg.train_coach else without_coach,
        update=CoachByChange(PLAYER, COACH, patience=cfg.patience, pay=coach_pay),
        play=DynamicSampling(cfg.extra_plays),
    )


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg, env), env=env)
