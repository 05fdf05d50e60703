"""Array rollouts: a whole forest of episodes as one compiled program.

The frontier is a static dictionary from plan branches to stacked states; which states are already done is data. Keys
are folded along the path (task, joint actions, role, sample, position), never split by batch position, so that a sample
depends on where it is in the tree and on nothing else: `rollout_host` plays the same environment with the same keys
to the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.generate import Completions, by_row, sample_completions
from jaxmarl_llm.memory import MemoryConfig, read
from jaxmarl_llm.plans import ROOT, Branch, Plan
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.sharding import cut_rows
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import (
    FROZEN,
    POLICY,
    ArrayEnv,
    Counts,
    Model,
    Nodes,
    Params,
    Policy,
    PyTree,
    Retrieval,
    Steps,
    Team,
    Transitions,
    Tree,
)

# Streams folded into a state's key. Roles and samples are folded below PLAY.
ENV, PLAY, CHILD, RESET = range(4)


def fold(key: jax.Array, *data: Any) -> jax.Array:
    """fold_in along a path; ``key`` and data may be arrays of equal shape."""
    for d in data:
        d = jnp.broadcast_to(jnp.asarray(d, jnp.uint32), key.shape)
        flat = jax.vmap(jax.random.fold_in)(key.reshape(-1), d.reshape(-1))
        key = flat.reshape(key.shape)
    return key


class Place(NamedTuple):
    """The states of one branch. Leading axis F."""

    state: PyTree
    key: jax.Array
    parent: jax.Array  # transition index, -1 at a root
    task: jax.Array
    done: jax.Array


class Block(NamedTuple):
    """A rectangle of the tables of an array rollout: ``nodes`` nodes with ``group`` steps each, row by row."""

    branch: Branch
    first_node: int
    nodes: int
    first_step: int
    group: int


def layout(plan: Plan, env: ArrayEnv, batch: int) -> list[Block]:
    """Where `make_rollout` puts which nodes and steps: known before anything runs."""
    blocks, frontier, n, c = [], {ROOT: batch}, 0, 0
    for _ in range(env.max_turns):
        reached: dict[Branch, int] = {}
        for branch, f in frontier.items():
            g, count = plan.width(branch), f * env.seats
            blocks.append(Block(branch, n, count, c, g))
            n, c = n + count, c + count * g
            for j in range(len(plan.actions(branch, env.seats))):
                to = plan.follow(branch, j)
                if to is not None:
                    reached[to] = reached.get(to, 0) + f
        frontier = reached
    return blocks


def check_seats(env: ArrayEnv, tree: Tree) -> None:
    """Raises ValueError where a seat was taken by a role that ``env.actors`` does not have there: it was not asked."""
    nodes = tree.nodes
    seat = np.arange(len(nodes.role)) % env.seats
    may = np.zeros((env.max_turns, env.seats, len(env.roles)), bool)
    for turn in range(env.max_turns):
        for role in range(len(env.roles)):
            may[turn, env.seats_of(turn, (role,)), role] = True
    for i in np.flatnonzero(nodes.valid & ~may[nodes.turn, seat, nodes.role])[:1]:
        at, taker = int(nodes.turn[i]), env.roles[int(nodes.role[i])]
        raise ValueError(
            f"environment {env.name!r}, turn {at}: seat {seat[i]} was taken by {taker!r}, but actors[{at}] is "
            f"{env.actors[at]}: expected as many as seats in their order, or another number of roles for any seat"
        )


def mean_embedding(embed: Callable, variables: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Mean of the agent's own token embeddings [N D]: the default memory key, no extra model."""
    x = embed(variables, tokens).astype(jnp.float32)
    mask = jnp.arange(tokens.shape[-1]) < length[..., None]
    return jnp.sum(x * mask[..., None], axis=-2) / jnp.maximum(length, 1)[..., None]


