"""Attention over ancestors, block by block and without scores in memory, forward and backward (Pallas).

For query i and key j with s_ij = q_i k_j (q already scaled), visible iff j <= i < end[j]:

    L_i = log sum_j exp(s_ij)      p_ij = exp(s_ij - L_i)      out_i = sum_j p_ij v_j
    D_i = dout_i out_i             dv_j = sum_i p_ij dout_i    ds_ij = p_ij (dout_i v_j - D_i)
                                   dq_i = sum_j ds_ij k_j      dk_j = sum_i ds_ij q_i

(FlashAttention-2, arXiv 2307.08691.) The forward pass keeps L in float32; the backward pass computes p again.

A block of queries visits a block of keys only if one of the keys has an ``end`` beyond the first query. Samples
therefore never visit the blocks of their siblings: of [prompt | G responses] remain the prompt and one response each.
The visited blocks depend on data: XLA makes lists of them, and a program walks its list. The gradients of keys and
values are summed over the query heads that share them, in the program that owns the keys.

This module is common to GPU (`tree_gpu`) and TPU (`tree_tpu`). The mathematics of a block is in `tree_tiles`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxmarl_llm.kernels.attention import tree_gpu, tree_tpu
from jaxmarl_llm.kernels.pallas_triton import lacking

FORMS = {"gpu": tree_gpu, "tpu": tree_tpu}

LARGEST = {"gpu": 128, "tpu": 256}  # head size


def refused(impl: str, h: int, block: int | None = None) -> str | None:
    """Say why ``impl`` has no kernel for these shapes, or return None where it has one.

    Args:
        impl: gpu or tpu.
        h: head size.
        block: tokens of a block, or None for `block_size`.
    """
    if why := lacking(impl):
        return why
    if h % 8 or h > LARGEST[impl]:
        return f"does not take heads of size {h}"
    fits = block is None or (block % 128 == 0 if impl == "tpu" else block >= 16 and block & (block - 1) == 0)
    return None if fits else f"does not take blocks of {block}"


def block_size(impl: str, t: int, dtype: Any) -> int:
    """Choose the tokens of a block. GPU: what registers hold. TPU: the largest with four blocks in a row.

    Args:
        impl: gpu or tpu.
        t: tokens of a row.
        dtype: of queries and keys.
    """
    if impl == "gpu":
        return 64 if jnp.dtype(dtype).itemsize == 2 else 16
    return next((size for size in (512, 256) if t >= 4 * size), 128)


def visits(
    end: Int[Array, "B T"], size: int, queries: int
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """List the blocks of keys that each block of queries sees, and the blocks of queries that see each block of keys.

    Args:
        end: index behind each token's subtree.
        size: tokens of a block.
        queries: number of queries, which are the last tokens.

    Returns:
        Two pairs (list [B n m], number of valid entries [B n]). Behind the valid entries the last one is repeated.
    """
    t = end.shape[1]
    n, m = pl.cdiv(queries, size), pl.cdiv(t, size)
    last = jnp.pad(end, ((0, 0), (0, m * size - t))).reshape(-1, 1, m, size).max(-1)
    first = t - queries + jnp.arange(n)[:, None] * size
    need = (jnp.arange(m) * size < first + size) & (last > first)

    def listed(need: jax.Array) -> tuple[jax.Array, jax.Array]:
        count = need.sum(-1, dtype=jnp.int32)
        order = jnp.argsort(~need, axis=-1, stable=True).astype(jnp.int32)
        at = jnp.minimum(jnp.arange(need.shape[-1]), jnp.maximum(count - 1, 0)[..., None])
        return jnp.take_along_axis(order, at, axis=-1), count

    return listed(need), listed(jnp.swapaxes(need, 1, 2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend(
    impl: str,
    size: int,
    interpret: bool,
    q: Float[Array, "B S Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    end: Int[Array, "B T"],
) -> Float[Array, "B S Q H"]:
    """Compute `tree_attention` by Pallas kernels.

    Args:
        impl: gpu or tpu.
        size: tokens of a block.
        interpret: run in Pallas' interpreter.
        q: scaled queries of the last S tokens.
        k: keys.
        v: values.
        end: index behind each token's subtree.
    """
    return _forward(impl, size, interpret, q, k, v, end)[0]


def _forward(
    impl: str, size: int, interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array
) -> tuple[jax.Array, tuple]:
    end = end.astype(jnp.int32)
    seen, _ = visits(end, size, q.shape[1])
    out, norm = FORMS[impl].forward(q, k, v, end, seen, size, interpret)
    return out, (q, k, v, end, out, norm)


def _backward(impl: str, size: int, interpret: bool, saved: tuple, do: jax.Array) -> tuple:
    q, k, v, end, out, norm = saved
    dot = jnp.einsum("bsqh,bsqh->bqs", do, out, preferred_element_type=jnp.float32)
    lists = visits(end, size, q.shape[1])
    return *FORMS[impl].backward((q, k, v, end, norm), do, dot, *lists, size, interpret), None


attend.defvjp(_forward, _backward)
