"""Softmax over blocks of 64 keys, inside a kernel for Pallas' Mosaic GPU backend.

Scores are [64 rows, 64 keys], and rows hold queries. ``carry`` are the running maximum [64], sum [64] and output
[64 H], in registers. ``H`` is 64 or 128.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxmarl_llm.kernels import pallas_mosaic_gpu
from jaxmarl_llm.kernels.attention.constants import NEG
from jaxmarl_llm.kernels.pallas_mosaic_gpu import DEEP, along, mosaic_gpu

SIZE = 64  # rows, and keys of a block
HEADS = (DEEP, 2 * DEEP)  # head sizes


def refused(h: int, interpret: bool, *arrays: Any) -> str | None:
    """Say why heads of size ``h`` have no kernel, or return None where they have one.

    Args:
        h: size of a head.
        interpret: whether Pallas' interpreter is asked for.
        arrays: queries, keys and values.
    """
    why = pallas_mosaic_gpu.lacking(interpret, *arrays)
    return why or (None if h in HEADS else f"does not take heads of size {h}")


def stages(h: int) -> int:
    """Blocks of keys and values that are in shared memory: 64 KiB. h: size of a head."""
    return 4 * DEEP // h


def empty(h: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The running maximum, sum and output before any key. h: size of a head."""
    layout = mosaic_gpu.Layout.WGMMA
    row = lambda fill: mosaic_gpu.layout_cast(jnp.full((SIZE,), fill, jnp.float32), layout.reduce(1))
    return row(NEG), row(0.0), mosaic_gpu.layout_cast(jnp.zeros((SIZE, h), jnp.float32), layout)


def scores(q: Any, k: Any) -> jax.Array:
    """Compute the scores of a block.

    Args:
        q: shared memory with the queries.
        k: shared memory with the keys.
    """
    return _product(q, mosaic_gpu.transpose_ref(k, (1, 0)), SIZE)


def fold(carry: Any, score: jax.Array, see: jax.Array, weights: Any, v: Any) -> Any:
    """Add a block of keys to the running sums.

    Args:
        carry: the running sums.
        score: scores of the block.
        see: which scores are visible.
        weights: shared memory for the weights of the block.
        v: shared memory with the values.
    """
    top, total, out = carry
    score = jnp.where(see, score, NEG)
    most = jnp.maximum(top, score.max(1))
    weight = jnp.where(see, jnp.exp(score - along(most, score.shape)), 0.0)
    keep = jnp.exp(top - most)
    weights[...] = weight.astype(weights.dtype)
    mosaic_gpu.commit_smem()
    out = out * along(keep, out.shape) + _product(weights, v, out.shape[1])
    return most, total * keep + weight.sum(1), out


def _product(a: Any, b: Any, wide: int) -> jax.Array:
    def compute(sum_: Any) -> jax.Array:
        mosaic_gpu.wgmma(sum_, a, b)
        return sum_[...]

    return pl.run_scoped(compute, mosaic_gpu.ACC((SIZE, wide), jnp.float32))
