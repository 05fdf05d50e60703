"""Selection of groups, steps of an episode and pairs of siblings for an update. Pure functions. K groups or pairs.

Parameters and optimizer states without a selected row stay equal to the bit; the update ensures that.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.credit.advantages import step_episodes
from jaxmarl_llm.types import Array, Tree


def top_k_variance(
    variance: Float[Array, " K"],
    eligible: Bool[Array, " K"],
    k: int | None,
    *,
    scope: Int[Array, " K"] | None = None,
    num_scopes: int = 1,
    tol: float = 0.0,
) -> Bool[Array, " K"]:
    """Select the k groups of largest reward variance in each scope: JoyAgents-R1's marginal-benefit selection.

    ``S = top-K_i Var_g(R_ig)``. Ties go to the lower index. A scope with fewer candidates than k yields all of them.

    Args:
        variance: population variance of the rewards of each group [K].
        eligible: groups that may be selected [K].
        k: number of groups in each scope; None: all.
        scope: id of each group's scope [K], below ``num_scopes``; in JoyAgents-R1 its task. None: the whole batch.
        num_scopes: number of scopes.
        tol: a variance that is not above it is never selected, because equal rewards have no gradient.

    Returns:
        Whether a group is selected [K].
    """
    if k is not None and k < 1:
        raise ValueError(f"k is at least 1, or None for all groups, not {k}")
    candidate = eligible & (variance > tol)
    if k is None:
        return candidate
    scope = jnp.zeros(variance.shape[0], jnp.int32) if scope is None else scope
    bucket = jnp.where(candidate, scope, num_scopes)  # the rest sorts behind every scope
    return candidate & (_ranks(bucket, jnp.where(candidate, -variance, 0.0), num_scopes + 1) < k)


def one_round(key: Array, tree: Tree, trained: Bool[Array, " C"]) -> Bool[Array, " C"]:
    """Select one of each role's steps in each episode, uniformly: WaltzRL trains on one random round.

    An episode is all that follows one joint action at a root. The key of a draw is folded by the task, the number of
    the episode among those of the task, and the role. Steps count by turn, and steps of one turn by row. So the draw
    depends neither on the place of the episode in the tables nor on other episodes.

    Args:
        key: PRNG key; folded, not consumed.
        tree: the rollout.
        trained: steps to choose from [C].

    Returns:
        Whether a step is selected [C].
    """
    steps, moves, num = tree.steps, tree.transitions, trained.shape[0]
    task, role, turn = (column[steps.node] for column in (tree.nodes.task, tree.nodes.role, tree.nodes.turn))
    episode = step_episodes(moves.steps, moves.parent, num_steps=num)
    here = jnp.arange(num)
    leads = (here == episode) & steps.valid
    number = _ranks(jnp.where(leads, task, num), here, num + 1)[episode]  # as many tasks as steps, at most

    def draw(*path: Array) -> Array:
        own = key
        for data in path:
            own = jax.random.fold_in(own, data)
        return jax.random.uniform(own)

    share = jax.vmap(draw)(task, number, role)
    roles = next(iter(moves.rewards.values())).shape[1]
    bucket = jnp.where(trained, episode * roles + role, num * roles)
    count = jax.ops.segment_sum(jnp.ones(num, jnp.int32), bucket, num * roles + 1)[bucket]
    drawn = jnp.minimum(jnp.floor(share * count).astype(jnp.int32), count - 1)
    return trained & (_ranks(bucket, turn, num * roles + 1) == drawn)


def _ranks(bucket: Int[Array, " C"], value: Array, num_buckets: int) -> Int[Array, " C"]:
    """The place of each row among those of its bucket, by value and then by row."""
    num = bucket.shape[0]
    order = jnp.lexsort((value, bucket))  # stable
    size = jax.ops.segment_sum(jnp.ones(num, jnp.int32), bucket, num_buckets)
    first = jnp.cumsum(size) - size
    return jnp.zeros(num, jnp.int32).at[order].set(jnp.arange(num, dtype=jnp.int32) - first[bucket[order]])


def same_parent_pairs(
    parent: Int[np.ndarray, " C"], label: Bool[np.ndarray, " C"], valid: Bool[np.ndarray, " C"]
) -> Int[np.ndarray, "K 2"]:
    """Preference pairs among siblings (MALT): all rows (labelled step, unlabelled step) of one node.

    Pairs are ordered by the first step, then by the second. A node whose steps all have one label has no pair.

    Args:
        parent: node of each step [C].
        label: whether a step is preferred [C].
        valid: steps that may be in a pair [C].

    Returns:
        Indices of steps [K 2].
    """
    better, worse = np.flatnonzero(valid & label), np.flatnonzero(valid & ~label)
    worse = worse[np.argsort(parent[worse], kind="stable")]
    first = np.searchsorted(parent[worse], parent[better], "left")
    count = np.searchsorted(parent[worse], parent[better], "right") - first
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.stack([np.repeat(better, count), worse[np.repeat(first, count) + within]], axis=1)
