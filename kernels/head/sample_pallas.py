"""Maximum and sum of exponentials of every block of ids, from hidden states, without logits in memory (Pallas).

For block k of 128 ids and row b, with z = h W / temperature:

    top[k, b] = max_j z_j        total[k, b] = sum_j exp(z_j - top[k, b])        over j in the block

Each program computes the logits of its ids for some rows in registers or on-chip memory. It writes two numbers per
block and row: 1/64 of the logits' size. There is one body for GPU (Triton) and one for TPU (Mosaic); the logits of
padding ids are -1e30. The form for Pallas' Mosaic GPU backend is in `sample_mosaic`. Compiler parameters are always
given, because the default backend of Pallas on GPU differs between releases of JAX.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as mosaic
from jaxtyping import Array, Float

from jaxmarl_llm.kernels.head.head import NEG, Head
from jaxmarl_llm.kernels.pallas_triton import lacking, triton

BLOCK = 128
DEPTH = 64  # GPU: hidden units of one partial product
ON_CHIP = 4 << 20  # TPU: bytes of a tile of the weight, two of which are in VMEM

Stats = tuple[Float[Array, "blocks B"], Float[Array, "blocks B"]]


def takes(head: Head, impl: str) -> bool:
    """Whether a platform has a kernel for this head: on TPU a block of ids must fit in on-chip memory.

    Args:
        head: the linear map to logits.
        impl: gpu or tpu.
    """
    return lacking(impl) is None if impl == "gpu" else BLOCK * head.dim * head.weight.dtype.itemsize <= ON_CHIP


def block_stats(
    hidden: Float[Array, "B D"], head: Head, *, temperature: float, impl: str, interpret: bool = False
) -> Stats:
    """Compute maximum and sum of exponentials of every block of `BLOCK` ids.

    Args:
        hidden: hidden states.
        head: the linear map to logits.
        temperature: divisor of the logits.
        impl: gpu, tpu or mosaic.
        interpret: run in Pallas' interpreter; not for mosaic.
    """
    if impl == "mosaic":
        from jaxmarl_llm.kernels.head import sample_mosaic  # loads a backend that other forms do without

        return sample_mosaic.block_stats(hidden, head, BLOCK, temperature)
    form = {"gpu": _triton, "tpu": _mosaic}[impl]
    used = head.vocab if head.used is None else head.used
    return form(hidden, head, used, temperature, interpret)


def _triton_body(
    h: Any, w: Any, top: Any, total: Any, *, head: tuple[int, int, bool], used: int, temperature: float, tall: int
) -> None:
    vocab, dim, by_row = head
    first, row = pl.program_id(0) * BLOCK, pl.program_id(1) * tall
    ids, rows = first + jnp.arange(BLOCK), row + jnp.arange(tall)
    is_id, is_row = ids < vocab, rows < h.shape[0]

    def add(k: jax.Array, z: jax.Array) -> jax.Array:
        units, part = k * DEPTH + jnp.arange(DEPTH), pl.ds(k * DEPTH, DEPTH)
        unit = units < dim
        x = triton.load(h.at[pl.ds(row, tall), part], mask=is_row[:, None] & unit, other=0)
        if by_row:
            y = triton.load(w.at[pl.ds(first, BLOCK), part], mask=is_id[:, None] & unit, other=0).T
        else:
            y = triton.load(w.at[part, pl.ds(first, BLOCK)], mask=unit[:, None] & is_id, other=0)
        return z + triton.dot(x, y, allow_tf32=False)

    z = jax.lax.fori_loop(0, pl.cdiv(dim, DEPTH), add, jnp.zeros((tall, BLOCK), jnp.float32)) / temperature
    z = jnp.where(ids < used, z, NEG)
    most = z.max(1)
    out = pl.program_id(0), pl.ds(row, tall)
    triton.store(top.at[out], most, mask=is_row)
    triton.store(total.at[out], jnp.exp(z - most[:, None]).sum(1), mask=is_row)


def _triton(hidden: jax.Array, head: Head, used: int, temperature: float, interpret: bool) -> Stats:
    n, blocks = len(hidden), pl.cdiv(head.vocab, BLOCK)
    tall = min(64, max(16, pl.next_power_of_2(n)))  # a product has at least 16 rows
    body = functools.partial(
        _triton_body, head=(head.vocab, head.dim, head.rows), used=used, temperature=temperature, tall=tall
    )
    top, total = pl.pallas_call(
        body,
        grid=(blocks, pl.cdiv(n, tall)),
        out_shape=[jax.ShapeDtypeStruct((blocks, n), jnp.float32)] * 2,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="head_block_stats",
    )(hidden, head.weight)
    return top, total


def _mosaic_body(h: Any, w: Any, top: Any, total: Any, *, by_row: bool, used: int, temperature: float) -> None:
    tile = w.shape[0 if by_row else 1]
    over = (((1 if by_row else 0,), (1,)), ((), ()))
    z = jax.lax.dot_general(w[...], h[...], over, preferred_element_type=jnp.float32) / temperature
    ids = pl.program_id(0) * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
    z = jnp.where(ids < used, z, NEG).reshape(tile // BLOCK, BLOCK, -1)
    most = z.max(1)
    top[0] = most
    total[0] = jnp.exp(z - most[:, None]).sum(1)


def _mosaic(hidden: jax.Array, head: Head, used: int, temperature: float, interpret: bool) -> Stats:
    n, dim = hidden.shape
    per_block = BLOCK * dim * head.weight.dtype.itemsize
    tile = BLOCK * next(k for k in (4, 2, 1) if k == 1 or k * per_block <= ON_CHIP)
    tiles, tall = pl.cdiv(head.vocab, tile), min(n, 256)
    of_weight = pl.BlockSpec((tile, dim), lambda i, j: (i, 0)) if head.rows else None
    of_weight = of_weight or pl.BlockSpec((dim, tile), lambda i, j: (0, i))
    top, total = pl.pallas_call(
        functools.partial(_mosaic_body, by_row=head.rows, used=used, temperature=temperature),
        grid=(tiles, pl.cdiv(n, tall)),
        in_specs=[pl.BlockSpec((tall, dim), lambda i, j: (j, 0)), of_weight],
        out_specs=[pl.BlockSpec((1, tile // BLOCK, tall), lambda i, j: (i, 0, j))] * 2,
        out_shape=[jax.ShapeDtypeStruct((tiles, tile // BLOCK, n), jnp.float32)] * 2,
        compiler_params=mosaic.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="head_block_stats",
    )(hidden, head.weight)
    return top.reshape(-1, n), total.reshape(-1, n)
