"""SCMA (arXiv 2601.21919). Variants:

tiny          `segments`, one model of 33 thousand parameters for reasoner, segmenter and scorer; CPU, minutes
uniform       the reasoner pays for every token alike: accuracy minus alpha for each token
accuracy      the reasoner is paid for accuracy alone
shared        all roles are paid the reasoner's reward: the scorer gives weight 5 everywhere

    jaxmarl-llm train --config=scma:tiny --workdir=runs/scma
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.scma import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "uniform", "accuracy", "shared")
TINY = Backbone(hidden_size=32, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return dataclasses.replace(
        Config(),
        steps=40,
        batch=16,
        team=TeamConfig(parameter_sharing="shared", backbone=TINY, max_new_tokens=26, remat=False),
        env=EnvConfig("segments", {"largest": 2}, eval_tasks=512),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=600, batch=64, samples=16384, optimizer=Optimizer(learning_rate=5e-3)),
        run=RunConfig(eval_every=20, checkpoint_every=40),
    )


def _reasoner(weights: dict[str, float]) -> Config:
    """``tiny`` with other rewards of the reasoner."""
    cfg = tiny()
    return dataclasses.replace(cfg, role_reward=cfg.role_reward | {"reasoner": weights})


def uniform() -> Config:
    return _reasoner({"accuracy": 1.0, "length": -0.008})


def accuracy() -> Config:
    return _reasoner({"accuracy": 1.0})


def shared() -> Config:
    cfg = tiny()
    return dataclasses.replace(cfg, reward=cfg.reward | cfg.role_reward["reasoner"], role_reward={})
