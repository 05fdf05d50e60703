"""Long completions: the soft penalty and the mask of DAPO (arXiv 2503.14476, section 3.4).

The penalty stands between `PerCompletion` and `GroupRelative`::

    back_up, per_completion, compare = standard_rule(cfg.credit).rules
    rule = chain(back_up, per_completion, SoftOverlong(limit=1024, margin=256), compare)
    algorithm = Algorithm(rule, cfg.reward, select_steps=complete_steps)
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.credit.rules import Signal
from jaxmarl_llm.types import Array, Tree


@dataclass(frozen=True)
class SoftOverlong:
    """Add the penalty of `soft_overlong` to the return of each completion.

    Attributes:
        limit: Length from which the whole penalty is paid, in tokens.
        margin: Tokens before the limit over which the penalty grows.
        weight: Largest penalty.
    """

    limit: int
    margin: int
    weight: float = 1.0

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        assert signal.value is not None, "SoftOverlong needs PerCompletion before it"
        value = signal.value + self.weight * soft_overlong(tree.steps.length, self.limit, self.margin)
        return signal.replace(value=value, advantage=value)


def soft_overlong(length: Int[Array, "*rows"], limit: int, margin: int) -> Float[Array, "*rows"]:
    """Compute the soft overlong punishment (DAPO eq. 13).

    The penalty is 0 up to ``limit - margin`` tokens, then falls linearly, and is -1 from ``limit`` tokens on.

    Args:
        length: Tokens of each completion.
        limit: Length from which the penalty is -1, in tokens.
        margin: Tokens over which it falls, above 0.
    """
    return jnp.clip((limit - margin - length) / margin, -1.0, 0.0)


def complete_steps(key: Array, tree: Tree, trained: Bool[Array, " C"]) -> Bool[Array, " C"]:
    """Leave completions that the length limit ended out of the update (DAPO's overlong filtering).

    Their returns still count in the statistics of their groups. Their tokens have no weight in the loss. A function
    for ``select_steps`` of `training.train_step.Algorithm`.

    Args:
        key: Not read.
        tree: The rollout.
        trained: Completions that would be trained.
    """
    return trained & ~tree.steps.truncated
