"""Array rollouts of trees that grow (`plans.grow`): one scan over expansions, which keeps the state behind each one.

The shapes are static. Each task has k + 1 slots: the first state, and the state behind each expansion. An expansion
takes one slot of each task by index, plays one turn from it, and writes the next slot.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmarl_llm.rollout.array_turn import Given, Place, RolloutSpec, Rows, Tables, act
from jaxmarl_llm.rollout.growth import ROOT, Grown, count_players, next_choice, nothing_grown
from jaxmarl_llm.rollout.plans import ROOT as FIRST
from jaxmarl_llm.rollout.ranking import team_value
from jaxmarl_llm.types import PyTree


class Slots(NamedTuple):
    """The states that may be expanded. Leading axes B k+1: slot 0 is the root, slot i + 1 is behind expansion i."""

    state: PyTree
    key: jax.Array
    row: jax.Array  # transition that led here, -1 at the root
    used: jax.Array  # number of expansions that went on from here


def play_expansions(spec: RolloutSpec, given: Given, roots: Place) -> Tables:
    """Play all expansions of all tasks. An expansion whose choice is not possible is not played.

    Args:
        spec: static arguments of the rollout.
        given: arrays that are the same at every expansion; without an assignment.
        roots: first state of each task.
    """
    expansions, tasks, seats = spec.env.max_turns, len(roots.task), spec.env.seats
    rows, players = Rows(tasks * seats, tasks * seats, tasks), count_players(spec.plan, spec.team)

    def expand(carry: tuple[Slots, Grown], n: jax.Array) -> tuple[tuple[Slots, Grown], Tables]:
        slots, grown = carry
        choice = next_choice(spec.plan, players, roots.key, grown, n)
        at = jnp.arange(tasks), choice.parent - ROOT
        from_slot = jax.tree.map(lambda x: x[at], slots)
        place = Place(from_slot.state, from_slot.key, from_slot.row, roots.task, ~choice.possible)
        who = jnp.broadcast_to(choice.player[:, None], (tasks, len(spec.env.roles)))
        first = Rows(*(n * count for count in rows))
        tables, stepped, row = act(spec, given._replace(assignment=who), FIRST, place, n, first, from_slot.used)
        behind = Slots(stepped.state, stepped.child_key, row, jnp.zeros_like(row))
        slots = slots._replace(used=slots.used.at[at].add(1))
        slots = jax.tree.map(lambda kept, new: kept.at[:, n + 1].set(new[:, 0]), slots, behind)
        known = stepped.played & stepped.finite
        paid = jnp.where(known, team_value(spec.plan, stepped.rewards), jnp.nan)
        made = Grown(choice.parent, choice.player, paid[:, 0], stepped.done[:, 0] | ~stepped.played[:, 0])
        grown = jax.tree.map(lambda kept, new: kept.at[:, n].set(new), grown, made)
        return (slots, grown), tables

    spread = lambda x: jnp.repeat(x[:, None], expansions + 1, 1)
    used = jnp.zeros((tasks, expansions + 1), jnp.int32)
    slots = Slots(jax.tree.map(spread, roots.state), spread(roots.key), spread(roots.parent), used)
    grown = jax.tree.map(jnp.asarray, nothing_grown(tasks, expansions))
    _, stacked = jax.lax.scan(expand, (slots, grown), jnp.arange(expansions, dtype=jnp.int32))
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), stacked)
