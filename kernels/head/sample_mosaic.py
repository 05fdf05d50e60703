"""Maximum and sum of exponentials of every block of ids (Pallas' Mosaic GPU backend): see `sample_pallas`.

A program takes 64 rows and one block of ids. It adds products of 64 hidden units, whose tiles are copied `STAGES`
products ahead.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxmarl_llm.kernels import pallas_mosaic_gpu
from jaxmarl_llm.kernels.head.head import NEG, Head
from jaxmarl_llm.kernels.pallas_mosaic_gpu import DEEP, along, count, mosaic_gpu, tiles

TALL = 64  # rows of a product
STAGES = 4  # products whose tiles are in shared memory: 96 KiB with blocks of 128 ids

Stats = tuple[Float[Array, "blocks B"], Float[Array, "blocks B"]]


def refused(hidden: Float[Array, "*B D"], head: Head, block: int, interpret: bool) -> str | None:
    """Say why there is no kernel for this head, or return None where there is one.

    Args:
        hidden: hidden states.
        head: the linear map to logits.
        block: ids of a block.
        interpret: whether Pallas' interpreter is asked for.
    """
    if why := pallas_mosaic_gpu.lacking(interpret, hidden, head.weight):
        return why
    if head.dim % DEEP:
        return f"does not take hidden states of size {head.dim}"
    least = 8 if head.rows else DEEP
    return f"does not take {head.vocab} ids" if head.vocab % least or head.vocab < block else None


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def block_stats(hidden: Float[Array, "B D"], head: Head, block: int, temperature: float) -> Stats:
    """Compute maximum and sum of exponentials of every block of ids. A gradient raises NotImplementedError.

    Args:
        hidden: hidden states.
        head: the linear map to logits.
        block: ids of a block.
        temperature: divisor of the logits.
    """
    n, blocks, rows = len(hidden), pl.cdiv(head.vocab, block), pl.cdiv(len(hidden), TALL)
    body = functools.partial(
        _body,
        block=block,
        by_row=head.rows,
        used=head.vocab if head.used is None else head.used,
        temperature=temperature,
    )
    stats = jax.ShapeDtypeStruct((blocks, rows * TALL), jnp.float32)
    row = mosaic_gpu.SMEM((TALL,), jnp.float32)
    top, total = mosaic_gpu.kernel(
        body,
        out_type=(stats, stats),
        scratch_types=dict(
            x=tiles(STAGES, TALL, DEEP),
            y=tiles(STAGES, block, DEEP) if head.rows else tiles(STAGES, DEEP, block),
            most=row,
            sums=row,
            ready=mosaic_gpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        ),
        grid=(blocks, rows),
        grid_names=("ids", "rows"),
        kernel_name="head_block_stats",
    )(jnp.pad(hidden, ((0, rows * TALL - n), (0, 0))), head.weight)
    return top[:, :n], total[:, :n]


@block_stats.defjvp
def _no_gradient(block: int, temperature: float, primals: tuple, tangents: tuple) -> Any:
    raise NotImplementedError("impl 'mosaic' of head_sample has no gradient; xla does")


def _body(
    h: Any,
    w: Any,
    top: Any,
    total: Any,
    *,
    x: Any,
    y: Any,
    most: Any,
    sums: Any,
    ready: Any,
    block: int,
    by_row: bool,
    used: int,
    temperature: float,
) -> None:
    own, row = jax.lax.axis_index("ids"), jax.lax.axis_index("rows") * TALL
    first = jnp.minimum(own * block, w.shape[0 if by_row else 1] - block)
    products = h.shape[1] // DEEP

    def fetch(k: Any, slot: Any) -> None:
        units, ids = pl.ds(k * DEEP, DEEP), pl.ds(first, block)
        mosaic_gpu.copy_gmem_to_smem(h.at[pl.ds(row, TALL), units], x.at[slot], ready.at[slot])
        mosaic_gpu.copy_gmem_to_smem(w.at[(ids, units) if by_row else (units, ids)], y.at[slot], ready.at[slot])

    for k in range(min(STAGES, products)):
        fetch(k, k)

    def logits(sum_: Any) -> jax.Array:
        @pl.loop(0, products)
        def add(k: jax.Array) -> None:
            slot = jax.lax.rem(k, STAGES)
            mosaic_gpu.barrier_wait(ready.at[slot])
            part = y.at[slot]
            mosaic_gpu.wgmma(sum_, x.at[slot], mosaic_gpu.transpose_ref(part, (1, 0)) if by_row else part)
            mosaic_gpu.wgmma_wait(0)

            @pl.when(k + STAGES < products)
            def ahead() -> None:
                fetch(k + STAGES, slot)

        return sum_[...]

    shape = TALL, block
    z = pl.run_scoped(logits, mosaic_gpu.ACC(shape, jnp.float32)) / temperature
    ids = first + count(shape, 1)
    z = jnp.where((ids >= own * block) & (ids < used), z, NEG)
    largest = z.max(1)
    most[...] = largest
    sums[...] = jnp.exp(z - along(largest, shape)).sum(1)
    mosaic_gpu.commit_smem()
    here = own, pl.ds(row, TALL)
    mosaic_gpu.copy_smem_to_gmem(most, top.at[here])
    mosaic_gpu.copy_smem_to_gmem(sums, total.at[here])
    mosaic_gpu.wait_smem_to_gmem(0)
