"""OPTAGENT (arXiv 2510.18032). Variants:

tiny        `debate`, meta-roles of 33 thousand parameters without training, a graph of four speakers; CPU, minutes
withhold    the same, where act is not shown reflections

    jaxmarl-llm train --config=optagent:tiny --workdir=runs/optagent
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.optagent import Config
from jaxmarl_llm.training.config import RunConfig

VARIANTS = ("tiny", "withhold")
TINY = Backbone(hidden_size=32, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=4,
        batch=32,
        team=TeamConfig(backbone=TINY, max_new_tokens=5, remat=False),
        env=EnvConfig("debate", {"practice": 6, "tasks": 256}, eval_tasks=128),
        run=RunConfig(eval_every=0, checkpoint_every=4),
    )


def withhold() -> Config:
    base = tiny()
    return dataclasses.replace(base, env=dataclasses.replace(base.env, args={**base.env.args, "withhold": True}))
