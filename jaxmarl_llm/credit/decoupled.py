"""Credit of several reward components, each normalised on its own (GDPO, arXiv 2601.05242)."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from jaxmarl_llm.credit.rules import CreditRule, Signal
from jaxmarl_llm.types import Tree


@dataclass(frozen=True)
class Decoupled:
    """Apply a rule to each reward component alone, and add the weighted advantages.

    GDPO is this with group-relative advantages, and a normalisation over the batch behind it::

        rule = chain(Decoupled(standard_rule(cfg.credit), tuple(cfg.reward.items())), Whiten())

    Returns, groups and their statistics are those of the weighted sum of the components. A selection by variance
    therefore sees the sum.

    Attributes:
        rule: From rewards to advantages.
        weights: Pairs of a component and the weight of its advantage. They replace the weights of the reward.
    """

    rule: CreditRule
    weights: tuple[tuple[str, float], ...]

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        whole, moves = self.rule(tree, signal), tree.transitions
        advantage = jnp.zeros(tree.steps.node.shape)
        for name, weight in self.weights:
            reward = jnp.where(moves.valid[:, None], moves.rewards[name], 0.0)
            part = self.rule(tree, signal.replace(reward=reward)).advantage
            assert part is not None, "Decoupled needs a rule that gives advantages"
            advantage = advantage + weight * part
        return whole.replace(advantage=advantage)
