"""Experts of array rollouts: they answer in place of a model where an environment says so (`Observation.expert`)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from jaxmarl_llm.envs.array_env import ArrayEnv, Observation
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.decoding import Completions
from jaxmarl_llm.types import Array


class Experts(NamedTuple):
    """Answers of experts at N nodes.

    Attributes:
        answers: An expert takes the place of the model.
        tokens: Its answer, padded to R tokens.
        length: Number of tokens; 0 where there is no answer.
    """

    answers: Bool[jax.Array, " N"]
    tokens: Int[jax.Array, "N R"]
    length: Int[jax.Array, " N"]

    @property
    def silent(self) -> Bool[jax.Array, " N"]:
        """Where an expert should answer, and there is no answer."""
        return self.answers & (self.length == 0)


def experts_of(env: ArrayEnv, seen: Observation, response: int) -> Experts | None:
    """The experts of an observation; None in an environment without experts.

    Args:
        env: Environment, for messages.
        seen: Observation of several states, whose seats follow each other in the result.
        response: R, the most tokens of a completion.

    Raises:
        ConfigError: An answer may have more tokens than R.
    """
    if seen.expert is None:
        return None
    assert seen.expert_length is not None
    width, length = seen.expert.shape[-1], seen.expert_length.reshape(-1)
    if width > response:
        raise ConfigError(
            f"config.team.max_new_tokens: expected at least {width}, the tokens of an expert's answer in environment "
            f"{env.name!r}, got {response}"
        )
    tokens = jnp.pad(seen.expert.reshape(-1, width), ((0, 0), (0, response - width)))
    return Experts(length >= 0, tokens, jnp.maximum(length, 0))


def with_experts(experts: Experts, valid: Bool[Array, " N"], made: Completions) -> Completions:
    """Completions of nodes, with the answers of experts in their place. The log-probs of answers are 0.

    Args:
        experts: Experts of the nodes.
        valid: Nodes that are played.
        made: Completions of the nodes by models.
    """
    alive = (experts.answers & valid)[:, None]
    return Completions(
        tokens=jnp.where(alive[..., None], experts.tokens[:, None], made.tokens),
        length=jnp.where(alive, experts.length[:, None], made.length),
        logprobs=jnp.where(alive[..., None], 0.0, made.logprobs),
        truncated=made.truncated & ~alive,
    )
