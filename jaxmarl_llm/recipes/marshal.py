"""MARSHAL: self-play in games of several turns, rewards by player (arXiv 2510.15414; its code is listed as MARS).

One model plays both sides. A player's turn k earns r_k (its own: in a zero-sum game the other's is the negative), and

    return      R_k = sum over k' >= k of r_k'                                  turn-level: not the episode's total
    advantage   A_k = R_k - mean of R over all turns of that role in the batch   summed, then normalised; no std

so that a side that is bound to lose is compared with itself. Objective: PPO with clip 0.2 and dual clip 3, minus 0.2
times the KL to the starting policy (k3), every token alike. With several games in a batch, roles are those of each game
(`envs/games.py`), which makes the group the paper's game tag x player.

The code's form differs from the text and is ``form="code"``, after the configurations for self-play that the authors
ship. Turn rewards are centred by game and player (plain mean). Their sums from a turn on are centred by the mean of the
player's *distinct* values. The sums are then whitened over the batch with the sample's standard deviation. The authors
also whiten the centred turn rewards. That changes nothing for actions of one token: their mean is 0, and the last step
divides by any scale.

Kept: the above; +-1 and chips as payoffs, +0.05 for the form, -10 and the end for an illegal action, as components with
weights. Chosen where the sources are silent: the episodes of a batch have different deals (``group=1``). "Turn reward"
in the code's form is what a player earns until it moves again. Dropped: the length bonus, since an action is one token
here. Changed: one update on a batch unless ``loss.epochs`` says otherwise (with one, the ratio is 1 and no clip acts).
In the code's form, statistics count turns. The authors' count tokens, which is the same for actions of one token. The
authors count the 0 of padding as one more distinct value. They take distinct values by player alone, here by game and
player.

Expected: Kuhn poker from an exploitability of 0.92 to at most 0.25 (`experiments/claims/marshal.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import one_of
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.rules import (
    CentreTurnRewards,
    CreditRule,
    GroupRelative,
    PerCompletion,
    ReturnToGo,
    Whiten,
    chain,
)
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.losses import Loss

FORMS = ("text", "code")


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of MARSHAL."""

    recipe: str = "marshal"
    group: int = 1  # games from each first state (deal)
    batch: int = 64
    team: TeamConfig = TeamConfig(parameter_sharing="shared", max_new_tokens=1)
    env: EnvConfig = EnvConfig("games")
    reward: dict[str, float] = field(default_factory=lambda: {"payoff": 1.0, "format": 0.05, "illegal": -10.0})
    form: str = "text"  # of the advantage: as the paper writes it, or as the authors' code has it
    credit: Credit = Credit(group="role", normalise="none")
    loss: Loss = Loss(dual_clip=3.0, kl_coef=0.2)

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 1 or self.group * self.batch < 2:
            expected = "two games in a batch at least, because a role is compared with itself"
            raise ConfigError(f"{path}.group: expected >= 1, and {expected}, got {self.group} x {self.batch}")
        one_of(f"{path}.form", self.form, FORMS)
        if self.credit.group not in ("role", "batch"):
            raise ConfigError(f"{path}.credit.group: expected role (batch: for comparison), got {self.credit.group!r}")


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` games from each first state."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Advantages of the paper's text or of the authors' code, as ``cfg.form`` says."""
    return Algorithm(text_rule(cfg) if cfg.form == "text" else code_rule(cfg), cfg.reward)


def text_rule(cfg: Config) -> CreditRule:
    """Credit rule of the paper's text: summed rewards, less the mean of the role's turns; uses ``cfg.credit``."""
    return standard_rule(cfg.credit)


def code_rule(cfg: Config) -> CreditRule:
    """Credit rule of the authors' code: centred turn rewards are summed, centred again, and whitened over the batch.

    ``cfg.credit`` gives discount, reduction and groups.
    """
    compare = GroupRelative(cfg.credit.group, "unique", "none")
    summed = ReturnToGo(cfg.credit.discount), PerCompletion(cfg.credit.joint_action_reduce)
    return chain(CentreTurnRewards("mean"), *summed, compare, Whiten(ddof=1))


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
