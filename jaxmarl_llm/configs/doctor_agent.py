"""DoctorAgent-RL (arXiv 2505.19630). Variants:

tiny        `consult`, a doctor of 21 thousand parameters, budgets of 2 to 6 turns; CPU, minutes
no_turns    the same without rewards of questions: the diagnosis and the end of the turns alone
fixed       the same with a budget of 4 turns in every consultation

    jaxmarl-llm train --config=doctor_agent:tiny --workdir=runs/doctor_agent
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.doctor_agent import TURN_REWARDS, Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "no_turns", "fixed")
TINY = Backbone(hidden_size=32, intermediate_size=96, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    base = Config()
    return dataclasses.replace(
        base,
        steps=80,
        batch=16,
        team=TeamConfig(backbone=TINY, max_new_tokens=2, remat=False),
        env=EnvConfig("consult", eval_tasks=1024),
        loss=dataclasses.replace(base.loss, epochs=2),
        optimizer=Optimizer(learning_rate=2e-3),
        sft=SFT(steps=1200, batch=128, samples=16384, optimizer=Optimizer(learning_rate=5e-3)),
        run=RunConfig(eval_every=40, checkpoint_every=80),
    )


def no_turns() -> Config:
    return dataclasses.replace(tiny(), reward={**tiny().reward, **dict.fromkeys(TURN_REWARDS, 0.0)})


def fixed() -> Config:
    return dataclasses.replace(tiny(), env=dataclasses.replace(tiny().env, args={"budgets": (4,)}))
