"""Search-R2 (arXiv 2602.03647). Variants:

tiny          `facts`, one model of 44 thousand parameters for actor and refiner; questions of two hops; CPU, minutes
em_alone      the same without the share of searches with evidence: EM alone
whole         a whole second trace in place of a cut; the refiner keeps one of the two (a control)

    jaxmarl-llm train --config=search_r2:tiny --workdir=runs/search_r2
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.search_r2 import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "em_alone", "whole")
TINY = Backbone(
    family="qwen3", hidden_size=32, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16
)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def _with(**settings: str) -> Config:
    """``tiny`` with other ``settings`` of the protocol."""
    args = {"protocol": "refine", "two_hops": 1.0, "copying": 0.0, "refine": settings}
    return dataclasses.replace(
        Config(),
        steps=10,  # after 100 the team is nearly always right, and a refiner has nothing to win
        batch=16,
        team=TeamConfig(parameter_sharing="shared", backbone=TINY, max_new_tokens=3, remat=False),
        env=EnvConfig("facts", args, eval_tasks=512),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=300, batch=64, samples=8192, optimizer=Optimizer(learning_rate=5e-3)),
        run=RunConfig(eval_every=5, checkpoint_every=10),
    )


def tiny() -> Config:
    return _with()


def em_alone() -> Config:
    return dataclasses.replace(tiny(), reward={"em": 1.0})


def whole() -> Config:
    return _with(second="whole")
