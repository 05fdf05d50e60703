"""ReMA (arXiv 2503.09501). Variants:

tiny        `chain`, a meta-thinker and a reasoner of 0.1 M parameters each, at most two turns each; CPU, some minutes
shared      the same with one model for both roles
single      one turn each, shaped

    python -m experiments.train --config=experiments/configs/rema.py:tiny --workdir=runs/rema
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.arena import EnvConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.recipes.rema import Config
from jaxmarl_llm.stages import SFT, RunConfig
from jaxmarl_llm.team import TeamConfig
from jaxmarl_llm.train import Optimizer

VARIANTS = ("tiny", "shared", "single")


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=120,
        batch=16,
        team=TeamConfig(max_new=5, remat=False),
        env=EnvConfig("chain", {"protocol": "meta", "rounds": 2}),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=300, batch=64, samples=4096, optimizer=Optimizer(learning_rate=3e-3)),
        run=RunConfig(eval_every=40, checkpoint_every=120),
    )


def shared() -> Config:
    return dataclasses.replace(tiny(), team=TeamConfig(share="shared", max_new=5, remat=False))


def single() -> Config:
    env = EnvConfig("chain", {"protocol": "meta", "rounds": 1, "terms": 2, "shaping": 0.25})
    return dataclasses.replace(tiny(), env=env)
