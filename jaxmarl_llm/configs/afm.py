"""Chain-of-Agents, AFM (arXiv 2508.13167). Variants:

tiny        `facts` with the protocol tags, four models of 44 thousand parameters; CPU, minutes
alone       the same without imitation: the agent's RL begins behind stage 0 (a control)

    jaxmarl-llm train --config=afm:tiny --workdir=runs/afm
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.afm import Config
from jaxmarl_llm.training.config import SFT, Offline, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "alone")
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
        steps=120,
        source_steps=40,
        batch=16,
        harvested=1024,
        imitation=Offline(steps=20, batch=32, optimizer=Optimizer(learning_rate=3e-3)),
        team=TeamConfig(backbone=TINY, max_new_tokens=10, remat=False),
        env=EnvConfig("facts", {"protocol": "tags"}, eval_tasks=512),
        optimizer=Optimizer(learning_rate=1e-3, max_grad_norm=0.5),
        sft=SFT(steps=TAUGHT.total_steps, batch=24, samples=8192, optimizer=TAUGHT),
        run=RunConfig(eval_every=20, checkpoint_every=100),
    )


def alone() -> Config:
    base = tiny()
    return dataclasses.replace(base, imitation=dataclasses.replace(base.imitation, steps=0), source_steps=0)
