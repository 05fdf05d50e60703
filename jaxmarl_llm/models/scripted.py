"""Scripted policy: a function from a prompt to its completion, in place of a language model.

It is for rule-following players and for tests with an expected text. It is a `Policy` like any other, so both rollouts
play it. A script reads the prompt alone, which is all that a model in its place would read. It has no parameters, and
its completions have log-probability 0. Steps of a `Model` with ``scripted=True`` have source ``SCRIPTED``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.kernels.head.head import NEG
from jaxmarl_llm.types import Model, Params, Policy

Script = Callable[[Int[Array, " P"], Int[Array, ""]], Int[Array, " R"]]


@dataclass(frozen=True)
class Config:
    """Script of a policy, and its sizes.

    Attributes:
        script: Prompt [P] and its number of tokens [] -> tokens of the completion [R]. Pure JAX; P differs between
            calls. A completion ends with a stop token, where R has room for it. What stands behind it is not read.
        size: R, at least 1.
        vocab_size: Number of token ids.
    """

    script: Script
    size: int
    vocab_size: int

    def __post_init__(self):
        for name in ("size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"scripted: {name}: expected at least 1, got {getattr(self, name)}")


@functools.cache
def make_policy(cfg: Config) -> Policy:
    """Make the `Policy` of a script. Its parameters are ``{}``, and its hidden state is the next token.

    A token behind the R of the script has NaN logits, so that it does not go unnoticed.

    Args:
        cfg: The script and its sizes.
    """

    def said(tokens: Int[Array, "N P"], length: Int[Array, " N"]) -> Float[Array, "N R"]:
        return jax.vmap(cfg.script)(tokens, length).astype(jnp.float32)

    def at(text: Float[Array, "N R"], t: Any) -> Float[Array, " N"]:
        return jnp.where(t < cfg.size, text[:, jnp.minimum(t, cfg.size - 1)], jnp.nan)

    def prefill(variables: Params, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        text = said(tokens, length)
        return text[:, :1], text

    def decode(
        variables: Params, tokens: Sequence[jax.Array], prefix: Sequence[jax.Array], length: Any, suffix: Any, t: Any
    ) -> tuple[tuple[jax.Array, ...], Any]:
        following = (at(text, t + 1)[:, None, None] for text in prefix)
        return tuple(jnp.broadcast_to(x, (*now.shape, 1)) for x, now in zip(following, tokens, strict=True)), suffix

    def hidden(variables: Params, tokens: jax.Array, length: jax.Array, completions: jax.Array) -> jax.Array:
        text = said(tokens, length)
        rows = jnp.stack([at(text, t) for t in range(completions.shape[-1])], axis=1)
        return jnp.broadcast_to(rows[:, None, :, None], (*completions.shape, 1))

    def unembed(variables: Params, hidden: Float[Array, "*B 1"]) -> Float[Array, "*B V"]:
        # -inf would make 0 * inf of entropies; exp of this is 0 as well.
        ids = jax.lax.broadcasted_iota(jnp.float32, (*hidden.shape[:-1], cfg.vocab_size), hidden.ndim - 1)
        sure = jnp.where(ids == hidden, 0.0, NEG)
        return jnp.where(jnp.isnan(hidden), jnp.nan, sure)

    def embed(variables: Params, tokens: jax.Array) -> jax.Array:
        return jax.nn.one_hot(tokens, cfg.vocab_size)

    keep: Any = lambda variables: variables
    none: Any = lambda prefix, group, response: ()
    return Policy(cfg, lambda key: {}, prefill, decode, none, hidden, unembed, embed, keep)


def make_model(name: str, script: Script, size: int, tokenizer: Any) -> Model:
    """Make a scripted player of a team.

    Args:
        name: Name of the model.
        script: As in `Config`.
        size: R, the tokens of a completion.
        tokenizer: Tokenizer of the team.
    """
    policy = make_policy(Config(script, size, tokenizer.vocab_size))
    return Model(name, policy, tokenizer, scripted=True)
