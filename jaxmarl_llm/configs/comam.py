"""CoMAM (arXiv 2603.12631). Variants:

tiny        `facts` with the protocol remember, three models of 47 thousand parameters; CPU, minutes
uniform     the reward of the answer has weight 1/3 for each agent, in place of weights by ranks (a control)
local       local rewards alone (a control)

    jaxmarl-llm train --config=comam:tiny --workdir=runs/comam
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.comam import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "uniform", "local")
TINY = Backbone(
    family="llama",
    hidden_size=48,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    rope_theta=30.0,
)
TAUGHT = Optimizer(learning_rate=5e-3, schedule="cosine", warmup_steps=50, total_steps=8000, b2=0.99)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return dataclasses.replace(
        Config(),
        steps=80,
        batch=16,
        team=TeamConfig(backbone=TINY, max_new_tokens=13, remat=False),
        env=EnvConfig("facts", {"protocol": "remember", "entities": 12, "relations": 6}, eval_tasks=512),
        optimizer=Optimizer(learning_rate=1e-3, max_grad_norm=0.5),
        sft=SFT(steps=TAUGHT.total_steps, batch=24, samples=8192, optimizer=TAUGHT),
        run=RunConfig(eval_every=40, checkpoint_every=80),
    )


def uniform() -> Config:
    return dataclasses.replace(tiny(), weights="uniform")


def local() -> Config:
    return dataclasses.replace(tiny(), weights="none")
