"""GRPO (arXiv 2402.03300). Variants:

tiny   one random model of 0.1 M parameters answers `dispatch_solo` queries; CPU, under a minute

    jaxmarl-llm train --config=grpo:tiny --workdir=runs/grpo
"""

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.grpo import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny",)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=400,
        batch=32,
        team=TeamConfig(max_new_tokens=7, remat=False),
        env=EnvConfig("dispatch_solo", {"efficiency": 0.05, "wrong_product": 0.25}),
        optimizer=Optimizer(learning_rate=4e-4, schedule="linear", total_steps=700),
        sft=SFT(steps=300, batch=64, optimizer=Optimizer(learning_rate=3e-3)),
        run=RunConfig(eval_every=50, checkpoint_every=100),
    )
