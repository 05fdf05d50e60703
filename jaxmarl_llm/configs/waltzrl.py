"""WaltzRL (arXiv 2510.08240). Variants:

tiny        `safety`, a conversation and a feedback agent of 30 thousand parameters each, one revision; CPU, minutes
no_dir      the same without the Dynamic Improvement Reward
judge       the same with a judge that is a third, frozen role, taught in stage 0

    jaxmarl-llm train --config=waltzrl:tiny --workdir=runs/waltzrl
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.waltzrl import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "no_dir", "judge")
TINY = Backbone(hidden_size=32, intermediate_size=96, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=80,
        stage_one=50,
        batch=32,
        team=TeamConfig(backbone=TINY, max_new_tokens=4, remat=False),
        env=EnvConfig("safety", eval_tasks=1024),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=300, batch=64, samples=4096, optimizer=Optimizer(learning_rate=3e-3)),
        run=RunConfig(eval_every=40, checkpoint_every=80),
    )


def no_dir() -> Config:
    return dataclasses.replace(tiny(), reward={**tiny().reward, "improvement": 0.0})


def judge() -> Config:
    return dataclasses.replace(tiny(), env=dataclasses.replace(tiny().env, args={"judge": "role"}))
