"""HILA (arXiv 2603.07972). Variants:

tiny          `defer`, a chooser of 33 thousand parameters, the accuracy of creating planted; CPU, minutes
outer         a second model creates, and imitates the expert where the chooser defers
inner         as outer, without imitation

    jaxmarl-llm train --config=hila:outer --workdir=runs/hila
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.hila import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "outer", "inner")
TINY = Backbone(hidden_size=32, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return dataclasses.replace(
        Config(),
        steps=100,
        batch=64,
        team=TeamConfig(parameter_sharing="shared", backbone=TINY, max_new_tokens=1, remat=False),
        env=EnvConfig("defer", eval_tasks=1024),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=100, batch=64, samples=4096, optimizer=Optimizer(learning_rate=3e-3)),
        run=RunConfig(eval_every=50, checkpoint_every=100),
    )


def outer() -> Config:
    base = tiny()
    return dataclasses.replace(
        base,
        steps=250,
        # One model for both roles forgets how to create while it learns to choose (docs/log.md).
        team=dataclasses.replace(base.team, parameter_sharing="separate"),
        env=EnvConfig("defer", {"planted": False}, eval_tasks=1024),
        optimizer=Optimizer(learning_rate=2e-3, schedule="linear", total_steps=250),
        sft=dataclasses.replace(base.sft, steps=250, samples=8192),
    )


def inner() -> Config:
    return dataclasses.replace(outer(), imitation=0.0)
