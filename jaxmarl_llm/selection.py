"""Which groups an update uses, and which members of a group are compared. Pure functions. Letters: K groups or pairs.

What is not selected must stay bit-identical, optimizer state included: that is the update's part of the bargain.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def top_k_variance(
    variance: Float[Array, "K"],
    eligible: Bool[Array, "K"],
    k: int | None,
    *,
    scope: Int[Array, "K"] | None = None,
    num_scopes: int = 1,
    tol: float = 0.0,
) -> Bool[Array, "K"]:
    """The k groups of largest reward variance in each scope: JoyAgents-R1's marginal-benefit selection.

    ``S = top-K_i Var_g(R_ig)``, population variance. ``scope`` gives each group an id below ``num_scopes`` (in
    JoyAgents-R1 its task); None is one scope, the whole batch. ``k`` None takes all. Ties go to the lower index. A
    variance that is not above ``tol`` is never selected, also with k None: there is nothing to learn from equal
    rewards. A scope with fewer candidates than k yields those it has.
    """
    if k is not None and k < 1:
        raise ValueError(f"k is at least 1, or None for all groups, not {k}")
    candidate = eligible & (variance > tol)
    if k is None:
        return candidate
    num = variance.shape[0]
    scope = jnp.zeros(num, jnp.int32) if scope is None else scope
    bucket = jnp.where(candidate, scope, num_scopes)  # the rest sorts behind every scope
    order = jnp.lexsort((jnp.where(candidate, -variance, 0.0), bucket))  # stable: ties stay in index order
    size = jax.ops.segment_sum(jnp.ones(num, jnp.int32), bucket, num_scopes + 1)
    first = jnp.cumsum(size) - size
    rank = jnp.zeros(num, jnp.int32).at[order].set(jnp.arange(num, dtype=jnp.int32) - first[bucket[order]])
    return candidate & (rank < k)


def same_parent_pairs(
    parent: Int[np.ndarray, "C"], label: Bool[np.ndarray, "C"], valid: Bool[np.ndarray, "C"]
) -> Int[np.ndarray, "K 2"]:
    """Preference pairs among siblings (MALT): rows (labelled step, unlabelled step) of one ``parent``, all of them.

    ``parent`` is what siblings share, their node. By the first step, then by the second, in the order of the rows.
    Invalid steps are in no pair; a node whose steps all have one label has none.
    """
    better, worse = np.flatnonzero(valid & label), np.flatnonzero(valid & ~label)
    worse = worse[np.argsort(parent[worse], kind="stable")]
    first = np.searchsorted(parent[worse], parent[better], "left")
    count = np.searchsorted(parent[worse], parent[better], "right") - first
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.stack([np.repeat(better, count), worse[np.repeat(first, count) + within]], axis=1)
