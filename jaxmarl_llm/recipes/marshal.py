"""MARSHAL: self-play in games of several turns, rewards by player (arXiv 2510.15414; its code is listed as MARS).

One model plays both sides. A player's turn k earns r_k (its own: in a zero-sum game the other's is the negative), and

    return      R_k = sum over k' >= k of r_k'                                  turn-level: not the episode's total
    advantage   A_k = R_k - mean of R over all turns of that role in the batch   summed, then normalised; no std

so that a side that is bound to lose is compared with itself. Objective: PPO with clip 0.2 and dual clip 3, minus 0.2
times the KL to the starting policy (k3), every token alike. With several games in a batch, roles are those of each game
(`envs/games.py`), which makes the group the paper's game tag x player.

Kept: the above; +-1 and chips as payoffs, +0.05 for the form, -10 and the end for an illegal action, as components with
weights. The code's form differs from the text and is `CODE`: raw turn rewards are centred by game and player before
they are summed, every centre is the mean of the *distinct* values, and the advantages of the batch are whitened. Chosen
where the sources are silent: the episodes of a batch have different deals (``group=1``), and "turn reward" in `CODE` is
what a player earns until it moves again. Dropped: the length bonus, since an action is one token here. Changed: one
update on a batch unless ``loss.epochs`` says otherwise (with one, the ratio is 1 and no clip acts).

Expected: Kuhn poker from an exploitability of 0.92 to at most 0.25 (`experiments/claims/marshal.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxmarl_llm import phases
from jaxmarl_llm.arena import EnvConfig
from jaxmarl_llm.credit import Credit
from jaxmarl_llm.losses import Loss
from jaxmarl_llm.plans import Plan, flat
from jaxmarl_llm.stages import BaseConfig
from jaxmarl_llm.team import TeamConfig
from jaxmarl_llm.text import ConfigError

TEXT = Credit(group="role", scale="none")
CODE = Credit(group="role", centre="unique", scale="none", turn_centre="unique", whiten=True)


@dataclass(frozen=True)
class Config(BaseConfig):
    recipe: str = "marshal"
    group: int = 1  # games from each first state (deal)
    batch: int = 64
    team: TeamConfig = TeamConfig(share="shared", max_new=1)
    env: EnvConfig = EnvConfig("games")
    reward: dict[str, float] = field(default_factory=lambda: {"payoff": 1.0, "format": 0.05, "illegal": -10.0})
    credit: Credit = TEXT
    loss: Loss = Loss(dual_clip=3.0, kl_coef=0.2)

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 1 or self.group * self.batch < 2:
            raise ConfigError(f"{path}: expected group >= 1 and two games in a batch: a role is compared with itself")
        if self.credit.group not in ("role", "batch"):
            raise ConfigError(f"{path}.credit.group: expected role (batch: for comparison), got {self.credit.group!r}")


def make_plan(cfg: Config) -> Plan:
    return flat(cfg.group)


def make(cfg: Config) -> phases.Recipe:
    return phases.make_recipe(cfg, make_plan(cfg), phases.improve_groups(cfg))
