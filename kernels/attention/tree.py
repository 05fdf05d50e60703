"""Attention in trees of token sequences with shared prefixes, each token once.

Sequences with shared prefixes (a conversation that branches, a prompt with its samples) are laid out depth first, T
tokens in one row. Token i sees token j iff j is one of its ancestors or itself, which in that order is

    j <= i < end[j]        end[j]: index behind the last token of j's subtree

    out[i] = softmax over the j that i sees of (q_i k_j / sqrt(H)) v_j

A row may hold several trees. Padding has ``end`` 0: no token sees it, and its own output is finite and meaningless.
[prompt | G responses] is the tree with one fork. Scores and the softmax are float32.

The portable form takes ``chunk`` queries at a time and computes them again in the backward pass. So at most [B Q chunk
T] scores are in memory. Its gradients are autodiff's. The Pallas forms (`tree_pallas`) have no scores in memory, skip
blocks that none of their queries sees, and have a backward pass of their own. The form mosaic (`tree_mosaic`) has the
forward pass alone, and its gradients are those of the portable form. In every form the gradient of a token's
key and value is the sum over the sequences that contain the token. (Splash attention, JAX's own kernel for TPU, needs
its mask at trace time, and cuDNN's has no such mask; here the trees are data.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmarl_llm.kernels.attention.constants import NEG
from jaxmarl_llm.kernels.matmul import matmul
from jaxmarl_llm.kernels.select_impl import WITH_MOSAIC, choose

CHUNK = 128  # queries
PAYS = {"tpu": 1024, "gpu": 4096}  # tokens of a row from which auto takes a kernel


def tree_attention(
    q: Float[Array, "B S Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    end: Int[Array, "B T"],
    *,
    chunk: int = CHUNK,
    impl: str = "auto",
    block: int | None = None,
    interpret: bool = False,
) -> Float[Array, "B S Q H"]:
    """Attend from each token to its ancestors and itself.

    Raises ValueError for shapes that do not fit each other or the impl.

    Args:
        q: queries of the last S tokens; of all tokens where S is T.
        k: keys.
        v: values.
        end: index behind the last token of each token's subtree; 0 is padding.
        chunk: queries that the portable form takes at once.
        impl: xla, gpu, tpu, mosaic or auto. auto is tpu where the program is lowered for it and a row has 1024 tokens
            or more, gpu likewise from 4096 tokens, else xla. mosaic is for Hopper GPUs and bfloat16, and no GPU has
            run it.
        block: tokens of a block of the Pallas forms: a power of two, at least 16 (gpu), a multiple of 128 (tpu), or 64
            (mosaic).
        interpret: run a Pallas form, other than mosaic, in Pallas' interpreter, on any machine.
    """
    (b, s, heads, h), (t, kv) = q.shape, k.shape[1:3]
    if k.shape != v.shape or k.shape != (b, t, kv, h) or heads % kv or end.shape != (b, t) or s > t:
        shapes = ", ".join(str(x.shape) for x in (q, k, v, end))
        raise ValueError(f"shapes do not fit [B S Q H] with S <= T, [B T K H] twice, [B T]: {shapes}")

    def refused(impl: str) -> str | None:
        from jaxmarl_llm.kernels.attention import tree_pallas  # loads Pallas, which takes as long as JAX

        if impl == "mosaic":
            from jaxmarl_llm.kernels.attention import tree_mosaic

            return tree_mosaic.refused(q, k, block, interpret)
        return tree_pallas.refused(impl, h, block)

    def pallas(impl: str) -> Callable[..., jax.Array]:
        from jaxmarl_llm.kernels.attention import tree_pallas

        if impl == "mosaic":
            return functools.partial(_mosaic, min(chunk, s))
        return functools.partial(tree_pallas.attend, impl, block or tree_pallas.block_size(impl, t, q.dtype), interpret)

    return choose(
        impl,
        (q * h**-0.5, k, v, end),
        portable=functools.partial(_by_chunks, min(chunk, s)),
        pallas=pallas,
        refused=refused,
        pays=[impl for impl, tokens in PAYS.items() if t >= tokens],
        platforms=WITH_MOSAIC,
    )


def _by_chunks(size: int, q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array) -> jax.Array:
    (b, s, heads, h), (t, kv) = q.shape, k.shape[1:3]
    chunks = -(-s // size)
    rows = jnp.pad(q, ((0, 0), (0, chunks * size - s), (0, 0), (0, 0)))
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

    first = jnp.arange(chunks) * size
    out = jax.lax.map(attend, (first + (t - s) if t > s else first, rows))
    return jnp.moveaxis(out, 0, 1).reshape(b, chunks * size, heads, h)[:, :s]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mosaic(chunk: int, q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array) -> jax.Array:
    from jaxmarl_llm.kernels.attention import tree_mosaic

    return tree_mosaic.attend(q, k, v, end)


def _mosaic_forward(chunk: int, *args: jax.Array) -> tuple[jax.Array, tuple]:
    return _mosaic(chunk, *args), args


def _mosaic_backward(chunk: int, args: tuple, cotangent: jax.Array) -> tuple:
    q, k, v, end = args
    return *jax.vjp(lambda q, k, v: _by_chunks(chunk, q, k, v, end), q, k, v)[1](cotangent), None


_mosaic.defvjp(_mosaic_forward, _mosaic_backward)
