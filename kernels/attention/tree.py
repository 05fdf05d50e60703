"""Attention of the tokens of trees that share their beginnings, each token once.

A forest of token sequences that begin alike (a conversation that branches, a prompt with its samples) laid out in depth
first order, T tokens in one row: token i sees token j iff j is one of its ancestors or itself, which in that order is

    j <= i < end[j]        end[j]: index behind the last token of j's subtree

    out[i] = softmax over the j that i sees of (q_i k_j / sqrt(H)) v_j

Several trees may stand in one row, and padding has ``end`` 0: nothing sees it (its own output means nothing and is
finite). [prompt | G responses] is the tree with one fork. Scores and the softmax are float32.

The portable form takes ``chunk`` queries at a time, made again in the backward pass, so that no more than [B Q chunk T]
scores are alive; its gradients are autodiff's. The Pallas forms (`tree_blocks`) have no scores in memory, pass over the
blocks that no query of theirs sees, and have a backward pass of their own. In each, keys and values of a token gather
their gradients from all that stands behind it, which is the sum over the sequences that use it. (Splash attention,
JAX's own for TPU, wants its mask when it is traced, and cuDNN's has no such mask; here the trees are data.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmarl_llm.kernels.group_attention import NEG
from jaxmarl_llm.kernels.impl import choose
from jaxmarl_llm.kernels.matmul import matmul

CHUNK = 128  # queries
PAYS = {"tpu": 1024}  # tokens of a row from which auto takes a form; the gpu form has not been timed yet


def tree_attention(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    end: Int[Array, "B T"],
    *,
    chunk: int = CHUNK,
    impl: str = "auto",
    block: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B T Q H"]:
    """Softmax attention of each token over its ancestors and itself.

    impl: xla, gpu or tpu; auto is tpu where the program is lowered for it and a row has 1024 tokens or more, else xla.
    chunk: queries at a time of the portable form. block: tokens of a block of the Pallas forms, a power of two from 16
    on (GPU) or a multiple of 128 (TPU). interpret: run a Pallas form on any machine. Raises ValueError for shapes that
    do not fit each other or the impl.
    """
    b, t, heads, h = q.shape
    kv = k.shape[2]
    if k.shape != v.shape or k.shape != (b, t, kv, h) or heads % kv or end.shape != (b, t):
        shapes = ", ".join(str(x.shape) for x in (q, k, v, end))
        raise ValueError(f"shapes do not fit [B T Q H], [B T K H] twice, [B T]: {shapes}")

    def refused(impl: str) -> str | None:
        from jaxmarl_llm.kernels import tree_blocks  # loads Pallas, which takes as long as JAX

        return tree_blocks.refused(impl, h, block)

    def pallas(impl: str) -> Callable[..., jax.Array]:
        from jaxmarl_llm.kernels import tree_blocks

        return functools.partial(tree_blocks.attend, impl, block or tree_blocks.block_size(impl, t, q.dtype), interpret)

    return choose(
        impl,
        (q * h**-0.5, k, v, end),
        portable=functools.partial(_by_chunks, min(chunk, t)),
        pallas=pallas,
        refused=refused,
        pays=[impl for impl, tokens in PAYS.items() if t >= tokens],
    )


def _by_chunks(size: int, q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array) -> jax.Array:
    b, t, heads, h = q.shape
    kv, chunks = k.shape[2], -(-t // size)
    rows = jnp.pad(q, ((0, 0), (0, chunks * size - t), (0, 0), (0, 0)))
    rows = jnp.moveaxis(rows.reshape(b, chunks, size, kv, heads // kv, h), 1, 0)
    f32 = {"preferred_element_type": jnp.float32}
    key = jnp.arange(t)

    @jax.checkpoint
    def attend(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        first, rows = part
        query = (first + jnp.arange(size))[:, None]
        see = (key <= query) & (query < end[:, None])  # [B size T]
        score = matmul(jnp.transpose(rows, (0, 2, 3, 1, 4)), jnp.transpose(k, (0, 2, 3, 1)), jnp.float32)
        score = jnp.where(see[:, None, None], score, NEG)
        weight = jax.nn.softmax(score, axis=-1).astype(q.dtype)
        return jnp.einsum("bkrts,bskh->btkrh", weight, v, **f32).astype(q.dtype)

    out = jax.lax.map(attend, (jnp.arange(chunks) * size, rows))
    return jnp.moveaxis(out, 0, 1).reshape(b, chunks * size, heads, h)[:, :t]
