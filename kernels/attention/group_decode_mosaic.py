"""Parts of a softmax over the first keys of a prefix (Pallas' Mosaic GPU backend): see `group_decode_pallas`.

A program takes one key head, 64 rows and a part of the keys. It walks blocks of 64 keys, which are copied some blocks
ahead. Own keys have few rows for a product of 64, so XLA computes their part, as on TPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxmarl_llm.kernels.attention.mosaic_tiles import SIZE, empty, fold, scores, stages
from jaxmarl_llm.kernels.attention.mosaic_tiles import refused as refused_heads
from jaxmarl_llm.kernels.pallas_mosaic_gpu import count, mosaic_gpu, tiles

PART = 256  # least number of keys of a part
PROGRAMS = 512  # number of programs that keeps a large GPU busy

Parts = tuple[Float[Array, "B J K M"], Float[Array, "B J K M"], Float[Array, "B J K M H"]]


def refused(q: Float[Array, "N G 1 Q H"], k: Float[Array, "N P K H"], interpret: bool) -> str | None:
    """Say why there is no kernel for these shapes, or return None where there is one.

    Args:
        q: query of each sample.
        k: keys of the shared prefix.
        interpret: whether Pallas' interpreter is asked for.
    """
    keys = k.shape[1]
    why = refused_heads(q.shape[-1], interpret, q, k)
    return why or (f"does not take a prefix of {keys} keys" if keys % 8 or keys < SIZE else None)


def parts(
    q: Float[Array, "B K M H"], k: Float[Array, "B L K H"], v: Float[Array, "B L K H"], length: Int[Array, " B"]
) -> Parts:
    """Compute largest score, sum of exponentials and weighted values over parts J of the first keys.

    Args:
        q: scaled query rows M of each key head.
        k: keys of the cache.
        v: values of the cache.
        length: number of keys to read of each row, at most L.
    """
    (b, kv, m, h), keys = q.shape, k.shape[1]
    rows = pl.cdiv(m, SIZE)
    few = max(1, min(pl.cdiv(keys, PART), PROGRAMS // (b * kv * rows)))
    part = pl.cdiv(pl.cdiv(keys, few), SIZE) * SIZE
    many, ahead = pl.cdiv(keys, part), stages(h)
    shape = lambda *rest: jax.ShapeDtypeStruct((b, many, kv, rows * SIZE, *rest), jnp.float32)
    row = mosaic_gpu.SMEM((SIZE,), jnp.float32)
    found = mosaic_gpu.kernel(
        functools.partial(_body, part=part),
        out_type=(shape(), shape(), shape(h)),
        scratch_types=dict(
            x=tiles(SIZE, h),
            ks=tiles(ahead, SIZE, h),
            vs=tiles(ahead, SIZE, h),
            weights=tiles(SIZE, SIZE),
            most=row,
            sums=row,
            values=mosaic_gpu.SMEM((SIZE, h), jnp.float32),
            asked=mosaic_gpu.Barrier(),
            ready=mosaic_gpu.Barrier(num_arrivals=2, num_barriers=ahead),
        ),
        grid=(b * kv, many, rows),
        grid_names=("heads", "parts", "rows"),
        kernel_name="group_decode",
    )(jnp.pad(q, ((0, 0), (0, 0), (0, rows * SIZE - m), (0, 0))), k, v, length)
    top, total, out = (x[:, :, :, :m] for x in found)
    return top, total, out


def _body(
    q: Any,
    k: Any,
    v: Any,
    length: Any,
    top: Any,
    total: Any,
    out: Any,
    *,
    x: Any,
    ks: Any,
    vs: Any,
    weights: Any,
    most: Any,
    sums: Any,
    values: Any,
    asked: Any,
    ready: Any,
    part: int,
) -> None:
    (keys, kv, h), ahead = k.shape[1:], ks.shape[0]
    b, head = jax.lax.div(jax.lax.axis_index("heads"), kv), jax.lax.rem(jax.lax.axis_index("heads"), kv)
    j, rows = jax.lax.axis_index("parts"), pl.ds(jax.lax.axis_index("rows") * SIZE, SIZE)
    begin = j * part
    last = jnp.minimum(begin + part, length[b])
    blocks = jax.lax.div(jnp.maximum(last - begin, 0) + SIZE - 1, SIZE)
    first = lambda i: jnp.minimum(begin + i * SIZE, keys - SIZE)

    def fetch(i: Any, slot: Any) -> None:
        at = b, pl.ds(first(i), SIZE), head
        mosaic_gpu.copy_gmem_to_smem(k.at[at], ks.at[slot], ready.at[slot])
        mosaic_gpu.copy_gmem_to_smem(v.at[at], vs.at[slot], ready.at[slot])

    mosaic_gpu.copy_gmem_to_smem(q.at[b, head, rows], x, asked)
    for i in range(ahead):
        pl.when(i < blocks)(functools.partial(fetch, i, i))
    mosaic_gpu.barrier_wait(asked)

    def step(i: jax.Array, carry: Any) -> Any:
        slot = jax.lax.rem(i, ahead)
        mosaic_gpu.barrier_wait(ready.at[slot])
        block_v = vs.at[slot]

        @pl.when(begin + i * SIZE + SIZE > last)
        def known() -> None:
            # A weight of 0 is not enough behind the last key: memory there may hold NaN.
            real = first(i) + count((SIZE, h), 0) < last
            block_v[...] = jnp.where(real, block_v[...], jnp.zeros((), block_v.dtype))

        key = first(i) + count((SIZE, SIZE), 1)
        see = (key >= begin + i * SIZE) & (key < last)
        carry = fold(carry, scores(x, ks.at[slot]), see, weights, block_v)

        @pl.when(i + ahead < blocks)
        def more() -> None:
            fetch(i + ahead, slot)

        return carry

    most[...], sums[...], values[...] = jax.lax.fori_loop(0, blocks, step, empty(h))
    mosaic_gpu.commit_smem()
    here = b, j, head, rows
    for given, to in ((most, top), (sums, total), (values, out)):
        mosaic_gpu.copy_smem_to_gmem(given, to.at[here])
    mosaic_gpu.wait_smem_to_gmem(0)
