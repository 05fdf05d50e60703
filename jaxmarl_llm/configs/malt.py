"""MALT (arXiv 2412.01928). Variants:

tiny        `chain`, a generator, a verifier and a refiner of 0.1 M parameters each; CPU, some minutes
random      the control: as many positive labels, on steps drawn at random
solo        stage 0 of one model alone, on the same questions

    jaxmarl-llm train --config=malt:tiny --workdir=runs/malt
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.recipes.malt import Config
from jaxmarl_llm.training.config import SFT, Offline, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "random", "solo")
# Sums and differences of two digits; most differences are taken for sums, verdicts are right in 9 of 10;
# a refiner acts on every other one. Without the last two the untrained team is no better than one model.
QUESTIONS = {
    "terms": 2,
    "largest": 9,
    "answer_error_rate": 0.6,
    "false_accept_rate": 0.1,
    "false_reject_rate": 0.05,
    "revision_rate": 0.5,
}


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict({"tiny": tiny, "random": control, "solo": solo}[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=100,
        batch=64,
        tasks=512,
        team=TeamConfig(max_new_tokens=2, remat=False),
        env=EnvConfig("chain", {"protocol": "refine", **QUESTIONS}, eval_tasks=512),
        optimizer=Optimizer(learning_rate=1e-4),
        sft=SFT(steps=500, batch=64, samples=8192, optimizer=Optimizer(learning_rate=3e-3)),
        imitation=Offline(steps=150, batch=64, optimizer=Optimizer(learning_rate=1e-3)),
        run=RunConfig(eval_every=50, checkpoint_every=250),
    )


def control() -> Config:
    """The variant ``random``."""
    return dataclasses.replace(tiny(), labels="random")


def solo() -> grpo.Config:
    team = tiny()
    theirs = ("batch", "team", "sft", "run", "reward")
    env = dataclasses.replace(team.env, args={**team.env.args, "protocol": "solo"})
    return grpo.Config(steps=0, env=env, **{name: getattr(team, name) for name in theirs})
