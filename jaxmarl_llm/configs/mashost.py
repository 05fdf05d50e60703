"""MasHost (arXiv 2506.08507). Variants:

tiny          `build`, a builder of 33 thousand parameters, at most 6 actions; CPU, minutes
trajectory    the same without rewards of actions: the advantage of the whole construction alone

    jaxmarl-llm train --config=mashost:tiny --workdir=runs/mashost
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.mashost import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "trajectory")
TINY = Backbone(hidden_size=32, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    base = Config()
    return dataclasses.replace(
        base,
        steps=80,
        batch=32,
        team=TeamConfig(backbone=TINY, max_new_tokens=3, remat=False),
        env=EnvConfig("build", eval_tasks=1024),
        loss=dataclasses.replace(base.loss, entropy_coef=0.01),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=400, batch=64, samples=4096, optimizer=Optimizer(learning_rate=5e-3)),
        run=RunConfig(eval_every=40, checkpoint_every=80),
    )


def trajectory() -> Config:
    return dataclasses.replace(tiny(), action_reward={})
