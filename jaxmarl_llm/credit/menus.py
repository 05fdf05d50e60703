"""Credit for menus: nodes whose siblings are every choice of a list, which nobody sampled (`rollout.plans.menu`).

`MenuRelative` takes the place of `rules.GroupRelative`. `policy_choices` draws the choice that the policy would make.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.credit.advantages import group_advantage
from jaxmarl_llm.credit.rules import Signal
from jaxmarl_llm.types import MENU, Array, Tree

WEIGHTS = ("alike", "by_policy")


def completion_logprobs(tree: Tree) -> Float[jax.Array, " C"]:
    """Log-prob of each whole completion under the policy that sampled or scored it.

    Args:
        tree: The rollout.
    """
    return jnp.where(tree.steps.loss_mask, tree.steps.logprobs, 0.0).sum(-1)


def menu_shares(
    logprob: Float[Array, " C"], group: Int[Array, " C"], valid: Bool[Array, " C"], num_groups: int, weights: str
) -> Float[jax.Array, " C"]:
    """Share of each choice in its menu. The shares of the valid choices of a menu add up to 1; others have 0.

    Args:
        logprob: Log-prob of each choice.
        group: Menu of each choice, an id below ``num_groups``.
        valid: Choices that count.
        num_groups: Number of menus.
        weights: ``alike``: equal shares. ``by_policy``: the policy's probabilities, normalised over the menu.
    """
    logit = jnp.where(valid, logprob if weights == "by_policy" else 0.0, -jnp.inf)
    top = jax.ops.segment_max(logit, group, num_groups)[group]
    mass = jnp.where(valid, jnp.exp(logit - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = jax.ops.segment_sum(mass, group, num_groups)[group]
    return jnp.where(valid, mass / jnp.where(total > 0, total, 1.0), 0.0)


def menu_advantage(
    value: Float[Array, " C"],
    share: Float[Array, " C"],
    group: Int[Array, " C"],
    valid: Bool[Array, " C"],
    num_groups: int,
) -> Float[jax.Array, " C"]:
    """Advantage of each choice: ``K share (R - mean)``, where the mean over the menu is weighted by the shares.

    K is the number of valid choices. With equal shares it is ``R - mean`` (HILA). With the policy's shares, take the
    mean of ``A grad log pi`` over the menu. It is the exact gradient of the expected return of choosing from the menu.

    Args:
        value: Return R of each choice.
        share: Result of `menu_shares`.
        group: Menu of each choice.
        valid: Choices that count; others have advantage 0.
        num_groups: Number of menus.
    """
    count = jax.ops.segment_sum(valid.astype(jnp.float32), group, num_groups)[group]
    clean = jnp.where(valid, value, 0.0)
    mean = jax.ops.segment_sum(share * clean, group, num_groups)[group]
    return jnp.where(valid, count * share * (clean - mean), 0.0)


@dataclass(frozen=True)
class MenuRelative:
    """Compare the choices of a menu with their mean (`menu_advantage`). Goes after `rules.PerCompletion`.

    A completion that is no choice of a menu has advantage 0. With ``alike`` the advantages of choices are those of
    ``GroupRelative("node", "mean", "none")``.

    Attributes:
        weights: ``alike`` or ``by_policy``, see `menu_shares`.
    """

    weights: str = "alike"

    def __post_init__(self) -> None:
        one_of("MenuRelative.weights", self.weights, WEIGHTS)

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        value, valid, node = signal.value, signal.valid, tree.steps.node
        assert value is not None and valid is not None, "MenuRelative needs PerCompletion before it"
        count, listed = len(tree.nodes.role), valid & (tree.steps.source == MENU)
        share = menu_shares(completion_logprobs(tree), node, listed, count, self.weights)
        advantage = menu_advantage(value, share, node, listed, count)
        _, stats = group_advantage(value, node, valid, num_groups=count, baseline="mean", normalise="none")
        return signal.replace(advantage=advantage, group=node, stats=stats, num_groups=count)


def policy_choices(key: Array, tree: Tree) -> Bool[jax.Array, " C"]:
    """Draw one choice of each menu by the policy's probabilities, normalised over the menu.

    Args:
        key: Random key.
        tree: The rollout.

    Returns:
        Whether each completion is the one drawn; False outside menus.
    """
    steps, count = tree.steps, len(tree.nodes.role)
    menu = jnp.asarray(steps.valid & (steps.source == MENU))
    noisy = completion_logprobs(tree) + jax.random.gumbel(key, steps.node.shape)  # the largest one is such a draw
    noisy = jnp.where(menu, noisy, -jnp.inf)
    return menu & (noisy == jax.ops.segment_max(noisy, steps.node, count)[steps.node])
