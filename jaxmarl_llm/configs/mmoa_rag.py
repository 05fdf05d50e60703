"""MMOA-RAG (arXiv 2501.15228). Variants:

tiny          `facts`, one model of 44 thousand parameters for rewriter, selector and generator; CPU, minutes
free          the same without penalties: the F1 of the answer alone
generator     the generator has a model of its own, and it alone learns; the others stay as after stage 0
smollm2       `facts_text`: SmolLM2-135M-Instruct with one LoRA adapter for each role (weights/smollm2); CPU

    jaxmarl-llm train --config=mmoa_rag:tiny --workdir=runs/mmoa_rag
"""

import dataclasses

from ml_collections import ConfigDict

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.mmoa_rag import Config
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer

VARIANTS = ("tiny", "free", "generator", "smollm2")
TINY = Backbone(
    family="qwen3", hidden_size=32, intermediate_size=96, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16
)
TAUGHT = Optimizer(learning_rate=1e-2, schedule="cosine", warmup_steps=50, total_steps=4000, b2=0.99)


def get_config(variant: str = "tiny") -> ConfigDict:
    one_of("variant", variant or "tiny", VARIANTS)
    return ConfigDict(to_dict(globals()[variant or "tiny"]()))


def tiny() -> Config:
    base = Config()
    return dataclasses.replace(
        base,
        steps=60,
        batch=16,
        group=4,
        team=TeamConfig(parameter_sharing="shared", backbone=TINY, critic="head", max_new_tokens=12, remat=False),
        env=EnvConfig("facts", eval_tasks=512),
        optimizer=Optimizer(learning_rate=1e-3, max_grad_norm=0.5),
        sft=SFT(steps=TAUGHT.total_steps, batch=24, samples=8192, optimizer=TAUGHT),
        run=RunConfig(eval_every=30, checkpoint_every=60),
    )


def free() -> Config:
    return dataclasses.replace(tiny(), reward={"f1": 1.0})


def generator() -> Config:
    cfg = tiny()
    team = dataclasses.replace(
        cfg.team, parameter_sharing="separate", models={"rewriter": "reader", "selector": "reader"}
    )
    return dataclasses.replace(cfg, team=team, trained_roles=("generator",))


def smollm2() -> Config:
    base = Config()
    return dataclasses.replace(
        base,
        steps=60,
        batch=2,
        group=4,
        team=TeamConfig(
            parameter_sharing="lora",
            backbone=Backbone(path="weights/smollm2"),
            lora_rank=8,
            critic="head",
            max_new_tokens=32,
        ),
        env=EnvConfig("facts_text", {"documents": 4, "passage_chars": 300}, max_prompt=640, eval_tasks=16),
        micro_tokens=1536,
        optimizer=Optimizer(learning_rate=3e-4, max_grad_norm=0.5),
        run=RunConfig(eval_every=0, checkpoint_every=5, log_every=1),
    )
