"""Rewards of records: what each completion of an episode changed, or what it is worth itself.

Some completions have a score, such as the F1 of an answer, or the share of tests that a program passes. A record is one
completion with a reward of its own. Nothing that is earned later comes to it. The two rules here are return rules: they
take the place of `rules.ReturnToGo`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.credit.rules import ReturnToGo, Signal, roles_that_act
from jaxmarl_llm.credit.shaping import Reweigh
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import Array, Tree


def changes_of_scores(
    score: Float[Array, " J"],
    scored: Bool[Array, " J"],
    parent: Int[Array, " J"],
    turn: Int[Array, " J"],
    valid: Bool[Array, " J"],
    *,
    max_turns: int,
) -> tuple[Float[Array, " J"], Bool[Array, " J"]]:
    """The change of the score that each transition leads to: the next score minus the last one before it.

    The next score is that of the transition itself, if it has one, or else the first one behind it. The last one before
    it is above the transition; it is 0 where nothing was scored yet. The change is 0 where no score follows. On a tree
    it is the mean over known children. So every transition behind R_0 and up to R_1 has R_1 - R_0.

    A change is unknown where its transition is invalid, or the one of the last score before it. Without a score of its
    own it is also unknown where the changes of all children are.

    Args:
        score: score of each transition [J]; read where ``scored``.
        scored: transitions that have a score [J].
        parent: row of the transition before [J], -1 for a root and for padding.
        turn: turn of each transition [J], later than the parent's and below ``max_turns``.
        valid: transitions whose reward is known [J].
        max_turns: number of turns of the longest episode.

    Returns:
        Changes [J], 0 where unknown, and whether they are known [J].
    """
    num, root, above = parent.shape[0], parent < 0, jnp.maximum(parent, 0)

    def down(_, carry):
        before, clear = carry
        inherited = jnp.where(scored, score, before)[above]
        return jnp.where(root, 0.0, inherited), root | jnp.where(scored, valid, clear)[above]

    def up(i, carry):
        change, known = carry
        t = max_turns - 1 - i
        later = turn > t
        usable = later & known
        total = jax.ops.segment_sum(jnp.where(usable, change, 0.0), parent, num)  # drops roots: -1
        count = jax.ops.segment_sum(usable.astype(change.dtype), parent, num)
        leaf = jax.ops.segment_sum(later.astype(jnp.int32), parent, num) == 0
        here = (turn == t) & ~scored
        return jnp.where(here, total / jnp.maximum(count, 1.0), change), known & (~here | leaf | (count > 0))

    nothing = jnp.zeros_like(score), jnp.ones(num, bool)
    before, clear = jax.lax.fori_loop(0, max_turns, down, nothing)
    own = jnp.where(scored, score - before, 0.0)
    change, known = jax.lax.fori_loop(0, max_turns, up, (own, valid & clear))
    return jnp.where(known, change, 0.0), known


@dataclass(frozen=True)
class PayRecords:
    """A return rule: each completion is paid its own score, or the change of the score that it leads to (UnityMAS-O).

    The weighted rewards of the completion's own transition are added, for example a penalty of form. What a change is
    stands in `changes_of_scores`. Where several roles with a score act at once, the transition has their mean.

    Attributes:
        score: Reward component that has the scores, each paid to the role that acts.
        scored: Roles whose scores are compared, by index; at least one.
        absolute: Roles that are paid their own score, by index. The others are paid the change.
        key: Name of ``score``, for error messages.
    """

    score: str
    scored: tuple[int, ...]
    absolute: tuple[int, ...] = ()
    key: str = "PayRecords.score"

    def __post_init__(self) -> None:
        if not self.scored:
            raise ConfigError("PayRecords.scored: expected one or several roles, got none")

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        moves, sizes = tree.transitions, signal.sizes
        acts = roles_that_act(tree, sizes.num_roles)
        worth = Reweigh(((self.score, 1.0),), self.key)(tree, signal).reward
        is_any = lambda roles: jnp.isin(jnp.arange(sizes.num_roles), jnp.array(roles, jnp.int32))
        judged = acts & is_any(self.scored)
        score = jnp.where(judged, worth, 0.0).sum(1) / jnp.maximum(judged.sum(1), 1)
        rows = score, jnp.any(judged, axis=1), moves.parent, moves.turn, moves.valid
        change, known = changes_of_scores(*rows, max_turns=sizes.max_turns)
        own = is_any(self.absolute)
        returns = signal.reward + jnp.where(acts, jnp.where(own, worth, change[:, None]), 0.0)
        known_of = jnp.where(own, moves.valid[:, None], known[:, None])
        return signal.replace(returns=jnp.where(known_of, returns, 0.0), known=known_of)


@dataclass(frozen=True)
class PayTeam:
    """A return rule: all completions are paid the team's reward of the whole episode; the control of `PayRecords`.

    The weighted rewards of the completion's own transition are added. On a tree the team's reward of a transition is
    the mean over what was played behind it.

    Attributes:
        team: Reward component that all roles are paid, for example at the last turn.
        key: Name of ``team``, for error messages.
    """

    team: str
    key: str = "PayTeam.team"

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        shared = ReturnToGo()(tree, Reweigh(((self.team, 1.0),), self.key)(tree, signal))
        assert shared.returns is not None and shared.known is not None
        returns = jnp.where(shared.known[:, None], signal.reward + shared.returns, 0.0)
        return signal.replace(returns=returns, known=shared.known)
