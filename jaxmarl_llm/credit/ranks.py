"""How much each role's local reward agrees with the shared one, by ranks, and weights of the shared reward from it.

`WeighByRanks` goes before a return rule. It makes the rewards; the rules behind it compare them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.credit.rules import ReturnToGo, Signal
from jaxmarl_llm.credit.shaping import Reweigh
from jaxmarl_llm.types import Array, Tree

DECIMALS = 5  # to which rewards are rounded before they are ranked: sums in another order are ties
WEIGHTS = ("ranks", "uniform", "none")


def mean_over_ties(
    key: Float[Array, " C"],
    group: Int[Array, " C"],
    valid: Bool[Array, " C"],
    of_place: Callable[[Float[Array, " C"]], Float[Array, " C"]],
    *,
    num_groups: int,
) -> Float[Array, " C"]:
    """The mean of ``of_place`` over the places that members with the same key share; 0 for rows that are no members.

    A place is counted from 0 in the member's group, by ascending key. So the result does not depend on the order of
    rows.

    Args:
        key: What members are ordered by.
        group: Group of each row, an id below ``num_groups`` for members, in any order.
        valid: Rows that are members.
        of_place: Function of places, element by element.
        num_groups: K. Groups may be empty.
    """
    num = len(key)
    ids, keys = jnp.where(valid, group, num_groups), jnp.where(valid, key, 0.0)
    order = jnp.lexsort((keys, ids))
    ids, keys = ids[order], keys[order]
    size = jax.ops.segment_sum(jnp.ones(num, jnp.int32), ids, num_groups + 1)
    place = jnp.arange(num) - (jnp.cumsum(size) - size)[ids]
    new = (ids[1:] != ids[:-1]) | (keys[1:] != keys[:-1])
    run = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(new, dtype=jnp.int32)])
    total = jax.ops.segment_sum(of_place(place.astype(keys.dtype)), run, num)
    mean = total / jnp.maximum(jax.ops.segment_sum(jnp.ones_like(keys), run, num), 1)
    return jnp.where(valid, jnp.zeros_like(keys).at[order].set(mean[run]), 0.0)


def rank_agreement(
    local: Float[Array, " C"],
    shared: Float[Array, " C"],
    group: Int[Array, " C"],
    valid: Bool[Array, " C"],
    *,
    num_groups: int,
) -> Float[Array, " K"]:
    """NDCG of each group, ordered by the local reward from the best down, with the shared reward's ranks as relevance.

        v = DCG / ideal DCG        DCG = sum_i relevance_i / log2(place_i + 2)

    Ranks ascend and count from 0: the relevance of the worst member is 0. So four members in the reverse order have
    .6138. Ranks from 1 would give .7489. Members with equal shared rewards have the mean of their ranks. Members with
    equal local rewards have the mean of their discounts, which is the mean over all orders of the tie. Rewards are
    equal where they agree to `DECIMALS` decimals. v is 1 where all shared rewards are equal, and for a group without
    two members.

    Args:
        local: What orders the members.
        shared: What their relevance is taken from.
        group: Group of each row, an id below ``num_groups`` for members, in any order.
        valid: Rows that are members.
        num_groups: K.
    """
    discount = lambda place: 1 / jnp.log2(place + 2)
    local, shared = jnp.round(local, DECIMALS), jnp.round(shared, DECIMALS)
    spread = lambda key, of_place: mean_over_ties(key, group, valid, of_place, num_groups=num_groups)
    relevance = spread(shared, lambda place: place)
    ids = jnp.where(valid, group, num_groups)  # out of range: dropped
    gain = lambda key: jax.ops.segment_sum(relevance * spread(-key, discount), ids, num_groups)
    ideal = gain(shared)
    return jnp.where(ideal > 0, gain(local) / jnp.where(ideal > 0, ideal, 1.0), 1.0)


@dataclass(frozen=True)
class WeighByRanks:
    """Pay each role its local reward plus the shared reward, weighted by how well the two agree in ranks.

        r = local_n + w_n shared        w = softmax over roles of v_n, the `rank_agreement` of the task's episodes

    ``shared`` is the reward of ``config.reward``. An episode counts by its sums of local and shared rewards, without a
    discount. On a tree these are the returns of its root. A weight is a number for each task and role. Credit has no
    gradient, so weights are constants of the update.

    Attributes:
        local: Pairs (component, weight) of the local rewards, at least one. A component that pays one role alone is
            that role's.
        weights: ``ranks``, as above; ``uniform``: 1 / number of roles; ``none``: local rewards alone.
        key: Name of the local rewards, for error messages.
    """

    local: tuple[tuple[str, float], ...]
    weights: str = "ranks"
    key: str = "WeighByRanks.local"

    def __post_init__(self) -> None:
        one_of("WeighByRanks.weights", self.weights, WEIGHTS)
        Reweigh(self.local, self.key)  # checks them

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        local = Reweigh(self.local, self.key)(tree, signal).reward
        weight = self.of_tasks(tree, signal, local)
        return signal.replace(reward=local + weight[tree.transitions.task] * signal.reward)

    def of_tasks(self, tree: Tree, signal: Signal, local: Float[Array, "J A"]) -> Float[Array, "K A"]:
        """The weight of the shared reward for each of K tasks and A roles.

        Args:
            tree: The rollout.
            signal: Its ``reward`` is the shared one.
            local: Local rewards of each transition.
        """
        shape = signal.sizes.num_tasks, local.shape[1]
        if self.weights != "ranks":
            return jnp.full(shape, 1 / shape[1] if self.weights == "uniform" else 0.0)
        moves = tree.transitions
        own, team = (ReturnToGo()(tree, signal.replace(reward=reward)) for reward in (local, signal.reward))
        assert own.known is not None and team.known is not None
        begins = moves.valid & (moves.parent < 0) & own.known & team.known
        of_role = lambda a, b: rank_agreement(a, b, moves.task, begins, num_groups=shape[0])
        return jax.nn.softmax(jax.vmap(of_role, in_axes=1, out_axes=1)(own.returns, team.returns), axis=-1)
