"""Assign credit: from the rewards of a tree to one advantage for each completion, by a chain of rules.

Credit is assigned before completions are split by model, so one agent's advantage may depend on another's completions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.config import in_range, load_object, one_of
from jaxmarl_llm.credit.advantages import GroupStats
from jaxmarl_llm.credit.returns import scalarise
from jaxmarl_llm.credit.rules import (
    GROUPS,
    Chain,
    CreditRule,
    GroupRelative,
    PerCompletion,
    ReturnToGo,
    RewardWeights,
    Signal,
    Sizes,
    chain,
)
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import Array, Counts, Nodes, Retrieval, Steps, Transitions, Tree


@dataclass(frozen=True)
class Credit:
    """Settings of the standard credit rule: return-to-go, then a comparison within a group.

    What one recipe alone needs is not here: a recipe composes its own rule from credit/rules.py.
    """

    discount: float = 1.0  # of a continuation's return
    group: str = "node"  # who is compared: see `rules.GroupRelative`
    baseline: str = "mean"  # mean, loo (leave-one-out), max or none
    normalise: str = "std"  # std or none
    ddof: int = 0  # 0 population, 1 sample standard deviation
    stats_over: str = "steps"  # what a group's statistics count: steps, or episodes
    joint_action_reduce: str = "mean"  # over the joint actions a completion takes part in: mean or sum
    rule: str | None = None  # package.module:name of a rule of your own, in place of the standard one

    ALIASES: ClassVar[dict[str, str]] = {
        "centre": "baseline",
        "scale": "normalise",
        "over": "stats_over",
        "reduce": "joint_action_reduce",
    }
    REMOVED: ClassVar[dict[str, str]] = {
        "coupling": "set config.beta of recipe advantage_alignment",
        "coupling_fade": "set config.fade of recipe advantage_alignment",
        "turn_centre": "set config.form='code' of recipe marshal, or compose rules.CentreTurnRewards",
        "whiten": "set config.form='code' of recipe marshal, or compose rules.Whiten",
        "singleton": "recipe dr_mas sets it; compose rules.GroupRelative(singleton=...)",
        "horizon": "recipe waltzrl sets it; compose rules.ReturnToGo(until_next_turn=True)",
    }

    def check(self, path: str) -> None:
        one_of(f"{path}.group", self.group, GROUPS)
        one_of(f"{path}.baseline", self.baseline, ("mean", "loo", "max", "none"))
        one_of(f"{path}.normalise", self.normalise, ("std", "none"))
        one_of(f"{path}.stats_over", self.stats_over, ("steps", "episodes"))
        one_of(f"{path}.joint_action_reduce", self.joint_action_reduce, ("mean", "sum"))
        one_of(f"{path}.ddof", self.ddof, (0, 1))
        in_range(f"{path}.discount", self.discount, 0, 1)


def standard_rule(cfg: Credit, *, until_next_turn: bool = False, singleton: str = "zero", eps: float = 1e-6) -> Chain:
    """The standard chain: return-to-go, one value for each completion, comparison within its group.

    Args:
        cfg: Discount, group, baseline and normalisation.
        until_next_turn: See `rules.ReturnToGo`.
        singleton: See `rules.GroupRelative`.
        eps: See `rules.GroupRelative`.
    """
    compare = GroupRelative(cfg.group, cfg.baseline, cfg.normalise, cfg.ddof, singleton, cfg.stats_over, eps)
    return chain(ReturnToGo(cfg.discount, until_next_turn), PerCompletion(cfg.joint_action_reduce), compare)


class Credited(struct.PyTreeNode):
    """One advantage for each completion, and the groups that completions were compared in."""

    returns: Float[Array, " C"]
    advantage: Float[Array, " C"]
    valid: Bool[Array, " C"]  # the completion has a return
    group: Int[Array, " C"]
    stats: GroupStats  # over groups
    group_task: Int[Array, " K"]  # task, role and turn of each group's first completion (0 for an empty group)
    group_role: Int[Array, " K"]
    group_turn: Int[Array, " K"]


def assign(rule: CreditRule | Credit, tree: Tree, *, weights: RewardWeights, sizes: Sizes) -> Credited:
    """Assign credit to every completion of the tree. Compiled once for each rule and shape of tables.

    Args:
        rule: The rule, or settings of the standard one. Hashable.
        tree: The rollout.
        weights: Weights of reward components that make the scalar reward. Values are data: they may be traced.
        sizes: Numbers of turns, tasks and roles.
    """
    rule = standard_rule(rule) if isinstance(rule, Credit) else rule
    check_hashable(rule)
    return _assign(rule, tree, dict(weights), sizes=sizes)


@functools.partial(jax.jit, static_argnames=("rule", "sizes"))
def _assign(rule: CreditRule, tree: Tree, weights: Mapping[str, float | Array], *, sizes: Sizes) -> Credited:
    signal = apply_rule(rule, tree, weights, sizes)
    value, advantage, valid, stats = signal.value, signal.advantage, signal.valid, signal.stats
    assert value is not None and advantage is not None and valid is not None
    group, count = signal.group, signal.num_groups
    if group is None or stats is None:  # a rule that compares nobody: one group a node, for metrics and selection
        compared = GroupRelative("node", "none", "none")(tree, signal)
        group, count, stats = compared.group, compared.num_groups, compared.stats
    assert group is not None and stats is not None
    c, node = len(advantage), tree.steps.node
    first = jax.ops.segment_min(jnp.where(valid, jnp.arange(c), c), group, count)

    def of(column: Array) -> Array:
        return jnp.where(first < c, column[node][jnp.minimum(first, c - 1)], 0)

    nodes = tree.nodes
    return Credited(value, advantage, valid, group, stats, of(nodes.task), of(nodes.role), of(nodes.turn))


WHOLE = "a rule replaces the whole chain: compose it with chain(*standard_rule(...).rules)"
EXPECTED = "expected a rule (tree, signal) -> signal"


def apply_rule(rule: CreditRule, tree: Tree, weights: RewardWeights, sizes: Sizes, name: str | None = None) -> Signal:
    """The signal that a rule makes of the rewards of a tree.

    Args:
        rule: The rule.
        tree: The rollout.
        weights: Weights of reward components that make the scalar reward.
        sizes: Numbers of turns, tasks and roles.
        name: How messages call the rule; None: as Python shows it.

    Raises:
        ConfigError: The rule raises, which is shown, or does not set one value, advantage and valid a completion.
    """
    where = f"config.credit.rule: {name or rule}"
    try:
        signal = rule(tree, Signal(scalarise(tree.transitions.rewards, dict(weights)), sizes=sizes))
    except ConfigError:
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError(f"{where}: raised {told}; {WHOLE}") from error
    if not isinstance(signal, Signal):
        raise ConfigError(f"{where}: {EXPECTED}, but it returned {type(signal).__name__}")
    completions = tree.steps.node.shape
    for field, kind in {"value": jnp.floating, "advantage": jnp.floating, "valid": jnp.bool_}.items():
        column: Any = getattr(signal, field)
        if column is None:
            raise ConfigError(
                f"{where}: expected value, advantage and valid of each completion, but {field} is not set; {WHOLE}"
            )
        shape: Any = getattr(column, "shape", None)
        dtype: Any = getattr(column, "dtype", None)
        if shape != completions or not jnp.issubdtype(dtype, kind):
            wanted = "bool" if field == "valid" else "float"
            raise ConfigError(
                f"{where}: {field} has dtype {dtype} and shape {shape}, expected {wanted} of {list(completions)}"
            )
    return signal


def find_rule(dotted: str, key: str = "config.credit.rule") -> CreditRule:
    """The credit rule of a dotted name. Raises a `ConfigError` of one line where there is none.

    Args:
        dotted: ``"package.module:name"``.
        key: dotted name of the config value, for error messages.
    """
    rule = load_object(key, dotted)
    if not callable(rule):
        raise ConfigError(f"{key}: {dotted}: {EXPECTED}, got {rule!r}")
    try:
        inspect.signature(rule).bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {dotted}: {EXPECTED}: {error}") from error
    check_hashable(rule, f"{key}: {dotted}")
    return rule


def check_hashable(rule: CreditRule, where: str = "config.credit.rule") -> None:
    """Raise ConfigError for a rule without a hash: it is part of a compiled program's key. ``where``: its key."""
    try:
        hash(rule)
    except TypeError as error:
        raise ConfigError(f"{where}: expected a function or a frozen dataclass, which have a hash: {error}") from error


