"""A whole training run on an array environment as one pure function of its seed: jit it, vmap it over seeds.

Supervised stage, rollouts, credit and updates are the same functions that `loop` calls step by step from the host; here
they are scanned, so that eight seeds of a small game take the time of one. Nothing is logged or saved on the way and
memory is not used: for runs of any length use `loop.fit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmarl_llm.advantages import returns_to_go
from jaxmarl_llm.arena import ArrayArena
from jaxmarl_llm.credit import assign
from jaxmarl_llm.losses import aggregation_weights
from jaxmarl_llm.plans import Plan
from jaxmarl_llm.rollout import layout, make_rollout
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.stages import SFT_LOSS, BaseConfig
from jaxmarl_llm.team import init_params, make_team
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.train import Batch, make_learner
from jaxmarl_llm.types import Params, PyTree, Tree


class Program(NamedTuple):
    """run(seed []) -> (params, {name: [steps]}): pure. ``name``: a reward component (mean over tasks and roles),
    ``component/role`` for each role, ``grad_norm/model``.
    """

    run: Callable[[jax.Array], tuple[Params, dict[str, jax.Array]]]
    tokens_per_step: int  # at most, decoded


def make_program(cfg: BaseConfig, plan: Plan) -> Program:
    """``cfg.sft.steps`` supervised steps, then ``cfg.steps`` of RL on all steps of the tree; ``cfg.run`` is unused.

    One optimizer step a batch, no reference or past policies, no critics: ConfigError for a configuration with them.
    """
    for name, asked in {
        "loss.epochs": cfg.loss.epochs > 1,
        "loss.kl_coef": bool(cfg.loss.kl_coef),
        "team.critic": cfg.team.critic != "none",
        "past.size": bool(cfg.past.size),
    }.items():
        if asked:
            raise ConfigError(f"config.{name}: a run compiled as a whole has none; use experiments.train")
    arena = ArrayArena(cfg.env)
    env, team = arena.env, make_team(cfg.team, arena.env.roles)
    roles = [r.name for r in team.roles]
    learners = {m.name: make_learner(m.policy, cfg.loss, cfg.optimizer, cfg.sampling) for m in team.models}
    tutors = {m.name: make_learner(m.policy, SFT_LOSS, cfg.sft.optimizer, Sampling()) for m in team.models}
    rollout = make_rollout(team, env, plan, cfg.sampling)
    blocks = layout(plan, env, cfg.batch)
    data = arena.demonstrations(team, cfg.sft.samples, cfg.seed, 0) if cfg.sft.steps else {}

    def apply(learner: Any, params: Params, opt_state: PyTree, model: Any, batches: list[Batch]) -> tuple:
        own, shared = params["agents"][model.name], params["shared"].get(model.base)
        gradient, value = None, jnp.float32(0)
        for batch in batches:
            gradient, metrics, _ = learner.accumulate(own, shared, batch, gradient)
            value += metrics["loss"]
        own, after, norm, _ = learner.apply(own, opt_state[model.name], gradient, value)
        params = {**params, "agents": {**params["agents"], model.name: own}}
        return params, {**opt_state, model.name: after}, norm

    def supervise(carry: tuple, key: jax.Array) -> tuple[tuple, jax.Array]:
        params, opt_state = carry
        batches: dict[str, list[Batch]] = {}
        for index, role in enumerate(team.roles):
            d = data[role.name]
            rows = jax.random.randint(jax.random.fold_in(key, index), (cfg.sft.batch,), 0, len(d.length))
            completions, size = jnp.asarray(d.completions)[rows], jnp.asarray(d.completion_length)[rows]
            mask = jnp.arange(completions.shape[1]) < size[:, None]
            weights = aggregation_weights(mask, jnp.ones(cfg.sft.batch), "token")[:, None]
            one, prompts = jnp.ones_like(weights), jnp.asarray(d.tokens)[rows]
            length = jnp.asarray(d.length)[rows]
            batch = Batch(prompts, length, completions[:, None], weights, one, jnp.zeros_like(one))
            batches.setdefault(role.model, []).append(batch)
        for model in team.models:
            if model.name in batches:
                params, opt_state, _ = apply(tutors[model.name], params, opt_state, model, batches[model.name])
        return (params, opt_state), jnp.float32(0)

    def improve(carry: tuple, x: tuple[jax.Array, jax.Array]) -> tuple[tuple, dict[str, jax.Array]]:
        (params, opt_state), (key, index) = carry, x
        at = (index * cfg.batch + jnp.arange(cfg.batch)) % arena.size
        tasks = jax.tree.map(lambda t: jnp.asarray(t)[at], arena.tasks)
        tree = rollout(params, {}, tasks, key, index)
        credited = assign(
            cfg.credit,
            tree,
            weights=tuple(sorted(cfg.reward.items())),
            max_turns=env.max_turns,
            num_tasks=cfg.batch,
            num_roles=len(roles),
        )
        out = _seen(tree, roles, env.max_turns)
        for m, model in enumerate(team.models):
            mine = credited.valid & (tree.nodes.model[tree.steps.node] == m)
            weights = aggregation_weights(
                tree.steps.loss_mask, mine.astype(jnp.float32), cfg.loss.aggregate, cfg.loss.constant
            )
            batches = [_block(tree, credited.advantage, weights, b) for b in blocks]
            params, opt_state, norm = apply(learners[model.name], params, opt_state, model, batches)
            out[f"grad_norm/{model.name}"] = norm
        return (params, opt_state), out

    def run(seed: jax.Array) -> tuple[Params, dict[str, jax.Array]]:
        root = jax.random.key(seed)
        start, taught, played = (jax.random.fold_in(root, i) for i in range(3))
        params = init_params(cfg.team, team, start)
        fresh = lambda makers, params: {m.name: makers[m.name].init(params["agents"][m.name]) for m in team.models}
        if cfg.sft.steps:
            carry = params, fresh(tutors, params)
            (params, _), _ = jax.lax.scan(supervise, carry, jax.random.split(taught, cfg.sft.steps))
        steps = jax.random.split(played, cfg.steps), jnp.arange(cfg.steps)
        (params, _), seen = jax.lax.scan(improve, (params, fresh(learners, params)), steps)
        return params, seen

    width = max(r.max_new for r in team.roles)
    return Program(run, sum(b.nodes * b.group for b in blocks) * width)


def _block(tree: Tree, advantage: jax.Array, weights: jax.Array, b: Any) -> Batch:
    nodes = slice(b.first_node, b.first_node + b.nodes)
    steps = slice(b.first_step, b.first_step + b.nodes * b.group)
    grid = lambda x: x[steps].reshape(b.nodes, b.group, -1)
    w = grid(weights)
    return Batch(
        tree.nodes.tokens[nodes],
        tree.nodes.length[nodes],
        grid(tree.steps.tokens),
        w,
        jnp.broadcast_to(grid(advantage), w.shape),
        grid(tree.steps.logprobs),
    )


def _seen(tree: Tree, roles: list[str], max_turns: int) -> dict[str, jax.Array]:
    """Mean over tasks of each component's undiscounted return."""
    moves, out = tree.transitions, {}
    for name, rewards in moves.rewards.items():
        values, ok = returns_to_go(rewards, moves.parent, moves.turn, moves.valid, max_turns=max_turns)
        root = ok & (moves.parent < 0)
        mean = jnp.where(root[:, None], values, 0.0).sum(0) / jnp.maximum(root.sum(), 1)
        out[name] = mean.mean()
        out |= {f"{name}/{role}": mean[i] for i, role in enumerate(roles)}
    return out
