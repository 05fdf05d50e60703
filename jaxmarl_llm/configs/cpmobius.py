"""CPMobius (arXiv 2602.02979). Variants:

tiny              `chain_coach`, a coach and a player of 24 thousand parameters each; CPU, minutes
no_band           the same with every question, whatever its solve rate
untrained_coach   the same with the coach that stage 0 ends with

    jaxmarl-llm train --config=cpmobius:tiny --workdir=runs/cpmobius
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.cpmobius import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "no_band", "untrained_coach")
TINY = Backbone(hidden_size=32, intermediate_size=96, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return dataclasses.replace(
        Config(),
        steps=40,
        extra_plays=1,
        batch=16,
        team=TeamConfig(backbone=TINY, max_new_tokens=12, remat=False),
        env=EnvConfig("chain_coach", eval_tasks=512),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=700, batch=64, samples=16384, optimizer=Optimizer(learning_rate=5e-3)),
        run=RunConfig(eval_every=20, checkpoint_every=40),
    )


def no_band() -> Config:
    return dataclasses.replace(tiny(), band=(0.0, 1.0))


def untrained_coach() -> Config:
    return dataclasses.replace(tiny(), train_coach=False)
