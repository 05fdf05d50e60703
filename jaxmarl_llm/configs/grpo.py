"""GRPO (arXiv 2402.03300). Variants:

tiny   one random model of 0.1 M parameters answers `dispatch_solo` queries; CPU, under a minute
task   a task of your own, --config.env.name=MODULE:FUNCTION: 100 steps of a random model of 0.1 M parameters; CPU.
       Every reward component has the weight 1 (--config.reward.NAME=WEIGHT). The environment runs in this process

    jaxmarl-llm train --config=grpo:tiny --workdir=runs/grpo
    jaxmarl-llm train --config=grpo:task --config.env.name=capitals:make --workdir=runs/capitals
"""

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.grpo import Config
from jaxmarl_llm.training.config import OTHERS, SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "task")


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


def task() -> Config:
    return Config(
        steps=100,
        batch=4,
        team=TeamConfig(max_new_tokens=16, remat=False),
        env=EnvConfig("dispatch_solo", workers=0, eval_tasks=64),  # a stand-in for --config.env.name
        reward={OTHERS: 1.0},
        optimizer=Optimizer(learning_rate=1e-3),
        run=RunConfig(eval_every=20, checkpoint_every=50, max_epochs=0.0),
    )
