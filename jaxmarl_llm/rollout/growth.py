"""What both engines share where a tree grows (`plans.grow`): the record of its expansions, and the next choice."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.keys import CHOOSE, fold
from jaxmarl_llm.rollout.plans import Plan
from jaxmarl_llm.types import Array, Team, Tree

ROOT, UNMADE = -1, -2  # in the column of parents: the first state, and an expansion that is not made yet
TRIALS = 16  # random trees on which a choice is tried


class Grown(NamedTuple):
    """The expansions of B tasks so far, as `plans.grow` describes them; ``closed``: nothing can be played behind it."""

    parents: Array  # int32 [B k]
    players: Array  # int32 [B k]
    rewards: Array  # float32 [B k], NaN where unknown
    closed: Array  # bool [B k]


class Choice(NamedTuple):
    """Beginning of the next expansion of each task."""

    named: tuple[Array, Array]  # int32 [B] each: parent and player, as ``choose`` returned them
    parent: Array  # int32 [B]: the last one of its line that is not closed; the root where the choice is not possible
    player: Array  # int32 [B]; 0 where the choice is not possible
    possible: Array  # bool [B]: the expansion was made before, and the role has such a player


def nothing_grown(tasks: int, expansions: int) -> Grown:
    """The record before the first expansion (NumPy arrays).

    Args:
        tasks: B.
        expansions: k.
    """
    shape = (tasks, expansions)
    ints = lambda value: np.full(shape, value, np.int32)
    return Grown(ints(UNMADE), ints(-1), np.full(shape, np.nan, np.float32), np.zeros(shape, bool))


@functools.partial(jax.jit, static_argnames=("plan", "players"))
def next_choice(plan: Plan, players: int, keys: jax.Array, grown: Grown, n: jax.Array) -> Choice:
    """Choose where expansion ``n`` of each task begins.

    Args:
        plan: plan of `plans.grow`.
        players: number of models that may play a role.
        keys: key of each task's first state [B].
        grown: the expansions so far.
        n: number of expansions so far, the same for every task.
    """
    assert plan.choose is not None
    k = grown.parents.shape[1]
    own = fold(keys, CHOOSE, n)
    parents, players_before, rewards, closed = (jnp.asarray(x) for x in grown)
    choose = jax.vmap(plan.choose, in_axes=(0, 0, 0, 0, None))
    found = choose(own, parents, players_before, rewards, n)
    named, player = (jnp.asarray(x, jnp.int32) for x in found)
    possible = (named >= ROOT) & (named < n) & (player >= 0) & (player < players)
    rows = jnp.arange(len(own))

    def up(_, at):  # to the state before an expansion behind which nothing can be played
        slot = jnp.maximum(at, 0)
        return jnp.where((at >= 0) & closed[rows, slot], parents[rows, slot], at)

    parent = jax.lax.fori_loop(0, k, up, jnp.where(possible, named, ROOT))
    return Choice((named, player), parent, jnp.where(possible, player, 0), possible)


def count_players(plan: Plan, team: Team) -> int:
    """The number of models that may play a role, the same for every role of the team.

    Args:
        plan: plan of `plans.grow`, for the message.
        team: roles and models.

    Raises:
        ConfigError: two roles have different numbers of models.
    """
    counts = {role.name: len(role.players) for role in team.roles}
    first = next(iter(counts.values()))
    for name, count in counts.items():
        if count != first:
            raise ConfigError(
                f"plan {plan.name}: expected {first} models of role {name!r}, as many as of role "
                f"{team.roles[0].name!r}, got {count}"
            )
    return first


def check_unassigned(plan: Plan, assignment: Array | None) -> None:
    """Raise ConfigError where a plan that grows has an assignment.

    Args:
        plan: plan of sampling.
        assignment: who plays which role, as the rollout has it.
    """
    if plan.choose is not None and assignment is not None:
        raise ConfigError(f"plan {plan.name}: expected no assignment: choose names the players")


def wrong_choice(plan: Plan, team: Team, n: int, choice: Choice | None = None, task: int = 0) -> ConfigError:
    """The error of a choice that is not possible.

    Args:
        plan: plan of `plans.grow`.
        team: roles and models.
        n: number of expansions before the choice.
        choice: the choices of all tasks; None: not known any more.
        task: the task whose choice is wrong.
    """
    roles = " and ".join(repr(role.name) for role in team.roles)
    wanted = f"-1 (the root){f' to {n - 1}' if n else ''} and player 0 to {len(team.roles[0].players) - 1} of {roles}"
    got = "another choice"
    if choice is not None:
        named, player = (int(x[task]) for x in choice.named)
        got = f"expansion {named} and player {player}"
    return ConfigError(f"plan {plan.name}: choose before expansion {n}: expected {wanted}, got {got}")


@functools.cache
def try_choice(plan: Plan, team: Team) -> None:
    """Let ``choose`` grow small random trees, before a run. Nothing is tried for other plans.

    Rewards are drawn from 0, 1, unknown, and the numbers between 0 and 1.

    Args:
        plan: plan of sampling.
        team: roles and models.

    Raises:
        ConfigError: ``choose`` raises, returns something else than two integers, or names an expansion that was not
            made yet or a player that no role has.
    """
    if plan.choose is None:
        return
    players, expansions = count_players(plan, team), plan.turns or 1
    rng, grown = np.random.default_rng(0), nothing_grown(TRIALS, plan.turns or 1)
    keys = jax.random.split(jax.random.key(0), TRIALS)
    _check_types(plan, keys[0], grown)
    drawn = rng.choice(np.array([0.0, 1.0, np.nan, 0.5], np.float32), grown.rewards.shape)
    drawn = np.where(drawn == 0.5, rng.random(drawn.shape, np.float32), drawn)
    for n in range(expansions):
        choice = jax.device_get(next_choice(plan, players, keys, grown, jnp.int32(n)))
        for i in np.flatnonzero(~choice.possible)[:1]:
            raise wrong_choice(plan, team, n, choice, i)
        grown.parents[:, n], grown.players[:, n], grown.rewards[:, n] = choice.parent, choice.player, drawn[:, n]


def _check_types(plan: Plan, key: jax.Array, grown: Grown) -> None:
    """ConfigError unless ``choose`` returns two integers."""
    wanted = f"plan {plan.name}: choose: expected two integers, (parent, player)"
    columns = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in grown[:3]]
    assert plan.choose is not None
    try:
        found = jax.eval_shape(plan.choose, key, *columns, jax.ShapeDtypeStruct((), jnp.int32))
    except ConfigError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"{wanted}, but it raised {told}") from error
    kinds = [(x.shape, x.dtype) for x in jax.tree.leaves(found)]
    if len(kinds) != 2 or any(shape or not jnp.issubdtype(dtype, jnp.integer) for shape, dtype in kinds):
        shown = ", ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds)
        raise ConfigError(f"{wanted}, got {shown or 'nothing'}")


def check_choices(plan: Plan, team: Team, tree: Tree) -> None:
    """Raise ConfigError where a choice of an array rollout was not possible: such an expansion was not played.

    Args:
        plan: plan of sampling; nothing is checked unless it grows.
        team: roles and models.
        tree: an array rollout, on the host.
    """
    moves = tree.transitions
    if plan.choose is not None:
        for j in np.flatnonzero(~moves.played)[:1]:
            raise wrong_choice(plan, team, int(moves.turn[j]))
