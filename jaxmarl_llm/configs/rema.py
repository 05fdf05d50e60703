"""ReMA (arXiv 2503.09501). Variants:

tiny        `chain`, a meta-thinker and a reasoner of 30 thousand parameters each, two turns each; CPU, minutes
shared      the same with one model for both roles
single      one turn each, shaped
tokens      as tiny, averaged over the tokens of a trajectory and not over its turns, for comparison

    jaxmarl-llm train --config=rema:tiny --workdir=runs/rema
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.rema import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "shared", "single", "tokens")
TINY = Backbone(hidden_size=32, intermediate_size=96, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=80,
        batch=8,
        team=TeamConfig(backbone=TINY, max_new_tokens=5, remat=False),
        env=EnvConfig("chain", {"protocol": "meta", "rounds": 2}),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=800, batch=64, samples=4096, optimizer=Optimizer(learning_rate=5e-3)),
        run=RunConfig(eval_every=40, checkpoint_every=80),
    )


def shared() -> Config:
    return dataclasses.replace(tiny(), team=dataclasses.replace(tiny().team, parameter_sharing="shared"))


def single() -> Config:
    env = EnvConfig("chain", {"protocol": "meta", "rounds": 1, "terms": 2, "shaping": 0.25})
    return dataclasses.replace(tiny(), env=env)


def tokens() -> Config:
    base = tiny()
    loss = dataclasses.replace(base.loss, aggregation="jaxmarl_llm.recipes.rema:mean_over_tokens")
    return dataclasses.replace(base, loss=loss)
