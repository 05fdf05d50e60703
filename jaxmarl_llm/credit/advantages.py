"""From rewards to advantages: weigh the components, back up over the forest, credit completions, compare siblings.

Pure functions over flat, padded tables (see ``types.py``). Every reduction is a segment reduction over integer ids,
so ragged, empty and single-member groups need no special layout. Letters besides the legend: K groups.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.types import Array


@struct.dataclass
class GroupStats:
    """Statistics over the valid members of each group; all zero for a group without one."""

    mean: Float[Array, " K"]
    variance: Float[Array, " K"]  # population (divided by the count)
    count: Int[Array, " K"]
    low: Float[Array, " K"]
    high: Float[Array, " K"]


def group_advantage(
    values: Float[Array, " C"],
    group: Int[Array, " C"],
    valid: Bool[Array, " C"],
    *,
    num_groups: int,
    baseline: str,
    normalise: str,
    ddof: int = 0,
    eps: float = 1e-6,
    singleton: str = "zero",
    counted: Bool[Array, " C"] | None = None,
) -> tuple[Float[Array, " C"], GroupStats]:
    """Group-relative advantage ``A_i = (x_i - centre_k) / (std_k + eps)``, over the valid members of each group k.

    With normalise ``std`` the advantage is standardised, so the baseline has no effect. MAGRPO, MAREINFORCE, MARLOO and
    MAREMAX are then one algorithm (CoMLRL's ``advantage_normalization``). The std is the group's own, never that of the
    others, which vanishes for rewards [0, .95, ..., .95].

    Members that are all equal (high == low) get exactly 0 when centred. Finite values give finite advantages, at most
    sqrt(n - 1) for mean and std. Invalid members get 0 and are in no statistic.

    Args:
        values: return of each completion [C]; x above.
        group: group of each completion [C], for valid members in [0, num_groups), in any order.
        valid: completions that have a return [C].
        num_groups: number of groups, K. Groups may be empty.
        baseline: ``mean`` (GRPO; MAGRPO eq. 2). ``unique``: the mean of the distinct values, each counted once
            (MARSHAL's code). ``loo``: the mean of the others, equal to n/(n-1) (x - mean) (RLOO, MARLOO). ``max``
            (MAREMAX). ``none`` (MAREINFORCE).
        normalise: ``std`` (GRPO, JoyAgents-R1: mean 0 and std 1 whatever the baseline) or ``none`` (MAGRPO).
        ddof: 0, or 1 for torch's sample std, as in Dr. MAS.
        eps: term added to the std.
        singleton: advantage of a centred group of one, which has no other member. ``zero``, or ``raw``: its value (Dr.
            MAS: mean 0 and std 1). With baseline ``none`` nothing is compared, and one member is like any other.
        counted: members that make the statistics [C]; None: all. The others are compared with those and are in no
            statistic themselves (Dr. MAS: one step for each trajectory).

    Returns:
        Advantages [C], and statistics of the groups [K].
    """
    _check_words(baseline, normalise, singleton)
    member = valid if counted is None else valid & counted
    x, ids = values, jnp.where(member, group, num_groups)  # out of range: dropped by segment reductions
    count = jax.ops.segment_sum(member.astype(jnp.int32), ids, num_groups)
    n = jnp.maximum(count, 1).astype(x.dtype)
    low = jnp.where(count > 0, jax.ops.segment_min(x, ids, num_groups), 0.0)
    high = jnp.where(count > 0, jax.ops.segment_max(x, ids, num_groups), 0.0)
    # Measured from the lowest member (equal members are exactly 0, whatever their size) and in units of the spread
    # (squares neither overflow nor vanish). A spread below the smallest normal number would flush to 0: equal too.
    flat = high - low < jnp.finfo(x.dtype).tiny
    unit = jnp.where(flat, 1.0, high - low)
    above = x - low[group]
    mean_above = jax.ops.segment_sum(above, ids, num_groups) / n
    deviation = above - mean_above[group]
    squares = jax.ops.segment_sum((deviation / unit[group]) ** 2, ids, num_groups)
    variance = jnp.where(flat, 0.0, unit**2 * (squares / n))
    stats = GroupStats(mean=low + mean_above, variance=variance, count=count, low=low, high=high)

    if normalise == "std":
        baseline = "mean"

    centred = {
        "mean": lambda: deviation,
        "unique": lambda: above - _mean_of_distinct(x, above, ids, num_groups)[group],
        "loo": lambda: deviation * (n / jnp.maximum(n - 1.0, 1.0))[group],
        "max": lambda: x - high[group],
        "none": lambda: x,
    }[baseline]()
    if normalise == "std":
        std = jnp.sqrt(squares / jnp.maximum(n - ddof, 1.0))  # in units of the spread
        centred = centred / unit[group] / jnp.where(flat, 1.0, std + eps / unit)[group]
    if baseline != "none":
        centred = jnp.where(flat[group], 0.0, centred)
        centred = jnp.where((count == 1)[group], x if singleton == "raw" else 0.0, centred)
    return jnp.where(valid, centred, 0.0), stats


def _check_words(baseline: str, normalise: str, singleton: str) -> None:
    """ValueError where a word is none of those of `group_advantage`."""
    if baseline not in ("mean", "unique", "loo", "max", "none"):
        raise ValueError(f"baseline is 'mean', 'unique', 'loo', 'max' or 'none', not {baseline!r}")
    if normalise not in ("std", "none"):
        raise ValueError(f"normalise is 'std' or 'none', not {normalise!r}")
    if singleton not in ("zero", "raw"):
        raise ValueError(f"singleton is 'zero' or 'raw', not {singleton!r}")


def _mean_of_distinct(x: Array, above: Array, ids: Array, num_groups: int) -> jax.Array:
    """Compute the mean [K] over the distinct values of each group, each counted once.

    Args:
        x: values [C], which give the order within a group.
        above: the same values [C], measured from the lowest one of their group.
        ids: group of each value [C]; ids out of range are dropped.
        num_groups: K.
    """
    order = jnp.lexsort((x, ids))
    k, v = ids[order], above[order]
    new = jnp.concatenate([jnp.ones(1, bool), (k[1:] != k[:-1]) | (v[1:] != v[:-1])])
    total = jax.ops.segment_sum(jnp.where(new, v, 0.0), k, num_groups)
    distinct = jax.ops.segment_sum(new.astype(x.dtype), k, num_groups)
    return total / jnp.maximum(distinct, 1.0)


def joint_values(
    steps: Int[Array, "J W"],
    role_of_step: Int[Array, " C"],
    values: Float[Array, " C"],
    valid: Bool[Array, " C"],
    *,
    num_roles: int,
) -> Float[Array, "J A"]:
    """Arrange a value of each completion by transition and role.

    Where every completion is in one joint action, `step_returns` is the inverse.

    Args:
        steps: completions of each joint action [J W], -1 for an empty seat.
        role_of_step: role of each completion [C].
        values: value of each completion [C].
        valid: whether a completion has a value [C].
        num_roles: number of roles, A.

    Returns:
        Values [J A]; 0 for a role that does not act in a transition, or has no valid completion there.
    """
    row = jnp.maximum(steps, 0)
    used = (steps >= 0) & valid[row]
    role = jnp.where(used, role_of_step[row], num_roles)  # out of range: dropped
    at = jnp.arange(steps.shape[0])[:, None]
    return jnp.zeros((steps.shape[0], num_roles), values.dtype).at[at, role].add(values[row], mode="drop")


def advantage_alignment(
    advantage: Float[Array, "J A"],
    parent: Int[Array, " J"],
    turn: Int[Array, " J"],
    valid: Bool[Array, " J"] | Bool[Array, "J A"],
    *,
    max_turns: int,
    beta: float,
    discount: float,
    fade: bool = False,
) -> Float[Array, "J A"]:
    """Advantage Alignment (Duque et al., arXiv 2406.14662) on a forest: own past times the others' present advantages.

    ``credit_t^i = A_t^i + beta (sum_{k<t} discount^(t-k) A_k^i) sum_{j != i} A_t^j``. The sum over k covers the
    transitions that led to t, without t itself. The term reinforces moves that help a player after that player helped
    oneself. The term also reinforces moves that hurt a player after that player hurt oneself. Rows as in
    `returns_to_go`.

    Args:
        advantage: advantage of each transition for each role [J A].
        parent: row of the transition before [J], -1 for a root.
        turn: turn of each transition [J]; t above.
        valid: valid transitions [J], or [J A] by role. Others get 0 and add nothing to those behind them.
        max_turns: number of turns of the longest episode.
        beta: weight of the term of alignment.
        discount: discount per turn.
        fade: whether the result is multiplied by ``discount^t``.
    """
    valid = valid[:, None] if valid.ndim == 1 else valid
    own = jnp.where(valid, advantage, 0.0)
    root, before = (parent < 0)[:, None], jnp.maximum(parent, 0)

    def one_turn(t, past):
        here = jnp.where(root, 0.0, discount * (past + own)[before])
        return jnp.where((turn == t)[:, None], here, past)

    past = jax.lax.fori_loop(0, max_turns, one_turn, jnp.zeros_like(own))
    others = sum((jnp.roll(own, k, axis=1) for k in range(1, own.shape[1])), start=jnp.zeros_like(own))
    credit = own + beta * past * others
    if fade:
        credit = credit * discount ** turn[:, None].astype(own.dtype)
    return jnp.where(valid, credit, 0.0)


def sibling_shaping(
    rewards: Float[Array, "J A"],
    parent: Int[Array, " J"],
    task: Int[Array, " J"],
    valid: Bool[Array, " J"],
    *,
    num_tasks: int,
    max_turns: int,
    strength: float,
    mix: float,
    shaped_parents: bool = False,
) -> Float[Array, "J A"]:
    """Shape rewards of a tree by parents and siblings (MARS^2, arXiv 2604.14564): ``r + strength (r - b)``.

    ``b = (1 - mix) r_parent + mix (mean of the siblings without the transition itself)``. Children of the root have no
    parent: b is the mean of the siblings. Without a sibling b is the parent's reward. With neither the reward stays as
    it is. All terms are rewards before shaping, unless ``shaped_parents`` is set.

    Args:
        rewards: reward of each transition for each role [J A].
        parent: row of the transition before [J], -1 at a root and for padding.
        task: task of each transition [J]; transitions without a parent are siblings in their task.
        valid: transitions whose reward is known [J]. Others are no sibling and no parent, and get 0.
        num_tasks: number of tasks.
        max_turns: number of turns of the longest line of play; read with ``shaped_parents``.
        strength: gamma of the paper, 0.5 in its scripts.
        mix: lambda of the paper, 0.5 in its scripts.
        shaped_parents: whether r_parent is the parent's shaped reward. The authors' code shapes in place, from the root
            down.
    """
    num, root = parent.shape[0], parent < 0
    family = jnp.where(root, num + task, parent)
    known = jnp.where(valid[:, None], rewards, 0.0)
    total = jax.ops.segment_sum(known, family, num + num_tasks)[family]
    others = jax.ops.segment_sum(valid.astype(rewards.dtype), family, num + num_tasks)[family] - 1.0
    siblings = (total - known) / jnp.maximum(others, 1.0)[:, None]
    has_parent, has_siblings = (~root & valid[jnp.maximum(parent, 0)])[:, None], (others > 0)[:, None]

    def shaped(above: Array) -> jax.Array:
        both = (1.0 - mix) * above + mix * siblings
        baseline = jnp.where(has_parent, jnp.where(has_siblings, both, above), jnp.where(has_siblings, siblings, known))
        return jnp.where(valid[:, None], known + strength * (known - baseline), 0.0)

    below = lambda _, x: shaped(x[jnp.maximum(parent, 0)])  # each pass is right one turn further down
    return jax.lax.fori_loop(0, max_turns if shaped_parents else 1, below, known)


def group_ids(*columns: Int[Array, " C"], sizes: tuple[int, ...]) -> tuple[Int[Array, " C"], int]:
    """Mixed-radix key of several columns, and the number of keys: ``((c0 * size1) + c1) * size2 + c2 ...``.

    The group of an estimator: task x role (Dr. MAS), task x role x turn, or a node id alone (JoyAgents-R1, MAGRPO).

    Args:
        *columns: ids, one array [C] or several. Values of column i are in [0, sizes[i]).
        sizes: number of values of each column.
    """
    if not columns or len(columns) != len(sizes):
        raise ValueError(f"{len(columns)} columns for {len(sizes)} sizes: give one size for each column")
    if math.prod(sizes) > jnp.iinfo(columns[0].dtype).max:
        raise ValueError(f"sizes {sizes} make more keys than {columns[0].dtype} can hold")
    key = columns[0]
    for column, size in zip(columns[1:], sizes[1:], strict=True):
        key = key * size + column
    return key, math.prod(sizes)


def roots(parent: Int[Array, " J"]) -> Int[Array, " J"]:
    """Root of the episode of each transition, as its row.

    Args:
        parent: row of the transition before [J], -1 for a root.
    """
    num = parent.shape[0]
    root = jnp.where(parent < 0, jnp.arange(num), parent)
    for _ in range(num.bit_length()):  # each pass doubles the distance climbed
        root = root[root]
    return root


def step_episodes(steps: Int[Array, "J W"], parent: Int[Array, " J"], *, num_steps: int) -> Int[Array, " C"]:
    """Episode of each completion, as the index of that episode's first completion.

    An episode is all that follows one joint action at a root; on a tree, with its branches. A completion of several
    joint actions belongs to the first one. A completion of no joint action is an episode of its own.

    Args:
        steps: completions of each joint action [J W], -1 for an empty seat.
        parent: row of the transition before [J], -1 for a root.
        num_steps: number of completions, C.

    Returns:
        Ids [C] in [0, num_steps).
    """
    num, root = parent.shape[0], roots(parent)
    seats = jnp.where(steps < 0, num_steps, steps)  # out of range: dropped
    of = jnp.full(num_steps, num).at[seats].min(jnp.broadcast_to(root[:, None], seats.shape), mode="drop")
    own = jnp.arange(num_steps)
    return jnp.where(of < num, jax.ops.segment_min(own, of, num + 1)[of], own)


def first_of_each(*columns: Int[Array, " C"], valid: Bool[Array, " C"]) -> Bool[Array, " C"]:
    """Mark the first valid row of every combination of ids.

    Args:
        *columns: ids, one array [C] or several.
        valid: rows that count [C].
    """
    order = jnp.lexsort((*columns, ~valid))
    rows = jnp.stack(columns)[:, order]
    new = jnp.any(rows[:, 1:] != rows[:, :-1], axis=0)
    return valid & jnp.zeros_like(valid).at[order].set(jnp.concatenate([jnp.ones(1, bool), new]))
