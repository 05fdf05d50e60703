"""Dr. MAS (arXiv 2602.08847). Variants:

tiny        `chain`, a solver and a verifier of 0.1 M parameters each, at most two attempts; CPU, some minutes
global      the control: one mean and std for all roles
hetero      as tiny, with a verifier of a quarter of the solver's width

    python -m experiments.train --config=experiments/configs/dr_mas.py:tiny --workdir=runs/dr_mas
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.arena import EnvConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.recipes.dr_mas import Config
from jaxmarl_llm.stages import SFT, RunConfig
from jaxmarl_llm.team import Backbone, TeamConfig
from jaxmarl_llm.train import Optimizer

VARIANTS = ("tiny", "global", "hetero")


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict({"tiny": tiny, "global": control, "hetero": hetero}[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=100,
        batch=16,
        team=TeamConfig(max_new=2, remat=False),
        env=EnvConfig("chain", {"protocol": "verify"}),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=300, batch=64, samples=4096, optimizer=Optimizer(learning_rate=3e-3)),
        run=RunConfig(eval_every=50, checkpoint_every=100),
    )


def control() -> Config:
    return dataclasses.replace(tiny(), norm="global")


def hetero() -> Config:
    small = Backbone(hidden_size=16, intermediate_size=48, num_heads=2, num_kv_heads=1, head_dim=8)
    return dataclasses.replace(tiny(), team=TeamConfig(max_new=2, remat=False, overrides={"verifier": small}))
