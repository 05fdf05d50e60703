"""Memory entries that are put in front of prompts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxmarl_llm.agents.memory import MemoryConfig, read
from jaxmarl_llm.types import (
    Params,
    PyTree,
    Retrieval,
    Team,
)


def mean_embedding(embed: Callable, variables: Params, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Mean of an agent's own token embeddings: the default memory key, which needs no other model.

    Args:
        embed: (variables, tokens) -> embeddings.
        variables: variables of the model.
        tokens: prompts [N P].
        length: tokens of each prompt [N].

    Returns:
        Keys [N D].
    """
    x = embed(variables, tokens).astype(jnp.float32)
    mask = jnp.arange(tokens.shape[-1]) < length[..., None]
    return jnp.sum(x * mask[..., None], axis=-2) / jnp.maximum(length, 1)[..., None]


def prepend(entries: jax.Array, entry_length: jax.Array, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Put memory entries before prompts without gaps: [entry_1 | ... | entry_X | prompt].

    Args:
        entries: tokens of the entries [N X T].
        entry_length: tokens of each entry [N X]; 0: no entry.
        tokens: prompts [N P].
        length: tokens of each prompt [N].

    Returns:
        Tokens [N X*T + P].
    """
    n, x, t = entries.shape
    parts = jnp.concatenate([entries.reshape(n, x * t), tokens], axis=1)
    used = jnp.arange(t) < entry_length[..., None]
    used = jnp.concatenate([used.reshape(n, x * t), jnp.arange(tokens.shape[1]) < length[:, None]], axis=1)
    order = jnp.argsort(~used, axis=1, stable=True)
    return jnp.take_along_axis(parts, order, axis=1)


def retrieve(
    team: Team,
    config: MemoryConfig,
    params: Params,
    memory: PyTree,
    role: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    actors: tuple[int, ...],
) -> tuple[jax.Array, jax.Array, Retrieval]:
    """Put each role's own memory entries before its prompts. Row i belongs to role[i].

    Args:
        team: roles and models.
        config: settings of the memory.
        params: parameters of the team.
        memory: memory of each role, by name.
        role: role of each prompt [N].
        tokens: prompts [N P].
        length: tokens of each prompt [N].
        actors: roles that may have a row.

    Returns:
        Tokens [N X*T + P], lengths [N], and the retrieved entries.
    """
    n, x = tokens.shape[0], config.retrieve
    stores = [memory[r.name] for r in team.roles]
    t, dim = stores[0].ids.shape[1], max(s.key.shape[1] for s in stores)
    slots, similarity = jnp.full((n, x), -1, jnp.int32), jnp.zeros((n, x), jnp.float32)
    query, entries, lengths = jnp.zeros((n, dim)), jnp.zeros((n, x, t), jnp.int32), jnp.zeros((n, x), jnp.int32)
    for r in actors:
        model, store = team.model_of(r), stores[r]
        q = mean_embedding(model.policy.embed, model.variables(params), tokens, length)
        found, cosine = jax.vmap(lambda v, s=store: read(config, s, v))(q)
        mine, safe = role == r, jnp.maximum(found, 0)
        slots = jnp.where(mine[:, None], found, slots)
        similarity = jnp.where(mine[:, None], cosine, similarity)
        query = jnp.where(mine[:, None], jnp.pad(q, ((0, 0), (0, dim - q.shape[1]))), query)
        entries = jnp.where(mine[:, None, None], store.ids[safe], entries)
        lengths = jnp.where(mine[:, None], jnp.where(found >= 0, store.length[safe], 0), lengths)
    added = lengths.sum(1)
    return prepend(entries, lengths, tokens, length), length + added, Retrieval(slots, similarity, query, added)
