"""MARS^2 (arXiv 2604.14564). Variants:

tiny        `programs`, two models of 33 thousand parameters each grow trees of 8 attempts; CPU, minutes
unshaped    rewards as they are (a control)
uniform     the next attempt goes on from any attempt alike (a control)
chain       each attempt goes on from the one before (a control)
alone       one model grows the trees (a control)
flat        one model makes 8 independent attempts of each task, and rewards are as they are: GRPO (a control)

    jaxmarl-llm train --config=mars2:tiny --workdir=runs/mars2
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.mars2 import PARTNER, Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "unshaped", "uniform", "chain", "alone", "flat")
TINY = Backbone(hidden_size=32, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    pair = TeamConfig(
        backbone=TINY,
        models={"coder": ("coder", PARTNER)},
        overrides={PARTNER: TINY},
        max_new_tokens=5,
        remat=False,
    )
    return Config(
        steps=200,
        batch=32,
        team=pair,
        env=EnvConfig("programs", {"protocol": "refine", "lengths": (1.0, 2.0, 1.0, 0.0)}, eval_tasks=512),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=1300, batch=64, samples=4096, optimizer=Optimizer(learning_rate=5e-3)),
        run=RunConfig(eval_every=100, checkpoint_every=200),
    )


def unshaped() -> Config:
    return dataclasses.replace(tiny(), strength=0.0)


def uniform() -> Config:
    return dataclasses.replace(tiny(), choose="uniform")


def chain() -> Config:
    return dataclasses.replace(tiny(), choose="last")


def alone() -> Config:
    base = tiny()
    return dataclasses.replace(base, team=dataclasses.replace(base.team, models={}, overrides={}))


def flat() -> Config:
    return dataclasses.replace(alone(), choose="root", strength=0.0)
