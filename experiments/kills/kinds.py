"""The runs that are killed: tiny ones of five kinds, which learn something, so that there is something to compare."""

from __future__ import annotations

from ml_collections import ConfigDict

KINDS = ("array", "host", "lora", "stages", "two processes")
# Completed steps after which the next phase begins.
STAGES = {"array": (10,), "host": (40,), "lora": (40,), "stages": (10, 16), "two processes": (10,)}
TINY = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
TEAM = {"remat": False, "parameter_sharing": "shared", "backbone": TINY}
RUN = {"eval_every": 2, "checkpoint_every": 3, "keep": 2, "log_every": 1, "tensorboard": False, "episodes": 2}
STAGE_0 = {"steps": 10, "batch": 16, "samples": 32, "optimizer": {"name": "adam", "learning_rate": 0.05}}
GAME = {
    "steps": 10,
    "batch": 4,
    "group": 4,
    "env": {"name": "matrix", "eval_tasks": 4},
    "reward": {"payoff": 1.0},
    "team": {"max_new_tokens": 1, **TEAM},
    "optimizer": {"learning_rate": 0.01},
    "sft": STAGE_0,
    "run": RUN,
}


def get_config(variant: str = "array") -> ConfigDict:
    """The configuration of a kind."""
    from jaxmarl_llm.config import from_dict, one_of, to_dict
    from jaxmarl_llm.recipes import grpo, joyagents_r1, magrpo, malt

    made: object
    kind = one_of("variant", variant.replace("_", " ") or "array", KINDS)
    if kind == "host":
        args = {"terms": 2, "modulus": 2, "largest": 1}
        env = {"name": "chain_text", "args": args, "eval_tasks": 2, "workers": 1, "max_prompt": 256}
        changes = {"steps": 5, "batch": 3, "team": {"max_new_tokens": 2, **TEAM}, "env": env}
        paid = {"reward": {"accuracy": 1.0, "format": 1.0}}
        made = from_dict(grpo.Config, {**GAME, **changes, **paid, "sft": {**STAGE_0, "steps": 40}})
    elif kind == "stages":
        chain = {
            "name": "chain",
            "args": {"protocol": "refine", "terms": 2, "modulus": 2, "largest": 1},
            "eval_tasks": 4,
        }
        changes = {"steps": 6, "tasks": 16, "pairs": 8, "batch": 8, "imitation": {"steps": 6, "batch": 8}, "env": chain}
        team = {"max_new_tokens": 2, "remat": False, "backbone": TINY}
        rest = {k: v for k, v in GAME.items() if k != "group"}
        made = from_dict(malt.Config, {**rest, **changes, "team": team, "reward": {"accuracy": 1.0}})
    elif kind == "two processes":
        # SGD: Adam makes whole steps of what rounding leaves of a gradient of 0.
        sgd = {"name": "sgd", "learning_rate": 0.2}
        mesh = {"data": 1, "fsdp": 4}
        made = from_dict(magrpo.Config, {**GAME, "optimizer": sgd, "mesh": mesh})
    else:
        memory = {"memory_reward": {"payoff": 1.0}, "memory": {"capacity": 8, "retrieve": 1, "warmup": 4}}
        sharing = {"parameter_sharing": "lora", "lora_rank": 2} if kind == "lora" else {}
        longer = (
            {"sft": {**STAGE_0, "steps": 40}, "group": 8, "batch": 8} if kind == "lora" else {}
        )  # adapters learn slowly
        best = {"best": "eval/return"} if kind == "array" else {}
        changes = {"team": {"max_new_tokens": 1, **TEAM, **sharing}, "run": {**RUN, **best}}
        made = from_dict(joyagents_r1.Config, {**GAME, **memory, **longer, **changes})
    return ConfigDict(to_dict(made))
