"""From rewards to advantages: weigh the components, back up over the forest, credit completions, compare siblings.

Pure functions over flat, padded tables (see ``types.py``). Every reduction is a segment reduction over integer ids,
so ragged, empty and single-member groups need no special layout. Letters besides the legend: K groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int


@struct.dataclass
class GroupStats:
    """Statistics over the valid members of each group; all zero for a group without one."""

    mean: Float[Array, "K"]
    variance: Float[Array, "K"]  # population (divided by the count)
    count: Int[Array, "K"]
    low: Float[Array, "K"]
    high: Float[Array, "K"]


def scalarise(rewards: Mapping[str, Float[Array, "J A"]], weights: Mapping[str, float | int]) -> Float[Array, "J A"]:
    """One reward per role, ``sum_c weights[c] * rewards[c]``. Components without a weight are left out.

    JoyAgents-R1 trains on accuracy + format - efficiency but remembers by accuracy + format: two sets of weights.
    """
    if not weights:
        raise ValueError("reward weights are empty: name at least one component")
    unknown = sorted(set(weights) - set(rewards))
    if unknown:
        raise KeyError(f"no reward component {', '.join(unknown)}; the environment pays {', '.join(sorted(rewards))}")
    return sum((weight * rewards[name] for name, weight in weights.items()), start=jnp.zeros(()))


def returns_to_go(
    rewards: Float[Array, "J A"],
    parent: Int[Array, "J"],
    turn: Int[Array, "J"],
    valid: Bool[Array, "J"],
    *,
    max_turns: int,
    discount: float = 1.0,
    backup: str = "mean",
    acts: Bool[Array, "J A"] | None = None,
) -> tuple[Float[Array, "J A"], Bool[Array, "J"] | Bool[Array, "J A"]]:
    """Return of every transition: ``R_j = r_j + discount * mean_{valid children i} R_i``, and r_j at a leaf.

    MAGRPO: on chains the paper's return-to-go (sum of r from t on), on trees the library's child mean. Rows come in
    any order. An invalid transition is out of its siblings' mean; one whose children are all invalid is invalid
    itself, since its return is unknown. Returns of invalid rows are 0.

    Children have a later turn than their parent, turns are below ``max_turns``, and padding rows have parent -1.

    acts: where each role acts. Given, a role's return runs only until just before it acts again: a child where it acts
        adds 0, valid or not. So WaltzRL pays each round of feedback for itself. What is known then depends on the role,
        [J A], since what is unknown may lie behind the end of one role's return and not of another's.
    """
    if backup != "mean":
        raise ValueError(f"backup is 'mean', not {backup!r}")
    num = parent.shape[0]
    ends = jnp.zeros((num, 1), bool) if acts is None else acts  # what was earned before a role acts is not passed on

    def one_turn(i, carry):
        returns, ok = carry
        t = max_turns - 1 - i
        later, here = (turn > t)[:, None], (turn == t)[:, None]
        usable = later & (ok | ends)
        total = jax.ops.segment_sum(jnp.where(usable & ~ends, returns, 0.0), parent, num)  # drops roots: -1
        count = jax.ops.segment_sum(usable.astype(returns.dtype), parent, num)
        leaf = jax.ops.segment_sum(later.astype(jnp.int32), parent, num) == 0
        backed_up = returns + discount * total / jnp.maximum(count, 1.0)
        return jnp.where(here, backed_up, returns), ok & (~here | leaf | (count > 0))

    known = jnp.broadcast_to(valid[:, None], ends.shape)
    returns, ok = jax.lax.fori_loop(0, max_turns, one_turn, (rewards, known))
    return jnp.where(ok, returns, 0.0), ok[:, 0] if acts is None else ok


def generalised_advantage(
    rewards: Float[Array, "J A"],
    values: Float[Array, "J A"],
    acts: Bool[Array, "J A"],
    parent: Int[Array, "J"],
    turn: Int[Array, "J"],
    played: Bool[Array, "J"],
    valid: Bool[Array, "J"],
    *,
    max_turns: int,
    discount: float = 1.0,
    decay: float = 0.0,
) -> tuple[Float[Array, "J A"], Float[Array, "J A"]]:
    """Advantages and value targets of transitions with a critic: GAE (Schulman et al. 2016) on a forest.

    ``d_j = r_j + discount V'_j - V_j``, V' the mean value of the child states (0 at a leaf), and
    ``A_j = d_j + discount decay mean_{valid children} A``; target ``A_j + V_j``. ``decay`` (lambda) 0 is TD(0), as IAC
    and MAAC use it; 1 is the Monte Carlo return minus V. ``values``: V of the state where j was taken, by role. Where a
    role does not act (``acts`` False) it has no V: there V_j is r_j + discount V'_j, so that d_j is 0. Rows that are
    not valid get 0; the value of a state counts whether or not what followed could be scored. Rows as in
    `returns_to_go`.
    """
    num = parent.shape[0]

    def mean_below(x: Array, use: Array) -> tuple[Array, Array]:
        total = jax.ops.segment_sum(jnp.where(use, x, 0.0), parent, num)  # drops roots: -1
        count = jax.ops.segment_sum(jnp.broadcast_to(use, x.shape).astype(x.dtype), parent, num)
        return total / jnp.maximum(count, 1.0), count > 0

    def one_turn(i, carry):
        value, known, advantage = carry
        t = max_turns - 1 - i
        later, here = (turn > t)[:, None], (turn == t)[:, None]
        below, some = mean_below(value, later & known)
        bootstrapped = rewards + discount * below
        leaf = jax.ops.segment_sum((later[:, 0] & played).astype(jnp.int32), parent, num)[:, None] == 0
        value = jnp.where(here & ~acts, bootstrapped, value)
        known = jnp.where(here & ~acts, valid[:, None] & (leaf | some), known)
        carried, _ = mean_below(advantage, later & valid[:, None])
        error = bootstrapped - value + discount * decay * carried
        return value, known, jnp.where(here & valid[:, None], error, advantage)

    start = values, acts & played[:, None], jnp.zeros_like(values)
    value, _, advantage = jax.lax.fori_loop(0, max_turns, one_turn, start)
    return advantage, jnp.where(valid[:, None], advantage + value, 0.0)


def step_returns(
    steps: Int[Array, "J W"],
    role_of_step: Int[Array, "C"],
    returns: Float[Array, "J A"],
    valid: Bool[Array, "J"] | Bool[Array, "J A"],
    *,
    num_steps: int,
    reduce: str = "mean",
) -> tuple[Float[Array, "C"], Bool[Array, "C"]]:
    """Credit of each completion: mean or sum, over the valid joint actions it is part of, of its own role's return.

    MAGRPO in cross mode: a completion is part of K^(n-1) joint actions. The official trainer sums over them, so its
    advantages are K^(n-1) times those of the mean (keep this in mind when comparing learning rates). In a sum an
    invalid joint action is simply missing: use the mean where rewards may be invalid. A completion of no valid joint
    action is invalid and gets 0. ``valid`` may differ from role to role, as the returns' own horizon makes it.
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce is 'mean' or 'sum', not {reduce!r}")
    if num_steps != role_of_step.shape[0]:
        raise ValueError(f"num_steps is {num_steps}, but role_of_step has {role_of_step.shape[0]} rows")
    role = role_of_step[jnp.maximum(steps, 0)]
    known = valid[:, None] if valid.ndim == 1 else jnp.take_along_axis(valid, role, axis=1)
    used = (steps >= 0) & known
    value = jnp.where(used, jnp.take_along_axis(returns, role, axis=1), 0.0)
    ids = jnp.where(used, steps, num_steps).ravel()  # out of range: dropped by segment sums
    total = jax.ops.segment_sum(value.ravel(), ids, num_steps)
    count = jax.ops.segment_sum(used.ravel().astype(returns.dtype), ids, num_steps)
    return (total / jnp.maximum(count, 1.0) if reduce == "mean" else total), count > 0


