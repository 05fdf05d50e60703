"""Attention of G sequences that share one prefix.

Every sample g of node n has the same P prompt keys and its own S keys:

    out[n,g,t] = softmax([ q k_prefix^T | q k_own^T ] / sqrt(H)) [ v_prefix ; v_own ]

Folding the G samples (and the query heads that share a key head) into the row dimension of one matrix product per node
reads the prefix once per node instead of once per sample, and never copies it. The same function serves decoding
(T = 1, own keys in a cache of S slots) and training (T = S, all response tokens at once): own key s is visible to query
t iff s <= t + offset. Scores and the softmax are float32.

``group_attention`` is the portable XLA form. Gradients are autodiff's: that of the prefix is the sum over the group.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NEG = -1e30  # finite: no NaN. A row always sees its own slot 0


def group_attention(
    q: Float[Array, "N G T Q H"],
    prefix_k: Float[Array, "N P K H"],
    prefix_v: Float[Array, "N P K H"],
    prefix_length: Int[Array, "N"],
    own_k: Float[Array, "N G S K H"],
    own_v: Float[Array, "N G S K H"],
    offset: Int[Array, ""] | int = 0,
) -> Float[Array, "N G T Q H"]:
    """Softmax attention over [prefix | own]; prefix slots at or beyond ``prefix_length`` are masked."""
    n, g, t, heads, h = q.shape
    p, kv = prefix_k.shape[1:3]
    s = own_k.shape[2]
    q = (q * h**-0.5).reshape(n, g, t, kv, heads // kv, h)
    f32 = {"preferred_element_type": jnp.float32}
    score_p = jnp.einsum("ngtkrh,npkh->nkgrtp", q, prefix_k, **f32)
    score_s = jnp.einsum("ngtkrh,ngskh->nkgrts", q, own_k, **f32)
    see_p = (jnp.arange(p) < prefix_length[:, None])[:, None, None, None, None, :]
    see_s = jnp.arange(s) <= jnp.arange(t)[:, None] + offset
    score_p = jnp.where(see_p, score_p, NEG)
    score_s = jnp.where(see_s, score_s, NEG)
    top = jnp.maximum(score_p.max(-1, initial=NEG), score_s.max(-1, initial=NEG))[..., None]
    top = jax.lax.stop_gradient(top)
    w_p, w_s = jnp.exp(score_p - top), jnp.exp(score_s - top)
    total = w_p.sum(-1) + w_s.sum(-1)
    out = jnp.einsum("nkgrtp,npkh->ngtkrh", w_p.astype(q.dtype), prefix_v, **f32)
    out += jnp.einsum("nkgrts,ngskh->ngtkrh", w_s.astype(q.dtype), own_v, **f32)
    out /= jnp.transpose(total, (0, 2, 4, 1, 3))[..., None]
    return out.reshape(n, g, t, heads, h).astype(q.dtype)
