"""MAGRPO (arXiv 2508.04652). Variants:

tiny        `duet`, two random models of 0.1 M parameters write strings that must fit together; CPU, about a minute.
            Crossed joint actions and standardised advantages, as in the authors' later library
sparse      the same, but a pair of strings earns nothing unless it is nearly perfect (2.75 of 3.0), 0.4 % of pairs at
            first: every string is tried with all of the partner's, which one model alone cannot do
paper       the task of `tiny` by the paper: aligned joint actions, no std
maze        `maze`, two agents who each see half of a 3x3 maze and must agree on every move; CPU, minutes
maze_solo   the same for one agent who sees all of it: what the collaboration gap is measured from
maze_text   the paper's 6x6 mazes in words (Qwen2.5-0.5B-Instruct from --config.team.backbone.path); for accelerators
tree        `matrix`, chicken played twice: a tree of crossed joint actions, discounted child means
smollm2     `writing`, TLDR on SciTLDR (the sample in the package; --config.env.args.data=DIR for all of it). Two
            SmolLM2-135M-Instruct (`make weights`) with a LoRA each; CPU, about a minute a step
tldr        the paper's setting of TLDR (two Qwen3-1.7B from --config.team.backbone.path); for accelerators
qwen3_1_7b  `tldr` for a slice of chips: a batch of 512 prompts, a mesh (docs/pods.md)
coding      the paper's setting of HumanEval (two Qwen2.5-Coder-3B); for accelerators

    jaxmarl-llm train --config=magrpo:tiny --workdir=runs/magrpo
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.credit.assign import Credit
from jaxmarl_llm.distributed.meshes import MeshConfig
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.recipes.magrpo import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = (
    *("tiny", "sparse", "paper", "tree", "maze", "maze_solo", "maze_text"),
    *("smollm2", "tldr", "qwen3_1_7b", "coding"),
)
DUET = {"form": 1.0, "ratio": 1.0, "unique": 1.0, "topic": 1.0}
WRITING = {"words": 1.0, "ratio": 1.0, "unique": 1.0, "transitions": 1.0, "jaccard": 1.0}
CODING = {"structure": 1.0, "syntax": 1.0, "tests": 1.0, "cooperation": 1.0}


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    return dataclasses.replace(paper(), tree_mode="tree", joint="cross", credit=Credit(group="node", normalise="std"))


def sparse() -> Config:
    return dataclasses.replace(tiny(), steps=100, env=EnvConfig("duet", {"bar": 2.75}))


def paper() -> Config:
    return Config(
        steps=300,
        batch=16,
        group=8,
        team=TeamConfig(max_new_tokens=10, remat=False),
        env=EnvConfig("duet"),
        reward=DUET,
        optimizer=Optimizer(learning_rate=1e-3, max_grad_norm=1.0),
        sft=SFT(steps=150, batch=64, optimizer=Optimizer(learning_rate=3e-3)),
        run=RunConfig(eval_every=50, checkpoint_every=100),
    )


def tree() -> Config:
    return Config(
        steps=100,
        batch=8,
        group=3,
        tree_mode="tree",
        joint="cross",
        team=TeamConfig(max_new_tokens=1, remat=False),
        env=EnvConfig("matrix", {"game": "chicken", "rounds": 2}),
        reward={"payoff": 1.0},
        credit=Credit(discount=0.9, group="node", normalise="none"),
        optimizer=Optimizer(learning_rate=1e-3),
        sft=SFT(steps=60, batch=32, samples=256, optimizer=Optimizer(learning_rate=3e-3)),
        run=RunConfig(eval_every=50, checkpoint_every=100),
    )


MAZE = {"size": 3, "shortest": 2, "longest": 4, "moves": 6, "skill": 0.95, "defer": 0.5}


def maze() -> Config:
    small = Backbone(hidden_size=32, intermediate_size=96, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    return Config(
        steps=300,
        batch=16,
        group=8,
        team=TeamConfig(parameter_sharing="shared", backbone=small, max_new_tokens=1, remat=False),
        env=EnvConfig("maze", MAZE, eval_tasks=512),
        reward={"accuracy": 1.0, "progress": 1.0},
        optimizer=Optimizer(learning_rate=3e-3, max_grad_norm=1.0),
        sft=SFT(steps=800, batch=64, samples=8192, optimizer=Optimizer(learning_rate=5e-3)),
        run=RunConfig(eval_every=50, checkpoint_every=100),
    )


def maze_solo() -> Config:
    return dataclasses.replace(maze(), env=dataclasses.replace(maze().env, args={**MAZE, "agents": 1}))


def maze_text() -> Config:
    return Config(
        steps=500,
        batch=16,
        team=TeamConfig(
            parameter_sharing="shared", backbone=Backbone(path="Qwen/Qwen2.5-0.5B-Instruct"), max_new_tokens=128
        ),
        env=EnvConfig("maze_text", workers=8, max_prompt=1024, eval_tasks=128),
        reward={"accuracy": 1.0, "progress": 1.0},
        sampling=Sampling(temperature=0.8),
        micro_tokens=65_536,
        optimizer=Optimizer(learning_rate=5e-6),
        run=RunConfig(max_logprob_diff=0.5),
    )


def smollm2() -> Config:
    return Config(
        steps=60,
        batch=2,
        group=4,
        team=TeamConfig(
            parameter_sharing="lora", backbone=Backbone(path="weights/smollm2"), lora_rank=8, max_new_tokens=128
        ),
        # 128 new tokens are some 95 words: the strict reward pays nothing for a text that the limit ends.
        env=EnvConfig(
            "writing",
            {"task": "tldr", "reward": "strict", "min_source": 60, "max_source": 170},
            max_prompt=320,
            eval_tasks=16,
        ),
        reward=WRITING,
        sampling=Sampling(temperature=0.8),
        micro_tokens=1536,
        optimizer=Optimizer(learning_rate=3e-4),
        run=RunConfig(eval_every=0, checkpoint_every=5, log_every=1),
    )


def tldr() -> Config:
    return Config(
        steps=1000,
        batch=16,
        team=TeamConfig(backbone=Backbone(path="Qwen/Qwen3-1.7B", dtype="bfloat16"), max_new_tokens=256),
        env=EnvConfig("writing", {"task": "tldr", "reward": "parity", "data": "trl-lib/tldr"}, max_prompt=1024),
        reward=WRITING,
        sampling=Sampling(temperature=0.7, top_p=0.9),
        micro_tokens=65_536,
        optimizer=Optimizer(learning_rate=5e-6, max_grad_norm=0.0),
        run=RunConfig(max_logprob_diff=0.5),
    )


def qwen3_1_7b() -> Config:
    return dataclasses.replace(tldr(), batch=512, micro_tokens=4096, mesh=MeshConfig(data=-1, fsdp=8, tensor=1))


def coding() -> Config:
    return Config(
        steps=1000,
        batch=16,
        team=TeamConfig(backbone=Backbone(path="Qwen/Qwen2.5-Coder-3B", dtype="bfloat16"), max_new_tokens=256),
        env=EnvConfig("coding", {"benchmark": "humaneval"}, workers=16, timeout=120.0, max_prompt=1024),
        reward=CODING,
        sampling=Sampling(temperature=0.8, top_p=0.95),
        micro_tokens=65_536,
        optimizer=Optimizer(learning_rate=1e-5, max_grad_norm=0.0),
        run=RunConfig(max_logprob_diff=0.5),
    )
