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
import numpy as np

from jaxmarl_llm.advantages import returns_to_go, step_episodes
from jaxmarl_llm.arena import ArrayArena
from jaxmarl_llm.credit import Weights, assign
from jaxmarl_llm.losses import aggregation_weights
from jaxmarl_llm.meshes import MeshConfig
from jaxmarl_llm.plans import Plan, single
from jaxmarl_llm.rollout import Block, layout, make_rollout
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.stages import PICK, SFT_LOSS, BaseConfig
from jaxmarl_llm.team import init_params, make_team
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.train import Batch, make_learner
from jaxmarl_llm.types import Params, PyTree, Tree


class Program(NamedTuple):
    """run(seed []) -> (params, {name: [steps]}): pure. ``name``: a reward component (mean over tasks and roles),
    ``component/role`` for each role, ``grad_norm/model`` (first epoch, not clipped), ``clip_fraction/model`` (last),
    and ``kl/model`` to the reference where there is one.
    """

    run: Callable[[jax.Array], tuple[Params, dict[str, jax.Array]]]
    tokens_per_step: int  # at most, decoded


def make_program(
    cfg: BaseConfig,
    plan: Plan,
    learns: Callable[[jax.Array], jax.Array] | None = None,
    *,
    weigh: Callable[[jax.Array], Weights] | None = None,
    pick: Callable[[jax.Array, Tree, jax.Array], jax.Array] | None = None,
) -> Program:
    """``cfg.sft.steps`` supervised steps, then ``cfg.steps`` of RL on all steps of the tree; ``cfg.run`` is unused.

    A loss that refers to another policy refers to the one that stage 0 ends with, ``reference`` in the parameters.
    ``learns``, ``weigh`` and ``pick`` as in phases.improve_groups; the RL step they get is traced. ConfigError for
    critics, past policies, a mesh and invariant generation, whose bits change where it is vmapped: it has none.
    """
    _refuse(
        {
            "team.critic": cfg.team.critic != "none",
            "past.size": bool(cfg.past.size),
            "mesh": cfg.mesh != MeshConfig(data=1),
            "team.invariant": cfg.team.invariant,
        }
    )
    arena = ArrayArena(cfg.env)
    env, team = arena.env, make_team(cfg.team, arena.env.roles)
    roles = [r.name for r in team.roles]
    learners = {m.name: make_learner(m.policy, cfg.loss, cfg.optimizer, cfg.sampling) for m in team.models}
    tutors = {m.name: make_learner(m.policy, SFT_LOSS, cfg.sft.optimizer, Sampling()) for m in team.models}
    rollout = make_rollout(team, env, plan, cfg.sampling)
    plays = [{r for r in range(len(roles)) if team.model_index(r) == m} for m in range(len(team.models))]
    blocks_of = [  # of each model: the turns at which it may act, and the seats it may take
        [(b, seats) for b in layout(plan, env, cfg.batch) if (seats := env.seats_of(b.branch.turn, mine))]
        for mine in plays
    ]
    data = arena.demonstrations(team, cfg.sft.samples, cfg.seed, 0) if cfg.sft.steps else {}

    def apply(
        learner: Any, params: Params, opt_state: PyTree, model: Any, batches: list[Batch], epochs: int = 1
    ) -> tuple[Params, PyTree, dict[str, jax.Array]]:
        start, shared = (params["agents"][model.name], opt_state[model.name]), params["shared"].get(model.base)
        if epochs > 1:
            batches = [b.replace(old=learner.score(start[0], shared, b)) for b in batches]

        def epoch(carry: tuple, _: Any) -> tuple[tuple, dict[str, jax.Array]]:
            (own, after), gradient, totals = carry, None, []
            for batch in batches:
                gradient, metrics, _ = learner.accumulate(own, shared, batch, gradient)
                totals.append(metrics)
            total = {k: sum(m[k] for m in totals) for k in totals[0]}
            own, after, norm, _ = learner.apply(own, after, gradient, total["loss"])
            mean = lambda k: total[k] / jnp.maximum(total["weight"], 1e-9)
            seen = {k: mean(k) for k in ("clip_fraction", "ref_kl") if k in total}
            return (own, after), {"grad_norm": norm, **seen}

        (own, after), seen = jax.lax.scan(epoch, start, None, length=epochs)
        params = {**params, "agents": {**params["agents"], model.name: own}}
        return params, {**opt_state, model.name: after}, seen

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
                params, opt_state, *_ = apply(tutors[model.name], params, opt_state, model, batches[model.name])
        return (params, opt_state), jnp.float32(0)

    def improve(carry: tuple, x: tuple[jax.Array, jax.Array]) -> tuple[tuple, dict[str, jax.Array]]:
        (params, opt_state), (key, index) = carry, x
        at = (index * cfg.batch + jnp.arange(cfg.batch)) % arena.size
        tasks = jax.tree.map(lambda t: jnp.asarray(t)[at], arena.tasks)
        tree = rollout(params, {}, tasks, key, index)
        credited = assign(
            cfg.credit,
            tree,
            weights=cfg.reward if weigh is None else weigh(index),
            max_turns=env.max_turns,
            num_tasks=cfg.batch,
            num_roles=len(roles),
        )
        out = _seen(tree, roles, env.max_turns)
        moves, node = tree.transitions, tree.steps.node
        trained, episode = credited.valid, None
        if pick is not None:
            trained &= pick(jax.random.fold_in(key, PICK), tree, trained)
        if learns is not None:
            trained &= jnp.asarray(learns(index))[tree.nodes.role[node]]
        if cfg.loss.aggregate == "trajectory":
            episode = step_episodes(moves.steps, moves.parent, num_steps=len(node))
        for m, model in enumerate(team.models):
            if not blocks_of[m]:
                continue
            mine = trained & (tree.nodes.model[node] == m)
            weights = aggregation_weights(
                tree.steps.loss_mask, mine.astype(jnp.float32), cfg.loss.aggregate, cfg.loss.constant, episode
            )
            learner, before = learners[model.name], (params["agents"][model.name], opt_state[model.name])
            batches = [_block(tree, credited.advantage, weights, b, env.seats, seats) for b, seats in blocks_of[m]]
            if cfg.loss.refers:
                reference = params["reference"][model.name], params["shared"].get(model.base)
                batches = [b.replace(reference=learner.score(*reference, b)) for b in batches]
            params, opt_state, seen = apply(learner, params, opt_state, model, batches, cfg.loss.epochs)
            if learns is not None:  # a model without a trained step stays as it is, optimizer state included
                after = params["agents"][model.name], opt_state[model.name]
                own, kept = jax.tree.map(lambda new, old: jnp.where(mine.any(), new, old), after, before)
                params = {**params, "agents": {**params["agents"], model.name: own}}
                opt_state = {**opt_state, model.name: kept}
            for name, epoch in (("grad_norm", 0), ("clip_fraction", -1), ("ref_kl", 0)):
                if name in seen:
                    out[f"{name.removeprefix('ref_')}/{model.name}"] = seen[name][epoch]
        return (params, opt_state), out

    def run(seed: jax.Array) -> tuple[Params, dict[str, jax.Array]]:
        root = jax.random.key(seed)
        start, taught, played = (jax.random.fold_in(root, i) for i in range(3))
        params = init_params(cfg.team, team, start)
        fresh = lambda makers, params: {m.name: makers[m.name].init(params["agents"][m.name]) for m in team.models}
        if cfg.sft.steps:
            carry = params, fresh(tutors, params)
            (params, _), _ = jax.lax.scan(supervise, carry, jax.random.split(taught, cfg.sft.steps))
        if cfg.loss.refers:
            params = {**params, "reference": params["agents"]}
        steps = jax.random.split(played, cfg.steps), jnp.arange(cfg.steps)
        (params, _), seen = jax.lax.scan(improve, (params, fresh(learners, params)), steps)
        return params, seen

    sampled = sum(b.nodes * b.group for b in layout(plan, env, cfg.batch))
    return Program(run, sampled * max(r.max_new for r in team.roles))


