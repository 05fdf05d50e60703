"""Array rollouts: a whole forest of episodes as one compiled program.

The frontier is a static dictionary from plan branches to stacked states; which states are already done is data. Turns
whose frontiers are alike are one `jax.lax.scan`, so that a program does not grow with the length of an episode. Keys
are folded along the path (task, joint actions, role, sample, position), never split by batch position. So a sample
depends on its place in the tree and on nothing else. `rollout.host` plays the same environment with the same keys to
the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.distributed.sharding import cut_rows
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.array_grow import play_expansions
from jaxmarl_llm.rollout.array_turn import Given, Place, RolloutSpec, Rows, Tables, acting_models, join, play_turn
from jaxmarl_llm.rollout.growth import check_unassigned, try_choice
from jaxmarl_llm.rollout.keys import RESET, fold
from jaxmarl_llm.rollout.menus import check_menus
from jaxmarl_llm.rollout.plans import ROOT, Branch, Plan
from jaxmarl_llm.types import Counts, PyTree, Team, Tree


class Block(NamedTuple):
    """The rows of one branch in the tables of an array rollout, at one turn or at all turns of a scan that are alike.

    The rows of one turn follow each other. From one turn of ``turns`` to the next are ``node_stride`` and
    ``step_stride`` rows.
    """

    branch: Branch  # at the first turn
    first_node: int
    nodes: int  # at all turns together
    first_step: int
    group: int  # G: steps of a node
    seats: int  # W: nodes of a state
    turns: range
    node_stride: int
    step_stride: int

    def rows(self, seats: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the nodes of ``seats`` (None: of all seats): nodes [n], and the steps [n G] of each of them.

        They are in the order of the tables.
        """
        own = np.arange(self.seats) if seats is None else np.array(seats, int)
        states = np.arange(0, self.nodes // len(self.turns), self.seats)
        each = np.add.outer(states, own).reshape(-1)
        time = np.arange(len(self.turns))[:, None]
        nodes = self.first_node + time * self.node_stride + each
        steps = self.first_step + time * self.step_stride + each * self.group
        return nodes.reshape(-1), steps.reshape(-1, 1) + np.arange(self.group)


class Segment(NamedTuple):
    """``period`` turns from ``first`` on, played ``repeats`` times: a scan where ``repeats`` is above 1."""

    first: int
    period: int
    repeats: int

    @property
    def turns(self) -> range:
        """The turns of the first period."""
        return range(self.first, self.first + self.period)


def frontiers(plan: Plan, env: ArrayEnv, batch: int) -> list[dict[Branch, int]]:
    """Frontier of each turn: its branches and the number of states of each, in the order of the tables.

    The list ends where the plan continues no joint action.

    Args:
        plan: plan of sampling.
        env: environment.
        batch: number of tasks, B.
    """
    out: list[dict[Branch, int]] = []
    frontier = {ROOT: batch}
    while frontier and len(out) < env.max_turns:
        out.append(frontier)
        reached: dict[Branch, int] = {}
        for branch, f in frontier.items():
            for to in _follows(plan, env, branch):
                if to is not None:
                    reached[to] = reached.get(to, 0) + f
        frontier = reached
    return out


def _follows(plan: Plan, env: ArrayEnv, branch: Branch) -> list[Branch | None]:
    return [plan.follow(branch, j) for j in range(len(plan.actions(branch, env.seats)))]


def segments(plan: Plan, env: ArrayEnv, batch: int) -> list[Segment]:
    """Cut the turns of a rollout into segments, in their order.

    Two turns are alike when their actors and the joint actions that continue are equal. The branches of the frontiers
    (apart from the turn), their menus, and the numbers of states and samples, must be equal too. From a turn on, the
    segment is the one that leaves the fewest turns to be compiled. Among equal ones it is the one of the least period.
    A turn that begins no repetition is alone.

    Args:
        plan: plan of sampling.
        env: environment.
        batch: number of tasks, B.
    """

    def kind(turn: int, frontier: dict[Branch, int]) -> Hashable:
        places = [
            (b.trunk, f, plan.width(b), plan.choices(b), tuple(to and to.trunk for to in _follows(plan, env, b)))
            for b, f in frontier.items()
        ]
        return env.actors[turn], tuple(places)

    kinds = [kind(turn, frontier) for turn, frontier in enumerate(frontiers(plan, env, batch))]
    out: list[Segment] = []
    first = 0
    while first < len(kinds):
        best = Segment(first, 1, 1)
        for period in range(1, (len(kinds) - first) // 2 + 1):
            repeats, one = 1, kinds[first : first + period]
            while kinds[first + repeats * period : first + (repeats + 1) * period] == one:
                repeats += 1
            if (repeats - 1) * period > (best.repeats - 1) * best.period:
                best = Segment(first, period, repeats)
        out.append(best)
        first += best.period * best.repeats
    return out


def _rows_of(plan: Plan, env: ArrayEnv, branch: Branch, states: int) -> Rows:
    """How many rows of each table ``states`` states of a branch have at one turn."""
    nodes = states * env.seats
    return Rows(nodes, nodes * plan.width(branch), states * len(plan.actions(branch, env.seats)))


def table_rows(plan: Plan, env: ArrayEnv, batch: int) -> Rows:
    """Rows of the three tables that `make_rollout` makes.

    Args:
        plan: Who samples how many completions.
        env: The environment.
        batch: Number of tasks.
    """
    total = Rows(0, 0, 0)
    for frontier in frontiers(plan, env, batch):
        for branch, states in frontier.items():
            total = _add(total, _rows_of(plan, env, branch, states))
    return total


def _add(rows: Rows, more: Rows, times: int | jax.Array = 1) -> Rows:
    return Rows(*(a + times * b for a, b in zip(rows, more, strict=True)))


def _period_rows(plan: Plan, env: ArrayEnv, segment: Segment, walk: list[dict[Branch, int]]) -> Rows:
    """How many rows of each table one period of a segment has. ``walk``: what `frontiers` returns."""
    total = Rows(0, 0, 0)
    for turn in segment.turns:
        for branch, f in walk[turn].items():
            total = _add(total, _rows_of(plan, env, branch, f))
    return total


def layout(plan: Plan, env: ArrayEnv, batch: int) -> list[Block]:
    """Rows of the nodes and steps that `make_rollout` writes, known before anything runs.

    Turns that are one scan are one block for each branch at each turn of its period.

    Args:
        plan: plan of sampling.
        env: environment.
        batch: number of tasks, B.
    """
    blocks, walk, first = [], frontiers(plan, env, batch), Rows(0, 0, 0)
    for segment in segments(plan, env, batch):
        period, place = _period_rows(plan, env, segment, walk), first
        node_stride, step_stride, _ = map(int, period)
        for turn in segment.turns:
            turns = range(turn, turn + segment.period * segment.repeats, segment.period)
            for branch, f in walk[turn].items():
                rows, (node, step, _) = _rows_of(plan, env, branch, f), map(int, place)
                total, group = int(rows.nodes) * segment.repeats, plan.width(branch)
                blocks.append(Block(branch, node, total, step, group, env.seats, turns, node_stride, step_stride))
                place = _add(place, rows)
        first = _add(first, period, segment.repeats)
    return blocks


def check_seats(env: ArrayEnv, tree: Tree) -> None:
    """Raise ConfigError where a role of ``tree`` took a seat that ``env.actors`` does not give to this role."""
    nodes = tree.nodes
    unknown = nodes.valid & ((nodes.role < 0) | (nodes.role >= len(env.roles)))
    for i in np.flatnonzero(unknown)[:1]:
        raise ConfigError(
            f"environment {env.name!r}, turn {nodes.turn[i]}: observe(state).role is {nodes.role[i]}, expected 0 to "
            f"{len(env.roles) - 1}"
        )
    seat = np.arange(len(nodes.role)) % env.seats
    may = np.zeros((env.max_turns, env.seats, len(env.roles)), bool)
    for turn in range(env.max_turns):
        for role in range(len(env.roles)):
            may[turn, env.seats_of(turn, (role,)), role] = True
    for i in np.flatnonzero(nodes.valid & ~may[nodes.turn, seat, nodes.role])[:1]:
        at, taker = int(nodes.turn[i]), env.roles[int(nodes.role[i])]
        raise ConfigError(
            f"environment {env.name!r}, turn {at}: seat {seat[i]} was taken by {taker!r}, but actors[{at}] is "
            f"{env.actors[at]}: expected as many as seats in their order, or another number of roles for any seat"
        )


def make_rollout(
    team: Team,
    env: ArrayEnv,
    plan: Plan,
    sampling: Sampling,
    memory_config: MemoryConfig | None = None,
) -> Callable[..., Tree]:
    """Make a pure function (params, memory, tasks, key, version, assignment) -> Tree; jit it.

    With ``team.batch_models`` the models that may act together are one launch. Each node then has a copy of its own
    model's parameters. This is for many small models or adapters of one architecture. Turns that are alike
    (`segments`) are one scan: there the environment's states keep their shapes and types.

    Arguments of the result. memory: unused without ``memory_config``. tasks: pytree with leading axis B. key: typed;
    consumed by folding. version: integer written into the steps. assignment: int [B A], which of ``Team.players`` plays
    each role of each task, or [B M A], which does at each turn. None: its own model plays every role. A plan that grows
    names the players itself and takes no assignment.

    Args:
        team: roles, models and critics.
        env: environment.
        plan: plan of sampling.
        sampling: distribution of tokens.
        memory_config: settings of the adaptive memory; None: no memory.

    Raises:
        ConfigError: the environment lacks what the plan asks for, or models to be stacked are not alike. A plan that
            grows chooses what is not there (`growth.try_choice`), or has an assignment. A role cannot choose from the
            menu of a turn (`menus.check_menus`).
    """
    plan.check(env)
    try_choice(plan, team)
    check_menus(plan, team, env)
    spec = RolloutSpec(team, env, plan, sampling, memory_config)
    _check_stacked(spec)

    def rollout(
        params: PyTree,
        memory: PyTree,
        tasks: PyTree,
        key: jax.Array,
        version: jax.Array,
        assignment: jax.Array | None = None,
    ) -> Tree:
        batch = jax.tree.leaves(tasks)[0].shape[0]
        given, roots = Given(params, memory, version, assignment), start(env, tasks, key)
        if plan.choose is not None:
            check_unassigned(plan, assignment)
            models = 1 if team.batch_models else len(acting_models(spec, 0, True))
            return finish(play_expansions(spec, given, roots), models * env.max_turns)
        frontier = {ROOT: roots}
        walk, tables, first, launches = frontiers(plan, env, batch), [], Rows(0, 0, 0), 0
        for segment in segments(plan, env, batch):
            rows = _period_rows(plan, env, segment, walk)
            table, frontier = play_segment(spec, given, segment, frontier, first, rows)
            tables.append(table)
            first = _add(first, rows, segment.repeats)
            for turn in segment.turns:
                models = 1 if team.batch_models else len(acting_models(spec, turn, assignment is not None))
                launches += models * len(walk[turn]) * segment.repeats
        return finish(join(tables), launches)

    return rollout


def _check_stacked(spec: RolloutSpec) -> None:
    """Raises ConfigError where models that ``team.batch_models`` puts into one launch are not alike."""
    first, *others = spec.models
    kind = lambda m: (m.policy, m.base, m.tokenizer)
    other = next((m.name for m in others if kind(m) != kind(first)), None)
    if spec.team.batch_models and other is not None:
        raise ConfigError(
            f"config.team.batch_models: expected models of one architecture, base and tokenizer; {other!r} is not as "
            f"{first.name!r}"
        )


def start(env: ArrayEnv, tasks: PyTree, key: jax.Array) -> Place:
    """First state of each task.

    Args:
        env: environment.
        tasks: pytree with leading axis B.
        key: PRNG key of the rollout.
    """
    batch = jax.tree.leaves(tasks)[0].shape[0]
    ids = jnp.arange(batch, dtype=jnp.int32)
    roots = fold(jnp.broadcast_to(key, (batch,)), ids)
    state = jax.vmap(env.reset)(fold(roots, RESET), cut_rows(tasks))
    return Place(state, roots, jnp.full((batch,), -1, jnp.int32), ids, jnp.zeros((batch,), bool))


def play_segment(
    spec: RolloutSpec, given: Given, segment: Segment, frontier: dict[Branch, Place], first: Rows, rows: Rows
) -> tuple[Tables, dict[Branch, Place]]:
    """Play all turns of a segment.

    Args:
        spec: static arguments of the rollout.
        given: arrays that are the same at every turn.
        segment: turns to play.
        frontier: states of each branch before the segment.
        first: first rows of the segment.
        rows: number of rows of one period.

    Returns:
        Rows of the tables, turn by turn, and the frontier after the segment.
    """

    def play(frontier: dict[Branch, Place], period: int | jax.Array) -> tuple[Tables, dict[Branch, Place]]:
        tables, at = [], _add(first, rows, period)
        for turn in segment.turns:
            table, frontier = play_turn(spec, given, frontier, turn + period * segment.period, at)
            tables.append(table)
            at = _add(at, table.rows)
        return join(tables), frontier

    if segment.repeats == 1:
        return play(frontier, 0)
    branches = list(frontier)
    behind: list[Branch] = []

    def body(places: list[Place], period: jax.Array) -> tuple[list[Place], Tables]:
        table, reached = play(dict(zip(branches, places, strict=True)), period)
        behind[:] = reached  # static; the same branches in the same order, one period later
        return list(reached.values()), table

    places, stacked = jax.lax.scan(body, list(frontier.values()), jnp.arange(segment.repeats, dtype=jnp.int32))
    later = segment.period * (segment.repeats - 1)
    after = [Branch(branch.turn + later, branch.trunk) for branch in behind]
    table = jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), stacked)
    return table, dict(zip(after, places, strict=True))


def finish(tables: Tables, launches: int) -> Tree:
    """Make the tree of a rollout from its ``tables``, and count. ``launches``: generation programs started."""
    nodes, steps, moves = cut_rows((tables.nodes, tables.steps, tables.transitions))
    counts = Counts(
        sequences=steps.valid.sum(),
        branch_sequences=tables.branched.sum(),
        prompt_tokens=jnp.where(nodes.valid, nodes.length, 0).sum(),
        completion_tokens=steps.length.sum(),
        env_calls=moves.played.sum(),
        invalid=(moves.played & ~moves.valid).sum(),
        launches=jnp.int32(launches),
    )
    return Tree(nodes, steps, moves, counts)