def prepend(entries: jax.Array, entry_length: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """[entry_1 | ... | entry_X | prompt] without gaps. entries [N X T], tokens [N P] -> [N X*T + P]."""
    n, x, t = entries.shape
    parts = jnp.concatenate([entries.reshape(n, x * t), tokens], axis=1)
    used = jnp.arange(t) < entry_length[..., None]
    used = jnp.concatenate([used.reshape(n, x * t), jnp.arange(tokens.shape[1]) < length[:, None]], axis=1)
    order = jnp.argsort(~used, axis=1, stable=True)
    return jnp.take_along_axis(parts, order, axis=1)


def retrieve(
    team: Team,
    config: MemoryConfig,
    params: Params,
    memory: PyTree,
    role: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    actors: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, Retrieval]:
    """Prompts with each role's own retrieved entries in front, and what was retrieved. Row i belongs to role[i]."""
    n, x = tokens.shape[0], config.retrieve
    stores = [memory[r.name] for r in team.roles]
    t, dim = stores[0].ids.shape[1], max(s.key.shape[1] for s in stores)
    slots, similarity = jnp.full((n, x), -1, jnp.int32), jnp.zeros((n, x), jnp.float32)
    query, entries, lengths = jnp.zeros((n, dim)), jnp.zeros((n, x, t), jnp.int32), jnp.zeros((n, x), jnp.int32)
    for r in actors:
        model, store = team.model_of(r), stores[r]
        q = mean_embedding(model.policy.embed, model.variables(params), tokens, length)
        found, cosine = jax.vmap(lambda v, s=store: read(config, s, v))(q)
        mine, safe = role == r, jnp.maximum(found, 0)
        slots = jnp.where(mine[:, None], found, slots)
        similarity = jnp.where(mine[:, None], cosine, similarity)
        query = jnp.where(mine[:, None], jnp.pad(q, ((0, 0), (0, dim - q.shape[1]))), query)
        entries = jnp.where(mine[:, None, None], store.ids[safe], entries)
        lengths = jnp.where(mine[:, None], jnp.where(found >= 0, store.length[safe], 0), lengths)
    added = lengths.sum(1)
    return prepend(entries, lengths, tokens, length), length + added, Retrieval(slots, similarity, query, added)


def make_rollout(
    team: Team,
    env: ArrayEnv,
    plan: Plan,
    sampling: Sampling,
    memory_config: MemoryConfig | None = None,
) -> Callable[..., Tree]:
    """A pure function (params, memory, tasks, key, version, cast) -> Tree; jit it.

    With ``team.stacked`` models that may act together are one launch, in which each node has its own model's parameters
    (a copy a node), instead of one launch each over all nodes. For many small models or adapters of one architecture.

    memory: unused without a config.
    tasks: pytree with leading axis B. key: typed; consumed by folding. version: integer written into the steps.
    cast: int [B A], which of ``Team.players`` plays each role of each task, or [B M A], which does at each turn; None:
    its own model plays every role.
    Raises ConfigError when the plan asks for what the environment lacks, or models to be stacked are not alike.
    """
    plan.check(env)
    response = max(r.max_new for r in team.roles)
    players = [team.players(r) for r in range(len(team.roles))]
    first, *others = (team.models[m] for m in sorted({m for p in players for m in p}))
    kind = lambda m: (m.policy, m.base, m.tokenizer)
    other = next((m.name for m in others if kind(m) != kind(first)), None)
    if team.stacked and other is not None:
        raise ConfigError(
            f"config.team.stacked: expected models of one architecture, base and tokenizer; {other!r} is not as "
            f"{first.name!r}"
        )
    table = jnp.array([(*p, *[p[0]] * (max(map(len, players)) - len(p))) for p in players], jnp.int32)

    def speak(
        params: Params,
        speaker: jax.Array,
        tokens: jax.Array,
        length: jax.Array,
        keys: jax.Array,
        active: jax.Array,
        seats: dict[int, list[int]],
    ) -> Completions:
        """Completions of every node by its own model: one launch for each model that may act, or for all of them.

        ``seats``: those that each such model may take; its launch has the nodes of no others.
        """

        def launch(model: Model, policy: Policy, variables: Params, rows: tuple[jax.Array, ...]) -> Completions:
            return sample_completions(
                policy,
                variables,
                *rows,
                max_new=response,
                stop_ids=model.tokenizer.stop_ids,
                pad_id=model.tokenizer.pad_id,
                sampling=sampling,
            )

        if team.stacked:
            models = list(seats)
            own = [params["agents"][team.models[m].name] for m in models]
            place = jnp.searchsorted(jnp.array(models), speaker)
            rows = jax.tree.map(lambda *x: jnp.stack(x)[place], *own)
            base = {} if first.base is None else {"params": params["shared"][first.base]}
            return launch(first, by_row(first.policy, tuple(rows)), {**base, **rows}, (tokens, length, keys, active))
        every, out = np.arange(len(length)).reshape(-1, env.seats), None
        for m, taken in seats.items():
            model, at = team.models[m], every[:, taken].reshape(-1)
            mine = (speaker == m)[at]
            given = (tokens[at], length[at], keys[at], active[at] & mine)
            said = launch(model, model.policy, model.variables(params), given)
            if out is None:
                out = jax.tree.map(lambda x: jnp.zeros((every.size, *x.shape[1:]), x.dtype), said)
                out = out.replace(tokens=out.tokens + model.tokenizer.pad_id)
            where = jnp.where(mine, at, every.size)
            out = jax.tree.map(lambda old, new, where=where: old.at[where].set(new, mode="drop"), out, said)
        assert out is not None
        return out

    def rollout(
        params: Params,
        memory: PyTree,
        tasks: PyTree,
        key: jax.Array,
        version: jax.Array,
        cast: jax.Array | None = None,
    ) -> Tree:
        batch = jax.tree.leaves(tasks)[0].shape[0]
        tasks = cut_rows(tasks)
        ids = jnp.arange(batch, dtype=jnp.int32)
        roots = fold(jnp.broadcast_to(key, (batch,)), ids)
        state = jax.vmap(env.reset)(fold(roots, RESET), tasks)
        none = jnp.full((batch,), -1, jnp.int32)
        frontier = {ROOT: Place(state, roots, none, ids, jnp.zeros((batch,), bool))}
        nodes: list[Nodes] = []
        steps: list[Steps] = []
        moves: list[Transitions] = []
        calls = jnp.int32(0)
        launches, branched = 0, jnp.int32(0)
        n_nodes = n_steps = n_moves = 0

        for turn in range(env.max_turns):
            reached: dict[Branch, list[Place]] = {}
            for branch, place in frontier.items():
                g, f, w = plan.width(branch), place.task.shape[0], env.seats
                obs = jax.vmap(env.observe)(place.state)
                role, tokens, length, active = (
                    x.reshape(f * w, *x.shape[2:]) for x in (obs.role, obs.tokens, obs.length, obs.active)
                )
                active &= jnp.repeat(~place.done, w)
                if memory_config is None:
                    found = Retrieval.empty(f * w)
                else:
                    tokens, length, found = retrieve(
                        team, memory_config, params, memory, role, tokens, length, env.actors[turn]
                    )
                node_key = fold(jnp.repeat(place.key, w), PLAY, role)
                keys = fold(jnp.repeat(node_key[:, None], g, 1), jnp.arange(g)[None].repeat(f * w, 0))
                each = lambda x, w=w: jnp.repeat(x, w)
                # Without a cast the first of a role's players plays it, and no launch is made for others.
                part = jnp.zeros_like(role)
                if cast is not None:
                    part = (cast if cast.ndim == 2 else cast[:, turn])[each(place.task), role]
                speaker = table[role, part]
                plays = [players[r][: 1 if cast is None else None] for r in range(len(players))]
                able = sorted({m for r in env.actors[turn] for m in plays[r]})
                seats = {m: env.seats_of(turn, {r for r, own in enumerate(plays) if m in own}) for m in able}
                said = speak(params, speaker, tokens, length, keys, active, seats)
                launches += 1 if team.stacked else len(able)

                nodes.append(
                    Nodes(
                        tokens=tokens,
                        length=length,
                        role=role,
                        model=speaker,
                        task=each(place.task),
                        turn=jnp.full((f * w,), turn),
                        parent=each(place.parent),
                        crn=each(place.task),
                        retrieved=found,
                        valid=active,
                    )
                )
                span = jnp.arange(response)
                alive = jnp.repeat(active, g)
                steps.append(
                    Steps(
                        node=n_nodes + jnp.repeat(jnp.arange(f * w), g),
                        tokens=said.tokens.reshape(-1, response),
                        length=said.length.reshape(-1),
                        loss_mask=(span < said.length[..., None]).reshape(-1, response),
                        logprobs=said.logprobs.reshape(-1, response),
                        truncated=said.truncated.reshape(-1) & alive,
                        source=jnp.repeat(jnp.where(part > 0, FROZEN, POLICY), g),
                        version=jnp.full((f * w * g,), version),
                        valid=alive,
                    )
                )
                if g > 1:
                    branched += alive.sum()

                # Joint actions [J W]: the sample index of every seat. An empty seat takes part with sample 0 alone.
                actions = np.array(plan.actions(branch, w))
                j = len(actions)
                spread = lambda x, j=j: jnp.repeat(x[:, None], j, 1)
                wide = jax.tree.map(spread, place.state)
                seat = np.arange(w)
                act = said.tokens.reshape(f, w, g, response)[:, seat, actions]
                size = said.length.reshape(f, w, g)[:, seat, actions]
                order = jnp.broadcast_to(jnp.arange(j), (f, j))
                env_key, child_key = jax.vmap(lambda stream: fold(spread(place.key), stream, order))(
                    jnp.array([ENV, CHILD])
                )
                after, rewards, done = jax.vmap(jax.vmap(env.step))(env_key, wide, act, size)
                if plan.local:
                    assert env.verify is not None  # the plan was checked
                    rewards = {**rewards, **jax.vmap(jax.vmap(env.verify))(after)}
                # Crossed with an empty seat, equal joint actions would come up again and again: the first one counts.
                twin = jnp.any(~obs.active[:, None] & (actions > 0), axis=2) & (plan.joint == "cross")
                alive_j = spread(~place.done) & ~twin
                calls += alive_j.sum()
                finite = jnp.stack([jnp.isfinite(r).all(-1) for r in rewards.values()]).all(0)
                good = alive_j & finite
                clean = {c: jnp.where(alive_j[..., None], jnp.nan_to_num(rewards[c]), 0.0) for c in env.components}
                index = n_steps + jnp.arange(f * w * g).reshape(f, w, g)[:, seat, actions]
                moves.append(
                    Transitions(
                        steps=jnp.where(obs.active[:, None], index, -1).reshape(f * j, w),
                        # What was not played is padding, nobody's child: its parent ended the episode and is a leaf.
                        parent=jnp.where(alive_j, spread(place.parent), -1).reshape(-1),
                        task=spread(place.task).reshape(-1),
                        turn=jnp.full((f * j,), turn),
                        rewards={c: r.reshape(f * j, -1) for c, r in clean.items()},
                        done=done.reshape(-1),
                        played=alive_j.reshape(-1),
                        valid=good.reshape(-1),
                    )
                )

                ends = spread(place.done) | done | twin
                move = n_moves + jnp.arange(f * j).reshape(f, j)
                if plan.rank or plan.stop_above is not None:
                    value = sum(weight * clean[c].mean(-1) for c, weight in plan.reward)
                    if plan.stop_above is not None:
                        mean = jnp.where(good, value, 0.0).sum(1) / jnp.maximum(good.sum(1), 1)
                        ends |= (good.any(1) & (mean > plan.stop_above))[:, None]
                    if plan.rank:
                        best = jnp.argsort(jnp.where(good, -value, jnp.inf), axis=1, stable=True)
                        rows = jnp.arange(f)[:, None]
                        pick = lambda x, rows=rows, best=best: x[rows, best]
                        after, child_key, move, ends = jax.tree.map(pick, (after, child_key, move, ends))
                for i in range(j):
                    to = plan.follow(branch, i)
                    if to is not None:
                        reached.setdefault(to, []).append(
                            Place(
                                jax.tree.map(lambda x, i=i: x[:, i], after),
                                child_key[:, i],
                                move[:, i],
                                place.task,
                                ends[:, i],
                            )
                        )
                n_nodes, n_steps, n_moves = n_nodes + f * w, n_steps + f * w * g, n_moves + f * j
            frontier = {b: jax.tree.map(lambda *x: jnp.concatenate(x), *places) for b, places in reached.items()}

        join = lambda tables: jax.tree.map(lambda *x: jnp.concatenate(x), *tables)
        all_nodes, all_steps, all_moves = cut_rows((join(nodes), join(steps), join(moves)))
        counts = Counts(
            sequences=all_steps.valid.sum(),
            branch_sequences=branched,
            prompt_tokens=jnp.where(all_nodes.valid, all_nodes.length, 0).sum(),
            completion_tokens=all_steps.length.sum(),
            env_calls=calls,
            invalid=(all_moves.played & ~all_moves.valid).sum(),
            launches=jnp.int32(launches),
        )
        return Tree(all_nodes, all_steps, all_moves, counts)

    return rollout
