"""Credit for several rewards and for completions that are too long.

`GroupDecoupled` and `SumOfCredits` take the place of the whole standard chain. `Reweigh` goes before a return rule, and
`SoftOverlong` between `rules.PerCompletion` and `rules.GroupRelative`. `complete_steps` selects what is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.config import at_least, finite
from jaxmarl_llm.credit.advantages import group_advantage, step_episodes
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.returns import scalarise
from jaxmarl_llm.credit.rules import CreditRule, Signal, Whiten
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import Array, Tree


@dataclass(frozen=True)
class GroupDecoupled:
    """GDPO: normalise each reward component in its group, then the weighted sum over the batch (arXiv 2601.05242).

    ``A = whiten(sum_k w_k (r_k - mean_k) / std_k)``. Means and stds are of component k in a group of ``credit``, and
    `rules.Whiten` is over all completions. GRPO normalises the sum of rewards. Different combinations of rewards may
    then have one advantage.

    ``value`` is the return of the weighted sum of rewards, for metrics. The variance of a group is that of its sums of
    normalised components. So `algorithm.unequal_groups` leaves out groups that have no gradient.

    Attributes:
        weights: Pairs (component, weight), at least one. They replace ``config.reward``, which a rule does not see.
        credit: Settings of the comparison; ``normalise`` is ``std`` in the paper.
        ddof: Of the batch's standard deviation: 0 population, 1 sample.
    """

    weights: tuple[tuple[str, float], ...]
    credit: Credit = Credit(group="task_role")
    ddof: int = 0

    def __post_init__(self) -> None:
        if not self.weights:
            raise ConfigError("GroupDecoupled.weights: expected pairs (component, weight), got none")
        for name, weight in self.weights:
            finite(f"GroupDecoupled.weights.{name}", weight)

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        rule, rewards = standard_rule(self.credit), tree.transitions.rewards
        whole = rule(tree, signal.replace(reward=scalarise(rewards, dict(self.weights))))
        assert whole.group is not None and whole.valid is not None and whole.stats is not None
        parts = {}
        for name, _ in self.weights:
            part = rule(tree, signal.replace(reward=rewards[name])).advantage
            assert part is not None
            parts[name] = part
        total = scalarise(parts, dict(self.weights))
        _, sums = group_advantage(
            total, whole.group, whole.valid, num_groups=whole.num_groups, baseline="none", normalise="none"
        )
        stats = replace(whole.stats, variance=sums.variance)
        return Whiten(ddof=self.ddof)(tree, whole.replace(advantage=total, stats=stats))


@dataclass(frozen=True)
class Reweigh:
    """Replace the scalar reward by another weighted sum of the reward components. Goes before a return rule.

    ``config.reward`` weighs the components for every rule. A part of `SumOfCredits` may need other weights.

    Attributes:
        weights: Pairs (component, weight), at least one.
        key: Name of the weights, for error messages.
    """

    weights: tuple[tuple[str, float], ...]
    key: str = "Reweigh.weights"

    def __post_init__(self) -> None:
        if not self.weights:
            raise ConfigError(f"{self.key}: expected pairs (component, weight), got none")
        for name, weight in self.weights:
            finite(f"{self.key}.{name}", weight)

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        rewards = tree.transitions.rewards
        for name, _ in self.weights:
            if name not in rewards:
                raise ConfigError(f"{self.key}: the environment pays no {name!r}; it pays {', '.join(rewards)}")
        return signal.replace(reward=scalarise(rewards, dict(self.weights)))


@dataclass(frozen=True)
class SumOfCredits:
    """Add the advantages of several credits, each with rewards, returns and groups of its own.

    Each part begins with the rewards of ``config.reward``. A completion has an advantage where every part gives it one.
    Value, groups and statistics are those of the first part, for metrics and selection.

    Attributes:
        parts: Whole chains, from rewards to advantages; at least one.
    """

    parts: tuple[CreditRule, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ConfigError("SumOfCredits.parts: expected at least one credit rule, got none")

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        first, *others = (part(tree, signal) for part in self.parts)
        total, valid = first.advantage, first.valid
        assert total is not None and valid is not None, "a part of SumOfCredits gives no advantages"
        for other in others:
            assert other.advantage is not None and other.valid is not None, "a part of SumOfCredits gives no advantages"
            total, valid = total + other.advantage, valid & other.valid
        return first.replace(advantage=jnp.where(valid, total, 0.0), valid=valid)


def soft_overlong(length: Int[Array, " C"], max_length: int, cache: int) -> Float[jax.Array, " C"]:
    """Penalty of long completions (DAPO, arXiv 2503.14476, eq. 13), in [-1, 0].

    0 up to ``max_length - cache`` tokens, then linear down to -1 at ``max_length``, and -1 beyond.

    Args:
        length: tokens of each completion [C].
        max_length: L_max, in tokens.
        cache: L_cache, tokens of the linear part, in [1, max_length].
    """
    over = length.astype(jnp.float32) - (max_length - cache)
    return -jnp.clip(over / cache, 0.0, 1.0)


@dataclass(frozen=True)
class SoftOverlong:
    """Add `soft_overlong` to the return of each completion. Goes after `rules.PerCompletion`.

    The length is that of the completion itself: with several turns, earlier turns do not pay for later ones.

    Attributes:
        max_length: L_max in tokens, usually ``team.max_new_tokens``.
        cache: L_cache, tokens of the linear part, in [1, max_length].
        weight: Factor of the penalty, at least 0; 1 in the paper.
    """

    max_length: int
    cache: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        at_least("SoftOverlong.max_length", self.max_length, 1)
        at_least("SoftOverlong.cache", self.cache, 1, self.max_length)
        at_least("SoftOverlong.weight", self.weight, 0)

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        assert signal.value is not None and signal.valid is not None, "SoftOverlong needs PerCompletion before it"
        penalty = self.weight * soft_overlong(tree.steps.length, self.max_length, self.cache)
        value = signal.value + jnp.where(signal.valid, penalty, 0.0)
        return signal.replace(value=value, advantage=value)


def complete_steps(key: Array, tree: Tree, trained: Bool[Array, " C"]) -> Bool[Array, " C"]:
    """Leave truncated completions out of the loss (DAPO's overlong filtering, arXiv 2503.14476, section 3.4).

    A function for ``select_steps`` of `training.algorithm.Algorithm`. Returns of truncated completions still count in
    the statistics of their groups, and in the metrics.

    Args:
        key: Not read.
        tree: The rollout.
        trained: Completions that would be trained [C].
    """
    return trained & ~tree.steps.truncated


def complete_episodes(key: Array, tree: Tree, trained: Bool[Array, " C"]) -> Bool[Array, " C"]:
    """Leave episodes with a truncated completion out of the loss: as `complete_steps`, for all turns of an episode.

    Args:
        key: Not read.
        tree: The rollout.
        trained: Completions that would be trained [C].
    """
    steps, moves, size = tree.steps, tree.transitions, len(trained)
    episode = step_episodes(moves.steps, moves.parent, num_steps=size)
    cut = (steps.truncated & steps.valid).astype(jnp.int32)
    return trained & (jax.ops.segment_max(cut, episode, size)[episode] <= 0)
