"""Credit rules: functions that compose, from rewards of transitions to one advantage for each completion.

A rule takes the tree and a `Signal` and returns a new `Signal`, as an optax transformation takes and returns updates::

    rule = chain(ReturnToGo(discount=0.9), PerCompletion(), GroupRelative("task_role", normalise="none"), Whiten())

The usual order is: rules on rewards (`CentreTurnRewards`), one return rule (`ReturnToGo`), `PerCompletion`,
`GroupRelative`, then rules on advantages (`AlignAdvantages`, `Whiten`). A rule of a user's own is any function or
callable object with the same signature (`CreditRule`). Rules run inside compiled programs: they are pure and traced.
Rules given to `assign` are part of the compiled program's key, so they must be hashable: a function, or a frozen
dataclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.credit.advantages import (
    GroupStats,
    advantage_alignment,
    first_of_each,
    group_advantage,
    group_ids,
    joint_values,
    sibling_shaping,
    step_episodes,
)
from jaxmarl_llm.credit.returns import own_turns, returns_to_go, step_returns
from jaxmarl_llm.types import Array, Tree

RewardWeights = Mapping[str, float | Array] | tuple[tuple[str, float], ...]  # of reward components
GROUPS = ("node", "task", "task_role", "task_role_turn", "role", "batch")


class Sizes(NamedTuple):
    """Static sizes of a batch of episodes."""

    max_turns: int
    num_tasks: int
    num_roles: int


class Signal(struct.PyTreeNode):
    """Arrays that credit rules pass on. A rule sets some fields and leaves the others.

    Attributes:
        reward: Scalar reward of each transition for each role: the weighted sum of the components.
        returns: Return of each transition for each role, from `ReturnToGo` on.
        known: Whether the return is known: [J], or [J A] where it differs from role to role.
        value: Return of each completion, from `PerCompletion` on.
        advantage: Advantage of each completion.
        valid: Whether the completion has a return.
        group: Group of each completion, an id below ``num_groups``.
        stats: Statistics of the groups.
        sizes: Static sizes of the batch.
        num_groups: Number of groups, static.
    """

    reward: Float[Array, "J A"]
    returns: Float[Array, "J A"] | None = None
    known: Bool[Array, " J"] | Bool[Array, "J A"] | None = None
    value: Float[Array, " C"] | None = None
    advantage: Float[Array, " C"] | None = None
    valid: Bool[Array, " C"] | None = None
    group: Int[Array, " C"] | None = None
    stats: GroupStats | None = None
    sizes: Sizes = struct.field(pytree_node=False, default=Sizes(1, 1, 1))
    num_groups: int = struct.field(pytree_node=False, default=0)


class CreditRule(Protocol):
    """One step from rewards to advantages."""

    def __call__(self, tree: Tree, signal: Signal, /) -> Signal:
        """Apply the rule.

        Args:
            tree: The rollout.
            signal: Result of the rules before this one.

        Returns:
            The signal with some fields replaced.
        """
        ...


@dataclass(frozen=True)
class Chain:
    """Rules that run one after the other; itself a rule."""

    rules: tuple[CreditRule, ...]

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        for rule in self.rules:
            signal = rule(tree, signal)
        return signal


def chain(*rules: CreditRule) -> Chain:
    """Compose credit rules: the first one runs first."""
    return Chain(rules)


@dataclass(frozen=True)
class CentreTurnRewards:
    """Move rewards to the role's own turns, then subtract the role's baseline over the batch (MARSHAL's code).

    Attributes:
        baseline: ``mean``, or ``unique``: the mean of the distinct values.
    """

    baseline: str = "mean"

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        moves, reward = tree.transitions, signal.reward
        j, a = reward.shape
        acts = roles_that_act(tree, a) & moves.valid[:, None]
        clean = jnp.where(moves.valid[:, None], reward, 0.0)
        reward = own_turns(clean, acts, moves.parent, max_turns=signal.sizes.max_turns)
        group = jnp.broadcast_to(jnp.arange(a), (j, a)).reshape(-1)
        flat = reward.reshape(-1), group, acts.reshape(-1)
        centred, _ = group_advantage(*flat, num_groups=a, baseline=self.baseline, normalise="none")
        return signal.replace(reward=centred.reshape(j, a))


@dataclass(frozen=True)
class ReturnToGo:
    """Back rewards up: ``R = r + discount * mean over valid continuations of R`` (`returns.returns_to_go`).

    Attributes:
        discount: Discount of a continuation, in [0, 1].
        until_next_turn: A role's return ends just before the role acts again (WaltzRL); else at the episode's end.
    """

    discount: float = 1.0
    until_next_turn: bool = False

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        moves = tree.transitions
        acts = roles_that_act(tree, signal.sizes.num_roles) if self.until_next_turn else None
        rows = signal.reward, moves.parent, moves.turn, moves.valid
        size = signal.sizes.max_turns
        returns, known = returns_to_go(*rows, max_turns=size, discount=self.discount, acts=acts)
        return signal.replace(returns=returns, known=known)


@dataclass(frozen=True)
class ShapeBySiblings:
    """A return rule: rewards shaped by the parent and the siblings of each transition (`advantages.sibling_shaping`).

    Attributes:
        strength: Factor of the difference to the baseline; 0 leaves rewards as they are.
        mix: Share of the siblings in the baseline; the rest is the parent's.
        shaped_parents: Whether the parent's reward is its shaped one.
    """

    strength: float = 0.5
    mix: float = 0.5
    shaped_parents: bool = False

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        moves, sizes = tree.transitions, signal.sizes
        shaped = sibling_shaping(
            signal.reward,
            moves.parent,
            moves.task,
            moves.valid,
            num_tasks=sizes.num_tasks,
            max_turns=sizes.max_turns,
            strength=self.strength,
            mix=self.mix,
            shaped_parents=self.shaped_parents,
        )
        return signal.replace(returns=shaped, known=moves.valid)


@dataclass(frozen=True)
class PerCompletion:
    """Give each completion its role's return over the joint actions that the completion is part of.

    Attributes:
        joint_action_reduce: ``mean`` over those joint actions, or ``sum`` (MAGRPO's library).
    """

    joint_action_reduce: str = "mean"

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        steps, moves = tree.steps, tree.transitions
        role, size = tree.nodes.role[steps.node], steps.node.shape[0]
        assert signal.returns is not None and signal.known is not None, "PerCompletion needs a return rule before it"
        value, has = step_returns(
            moves.steps, role, signal.returns, signal.known, num_steps=size, reduce=self.joint_action_reduce
        )
        return signal.replace(value=value, advantage=value, valid=has & steps.valid)


Grouping = Callable[[Tree, Sizes], tuple[Array, int]]


@dataclass(frozen=True)
class GroupRelative:
    """Compare completions with their group: ``(x - baseline) / std`` (`advantages.group_advantage`).

    Attributes:
        group: Who is compared. ``node``: siblings of a node. ``task``: completions of a task. ``task_role`` (Dr. MAS)
            and ``task_role_turn``: those of one role, and turn, of it. ``role`` (MARSHAL): one role's of the whole
            batch. ``batch``: all. Or a function (tree, sizes) -> (ids [C], number of groups).
        baseline: ``mean``, ``loo`` (leave-one-out), ``max``, ``none``, or ``unique`` (mean of distinct values).
        normalise: ``std`` or ``none``.
        ddof: 0 for the population's standard deviation, 1 for the sample's.
        singleton: Advantage of a group of one: ``zero``, or ``raw``, its value (Dr. MAS).
        stats_over: Members that the statistics count: ``steps``, or ``episodes``, the first completion of each in the
            group.
        eps: Term added to the standard deviation.
    """

    group: str | Grouping = "node"
    baseline: str = "mean"
    normalise: str = "std"
    ddof: int = 0
    singleton: str = "zero"
    stats_over: str = "steps"
    eps: float = 1e-6

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        moves, value, valid = tree.transitions, signal.value, signal.valid
        assert value is not None and valid is not None, "GroupRelative needs PerCompletion before it"
        ids, count = self.groups(tree, signal.sizes)
        counted = None
        if self.stats_over == "episodes":
            episodes = step_episodes(moves.steps, moves.parent, num_steps=len(value))
            counted = first_of_each(ids, episodes, valid=valid)
        advantage, stats = group_advantage(
            value,
            ids,
            valid,
            num_groups=count,
            baseline=self.baseline,
            normalise=self.normalise,
            ddof=self.ddof,
            eps=self.eps,
            singleton=self.singleton,
            counted=counted,
        )
        return signal.replace(advantage=advantage, group=ids, stats=stats, num_groups=count)

    def groups(self, tree: Tree, sizes: Sizes) -> tuple[Int[Array, " C"], int]:
        """Group of each completion, and the number of groups."""
        if not isinstance(self.group, str):
            return self.group(tree, sizes)
        nodes, node = tree.nodes, tree.steps.node
        if self.group == "node":
            return node, nodes.role.shape[0]
        if self.group == "batch":
            return jnp.zeros_like(node), 1
        columns = {
            "task": (nodes.task[node], sizes.num_tasks),
            "role": (nodes.role[node], sizes.num_roles),
            "turn": (nodes.turn[node], sizes.max_turns),
        }
        ids, counts = zip(*(columns[name] for name in self.group.split("_")), strict=True)
        return group_ids(*ids, sizes=counts)


@dataclass(frozen=True)
class AlignAdvantages:
    """Advantage Alignment: add own past advantages times the others' present ones (`advantages.advantage_alignment`).

    Attributes:
        beta: Weight of the product; 0 leaves the advantages as they are.
        discount: Discount of past advantages, by turn.
        fade: Multiply the whole by ``discount ** turn``.
    """

    beta: float
    discount: float
    fade: bool = False

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        if not self.beta:
            return signal
        moves, steps, sizes = tree.transitions, tree.steps, signal.sizes
        assert signal.advantage is not None and signal.valid is not None and signal.known is not None
        role, size = tree.nodes.role[steps.node], steps.node.shape[0]
        joint = joint_values(moves.steps, role, signal.advantage, signal.valid, num_roles=sizes.num_roles)
        joint = advantage_alignment(
            joint,
            moves.parent,
            moves.turn,
            signal.known,
            max_turns=sizes.max_turns,
            beta=self.beta,
            discount=self.discount,
            fade=self.fade,
        )
        aligned, _ = step_returns(moves.steps, role, joint, signal.known, num_steps=size)
        return signal.replace(advantage=jnp.where(signal.valid, aligned, 0.0))


@dataclass(frozen=True)
class Whiten:
    """Normalise the advantages of the whole batch to mean 0 and standard deviation 1.

    Attributes:
        by_model: Each model's completions on their own.
        models: Number of models, with ``by_model``.
        ddof: 0 for the population's standard deviation, 1 for the sample's.
    """

    by_model: bool = False
    models: int = 1
    ddof: int = 0

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        assert signal.advantage is not None and signal.valid is not None, "Whiten needs advantages"
        model = tree.nodes.model[tree.steps.node]
        ids = model if self.by_model else jnp.zeros_like(model)
        rows = signal.advantage, ids, signal.valid
        advantage, _ = group_advantage(*rows, num_groups=self.models, baseline="mean", normalise="std", ddof=self.ddof)
        return signal.replace(advantage=advantage)


def roles_that_act(tree: Tree, num_roles: int) -> Bool[Array, "J A"]:
    """Whether a role takes part in a joint action.

    Args:
        tree: The rollout.
        num_roles: Number of roles, A.
    """
    seats = tree.transitions.steps
    role = tree.nodes.role[tree.steps.node[jnp.maximum(seats, 0)]]
    return jnp.any((seats >= 0)[..., None] & (role[..., None] == jnp.arange(num_roles)), axis=1)
