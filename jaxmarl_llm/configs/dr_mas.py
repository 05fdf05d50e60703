"""Dr. MAS (arXiv 2602.08847). Variants:

tiny        `chain`, a solver and a verifier of 30 thousand parameters each, at most two attempts; CPU, minutes
task        the control: one mean and std for all roles
hetero      as tiny, with a verifier of a quarter of the solver's width

    jaxmarl-llm train --config=dr_mas:tiny --workdir=runs/dr_mas
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.dr_mas import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "task", "hetero")
TINY = Backbone(hidden_size=32, intermediate_size=96, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=100,
        batch=8,
        team=TeamConfig(backbone=TINY, max_new_tokens=2, remat=False),
        env=EnvConfig("chain", {"protocol": "verify", "terms": 2, "largest": 9}),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=800, batch=64, samples=4096, optimizer=Optimizer(learning_rate=5e-3)),
        run=RunConfig(eval_every=50, checkpoint_every=100),
    )


def task() -> Config:
    return dataclasses.replace(tiny(), credit=dataclasses.replace(tiny().credit, group="task"))


def hetero() -> Config:
    small = Backbone(hidden_size=16, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
    return dataclasses.replace(tiny(), team=dataclasses.replace(tiny().team, overrides={"verifier": small}))
