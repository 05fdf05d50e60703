"""MARSHAL (arXiv 2510.15414). Variants:

tiny        Kuhn poker by a random model of 13 thousand parameters, self-play; CPU, a few minutes
code        the same with the advantages of the authors' code instead of the paper's text
tic_tac_toe  the same model, twice as wide and deep, on the board; CPU, some minutes
hanabi      and with a partner instead of an opponent
games       Kuhn poker, tic-tac-toe and mini-Hanabi in every batch, compared by game and player; CPU

    jaxmarl-llm train --config=marshal:tiny --workdir=runs/marshal

Needs the extra `games`.
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.marshal import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "code", "tic_tac_toe", "hanabi", "games")
TINY = Backbone(hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)

BOARD = Backbone(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=1000,
        batch=64,
        team=TeamConfig(parameter_sharing="shared", backbone=TINY, max_new_tokens=1, remat=False),
        env=EnvConfig("games", {"games": ("kuhn_poker",)}),
        optimizer=Optimizer(learning_rate=3e-3, schedule="linear", total_steps=1000),
        # At 1e-2 one seed in five came out of stage 0 blind to its card.
        sft=SFT(steps=150, batch=64, optimizer=Optimizer(learning_rate=3e-3)),
        run=RunConfig(eval_every=250, checkpoint_every=250),
    )


def code() -> Config:
    return dataclasses.replace(tiny(), form="code")


def tic_tac_toe() -> Config:
    cfg = tiny()
    return dataclasses.replace(
        cfg,
        steps=1500,
        batch=128,
        team=TeamConfig(parameter_sharing="shared", backbone=BOARD, max_new_tokens=1, remat=False),
        env=EnvConfig("games", {"games": ("tic_tac_toe",)}),
        optimizer=Optimizer(learning_rate=3e-3, schedule="linear", total_steps=1500),
        # A team that has forgotten how others play is lost off its own line of play.
        loss=dataclasses.replace(cfg.loss, kl_coef=0.05),
        # The rules: after 300 steps one game in five ends with a move on a taken cell.
        sft=SFT(steps=1500, batch=64, samples=8192, optimizer=Optimizer(learning_rate=3e-3)),
    )


def hanabi() -> Config:
    cfg = tic_tac_toe()
    return dataclasses.replace(cfg, steps=500, env=EnvConfig("games", {"games": ("hanabi",)}))


def games() -> Config:
    return dataclasses.replace(
        tiny(),
        batch=96,
        team=TeamConfig(parameter_sharing="shared", max_new_tokens=1, remat=False),
        env=EnvConfig("games", {"games": ("kuhn_poker", "tic_tac_toe", "hanabi"), "tasks": 96}),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=300, batch=64, optimizer=Optimizer(learning_rate=3e-3)),
    )