def make_evaluation(cfg: BaseConfig, sampling: Sampling | None = None) -> Callable[[Params, jax.Array], dict]:
    """(params, seed []) -> {name: []}: mean returns of each component over the held-out tasks, named as in `Program`.

    One episode a task, drawn as in training unless ``sampling`` says otherwise. Pure: jit it, vmap it over seeds.
    ConfigError for invariant generation, as `make_program`.
    """
    _refuse({"team.invariant": cfg.team.invariant})
    arena = ArrayArena(cfg.env)
    team = make_team(cfg.team, arena.env.roles)
    rollout = make_rollout(team, arena.env, single(), sampling or cfg.sampling)

    def run(params: Params, seed: jax.Array) -> dict[str, jax.Array]:
        tasks = jax.tree.map(jnp.asarray, arena.held_out)
        tree = rollout(params, {}, tasks, jax.random.fold_in(jax.random.key(seed), 2**31), 0)
        return _seen(tree, [r.name for r in team.roles], arena.env.max_turns)

    return run


def _refuse(beyond: dict[str, bool]) -> None:
    for name, asked in beyond.items():
        if asked:
            raise ConfigError(f"config.{name}: a run compiled as a whole has none; use experiments.train")


def _block(tree: Tree, advantage: jax.Array, weights: jax.Array, b: Block, width: int, seats: list[int]) -> Batch:
    """The nodes of ``seats`` of a block, in which each state has ``width`` of them."""
    rows = np.arange(b.nodes).reshape(-1, width)[:, seats].reshape(-1)
    nodes = b.first_node + rows
    steps = b.first_step + rows[:, None] * b.group + np.arange(b.group)
    grid = lambda x: x[steps].reshape(*steps.shape, -1)
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