def try_rule(
    rule: CreditRule,
    components: Sequence[str],
    sizes: Sizes,
    rows: Sequence[int],
    *,
    seats: int = 1,
    name: str | None = None,
) -> None:
    """Try a rule on shapes alone, before a run.

    Args:
        rule: The rule.
        components: Names of reward components.
        sizes: Numbers of turns, tasks and roles.
        rows: Numbers of nodes, completions and transitions.
        seats: Number of roles that act at once.
        name: How messages call the rule.

    Raises:
        ConfigError: See `apply_rule`.
    """
    check_hashable(rule)
    tree = _shapes_of_a_tree(components, sizes, rows, seats)
    weights = dict.fromkeys(components, 1.0)
    jax.eval_shape(lambda tree: apply_rule(rule, tree, weights, sizes, name), tree)


def _shapes_of_a_tree(components: Sequence[str], sizes: Sizes, rows: Sequence[int], seats: int) -> Tree:
    """A tree of shapes; see `try_rule`. Prompts and completions have 8 tokens."""
    (n, c, j), size = rows, 8
    of: Any = jax.ShapeDtypeStruct
    ints, bools = (lambda *shape: of(shape, jnp.int32)), (lambda *shape: of(shape, jnp.bool_))
    floats = lambda *shape: of(shape, jnp.float32)
    retrieved = Retrieval(ints(n, 0), floats(n, 0), floats(n, 0), ints(n))
    nodes = Nodes(ints(n, size), ints(n), ints(n), ints(n), ints(n), ints(n), ints(n), retrieved, bools(n))
    said = ints(c, size), ints(c), bools(c, size), floats(c, size)
    steps = Steps(ints(c), *said, bools(c), ints(c), ints(c), bools(c))
    rewards = {component: floats(j, sizes.num_roles) for component in components}
    moves = Transitions(ints(j, seats), ints(j), ints(j), ints(j), rewards, bools(j), bools(j), bools(j))
    return Tree(nodes, steps, moves, Counts(*(ints() for _ in range(7))))
