"""CoRe-Code (arXiv 2605.24812). Variants:

tiny        `programs`, a planner and a coder of 33 thousand parameters each, four plans of four programs; CPU, minutes
plans       as many programs, each of its own plan; the planner alone learns (a control)

    jaxmarl-llm train --config=core_code:tiny --workdir=runs/core_code
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.core_code import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "plans")
TINY = Backbone(hidden_size=32, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=300,
        stage_one=150,
        batch=32,
        team=TeamConfig(backbone=TINY, max_new_tokens=5, remat=False),
        env=EnvConfig("programs", {"lengths": (1.0, 2.0, 1.0, 0.0)}, eval_tasks=512),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=1300, batch=64, samples=4096, optimizer=Optimizer(learning_rate=5e-3)),
        run=RunConfig(eval_every=150, checkpoint_every=300),
    )


def plans() -> Config:
    base = tiny()
    return dataclasses.replace(base, plans=base.plans * base.programs, programs=1, steps=base.stage_one)
