"""Credit for several rewards and for completions that are too long.

`GroupDecoupled` takes the place of the whole standard chain. `SoftOverlong` goes
between `rules.PerCompletion` and `rules.GroupRelative`. `complete_steps` selects what is trained.
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
from jaxmarl_llm.credit.rules import Signal, Whiten
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import Array, Tree


@dataclass(frozen=True)
class GroupDecoupled:
    """GDPO: normalise each reward component in its group, then the weighted sum over the batch (arXiv 2601.05242).

    ``A = whiten(sum_k w_k (r_k - mean_k) / std_k)``. Means and stds are of component k in a group of ``credit``, and
    `rules.Whiten` is over all completions. GRPO normalises the sum of rewards. Different combinations of rewards may
    then have one advantage.

    ``value`` is the return of the weighted sum of rewards, for metrics. The variance of a group is that of its sums of
    normalised components. So `train_step.unequal_groups` leaves out groups that have no gradient.

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

    A function for ``select_steps`` of `training.train_step.Algorithm`. Returns of truncated completions still count in
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
