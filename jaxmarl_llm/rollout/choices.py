"""Functions to grow a tree by (`plans.grow`): where the next expansion goes on from, and which model plays it.

Each function here makes such a choice for a number of players, the models that may play a role. Equal arguments give
the same function, so equal plans are found again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmarl_llm.rollout.growth import ROOT
from jaxmarl_llm.rollout.plans import Choose


def _named(choose: Choose, name: str) -> Choose:
    choose.__name__ = name
    return choose


def _any_player(key: Array, players: int) -> Array:
    return jax.random.randint(key, (), 0, players)


@functools.cache
def root(players: int = 1) -> Choose:
    """Make a choice that always names the root: independent first turns, as ``flat(k)`` samples them.

    Args:
        players: number of models that may play a role; one is drawn uniformly.
    """
    return _named(lambda key, parents, played, rewards, n: (ROOT, _any_player(key, players)), "root")


@functools.cache
def last(players: int = 1) -> Choose:
    """Make a choice that always names the last expansion: a chain, in which each attempt goes on from the one before.

    Args:
        players: number of models that may play a role; one is drawn uniformly.
    """
    return _named(lambda key, parents, played, rewards, n: (n - 1, _any_player(key, players)), "last")


@functools.cache
def uniform(players: int = 1) -> Choose:
    """Make a choice that draws uniformly among the root and all expansions.

    Args:
        players: number of models that may play a role; one is drawn uniformly.
    """

    def choose(key, parents, played, rewards, n):
        where, who = jax.random.split(key)
        return jax.random.randint(where, (), ROOT, n), _any_player(who, players)

    return _named(choose, "uniform")


@functools.cache
def best(players: int = 1) -> Choose:
    """Make a choice that names the expansion of largest reward, the first of equal ones; the root where none is known.

    Args:
        players: number of models that may play a role; one is drawn uniformly.
    """

    def choose(key, parents, played, rewards, n):
        known = ~jnp.isnan(rewards)
        top = jnp.argmax(jnp.where(known, rewards, -jnp.inf))
        return jnp.where(known.any(), top, ROOT), _any_player(key, players)

    return _named(choose, "best")


@functools.cache
def thompson(players: int = 1) -> Choose:
    """Make a choice by Thompson sampling over nodes and models, as MARS^2 grows a tree (arXiv 2604.14564).

    A value is drawn from Beta(1 + sum of r, 1 + n - sum of r) over n rewards r in [0, 1]. From the root the choice goes
    down. At a node it draws one value for each child, over the rewards of that child's children. It draws one value for
    "a new child here", over the rewards of the node's own children. The largest decides: the choice goes to that child,
    or names this node. Then it draws a value for each model, over the rewards of the node's children that this model
    wrote. The model of the largest value plays. Rewards that are not known do not count, and others are clipped to
    [0, 1].

    Args:
        players: number of models that may play a role.
    """

    def choose(key, parents, played, rewards, n):
        child_key, here_key, player_key = jax.random.split(key, 3)
        k, known = len(parents), ~jnp.isnan(rewards)
        nodes = jnp.arange(ROOT, k)
        below = (parents == nodes[:, None]) & (jnp.arange(k) < n)  # [k+1 k]: the children of each node, the root first
        there = _beta(child_key, rewards, known & below)[1:]
        here = _beta(here_key, rewards, known & below)

        def down(_, at):
            value = jnp.where(below[at], there, -1.0)
            child = jnp.argmax(value)
            return jnp.where(value[child] > here[at], child + 1, at)

        at = jax.lax.fori_loop(0, k, down, 0)
        wrote = (played == jnp.arange(players)[:, None]) & known & below[at]
        return nodes[at], jnp.argmax(_beta(player_key, rewards, wrote))

    return _named(choose, "thompson")


def _beta(key: Array, rewards: Float[Array, " k"], counted: Bool[Array, "o k"]) -> Float[Array, " o"]:
    """One draw for each option [o], over the rewards that count for it."""
    total = jnp.where(counted, jnp.clip(rewards, 0.0, 1.0), 0.0).sum(-1)
    number = counted.sum(-1)
    return jax.random.beta(key, 1.0 + total, 1.0 + number - total)
