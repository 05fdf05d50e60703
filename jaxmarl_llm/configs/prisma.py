"""PRISMA (arXiv 2601.05465). Variants:

tiny        `facts` with the protocol inspect, three models of 44 thousand parameters, one intervention; CPU, minutes
blind       the inspector reads the question alone (a control)

``stage_one`` of the ``steps`` are stage I, and the rest is stage II.

    jaxmarl-llm train --config=prisma:tiny --workdir=runs/prisma
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.prisma import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "blind")
TINY = Backbone(
    family="qwen3", hidden_size=32, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16
)
TAUGHT = Optimizer(learning_rate=1e-2, schedule="cosine", warmup_steps=50, total_steps=4000, b2=0.99)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return dataclasses.replace(
        Config(),
        steps=65,
        stage_one=5,  # a team that is always right would leave an inspector nothing to win
        batch=16,
        team=TeamConfig(backbone=TINY, max_new_tokens=12, remat=False),
        env=EnvConfig("facts", {"protocol": "inspect", "inspect": {"interventions": 1}}, eval_tasks=512),
        optimizer=Optimizer(learning_rate=1e-3, max_grad_norm=0.5),
        sft=SFT(steps=TAUGHT.total_steps, batch=24, samples=8192, optimizer=TAUGHT),
        run=RunConfig(eval_every=10, checkpoint_every=65),
    )


def blind() -> Config:
    base = tiny()
    inspects = {**base.env.args["inspect"], "trace": False}
    return dataclasses.replace(base, env=dataclasses.replace(base.env, args={**base.env.args, "inspect": inspects}))
