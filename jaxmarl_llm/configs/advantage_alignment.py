"""Advantage Alignment (arXiv 2511.19405). Variants:

tiny        `dilemma`, the iterated prisoner's dilemma for 5 rounds: one random model of a few thousand parameters plays
            both seats; CPU, minutes
split       `dilemma`, Trust-and-Split with one-byte messages
past        as tiny, half of the tasks against one of 30 snapshots of itself
naive       as tiny with beta 0, the control: independent learners
shipped     as tiny with what the authors ship for this game: discount 0.9, beta 0.5, entropy bonus, one more discount
text        as tiny through chat prompts (`dilemma_text`): what an instruct model plays, see team.backbone.path

    jaxmarl-llm train --config=advantage_alignment:tiny --workdir=runs/alignment
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.snapshots import Past
from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.advantage_alignment import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "split", "past", "naive", "shipped", "text")
TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return Config(
        steps=200,
        batch=8,
        team=TeamConfig(parameter_sharing="shared", backbone=TINY, max_new_tokens=1, remat=False),
        # Stage 0 teaches legal moves, mostly C: from an even start a policy falls to D before it tells histories apart.
        env=EnvConfig("dilemma", {"rounds": 5, "cooperate": 0.9}),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=100, batch=64, samples=1024, optimizer=Optimizer(learning_rate=5e-3)),
        run=RunConfig(eval_every=50, checkpoint_every=100),
    )


def split() -> Config:
    return dataclasses.replace(
        tiny(),
        team=TeamConfig(parameter_sharing="shared", max_new_tokens=1, remat=False),
        env=EnvConfig("dilemma", {"game": "split", "rounds": 4}),
        reward={"payoff": 0.01},
    )


def past() -> Config:
    return dataclasses.replace(tiny(), past=Past(size=30))


def naive() -> Config:
    return dataclasses.replace(tiny(), beta=0.0)


def shipped() -> Config:
    base = tiny()
    return dataclasses.replace(
        base,
        beta=0.5,
        extra_discount=True,
        credit=dataclasses.replace(base.credit, discount=0.9),
        loss=dataclasses.replace(base.loss, entropy_coef=0.01),
    )


def text() -> Config:
    team = TeamConfig(parameter_sharing="shared", backbone=TINY, max_new_tokens=2, remat=False)
    return dataclasses.replace(tiny(), team=team, env=dataclasses.replace(tiny().env, name="dilemma_text"))
