"""Checks of ``run.debug``: the first value that is not finite is one error with its step, its role or model, its part.

On the host, values are read as they come, and the error is a `FloatingPointError`. Inside a compiled run the checks are
chex assertions: the caller wraps the outermost transformation by `chex.chexify`, see `runs.compiled.make_program`.

Rewards that could not be computed are no fault of a run: their transitions are invalid, and no check reads them. Steps
are counted as in the metrics, from 1. `check_traced_choices` is the one check that is not of a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.credit.returns import scalarise
from jaxmarl_llm.credit.rules import RewardWeights
from jaxmarl_llm.rollout.plans import Plan
from jaxmarl_llm.types import Array, Params, PyTree, Team, TrainState, Tree


def require_finite(step: Any, who: str, part: str, values: Array, counted: Array | None = None) -> None:
    """Raise unless all values are finite, or, inside a compiled run, assert it.

    Args:
        step: Number of the step; may be traced.
        who: Role or model, for the message.
        part: Name of the values, in the plural, for the message.
        values: Floating-point numbers.
        counted: Which values count, of a shape that broadcasts to theirs; None: all.

    Raises:
        FloatingPointError: A value that counts is infinite or NaN; only where values are concrete.
    """
    traced = any(isinstance(x, jax.core.Tracer) for x in (values, counted))
    xp = np if isinstance(values, np.ndarray) and not traced else jnp
    mask = xp.broadcast_to(True if counted is None else counted, values.shape)
    wrong, total = xp.sum(mask & ~xp.isfinite(values)), xp.sum(mask)
    text = f"{who}: {part} are not finite"
    if traced:
        escaped = text.replace("{", "{{").replace("}", "}}")
        chex.assert_tree_all_finite(
            jnp.where(wrong > 0, jnp.nan, 0.0),
            custom_message=f"step {{}}: {escaped} ({{}} of {{}})",
            custom_message_format_vars=(jnp.asarray(step), wrong, total),
        )
    elif int(wrong):
        raise FloatingPointError(f"step {int(step)}: {text} ({int(wrong)} of {int(total)})")


def number_of(state: TrainState) -> Any:
    """Number of the step that begins at ``state``, as the metrics count it."""
    return state.step + 1


def check_rollout(team: Team, tree: Tree, step: Any) -> None:
    """Log-probabilities of the sampled tokens of each role.

    Args:
        team: Roles and models.
        tree: The rollout.
        step: Number of the step.
    """
    steps, role_of = tree.steps, tree.nodes.role[tree.steps.node]
    for index, role in enumerate(team.roles):
        mine = steps.valid & (role_of == index)
        own = mine[:, None] & steps.loss_mask
        require_finite(step, f"role {role.name!r}", "sampler log-probabilities", steps.logprobs, own)


def check_traced_choices(plan: Plan, tree: Tree, step: Any) -> None:
    """Choices of a plan that grows: an array rollout leaves an expansion unplayed whose choice is not possible.

    Args:
        plan: Plan of sampling; nothing is checked unless it grows.
        tree: An array rollout, inside a compiled run.
        step: Number of the step; may be traced.
    """
    if plan.choose is None:
        return
    played = tree.transitions.played
    chex.assert_tree_all_finite(
        jnp.where(played.all(), 0.0, jnp.nan),
        custom_message=f"step {{}}: plan {plan.name}: {{}} of {{}} choices name no expansion made before, or no player",
        custom_message_format_vars=(jnp.asarray(step), (~played).sum(), jnp.asarray(played.size)),
    )


def check_rewards(team: Team, tree: Tree, weights: RewardWeights, step: Any) -> None:
    """Weighted rewards of each role, of valid transitions.

    Args:
        team: Roles and models.
        tree: The rollout.
        weights: Weights of the reward components.
        step: Number of the step.
    """
    rewards = scalarise(tree.transitions.rewards, dict(weights))
    for index, role in enumerate(team.roles):
        require_finite(step, f"role {role.name!r}", "weighted rewards", rewards[:, index], tree.transitions.valid)


def check_advantages(team: Team, tree: Tree, advantage: Array, valid: Array, step: Any) -> None:
    """Advantages of each role's completions.

    Args:
        team: Roles and models.
        tree: The rollout.
        advantage: Of each completion [C].
        valid: Whether a completion has one [C].
        step: Number of the step.
    """
    role_of = tree.nodes.role[tree.steps.node]
    for index, role in enumerate(team.roles):
        require_finite(step, f"role {role.name!r}", "advantages", advantage, valid & (role_of == index))


def update_check(step: Any) -> Callable[[str], Callable[..., None]]:
    """Model -> what `learner.optimize` reports an optimizer step to: it checks log-probs, loss terms and gradient.

    ``step``: number of the step.
    """

    def of_model(name: str) -> Callable[..., None]:
        who = f"model {name!r}"

        def report(fine: Any, totals: Sequence[dict[str, Array]], gaps: Sequence[Array], gradient: PyTree) -> None:
            require_finite(step, who, "differences between log-probabilities and the sampler's", jnp.stack(gaps))
            for term in totals[0]:
                require_finite(step, who, f"values of {term!r} in the loss", jnp.stack([t[term] for t in totals]))
            _check_leaves(step, who, "gradients of", gradient)

        return report

    return of_model


def check_parameters(agents: Params, step: Any) -> None:
    """Parameters of each model after the update.

    Args:
        agents: Trained parameters by model.
        step: Number of the step.
    """
    for name, own in agents.items():
        _check_leaves(step, f"model {name!r}", "updated parameters", own)


def _check_leaves(step: Any, who: str, part: str, tree: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            require_finite(step, who, f"{part} {jax.tree_util.keystr(path, simple=True, separator='/')}", leaf)
