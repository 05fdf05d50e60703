"""Imitation of experts in the update of a policy gradient: what experts wrote, with weights of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxmarl_llm.config import at_least
from jaxmarl_llm.training.losses import Loss, aggregation_weights
from jaxmarl_llm.types import EXPERT, Array, Tree


def all_experts(key: Array, tree: Tree) -> Float[jax.Array, " C"]:
    """Weight 1 for every completion of a rollout.

    Args:
        key: Not read.
        tree: The rollout.
    """
    return jnp.ones(tree.steps.node.shape)


@dataclass(frozen=True)
class Imitation:
    """Add the likelihood of experts' completions to the loss: ``-coef * sum_c w_c sum_t log pi_t``.

    A completion of an expert has the source ``EXPERT`` (`Observation.expert`). It is no sample of a policy, so this
    term has no advantage, ratio, clip, KL or entropy. No other term has a gradient of an expert's tokens. The role at
    whose node the expert answered imitates it. An answer that is not there is not imitated.

    Attributes:
        coef: Coefficient of the term, at least 0.
        weigh: Function (key, tree) -> factor of each completion [C], at least 0; only experts' completions count. Each
            factor is in numerator and denominator of ``loss.aggregation`` (`losses.aggregation_weights`). So factors
            of 0 and 1 are a mean over the imitated tokens, or completions, of the whole batch.
    """

    coef: float = 1.0
    weigh: Callable[[Array, Tree], Array] = all_experts

    def __post_init__(self) -> None:
        at_least("Imitation.coef", self.coef, 0)

    def __call__(self, key: Array, tree: Tree, loss: Loss) -> Float[jax.Array, "C R"]:
        """Weight of each token in the term.

        Args:
            key: Random key of the step.
            tree: The rollout.
            loss: Its ``aggregation`` averages.
        """
        steps, kind = tree.steps, "token" if loss.reads_episodes else loss.aggregation
        written = jnp.arange(steps.tokens.shape[1]) < jnp.asarray(steps.length)[:, None]
        expert = jnp.asarray((steps.source == EXPERT) & steps.valid)
        counted = jnp.where(expert, self.weigh(key, tree), 0.0)
        return self.coef * aggregation_weights(written, counted, kind, loss.loss_length)
