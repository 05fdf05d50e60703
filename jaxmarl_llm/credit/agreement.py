"""Credit without labels: completions of a node vote on the answer, and are right where they agree with the majority."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.config import at_least
from jaxmarl_llm.credit.returns import step_returns
from jaxmarl_llm.credit.rules import Signal
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import Array, Tree


class Vote(NamedTuple):
    """The vote of each group. Leading axis K."""

    label: Int[Array, " K"]  # outcome of the majority; -1 where no member has one
    share: Float[Array, " K"]  # of the valid members whose outcome is the label; 0 without a label
    members: Int[Array, " K"]  # valid ones, those without an outcome too


def majority(
    outcome: Int[Array, " C"], group: Int[Array, " C"], valid: Bool[Array, " C"], *, num_groups: int, num_outcomes: int
) -> Vote:
    """Find the most frequent outcome of each group. Among equally frequent ones it is the smallest.

    Args:
        outcome: Outcome of each completion, from 0 to ``num_outcomes`` - 1; anything else is none.
        group: Group of each completion, an id below ``num_groups``, in any order.
        valid: Completions that are members.
        num_groups: K.
        num_outcomes: Number of different outcomes.
    """
    has = valid & (outcome >= 0) & (outcome < num_outcomes)
    cell = jnp.where(has, group * num_outcomes + outcome, num_groups * num_outcomes)  # out of range: dropped
    votes = jax.ops.segment_sum(has.astype(jnp.int32), cell, num_groups * num_outcomes)
    votes = votes.reshape(num_groups, num_outcomes)
    count = jax.ops.segment_sum(valid.astype(jnp.int32), group, num_groups)
    most = votes.max(1)
    label = jnp.where(most > 0, votes.argmax(1), -1)  # argmax takes the first of equal ones
    return Vote(label.astype(jnp.int32), most / jnp.maximum(count, 1), count)


def behind(tree: Tree, value: Float[Array, " K"], counted: Bool[Array, " K"]) -> Float[Array, " C"]:
    """Mean value of the nodes that each completion leads to; 0 where it leads to none.

    Args:
        tree: The rollout, with K nodes and C completions.
        value: Value of each node.
        counted: Nodes that count.
    """
    moves, size = tree.transitions, len(tree.steps.node)
    before = jnp.where(counted & (tree.nodes.parent >= 0), tree.nodes.parent, len(moves.parent))
    total = jax.ops.segment_sum(jnp.where(counted, value, 0.0), before, len(moves.parent))
    nodes = jax.ops.segment_sum(counted.astype(jnp.int32), before, len(moves.parent))
    seats = jnp.where(moves.steps < 0, size, moves.steps)  # out of range: dropped
    spread = lambda x: jnp.zeros(size, x.dtype).at[seats].add(x[:, None], mode="drop")
    return spread(total) / jnp.maximum(spread(nodes), 1)


@dataclass(frozen=True)
class Agreement:
    """Pay answers by agreement with the majority of their node, and questions by the share that agrees.

    Goes before `rules.GroupRelative`, in place of a return rule and `rules.PerCompletion`. A node where several
    completions were played is a vote. An answer is worth 1 where its outcome is the majority's, else -1. So an answer
    without an outcome is worth -1. A completion that leads to a vote is worth its solve rate: the share of answers
    that are worth 1. A completion that leads to no vote is worth minus its penalty, which may be 0. No reward but the
    outcome and the penalty is read.

    Attributes:
        outcome: Reward component with the outcome of an answer, a whole number below ``outcomes``; below 0: none.
        outcomes: Number of different outcomes, at least 2.
        penalty: Reward component that is 1 for a completion that is penalised.
        cost: Worth of such a completion, with its sign changed; at least 0.
    """

    outcome: str = "answer"
    outcomes: int = 10
    penalty: str = "malformed"
    cost: float = 0.0

    def __post_init__(self) -> None:
        at_least("Agreement.outcomes", self.outcomes, 2)
        at_least("Agreement.cost", self.cost, 0)

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        steps, moves, nodes = tree.steps, tree.transitions, tree.nodes
        role, size, count = nodes.role[steps.node], len(steps.node), len(nodes.role)
        for name in (self.outcome, self.penalty):
            if name not in moves.rewards:
                raise ConfigError(f"Agreement: the environment pays no {name!r}; it pays {', '.join(moves.rewards)}")

        def of(name: str) -> tuple[Array, Array]:
            return step_returns(moves.steps, role, moves.rewards[name], moves.valid, num_steps=size)

        said, has = of(self.outcome)
        valid = has & steps.valid
        outcome = jnp.round(said).astype(jnp.int32)
        vote = majority(outcome, steps.node, valid, num_groups=count, num_outcomes=self.outcomes)
        voted = vote.members > 1
        label = vote.label[steps.node]
        asked = behind(tree, vote.share, voted) - self.cost * of(self.penalty)[0]
        answered = jnp.where((outcome == label) & (label >= 0), 1.0, -1.0)
        value = jnp.where(valid, jnp.where(voted[steps.node], answered, asked), 0.0)
        return signal.replace(value=value, advantage=value, valid=valid)