def own_turns(
    rewards: Float[Array, "J A"],
    acts: Bool[Array, "J A"],
    parent: Int[Array, "J"],
    *,
    max_turns: int,
) -> Float[Array, "J A"]:
    """Rewards by a role's own turns: what it earns until it acts again counts for the transition where it acted last.

    In a game of alternating moves the loser is paid at the winner's move; its turn reward stands at its own last move.
    Sums from a role's own turn on are as before. What a role earns before its first turn is no move's doing: dropped.
    Rows as in `returns_to_go`; use it on chains (a move followed by several would get the sum over all of them).
    """
    num = parent.shape[0]
    here = jnp.arange(num)[:, None]
    above = jnp.where(parent >= 0, parent, num)

    def up(_, last):
        inherited = jnp.concatenate([last, jnp.full((1, last.shape[1]), num)])[above]
        return jnp.where(acts, here, inherited)

    last = jax.lax.fori_loop(0, max_turns, up, jnp.where(acts, here, num))
    collect = lambda r, at: jax.ops.segment_sum(r, at, num)  # drops those without a turn: num
    return jax.vmap(collect, in_axes=1, out_axes=1)(rewards, last)


def group_advantage(
    values: Float[Array, "C"],
    group: Int[Array, "C"],
    valid: Bool[Array, "C"],
    *,
    num_groups: int,
    centre: str,
    scale: str,
    ddof: int = 0,
    eps: float = 1e-6,
    singleton: str = "zero",
    counted: Bool[Array, "C"] | None = None,
) -> tuple[Float[Array, "C"], GroupStats]:
    """Group-relative advantage ``A_i = (x_i - centre_k) / (std_k + eps)``, over the valid members of each group k.

    centre: ``mean`` (GRPO; MAGRPO eq. 2), ``unique`` the mean of the distinct values, each counted once (MARSHAL's
        code), ``loo`` the mean of the others, equal to n/(n-1) (x - mean) (RLOO, MARLOO), ``max`` (MAREMAX), ``none``
        (MAREINFORCE).
    scale: ``std`` (GRPO, JoyAgents-R1: mean 0 and std 1 whatever the centre; ``ddof=1`` is torch's sample std, as in
        Dr. MAS) or ``none`` (MAGRPO).
    singleton: what a centred group of one gets, having nobody to be compared with: ``zero``, or ``raw`` its value
        (Dr. MAS: mean 0 and std 1). With centre ``none`` nothing is compared, and one member is like any other.

    With scale ``std`` the advantage is standardised, so the centre has no effect: MAGRPO, MAREINFORCE, MARLOO and
    MAREMAX are then one algorithm (CoMLRL's ``advantage_normalization``). The std is the group's own, never that of the
    others, which vanishes for rewards [0, .95, ..., .95].

    counted: the members that make the statistics (None: all); the others are compared with those and are in no
        statistic themselves (Dr. MAS: one step for each trajectory).

    Members that are all equal (high == low) get exactly 0 when centred.
    Finite values give finite advantages, at most sqrt(n - 1) for mean and std. Invalid members get 0 and are in no
    statistic. Ids of valid members are in [0, num_groups), in any order; groups may be empty.
    """
    if centre not in ("mean", "unique", "loo", "max", "none"):
        raise ValueError(f"centre is 'mean', 'unique', 'loo', 'max' or 'none', not {centre!r}")
    if scale not in ("std", "none"):
        raise ValueError(f"scale is 'std' or 'none', not {scale!r}")
    if singleton not in ("zero", "raw"):
        raise ValueError(f"singleton is 'zero' or 'raw', not {singleton!r}")
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

    if scale == "std":
        centre = "mean"

    def from_distinct() -> Array:
        order = jnp.lexsort((x, ids))
        k, v = ids[order], above[order]
        new = jnp.concatenate([jnp.ones(1, bool), (k[1:] != k[:-1]) | (v[1:] != v[:-1])])
        total = jax.ops.segment_sum(jnp.where(new, v, 0.0), k, num_groups)
        distinct = jax.ops.segment_sum(new.astype(x.dtype), k, num_groups)
        return above - (total / jnp.maximum(distinct, 1.0))[group]

    centred = {
        "mean": lambda: deviation,
        "unique": from_distinct,
        "loo": lambda: deviation * (n / jnp.maximum(n - 1.0, 1.0))[group],
        "max": lambda: x - high[group],
        "none": lambda: x,
    }[centre]()
    if scale == "std":
        std = jnp.sqrt(squares / jnp.maximum(n - ddof, 1.0))  # in units of the spread
        centred = centred / unit[group] / jnp.where(flat, 1.0, std + eps / unit)[group]
    if centre != "none":
        centred = jnp.where(flat[group], 0.0, centred)
        centred = jnp.where((count == 1)[group], x if singleton == "raw" else 0.0, centred)
    return jnp.where(valid, centred, 0.0), stats


