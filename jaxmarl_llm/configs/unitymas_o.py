"""UnityMAS-O (arXiv 2605.26646), one recipe over several workflows. Variants:

tiny        M-ASK: `facts` with the protocol mask, one model of 44 thousand parameters for all five roles; CPU, minutes
team        the same with one reward for all records (a control)
split       the same with the authors' map: planner and answerer share a model, the other roles have their own
pipeline    `facts` with the protocol pipeline: rewriter, selector and generator of one model, paid the last F1
verify      `chain` with the protocol verify: solver and verifier have models of their own, paid the last answer
code        `programs` with the protocol reflect: planner, coder and reflector, each paid the change of tests that pass

    jaxmarl-llm train --config=unitymas_o:tiny --workdir=runs/unitymas_o
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.unitymas_o import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "team", "split", "pipeline", "verify", "code")
TINY = Backbone(
    family="qwen3", hidden_size=32, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16
)
TAUGHT = Optimizer(learning_rate=1e-2, schedule="cosine", warmup_steps=50, total_steps=4000, b2=0.99)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def models(sharing: str, most: int) -> TeamConfig:
    """Tiny models with value heads. ``sharing``: of their parameters. ``most``: tokens of a completion."""
    return TeamConfig(parameter_sharing=sharing, backbone=TINY, critic="head", max_new_tokens=most, remat=False)


def tiny() -> Config:
    return dataclasses.replace(
        Config(),
        steps=60,
        batch=16,
        group=4,
        team=models("shared", 12),
        env=EnvConfig("facts", {"protocol": "mask"}, eval_tasks=512),
        optimizer=Optimizer(learning_rate=1e-3, max_grad_norm=0.5),
        sft=SFT(steps=TAUGHT.total_steps, batch=24, samples=8192, optimizer=TAUGHT),
        run=RunConfig(eval_every=30, checkpoint_every=30),
    )


def team() -> Config:
    return dataclasses.replace(tiny(), pay="team")


def split() -> Config:
    return dataclasses.replace(tiny(), team=dataclasses.replace(models("separate", 12), models={"planner": "answerer"}))


def pipeline() -> Config:
    env = EnvConfig("facts", {"protocol": "pipeline"}, eval_tasks=512)
    return dataclasses.replace(tiny(), pay="team", env=env, reward={"penalty": 1.0})


def verify() -> Config:
    return dataclasses.replace(
        tiny(),
        steps=150,
        batch=32,
        pay="team",
        team_reward="accuracy",
        team=models("separate", 2),
        env=EnvConfig("chain", {"protocol": "verify", "terms": 4, "largest": 2}, eval_tasks=512),
        sft=SFT(steps=800, batch=64, samples=4096, optimizer=Optimizer(learning_rate=5e-3)),
    )


def code() -> Config:
    return dataclasses.replace(
        tiny(),
        steps=150,
        batch=32,
        scored=("coder",),
        absolute=(),
        team=models("separate", 5),
        env=EnvConfig("programs", {"protocol": "reflect", "lengths": (1.0, 2.0, 1.0, 0.0)}, eval_tasks=512),
        sft=SFT(steps=1300, batch=64, samples=4096, optimizer=Optimizer(learning_rate=5e-3)),
    )
