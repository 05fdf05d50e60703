"""Workload of a training configuration, the input of `costs.counts` and `costs.model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.agents.team import make_team
from jaxmarl_llm.costs import counts as cx
from jaxmarl_llm.credit.selection import one_round
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.envs.contract import ArrayTask
from jaxmarl_llm.envs.protocols import wrap
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import HostEnv
from jaxmarl_llm.models.value_head import init_head
from jaxmarl_llm.rollout.plans import ROOT, Plan
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.types import Team


class GivenLengths(NamedTuple):
    """Length distributions that are known before a run. None: the largest length.

    prompt, response: of prompts and of completions. source: the flag that gave them, for error messages.
    """

    prompt: cx.Lengths | None = None
    response: cx.Lengths | None = None
    source: str = ""


def workload_of(
    cfg: BaseConfig, given: GivenLengths = GivenLengths(), by_role: Mapping[str, GivenLengths] | None = None
) -> tuple[cx.Workload, list[str]]:
    """Workload of a training configuration, and the assumptions it makes, one line each.

    cfg: the configuration. given: lengths of the roles that are not in ``by_role``, and of what is None there. by_role:
    lengths of single roles, by name. Raises ConfigError for an unknown role, an impossible length, and devices that
    sample and do not train, which the costs do not know.
    """
    if cfg.mesh.rollout_devices:
        raise ConfigError("config.mesh.rollout_devices: expected 0: costs are of devices that sample and train")
    task, notes = cfg.env.environment(), []
    env: ArrayEnv | HostEnv
    memory = getattr(cfg, "memory", None)
    remembers = memory.retrieve if memory is not None and getattr(cfg, "use_memory", False) else 0
    if isinstance(task, ArrayTask):
        game, env = task.env, task.env
        first = jax.tree.map(lambda x: x[0], task.tasks)
        seen = jax.eval_shape(lambda t: game.observe(game.reset(jax.random.key(0), t)), first)
        width = seen.tokens.shape[-1] + remembers * task.entry_length
        acting = [list(actors) for actors in game.actors]
        seats = game.seats
    else:
        env, width = wrap(task.make(), cfg.env.protocol), cfg.env.max_prompt
        seats = len(env.observe(env.reset(0, task.tasks[0])))
        acting = [list(range(len(env.roles)))] * env.max_turns
        notes.append(f"every turn has {seats} acting, as the first of the first task; no episode ends before the last")
    if any(len(a) != seats for a in acting):
        notes.append("where several roles may take a seat they are taken to be equally likely")
    team = make_team(cfg.team, env.roles)
    lengths, assumed = _role_lengths(team, width, given, by_role or {})
    notes += assumed
    extra = 0
    if team.critics:
        dim = team.models[0].policy.config.hidden_size
        head = jax.eval_shape(lambda: init_head(jax.random.key(0), dim, cfg.team.critic_hidden))
        extra = sum(x.size for x in jax.tree.leaves(head))
    models = tuple(
        cx.ModelSize(
            m.policy.config,
            cfg.team.lora_rank if m.base else 0,
            cfg.team.lora_targets,
            extra if m.name in team.critics else 0,
            cfg.rollout_weights,
            cfg.rollout_cache,
        )
        for m in team.models
    )
    certain = lambda a: tuple({r: 1.0} for r in a)
    turns = tuple(cx.Turn(certain(a) if len(a) == seats else (cx.uniform(*a),) * seats) for a in acting)
    engine = "array" if isinstance(task, ArrayTask) else "host"
    joined = cfg.mesh.rollout_blocks == 1 and joins_adapters(cfg, engine)
    return cx.Workload(turns, lengths, models, cfg.batch, engine, width, seats, cfg.team.batch_models, joined), notes


def joins_adapters(cfg: BaseConfig, engine: str) -> bool:
    """Whether all roles of a configuration sample in one launch, unless in blocks (`Workload.join_adapters`).

    Args:
        cfg: the configuration.
        engine: "array" or "host".
    """
    team, alike = cfg.team, cfg.mesh.models == "all" and cfg.team.critic != "head"
    return engine == "host" and team.parameter_sharing == "lora" and alike and not team.batch_invariant


def _role_lengths(
    team: Team, width: int, given: GivenLengths, by_role: Mapping[str, GivenLengths]
) -> tuple[tuple[cx.RoleLengths, ...], list[str]]:
    """Lengths of every role of a team, and the assumptions. width: largest number of prompt tokens."""
    names = [role.name for role in team.roles]
    unknown = next((name for name in by_role if name not in names), None)
    if unknown is not None:
        raise ConfigError(f"{by_role[unknown].source}: unknown role {unknown!r}; the roles are {', '.join(names)}")
    out, most_prompt, most_response = [], [], []
    for i, role in enumerate(team.roles):
        own = by_role.get(role.name, given)
        prompt = given.prompt if own.prompt is None else own.prompt
        response = given.response if own.response is None else own.response
        for values, most, what in ((prompt, width, "prompt"), (response, role.max_new_tokens, "response")):
            source = (own if getattr(own, what) is not None else given).source or f"--{what}"
            cx.check_lengths(f"{source}: {what} of role {role.name!r}", values or {most: 1.0}, most)
        most_prompt += [role.name] * (prompt is None)
        most_response += [role.name] * (response is None)
        prompts = ({width: 1.0} if prompt is None else prompt,)
        completion = {role.max_new_tokens: 1.0} if response is None else response
        out.append(cx.RoleLengths(team.model_index(i), prompts, completion, role.max_new_tokens))
    whose = lambda some: "every" if len(some) == len(names) else f"of {', '.join(some)} every"
    notes = [f"{whose(most_prompt)} prompt has {width} tokens, the most (--prompt, --length)"] if most_prompt else []
    limits = {role.max_new_tokens for role in team.roles if role.name in most_response}
    tokens = f"{limits.pop()} tokens" if len(limits) == 1 else "the tokens of its role's limit"
    if most_response:
        notes.append(f"{whose(most_response)} completion has {tokens}, the most (--response, --length)")
    return tuple(out), notes


def lengths_of_run(rows: Sequence[Mapping[str, Any]], source: str, last: int = 10) -> dict[str, GivenLengths]:
    """Mean length of the completions of each role that acted in a run, in its last steps of RL.

    rows: lines of the run's metrics.jsonl. source: their file, for error messages. last: number of steps that count.
    The mean lies between two numbers of tokens, which share the probability. The longest of several completions is
    then not shorter than predicted. Raises ConfigError where no completion was sampled.
    """
    lengths: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            parts = key.split("/")
            if parts[0] == "agent" and parts[2:] == ["length"] and value is not None:
                lengths.setdefault(parts[1], []).append(float(value))
    if not lengths:
        raise ConfigError(f"{source}: no line has a key agent/<role>/length: no step of RL was logged")
    between = lambda x: {int(x): 1 - x % 1, int(x) + 1: x % 1} if x % 1 else {int(x): 1.0}
    mean = {role: max(sum(x[-last:]) / len(x[-last:]), 1.0) for role, x in lengths.items()}
    return {role: GivenLengths(None, between(x), source) for role, x in mean.items()}


def memory_options(cfg: BaseConfig) -> dict[str, Any]:
    """Keyword arguments of `costs.model.memory` for ``cfg``: its optimizer, and the copies of parameters it keeps."""
    o = cfg.optimizer
    copies = int(cfg.loss.needs_reference) + cfg.past.size + cfg.staleness
    return {"optimizer": o.name, "copies": copies, "masters": o.float32_master_weights, "offload": o.offload}


def update_selection(cfg: Any, work: cx.Workload) -> tuple[bool, int | None]:
    """Whether an update takes whole groups of a node, and the largest number of nodes it takes (None: all).

    cfg: configuration. work: its workload.
    """
    groups = hasattr(cfg, "selected_groups") and cfg.credit.group == "node"
    if not groups or cfg.selected_groups is None:
        return groups, None
    return groups, cfg.selected_groups * (work.tasks if cfg.selection_scope == "task" else 1)


def trained_shares(cfg: Any, algorithm: Any, plan: Plan, work: cx.Workload) -> list[tuple[float, ...]]:
    """Share of each role's completions that an update trains, for every set of roles that learn in the same step.

    cfg: configuration. algorithm: `algorithm.Algorithm` of its recipe. plan: plan of sampling. work: the workload.
    Roles that learn in turn (``trainable_roles``) give several sets. Where `one_round` draws single steps of an episode
    (``select_steps``), a role trains on one completion of each episode. Another selection may train all of them. Moves
    of past policies are not trained.
    """
    roles = len(work.roles)
    masks = np.ones((1, roles), bool)
    if algorithm.trainable_roles is not None:
        steps = jnp.arange(max(cfg.steps, 1))
        masks = np.unique(np.asarray(jax.vmap(algorithm.trainable_roles)(steps)).reshape(len(steps), roles), axis=0)
    share = np.ones(roles)
    if algorithm.select_steps is one_round:
        sampled = np.zeros(roles)
        for level in cx.turn_states(plan, work):
            for n, index in cx.acting(level, work):
                sampled[index] += float(n * level.group)
        share = np.minimum(1.0, work.tasks * plan.width(ROOT) / np.maximum(sampled, 1.0))
    if cfg.past.size:
        share = share * (1 - cfg.past.fraction / roles)
    return [tuple(float(x) for x in share * mask) for mask in masks]
