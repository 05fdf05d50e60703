"""From a training configuration to what its rollouts and updates are made of, for `complexity` and `costs`."""

from __future__ import annotations

from typing import Any

import jax

from jaxmarl_llm import complexity as cx
from jaxmarl_llm.envs.protocols import wrap
from jaxmarl_llm.losses import init_head
from jaxmarl_llm.stages import BaseConfig
from jaxmarl_llm.team import make_team
from jaxmarl_llm.types import ArrayEnv


def workload_of(
    cfg: BaseConfig, prompt: cx.Lengths | None = None, response: cx.Lengths | None = None
) -> tuple[cx.Workload, list[str]]:
    """The workload of a training configuration, and what had to be assumed, one line each."""
    module, built, notes = cfg.env.module, cfg.env.build(), []
    env = module.make(built)
    array = isinstance(env, ArrayEnv)
    memory = getattr(cfg, "memory", None)
    remembers = memory.retrieve if memory is not None and getattr(cfg, "use_memory", False) else 0
    if array:
        task = jax.tree.map(lambda x: x[0], module.make_tasks(built, 0, 1))
        seen = jax.eval_shape(lambda t: env.observe(env.reset(jax.random.key(0), t)), task)
        width = seen.tokens.shape[-1] + remembers * module.entry_length(built)
        acting = [list(actors) for actors in env.actors]
        seats = env.seats
    else:
        env, width = wrap(env, cfg.env.protocol), cfg.env.max_prompt
        first = env.observe(env.reset(0, module.tasks(built)[0]))
        seats = len(first)
        acting = [list(range(len(env.roles)))] * env.max_turns
        notes.append(f"every turn has {seats} acting, as the first of the first task; no episode ends before the last")
    if any(len(a) != seats for a in acting):
        notes.append("where several roles may take a seat they are taken to be equally likely")
    if prompt is None:
        notes.append(f"every prompt has {width} tokens, the most (--prompt)")
    if response is None:
        notes.append(f"every completion has {cfg.team.max_new} tokens, the most (--response)")
    team = make_team(cfg.team, env.roles)
    extra = 0
    if team.critics:
        dim = team.models[0].policy.config.hidden_size
        head = jax.eval_shape(lambda: init_head(jax.random.key(0), dim, cfg.team.critic_hidden))
        extra = sum(x.size for x in jax.tree.leaves(head))
    models = tuple(
        cx.Weights(
            m.policy.config,
            cfg.team.lora_rank if m.base else 0,
            cfg.team.lora_targets,
            extra if m.name in team.critics else 0,
        )
        for m in team.models
    )
    said = response or {cfg.team.max_new: 1.0}
    read = (prompt or {width: 1.0},)
    speakers = tuple(cx.Speaker(team.model_index(i), read, said, r.max_new) for i, r in enumerate(team.roles))
    certain = lambda a: tuple({r: 1.0} for r in a)
    turns = tuple(cx.Turn(certain(a) if len(a) == seats else (cx.uniform(*a),) * seats) for a in acting)
    engine = "array" if array else "host"
    return cx.Workload(turns, speakers, models, cfg.batch, engine, width, seats, cfg.team.stacked), notes


def kept(cfg: BaseConfig) -> dict[str, Any]:
    """What `costs.memory` asks of a configuration: its optimizer, and copies of the parameters beside those trained."""
    o = cfg.optimizer
    copies = int(cfg.loss.refers) + cfg.past.size
    return {"optimizer": o.name, "copies": copies, "masters": o.masters, "offload": o.offload}


def selected(cfg: Any, work: cx.Workload) -> tuple[bool, int | None]:
    """Whether an update takes nodes by their groups, and how many of them at most (None: all)."""
    groups = hasattr(cfg, "top_k") and cfg.credit.group == "node"
    if not groups or cfg.top_k is None:
        return groups, None
    return groups, cfg.top_k * (work.tasks if cfg.scope == "task" else 1)
