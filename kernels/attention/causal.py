"""Causal attention of a prompt.

    out[i] = softmax over j <= i of (q_i k_j / sqrt(H)) v_j

The portable form is ``jax.nn.dot_product_attention``, which has the scores [B Q T T] in memory. The mask is known at
trace time, so the form for TPU is a kernel of JAX, splash attention. It skips the blocks above the diagonal and has a
backward pass of its own. On GPU there are two forms. cudnn is cuDNN's kernel, for 16-bit numbers. A program with it
cannot be lowered on a machine without a GPU, so auto takes it in a process with one. gpu is a tree without forks
(`tree_pallas`).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmarl_llm.kernels.select_impl import PLATFORM, choose

PAYS = {"tpu": 1024, "cudnn": 2048}  # tokens from which auto takes a kernel


def causal_attention(
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    impl: str = "auto",
    interpret: bool = False,
) -> Float[Array, "B T Q H"]:
    """Attend from each token to itself and all tokens before it.

    Raises ValueError for an impl that does not take the shapes.

    Args:
        q: queries.
        k: keys.
        v: values.
        impl: xla, gpu, tpu, cudnn or auto. auto is tpu where the program is lowered for it and T is a multiple of 128,
            at least 1024. auto is cudnn on a GPU in 16 bits from 2048 tokens on. Otherwise auto is xla.
        interpret: run a Pallas form in Pallas' interpreter, on any machine.
    """
    t, heads, h = q.shape[1:]

    def refused(impl: str) -> str | None:
        if impl == "cudnn":
            if jax.default_backend() != "gpu":
                return "needs a GPU in this process"
            takes = q.dtype.itemsize == 2 and h % 8 == 0 and h <= 128
            return None if takes else f"does not take {q.dtype} heads of size {h}"
        from jaxmarl_llm.kernels.attention import tree_pallas  # loads Pallas, which takes as long as JAX

        if impl == "tpu" and t % 128:
            return f"does not take {t} tokens"
        return tree_pallas.refused(impl, h)

    return choose(
        impl,
        (q, k, v),
        portable=functools.partial(jax.nn.dot_product_attention, is_causal=True),
        pallas=lambda impl: functools.partial({"gpu": _as_tree, "tpu": _splash, "cudnn": _cudnn}[impl], interpret),
        refused=refused,
        pays=[impl for impl, least in PAYS.items() if t >= least],
        platforms={**PLATFORM, "cudnn": "cuda"},
    )


def _cudnn(interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _as_tree(interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jaxmarl_llm.kernels.attention import tree_pallas

    b, t, _, h = q.shape
    size = tree_pallas.block_size("gpu", t, q.dtype)
    return tree_pallas.attend("gpu", size, interpret, q * h**-0.5, k, v, jnp.full((b, t), t))


def splash_block(tokens: int) -> int:
    """Tokens of a block of the kernel for TPU. tokens: a multiple of 128."""
    return next(size for size in (512, 256, 128) if tokens % size == 0)


def _splash(interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    t, heads, h = q.shape[1:]
    size = splash_block(t)
    blocks = splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_kv_compute=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_kv_dkv_compute=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
    kernel = splash.make_splash_mha_single_device(
        splash.MultiHeadMask([splash.CausalMask((t, t))] * heads),
        block_sizes=blocks,
        interpret=interpret,
    )
    by_head = lambda x: jnp.swapaxes(x, 1, 2)
    return by_head(jax.vmap(kernel)(by_head(q * h**-0.5), by_head(k), by_head(v))).astype(q.dtype)
