"""One turn of an array rollout, as pure functions of a `RolloutSpec` and of arrays.

At a turn, every state of the frontier is observed, the models of its seats generate, and the environment is stepped
with every joint action. The states that the plan plays on are the next frontier. The number of a turn may be traced.
What a turn compiles to depends only on ``env.actors`` of the turn and on what the plan says of its branches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.generation.decoding import Completions
from jaxmarl_llm.generation.generate import by_row, sample_completions
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.experts import Experts, experts_of, with_experts
from jaxmarl_llm.rollout.keys import CHILD, ENV, PLAY, fold
from jaxmarl_llm.rollout.menus import score_menu
from jaxmarl_llm.rollout.plans import Branch, Plan
from jaxmarl_llm.rollout.recall import retrieve
from jaxmarl_llm.types import (
    EXPERT,
    MENU,
    POLICY,
    Array,
    Model,
    Nodes,
    Params,
    Policy,
    PyTree,
    Retrieval,
    Steps,
    Team,
    Transitions,
)


@dataclass(frozen=True, eq=False)
class RolloutSpec:
    """Static arguments of a rollout: those of `array.make_rollout`."""

    team: Team
    env: ArrayEnv
    plan: Plan
    sampling: Sampling
    memory_config: MemoryConfig | None

    @property
    def response(self) -> int:
        """R: the most tokens that a completion of any role may have."""
        return max(role.max_new_tokens for role in self.team.roles)

    @property
    def players(self) -> list[tuple[int, ...]]:
        """For each role, the models that may play it (indices into ``team.models``), its own model first."""
        return [self.team.players(role) for role in range(len(self.team.roles))]

    @property
    def models(self) -> list[Model]:
        """The models that play any role, in the order of ``team.models``."""
        return [self.team.models[m] for m in sorted({m for players in self.players for m in players})]


class Given(NamedTuple):
    """The arrays that are the same at every turn: arguments of the rollout function of `array.make_rollout`."""

    params: Params
    memory: PyTree
    version: jax.Array
    assignment: jax.Array | None


class Place(NamedTuple):
    """The states of one branch. Leading axis F."""

    state: PyTree
    key: jax.Array
    parent: jax.Array  # transition index, -1 at a root
    task: jax.Array
    done: jax.Array


class Rows(NamedTuple):
    """A number of rows of each table: where the next rows begin, or how many there are. Integers or traced scalars."""

    nodes: int | jax.Array
    steps: int | jax.Array
    transitions: int | jax.Array


class Tables(NamedTuple):
    """Rows of the three tables, in the order in which they are played.

    ``branched`` [K]: for each branch at each turn, the valid steps where the plan branches (0 where it does not).
    """

    nodes: Nodes
    steps: Steps
    transitions: Transitions
    branched: jax.Array

    @property
    def rows(self) -> Rows:
        """How many rows each table has."""
        return Rows(len(self.nodes.role), len(self.steps.node), len(self.transitions.task))


class Observed(NamedTuple):
    """Result of `observe_nodes`: rows of the nodes table [F W], and columns that the table does not have."""

    nodes: Nodes
    occupied: jax.Array  # bool [F W]: the environment has a role in this seat
    frozen: jax.Array  # bool [F W]: the model does not learn from what it plays here
    expert: Experts | None = None  # experts that answer in place of models; None: the environment has none

    @property
    def sampled(self) -> Nodes:
        """The nodes, of which those that an expert answers are not valid."""
        if self.expert is None:
            return self.nodes
        return self.nodes.replace(valid=self.nodes.valid & ~self.expert.answers)


class Stepped(NamedTuple):
    """Result of `joint_step`. Leading axes F J: every joint action of every state."""

    state: PyTree
    child_key: jax.Array  # the key of the state behind the joint action
    rewards: dict[str, jax.Array]  # by component [F J A], 0 where nothing was played or the value is not finite
    done: jax.Array
    played: jax.Array  # False in states that are done, and for a joint action that repeats another one
    finite: jax.Array  # all rewards are finite numbers


class Reached(NamedTuple):
    """The states behind the joint actions, in the order in which ``plan.follow`` counts them. Leading axes F J."""

    state: PyTree
    key: jax.Array
    parent: jax.Array
    done: jax.Array


def acting_roles(spec: RolloutSpec, turn: int, assigned: bool) -> dict[int, list[int]]:
    """Models that may act at a turn (indices into ``team.models``), each with the roles that it may play there.

    Args:
        spec: static arguments of the rollout.
        turn: number of the turn.
        assigned: whether the rollout has an assignment. Without one, only the first player of a role plays it.
    """
    plays = [players if assigned else players[:1] for players in spec.players]
    acting = sorted(set(spec.env.actors[turn]))
    able = sorted({m for role in acting for m in plays[role]})
    return {m: [role for role in acting if m in plays[role]] for m in able}


def acting_models(spec: RolloutSpec, turn: int, assigned: bool) -> dict[int, list[int]]:
    """Models that may act at a turn (indices into ``team.models``), each with the seats that it may take.

    Arguments are those of `acting_roles`.
    """
    acting = acting_roles(spec, turn, assigned)
    return {m: spec.env.seats_of(turn, roles) for m, roles in acting.items()}


def observe_nodes(spec: RolloutSpec, given: Given, place: Place, turn: int, number: int | jax.Array) -> Observed:
    """Nodes of a branch: one prompt for every seat of every state, after its memory entries.

    Args:
        spec: static arguments of the rollout.
        given: arrays that are the same at every turn.
        place: states of the branch.
        turn: a turn with the same actors as this one.
        number: number of this turn, which may be traced.
    """
    f, w = place.task.shape[0], spec.env.seats
    seen = jax.vmap(spec.env.observe)(place.state)
    role, tokens, length, active = (
        x.reshape(f * w, *x.shape[2:]) for x in (seen.role, seen.tokens, seen.length, seen.active)
    )
    if spec.memory_config is None:
        found = Retrieval.empty(f * w)
    else:
        tokens, length, found = retrieve(
            spec.team, spec.memory_config, given.params, given.memory, role, tokens, length, spec.env.actors[turn]
        )
    task = jnp.repeat(place.task, w)
    player = jnp.zeros_like(role)
    if given.assignment is not None:
        by_role = given.assignment if given.assignment.ndim == 2 else given.assignment[:, number]
        player = by_role[task, role]
    most = max(map(len, spec.players))
    table = jnp.array([(*p, *[p[0]] * (most - len(p))) for p in spec.players], jnp.int32)
    nodes = Nodes(
        tokens=tokens,
        length=length,
        role=role,
        model=table[role, player],
        task=task,
        turn=jnp.full((f * w,), number, jnp.int32),
        parent=jnp.repeat(place.parent, w),
        retrieved=found,
        valid=active & jnp.repeat(~place.done, w),
    )
    learning = jnp.array([r.learning for r in spec.team.roles])
    return Observed(nodes, seen.active, player >= learning[role], experts_of(spec.env, seen, spec.response))


def sample_keys(key: jax.Array, role: Array, group: int, earlier: jax.Array | None = None) -> jax.Array:
    """PRNG keys of the samples of each node. The nodes of a state follow each other: N = F W.

    Args:
        key: keys of the states [F].
        role: roles of the seats [N].
        group: samples of a node, G.
        earlier: number of samples that each state had before [F]; None: none.

    Returns:
        Keys [N G].
    """
    n = len(role)
    node_key = fold(jnp.repeat(key, n // len(key)), PLAY, role)
    order = jnp.arange(group)[None].repeat(n, 0)
    if earlier is not None:
        order = order + jnp.repeat(earlier, n // len(key))[:, None]
    return fold(jnp.repeat(node_key[:, None], group, 1), order)


def generate_nodes(
    spec: RolloutSpec, params: Params, nodes: Nodes, keys: jax.Array, acting: Mapping[int, Sequence[int]], turn: int
) -> Completions:
    """Completions of every node by its own model: one launch for each model that may act, or one for all of them.

    The launch of a model has the nodes of the seats that it may take and of no others.

    Args:
        spec: static arguments of the rollout.
        params: parameters of the team.
        nodes: prompts of N seats.
        keys: one PRNG key for each sample [N G].
        acting: models that may act, each with the roles that it may play (`acting_roles`).
        turn: a turn with the same actors as this one.
    """
    team = spec.team
    if team.batch_models:
        first, index = spec.models[0], list(acting)
        own = [params["agents"][team.models[m].name] for m in index]
        which = jnp.searchsorted(jnp.array(index), nodes.model)
        by_node = jax.tree.map(lambda *x: jnp.stack(x)[which], *own)
        base = {} if first.base is None else {"params": params["shared"][first.base]}
        policy = by_row(first.policy, tuple(by_node))
        rows = (jnp.asarray(nodes.tokens), jnp.asarray(nodes.length), keys, jnp.asarray(nodes.valid))
        able = sorted({role for roles in acting.values() for role in roles})
        return _launch(spec, first, policy, {**base, **by_node}, rows, able, jnp.asarray(nodes.role))
    every, out = np.arange(len(nodes.length)).reshape(-1, spec.env.seats), None
    for m, roles in acting.items():
        model, at = team.models[m], jnp.asarray(every[:, spec.env.seats_of(turn, roles)].reshape(-1))
        mine = (nodes.model == m)[at]
        rows = (nodes.tokens[at], nodes.length[at], keys[at], nodes.valid[at] & mine)
        made = _launch(spec, model, model.policy, model.variables(params), rows, roles, jnp.asarray(nodes.role)[at])
        if out is None:
            out = jax.tree.map(lambda x: jnp.zeros((every.size, *x.shape[1:]), x.dtype), made)
            out = out.replace(tokens=out.tokens + model.tokenizer.pad_id)
        where = jnp.where(mine, at, every.size)
        out = jax.tree.map(lambda old, new, where=where: old.at[where].set(new, mode="drop"), out, made)
    assert out is not None
    return out


def _launch(
    spec: RolloutSpec,
    model: Model,
    policy: Policy,
    variables: Params,
    rows: tuple[jax.Array, ...],
    roles: Sequence[int],
    role: jax.Array,
) -> Completions:
    """`sample_completions` of the rows (tokens, length, keys, active), with the tokenizer of ``model``.

    roles: those that the rows may have. role: the role of each row [N]; its ``max_new_tokens`` is the limit of the row.
    The result has R columns, which is the largest limit of the team; the launch computes no more than it needs.
    """
    limits = [r.max_new_tokens for r in spec.team.roles]
    own = {limits[i] for i in roles}
    made = sample_completions(
        policy,
        variables,
        *rows,
        max_new_tokens=max(own),
        stop_ids=model.tokenizer.stop_ids,
        pad_id=model.tokenizer.pad_id,
        sampling=spec.sampling,
        limit=jnp.array(limits, jnp.int32)[role] if len(own) > 1 else None,
    )
    missing = spec.response - max(own)
    if not missing:
        return made
    widen = lambda x, fill: jnp.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=fill)
    return made.replace(tokens=widen(made.tokens, model.tokenizer.pad_id), logprobs=widen(made.logprobs, 0.0))


def step_rows(
    team: Team, given: Given, seen: Observed, made: Completions, first_node: int | jax.Array, menu: bool = False
) -> Steps:
    """Rows of the steps table: the samples of each node one after the other.

    No token of an expert is in ``loss_mask``. Where an expert gave no answer, the row is not valid.

    Args:
        team: roles and models.
        given: arrays that are the same at every turn.
        seen: nodes of the branch.
        made: completions of the nodes.
        first_node: row of the first node of the branch.
        menu: whether the completions are those of a menu.
    """
    n, g, response = made.tokens.shape
    alive = jnp.repeat(seen.nodes.valid, g)
    learns, frozen = (jnp.array(team.sources(f))[seen.nodes.model] for f in (False, True))
    who, learnt = jnp.where(seen.frozen, frozen, learns), jnp.ones(n, bool)
    if menu:
        who = jnp.where(who == POLICY, MENU, who)
    if seen.expert is not None:
        who, learnt = jnp.where(seen.expert.answers, EXPERT, who), ~seen.expert.answers
        alive = alive & (made.length.reshape(-1) > 0)
    return Steps(
        node=first_node + jnp.repeat(jnp.arange(n), g),
        tokens=made.tokens.reshape(-1, response),
        length=made.length.reshape(-1),
        loss_mask=(learnt[:, None, None] & (jnp.arange(response) < made.length[..., None])).reshape(-1, response),
        logprobs=made.logprobs.reshape(-1, response),
        truncated=made.truncated.reshape(-1) & alive,
        source=jnp.repeat(who, g),
        version=jnp.full((n * g,), given.version),
        valid=alive,
    )


def joint_step(
    spec: RolloutSpec,
    place: Place,
    seen: Observed,
    made: Completions,
    actions: np.ndarray,
    earlier: jax.Array | None = None,
) -> Stepped:
    """Every state of a branch, stepped with every joint action, and its rewards.

    Args:
        spec: static arguments of the rollout.
        place: states of the branch.
        seen: nodes of the branch.
        made: completions of the nodes.
        actions: sample index of every seat [J W]. An empty seat takes part with sample 0 alone.
        earlier: number of joint actions that were played from each state before [F]; None: none.
    """
    f, w, g, j = place.task.shape[0], spec.env.seats, made.tokens.shape[1], len(actions)
    spread = lambda x: jnp.repeat(x[:, None], j, 1)
    seat = np.arange(w)
    tokens = made.tokens.reshape(f, w, g, -1)[:, seat, actions]
    length = made.length.reshape(f, w, g)[:, seat, actions]
    order = jnp.broadcast_to(jnp.arange(j), (f, j))
    if earlier is not None:
        order = order + earlier[:, None]
    keys_of = jax.vmap(lambda stream: fold(spread(place.key), stream, order))
    env_key, child_key = keys_of(jnp.array([ENV, CHILD]))
    wide = jax.tree.map(spread, place.state)
    state, rewards, done = jax.vmap(jax.vmap(spec.env.step))(env_key, wide, tokens, length)
    if spec.plan.local:
        assert spec.env.verify is not None  # the plan was checked
        rewards = {**rewards, **jax.vmap(jax.vmap(spec.env.verify))(state)}
    # Crossed with an empty seat, equal joint actions would come up again and again: the first one counts.
    twin = jnp.any(~seen.occupied[:, None] & (actions > 0), axis=2) & (spec.plan.joint == "cross")
    played = spread(~place.done) & ~twin
    finite = jnp.stack([jnp.isfinite(r).all(-1) for r in rewards.values()]).all(0)
    if seen.expert is not None:  # what an expert did not answer has no reward
        finite = finite & ~seen.expert.silent.reshape(f, w).any(1)[:, None]
    clean = {c: jnp.where(played[..., None], jnp.nan_to_num(rewards[c]), 0.0) for c in spec.env.components}
    return Stepped(state, child_key, clean, done, played, finite)


def transition_rows(
    place: Place,
    seen: Observed,
    stepped: Stepped,
    actions: np.ndarray,
    first: Rows,
    group: int,
    number: int | jax.Array,
) -> Transitions:
    """Rows of the transitions table: the joint actions of each state one after the other.

    Args:
        place: states of the branch.
        seen: nodes of the branch.
        stepped: results of the joint actions.
        actions: sample index of every seat [J W].
        first: first rows of this branch.
        group: samples of a node, G.
        number: number of the turn.
    """
    (f, w), j = seen.occupied.shape, len(actions)
    index = first.steps + jnp.arange(f * w * group).reshape(f, w, group)[:, np.arange(w), actions]
    spread = lambda x: jnp.repeat(x[:, None], j, 1)
    return Transitions(
        steps=jnp.where(seen.occupied[:, None], index, -1).reshape(f * j, w),
        # What was not played is padding, nobody's child: its parent ended the episode and is a leaf.
        parent=jnp.where(stepped.played, spread(place.parent), -1).reshape(-1),
        task=spread(place.task).reshape(-1),
        turn=jnp.full((f * j,), number, jnp.int32),
        rewards={c: r.reshape(f * j, -1) for c, r in stepped.rewards.items()},
        done=stepped.done.reshape(-1),
        played=stepped.played.reshape(-1),
        valid=(stepped.played & stepped.finite).reshape(-1),
    )


def rank_or_stop(plan: Plan, stepped: Stepped, reached: Reached) -> Reached:
    """Order the joint actions where the plan ranks, and end the states where the plan stops.

    A joint action whose rewards are not all finite is the last in the order, and does not enter the mean of its state.

    Args:
        plan: plan of sampling.
        stepped: results of the joint actions.
        reached: states after the joint actions.

    Returns:
        ``reached`` from the best team reward down, and ``done`` where the plan stops.
    """
    if not plan.rank and plan.stop_above is None:
        return reached
    good = stepped.played & stepped.finite
    value = sum(weight * stepped.rewards[c].mean(-1) for c, weight in plan.reward)
    if plan.stop_above is not None:
        mean = jnp.where(good, value, 0.0).sum(1) / jnp.maximum(good.sum(1), 1)
        stops = good.any(1) & (mean > plan.stop_above)
        reached = reached._replace(done=reached.done | stops[:, None])
    if plan.rank:
        best = jnp.argsort(jnp.where(good, -value, jnp.inf), axis=1, stable=True)
        rows = jnp.arange(len(best))[:, None]
        reached = jax.tree.map(lambda x: x[rows, best], reached)
    return reached


class Acted(NamedTuple):
    """Result of `act`: rows of the tables, what the joint actions led to, and their rows [F J] among transitions."""

    tables: Tables
    stepped: Stepped
    row: jax.Array


def act(
    spec: RolloutSpec,
    given: Given,
    branch: Branch,
    place: Place,
    number: int | jax.Array,
    first: Rows,
    earlier: jax.Array | None = None,
) -> Acted:
    """Observe the states of one branch, sample completions, and play the joint actions.

    Args:
        spec: static arguments of the rollout.
        given: arrays that are the same at every turn.
        branch: the branch; ``branch.turn`` is a turn with the same actors as this one.
        place: states of the branch.
        number: number of this turn, which may be traced.
        first: first rows of this branch.
        earlier: number of joint actions that were played from each state before [F]; None: none.
    """
    plan, env, f = spec.plan, spec.env, place.task.shape[0]
    group, actions = plan.width(branch), np.array(plan.actions(branch, env.seats))
    seen = observe_nodes(spec, given, place, branch.turn, number)
    keys = sample_keys(place.key, seen.nodes.role, group, earlier)
    acting = acting_roles(spec, branch.turn, given.assignment is not None)
    choices = plan.choices(branch)
    if choices:
        models = {m: [(r, env.seats_of(branch.turn, (r,))) for r in able] for m, able in acting.items()}
        made = score_menu(spec.team, given.params, seen.sampled, env.seats, choices, models, spec.sampling)
    else:
        made = generate_nodes(spec, given.params, seen.sampled, keys, acting, branch.turn)
    if seen.expert is not None:
        made = with_experts(seen.expert, seen.nodes.valid, made)
    steps = step_rows(spec.team, given, seen, made, first.nodes, bool(choices))
    stepped = joint_step(spec, place, seen, made, actions, earlier)
    moves = transition_rows(place, seen, stepped, actions, first, group, number)
    row = first.transitions + jnp.arange(f * len(actions)).reshape(f, -1)
    branched = steps.valid.sum() if group > 1 else jnp.zeros((), jnp.int32)
    return Acted(Tables(seen.nodes, steps, moves, branched[None]), stepped, row)


def play_branch(
    spec: RolloutSpec, given: Given, branch: Branch, place: Place, number: int | jax.Array, first: Rows
) -> tuple[Tables, list[tuple[Branch, Place]]]:
    """Play one turn of the states of one branch.

    Arguments are those of `act`.

    Returns:
        Rows of the tables, and the states that the plan continues, by branch.
    """
    plan = spec.plan
    tables, stepped, row = act(spec, given, branch, place, number, first)
    ends = stepped.done | ~stepped.played
    reached = rank_or_stop(plan, stepped, Reached(stepped.state, stepped.child_key, row, ends))
    onward = []
    for i in range(row.shape[1]):
        to = plan.follow(branch, i)
        if to is not None:
            one = jax.tree.map(lambda x, i=i: x[:, i], reached)
            onward.append((to, Place(one.state, one.key, one.parent, place.task, one.done)))
    return tables, onward


def play_turn(
    spec: RolloutSpec, given: Given, frontier: Mapping[Branch, Place], number: int | jax.Array, first: Rows
) -> tuple[Tables, dict[Branch, Place]]:
    """Play one turn of all states of a frontier.

    The branches of the next frontier stand in the order in which they are reached.

    Args:
        spec: static arguments of the rollout.
        given: arrays that are the same at every turn.
        frontier: states of each branch.
        number: number of this turn, which may be traced.
        first: first rows of this turn.

    Returns:
        Rows of the tables branch by branch, and the next frontier.
    """
    tables: list[Tables] = []
    reached: dict[Branch, list[Place]] = {}
    for branch, place in frontier.items():
        table, onward = play_branch(spec, given, branch, place, number, first)
        tables.append(table)
        first = Rows(*(a + b for a, b in zip(first, table.rows, strict=True)))
        for to, behind in onward:
            reached.setdefault(to, []).append(behind)
    return join(tables), {to: join(places) for to, places in reached.items()}


def join(parts: Sequence[PyTree]) -> PyTree:
    """Concatenate the leaves of ``parts``, trees of arrays of one structure, along axis 0."""
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
