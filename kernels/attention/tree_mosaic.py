"""Attention over ancestors (Pallas' Mosaic GPU backend), forward: see `tree_pallas`.

A program takes one head and 64 queries. It walks the list of blocks of 64 keys that these queries see, which are copied
some blocks ahead. Rows are padded to whole blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxmarl_llm.kernels.attention import tree_pallas
from jaxmarl_llm.kernels.attention.mosaic_tiles import SIZE, empty, fold, scores, stages
from jaxmarl_llm.kernels.attention.mosaic_tiles import refused as refused_heads
from jaxmarl_llm.kernels.pallas_mosaic_gpu import along, count, mosaic_gpu, tiles


def refused(q: Float[Array, "B S Q H"], k: Float[Array, "B T K H"], block: int | None, interpret: bool) -> str | None:
    """Say why there is no kernel for these shapes, or return None where there is one.

    Args:
        q: queries.
        k: keys.
        block: tokens of a block, or None for 64.
        interpret: whether Pallas' interpreter is asked for.
    """
    why = refused_heads(q.shape[-1], interpret, q, k)
    return why or (None if block in (None, SIZE) else f"does not take blocks of {block}")


def attend(
    q: Float[Array, "B S Q H"], k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], end: Int[Array, "B T"]
) -> Float[Array, "B S Q H"]:
    """Compute `tree_attention`. There is no backward pass.

    Args:
        q: scaled queries of the last S tokens.
        k: keys.
        v: values.
        end: index behind each token's subtree.
    """
    (b, s, heads, h), t = q.shape, k.shape[1]
    (order, many), _ = tree_pallas.visits(end, SIZE, s)
    whole = lambda x: jnp.pad(x, ((0, 0), (0, -x.shape[1] % SIZE), *((0, 0),) * (x.ndim - 2)))
    given, ahead = [whole(x) for x in (q, k, v)], stages(h)
    ends = whole(end.astype(jnp.int32)).reshape(b, -1, SIZE)
    out = mosaic_gpu.kernel(
        functools.partial(_body, before=t - s),
        out_type=jax.ShapeDtypeStruct(given[0].shape, q.dtype),
        scratch_types=dict(
            x=tiles(SIZE, h),
            ks=tiles(ahead, SIZE, h),
            vs=tiles(ahead, SIZE, h),
            until=mosaic_gpu.SMEM((ahead, SIZE), jnp.int32),
            weights=tiles(SIZE, SIZE),
            asked=mosaic_gpu.Barrier(),
            ready=mosaic_gpu.Barrier(num_arrivals=3, num_barriers=ahead),
        ),
        grid=(b, heads, given[0].shape[1] // SIZE),
        grid_names=("rows", "heads", "blocks"),
        kernel_name="tree_attention",
    )(*given, ends, order, many)
    return out[:, :s]


def _body(
    q: Any,
    k: Any,
    v: Any,
    ends: Any,
    order: Any,
    many: Any,
    out: Any,
    *,
    x: Any,
    ks: Any,
    vs: Any,
    until: Any,
    weights: Any,
    asked: Any,
    ready: Any,
    before: int,
) -> None:
    ahead, (_, h) = ks.shape[0], x.shape
    b, head, i = (jax.lax.axis_index(name) for name in ("rows", "heads", "blocks"))
    kv = jax.lax.div(head, q.shape[2] // k.shape[2])
    blocks, mine = many[b, i], (b, pl.ds(i * SIZE, SIZE), head)

    def fetch(n: Any, slot: Any) -> None:
        j = order[b, i, n]
        at = b, pl.ds(j * SIZE, SIZE), kv
        mosaic_gpu.copy_gmem_to_smem(k.at[at], ks.at[slot], ready.at[slot])
        mosaic_gpu.copy_gmem_to_smem(v.at[at], vs.at[slot], ready.at[slot])
        mosaic_gpu.copy_gmem_to_smem(ends.at[b, j], until.at[slot], ready.at[slot])

    mosaic_gpu.copy_gmem_to_smem(q.at[mine], x, asked)
    for n in range(ahead):
        pl.when(n < blocks)(functools.partial(fetch, n, n))
    mosaic_gpu.barrier_wait(asked)
    shape = SIZE, SIZE
    query = before + i * SIZE + count(shape, 0)
    layout = mosaic_gpu.Layout.WGMMA

    def step(n: jax.Array, carry: Any) -> Any:
        slot = jax.lax.rem(n, ahead)
        mosaic_gpu.barrier_wait(ready.at[slot])
        last = mosaic_gpu.layout_cast(until[slot], layout.reduce(0))
        last = mosaic_gpu.layout_cast(jax.lax.broadcast_in_dim(last, shape, [1]), layout)
        see = (order[b, i, n] * SIZE + count(shape, 1) <= query) & (query < last)
        carry = fold(carry, scores(x, ks.at[slot]), see, weights, vs.at[slot])

        @pl.when(n + ahead < blocks)
        def more() -> None:
            fetch(n + ahead, slot)

        return carry

    _, total, value = jax.lax.fori_loop(0, blocks, step, empty(h))
    total = jnp.where(total > 0, total, 1.0)  # queries that see no key give 0
    x[...] = (value / along(total, (SIZE, h))).astype(x.dtype)
    mosaic_gpu.commit_smem()
    mosaic_gpu.copy_smem_to_gmem(x, out.at[mine])
    mosaic_gpu.wait_smem_to_gmem(0)