def joint_values(
    steps: Int[Array, "J W"],
    role_of_step: Int[Array, "C"],
    values: Float[Array, "C"],
    valid: Bool[Array, "C"],
    *,
    num_roles: int,
) -> Float[Array, "J A"]:
    """A value of each completion, by transition and role; 0 for a role that does not act there or has no valid one.

    Where every completion is in one joint action `step_returns` takes it back to the completions.
    """
    row = jnp.maximum(steps, 0)
    used = (steps >= 0) & valid[row]
    role = jnp.where(used, role_of_step[row], num_roles)  # out of range: dropped
    at = jnp.arange(steps.shape[0])[:, None]
    return jnp.zeros((steps.shape[0], num_roles), values.dtype).at[at, role].add(values[row], mode="drop")


def advantage_alignment(
    advantage: Float[Array, "J A"],
    parent: Int[Array, "J"],
    turn: Int[Array, "J"],
    valid: Bool[Array, "J"] | Bool[Array, "J A"],
    *,
    max_turns: int,
    beta: float,
    discount: float,
    fade: bool = False,
) -> Float[Array, "J A"]:
    """Advantage Alignment (Duque et al., arXiv 2406.14662), on a forest: own past advantages times the others' now.

    ``credit_t^i = A_t^i + beta (sum_{k<t} discount^(t-k) A_k^i) sum_{j != i} A_t^j``, k over the transitions that led
    to t (t itself excluded) and t in turns. It reinforces what serves another player after that player's moves served
    oneself, and what hurts it after they hurt. ``fade`` multiplies the whole by ``discount^t``. Invalid transitions get
    0 and add nothing to those behind them. Rows as in `returns_to_go`.
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


def group_ids(*columns: Int[Array, "C"], sizes: tuple[int, ...]) -> tuple[Int[Array, "C"], int]:
    """Mixed-radix key of several columns, and the number of keys: ``((c0 * size1) + c1) * size2 + c2 ...``.

    The group of an estimator: task x role (Dr. MAS), task x role x turn, or a node id alone (JoyAgents-R1, MAGRPO).
    Values of column i are in [0, sizes[i]).
    """
    if not columns or len(columns) != len(sizes):
        raise ValueError(f"{len(columns)} columns for {len(sizes)} sizes: give one size for each column")
    if math.prod(sizes) > jnp.iinfo(columns[0].dtype).max:
        raise ValueError(f"sizes {sizes} make more keys than {columns[0].dtype} can hold")
    key = columns[0]
    for column, size in zip(columns[1:], sizes[1:], strict=True):
        key = key * size + column
    return key, math.prod(sizes)


def step_episodes(steps: Int[Array, "J W"], parent: Int[Array, "J"], *, num_steps: int) -> Int[Array, "C"]:
    """The episode of each completion, as the index of that episode's first completion: ids in [0, num_steps).

    An episode is all that follows one joint action at a root (on a tree with its branches). A completion of several
    joint actions belongs to the first; one of none is an episode of its own.
    """
    num = parent.shape[0]
    root = jnp.where(parent < 0, jnp.arange(num), parent)
    for _ in range(num.bit_length()):  # each pass doubles the distance climbed
        root = root[root]
    seats = jnp.where(steps < 0, num_steps, steps)  # out of range: dropped
    of = jnp.full(num_steps, num).at[seats].min(jnp.broadcast_to(root[:, None], seats.shape), mode="drop")
    own = jnp.arange(num_steps)
    return jnp.where(of < num, jax.ops.segment_min(own, of, num + 1)[of], own)


def first_of_each(*columns: Int[Array, "C"], valid: Bool[Array, "C"]) -> Bool[Array, "C"]:
    """Marks the first valid row of every combination of ids."""
    order = jnp.lexsort((*columns, ~valid))
    rows = jnp.stack(columns)[:, order]
    new = jnp.any(rows[:, 1:] != rows[:, :-1], axis=0)
    return valid & jnp.zeros_like(valid).at[order].set(jnp.concatenate([jnp.ones(1, bool), new]))
