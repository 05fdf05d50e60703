"""Forms of the keys and values that a training rollout caches: ``config.rollout_cache``.

A form makes from a policy one that generates with such a cache. Keys and values are rounded once, when they are made.
All tokens read the rounded ones, those of a prompt too. So it does not matter which launch read a prompt. Functions of
training and scripted models stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.kernels.quantized import VALUES, quantize_vectors
from jaxmarl_llm.models import batch_invariant, decoder
from jaxmarl_llm.models.rollout_weights import SAME
from jaxmarl_llm.types import Policy, Team

PREFILLS = (decoder.prefill, batch_invariant.prefill)  # functions whose caches have forms


@functools.cache
def quantized(policy: Policy, form: str) -> Policy:
    """Make a policy whose caches are `kernels.quantized.ScaledVectors`: a scale for each token and key/value head.

    Args:
        policy: of `decoder.make_policy` or `batch_invariant.invariant`.
        form: one of `kernels.quantized.VALUES`.

    Raises:
        ConfigError: it is another policy.
    """
    prefill = policy.prefill
    if not isinstance(prefill, functools.partial) or prefill.func not in PREFILLS or prefill.keywords:
        raise ConfigError(
            f"config.rollout_cache: expected {SAME!r} for a model that is no decoder of this package, got {form!r}"
        )
    keep = functools.partial(quantize_vectors, dtype=VALUES[form])
    return policy._replace(prefill=functools.partial(prefill, keep=keep))


@functools.cache
def with_caches(team: Team, form: Callable[[Policy], Policy]) -> Team:
    """Return a team whose models generate with caches in a form. Equal arguments give the same team.

    Args:
        team: roles and models. Scripted models stay as they are.
        form: one of `FORMS`.
    """
    models = (m if m.scripted else replace(m, policy=form(m.policy)) for m in team.models)
    return replace(team, models=tuple(models))


# Name of a form -> the function; None: keys and values as the model computes them.
FORMS: dict[str, Callable[[Policy], Policy] | None] = {
    SAME: None,
    **{form: functools.partial(quantized, form=form) for form in VALUES},
}
