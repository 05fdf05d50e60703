"""Attention of the tokens of trees that share their beginnings, each token once.

A forest of token sequences that begin alike (a conversation that branches, a prompt with its samples) laid out in depth
first order, T tokens in one row: token i sees token j iff j is one of its ancestors or itself, which in that order is

    j <= i < end[j]        end[j]: index behind the last token of j's subtree

    out[i] = softmax over the j that i sees of (q_i k_j / sqrt(H)) v_j

Several trees may stand in one row, and padding has ``end`` 0: nothing sees it (its own output means nothing and is
finite). [prompt | G responses] is the tree with one fork. Scores and the softmax are float32.

``tree_attention`` is the portable XLA form: ``chunk`` queries at a time, made again in the backward pass, so that no
more than [B Q chunk T] scores are alive. Gradients are autodiff's: keys and values of a token gather theirs from all
that stands behind it, which is the sum over the sequences that use it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmarl_llm.kernels.group_attention import NEG

CHUNK = 128  # queries


def tree_attention(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    end: Int[Array, "B T"],
    *,
    chunk: int = CHUNK,
) -> Float[Array, "B T Q H"]:
    """Softmax attention of each token over its ancestors and itself."""
    b, t, heads, h = q.shape
    kv, size = k.shape[2], min(chunk, t)
    chunks = -(-t // size)
    rows = jnp.pad(q * h**-0.5, ((0, 0), (0, chunks * size - t), (0, 0), (0, 0)))
    rows = jnp.moveaxis(rows.reshape(b, chunks, size, kv, heads // kv, h), 1, 0)
    f32 = {"preferred_element_type": jnp.float32}
    key = jnp.arange(t)

    @jax.checkpoint
    def attend(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        first, rows = part
        query = (first + jnp.arange(size))[:, None]
        see = (key <= query) & (query < end[:, None])  # [B size T]
        score = jnp.where(see[:, None, None], jnp.einsum("btkrh,bskh->bkrts", rows, k, **f32), NEG)
        weight = jax.nn.softmax(score, axis=-1).astype(q.dtype)
        return jnp.einsum("bkrts,bskh->btkrh", weight, v, **f32).astype(q.dtype)

    out = jax.lax.map(attend, (jnp.arange(chunks) * size, rows))
    return jnp.moveaxis(out, 0, 1).reshape(b, chunks * size, heads, h)[:, :t]
