"""WaltzRL (arXiv 2510.08240). Variants:

tiny        `safety`, a conversation and a feedback agent of 0.1 M parameters each, one revision; CPU, some minutes
no_dir      the same without the Dynamic Improvement Reward
judge       the same with a judge that is a third, frozen role, taught in stage 0

    python -m experiments.train --config=experiments/configs/waltzrl.py:tiny --workdir=runs/waltzrl
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.arena import EnvConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.recipes.waltzrl import Config
from jaxmarl_llm.stages import SFT, RunConfig
from jaxmarl_llm.team import TeamConfig
from jaxmarl_llm.train import Optimizer

VARIANTS = ("tiny", "no_dir", "judge")


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=80,
        stage_one=50,
        batch=32,
        team=TeamConfig(max_new=4, remat=False),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=300, batch=64, samples=4096, optimizer=Optimizer(learning_rate=3e-3)),
        run=RunConfig(eval_every=50, checkpoint_every=80),
    )


def no_dir() -> Config:
    return dataclasses.replace(tiny(), reward={**tiny().reward, "improvement": 0.0})


def judge() -> Config:
    return dataclasses.replace(tiny(), env=EnvConfig("safety", {"judge": "role"}))
