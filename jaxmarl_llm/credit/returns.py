"""From rewards on transitions to returns of transitions and of completions. Pure functions over flat, padded tables."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.types import Array


def scalarise(rewards: Mapping[str, Float[Array, "J A"]], weights: Mapping[str, float | Array]) -> Float[Array, "J A"]:
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
    parent: Int[Array, " J"],
    turn: Int[Array, " J"],
    valid: Bool[Array, " J"],
    *,
    max_turns: int,
    discount: float = 1.0,
    acts: Bool[Array, "J A"] | None = None,
) -> tuple[Float[Array, "J A"], Bool[Array, " J"] | Bool[Array, "J A"]]:
    """Return of every transition: ``R_j = r_j + discount * mean_{valid children i} R_i``, and r_j at a leaf.

    MAGRPO: on chains the paper's return-to-go (sum of r from t on), on trees the library's child mean. Rows may have
    any order. An invalid transition does not enter the mean of its siblings. A transition whose children are all
    invalid is invalid too, because its return is unknown. Returns of invalid rows are 0.

    Args:
        rewards: reward of each transition for each role [J A].
        parent: row of the transition before [J], -1 for a root and for padding.
        turn: turn of each transition [J], later than the parent's and below ``max_turns``.
        valid: transitions whose reward is known [J].
        max_turns: number of turns of the longest episode.
        discount: discount per turn.
        acts: transitions where each role acts [J A]. A role's return then runs until just before the role acts again. A
            child where the role acts adds 0, valid or not. So WaltzRL pays each round of feedback for itself.

    Returns:
        Returns [J A], and whether they are known: [J], or with ``acts`` [J A].
    """
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
    parent: Int[Array, " J"],
    turn: Int[Array, " J"],
    played: Bool[Array, " J"],
    valid: Bool[Array, " J"] | Bool[Array, "J A"],
    *,
    max_turns: int,
    discount: float = 1.0,
    gae_lambda: float = 0.0,
) -> tuple[Float[Array, "J A"], Float[Array, "J A"]]:
    """Advantages and value targets of transitions with a critic: GAE (Schulman et al. 2016) on a forest.

    ``d_j = r_j + discount V'_j - V_j``, V' the mean value of the child states (0 at a leaf), and ``A_j = d_j + discount
    gae_lambda mean_{valid children} A``. The target is ``A_j + V_j``. Rows as in `returns_to_go`. Rows that are not
    valid get 0. The value of a state counts whether or not the rewards behind it are known.

    Args:
        rewards: reward of each transition for each role [J A].
        values: V of the state before each transition, by role [J A].
        acts: where each role acts [J A]. Elsewhere V_j is r_j + discount V'_j, so that d_j is 0.
        parent: row of the transition before [J], -1 for a root and for padding.
        turn: turn of each transition [J].
        played: transitions that were played [J].
        valid: transitions whose reward is known [J], or [J A] where that differs from role to role.
        max_turns: number of turns of the longest episode.
        discount: discount per turn.
        gae_lambda: lambda. 0 is TD(0), as in IAC and MAAC; 1 is the Monte Carlo return minus V.

    Returns:
        Advantages [J A] and targets [J A].
    """
    num = parent.shape[0]
    paid = valid[:, None] if valid.ndim == 1 else valid

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
        known = jnp.where(here & ~acts, paid & (leaf | some), known)
        carried, _ = mean_below(advantage, later & paid)
        error = bootstrapped - value + discount * gae_lambda * carried
        return value, known, jnp.where(here & paid, error, advantage)

    start = values, acts & played[:, None], jnp.zeros_like(values)
    value, _, advantage = jax.lax.fori_loop(0, max_turns, one_turn, start)
    return advantage, jnp.where(paid, advantage + value, 0.0)


def step_returns(
    steps: Int[Array, "J W"],
    role_of_step: Int[Array, " C"],
    returns: Float[Array, "J A"],
    valid: Bool[Array, " J"] | Bool[Array, "J A"],
    *,
    num_steps: int,
    reduce: str = "mean",
) -> tuple[Float[Array, " C"], Bool[Array, " C"]]:
    """Credit of each completion: the return of its own role, over the valid joint actions that contain the completion.

    MAGRPO in cross mode: a completion is part of K^(n-1) joint actions. The official trainer sums over them, so its
    advantages are K^(n-1) times those of the mean. Learning rates differ by the same factor.

    Args:
        steps: completions of each joint action [J W], -1 for an empty seat.
        role_of_step: role of each completion [C].
        returns: return of each transition for each role [J A].
        valid: transitions whose return is known [J], or [J A] by role.
        num_steps: number of completions, C.
        reduce: ``mean`` or ``sum``. A sum has no term for an invalid joint action: use the mean where rewards may be
            invalid.

    Returns:
        Credits [C], and whether they are known [C]. A completion of no valid joint action has credit 0.
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
    parent: Int[Array, " J"],
    *,
    max_turns: int,
) -> Float[Array, "J A"]:
    """Rewards by a role's own turns: rewards until the role acts again count for the transition where it acted last.

    In a game of alternating moves the loser is paid at the winner's move. The result has this reward at the loser's own
    last move. Sums from a role's own turn on do not change. Rewards before a role's first turn are dropped. Rows as in
    `returns_to_go`. Use this function on chains only: with several children their rewards would be summed.

    Args:
        rewards: reward of each transition for each role [J A].
        acts: where each role acts [J A].
        parent: row of the transition before [J], -1 for a root and for padding.
        max_turns: number of turns of the longest episode.
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
