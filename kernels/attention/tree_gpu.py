"""`tree_pallas` on GPU (Triton). A program walks the list of its block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxmarl_llm.kernels.attention.constants import NEG
from jaxmarl_llm.kernels.attention.group_decode_pallas import product
from jaxmarl_llm.kernels.attention.tree_tiles import Lists, finish, fold, pulled
from jaxmarl_llm.kernels.pallas_triton import triton


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array, seen: Lists, size: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Run the forward pass.

    Args:
        q: scaled queries [B S Q H], those of the last S tokens.
        k: keys [B T K H].
        v: values [B T K H].
        end: index behind each token's subtree [B T].
        seen: lists of the blocks of keys that each block of queries sees.
        size: tokens of a block.
        interpret: run in Pallas' interpreter.

    Returns:
        The output [B S Q H] and L [B Q S], the log-sum-exp of each query's scores.
    """
    norm = jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), jnp.float32)
    out, norm = _call(_forward, size, (q, k, v, end, *seen), [q, norm], interpret)
    return out, norm


def backward(
    saved: tuple, do: jax.Array, dot: jax.Array, seen: Lists, seers: Lists, size: int, interpret: bool
) -> tuple:
    """Run the backward pass.

    Args:
        saved: (q, k, v, end, L), arguments and result of the forward pass.
        do: cotangent of the output [B S Q H].
        dot: D, the inner product of output and cotangent [B Q S].
        seen: lists of the blocks of keys that each block of queries sees.
        seers: lists of the blocks of queries that see each block of keys.
        size: tokens of a block.
        interpret: run in Pallas' interpreter.

    Returns:
        Gradients of q, k and v.
    """
    q, k, v, end, norm = saved
    given = q, k, v, do, norm, dot, end
    (dq,) = _call(_to_queries, size, (*given, *seen), [q], interpret)
    dk, dv = _call(_to_keys, size, (*given, *seers), [k, v], interpret)
    return dq, dk, dv


class Tiles:
    """Loads and stores of tiles of arrays [B T heads H] and [B heads T], whose shapes need not fit blocks."""

    def __init__(self, size: int, q: Any, k: Any) -> None:
        self.size, self.h, self.deep = size, q.shape[3], max(16, pl.next_power_of_2(q.shape[3]))
        self.before = k.shape[1] - q.shape[1]  # tokens that are no queries
        self.share = q.shape[2] // k.shape[2]

    def first(self, keys: jax.Array, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first tokens of two blocks."""
        return keys * self.size, self.before + queries * self.size

    def of(self, block: jax.Array, t: int) -> tuple[Any, jax.Array]:
        return pl.ds(block * self.size, self.size), block * self.size + jnp.arange(self.size) < t

    def tile(self, ref: Any, b: jax.Array, head: jax.Array, block: jax.Array) -> tuple[Any, jax.Array]:
        at, real = self.of(block, ref.shape[1])
        return ref.at[b, at, head, pl.ds(0, self.deep)], real[:, None] & (jnp.arange(self.deep) < self.h)

    def load(self, ref: Any, b: jax.Array, head: jax.Array, block: jax.Array) -> jax.Array:
        at, real = self.tile(ref, b, head, block)
        return triton.load(at, mask=real, other=0).T

    def store(self, ref: Any, b: jax.Array, head: jax.Array, block: jax.Array, x: jax.Array) -> None:
        at, real = self.tile(ref, b, head, block)
        triton.store(at, x.astype(ref.dtype).T, mask=real)

    def row(self, ref: Any, b: jax.Array, head: jax.Array, block: jax.Array) -> jax.Array:
        at, real = self.of(block, ref.shape[2])
        return triton.load(ref.at[b, head, at], mask=real, other=0)[None]

    def ends(self, ref: Any, b: jax.Array, block: jax.Array) -> jax.Array:
        at, real = self.of(block, ref.shape[1])
        return triton.load(ref.at[b, at], mask=real, other=0)[:, None]

    def zeros(self) -> jax.Array:
        return jnp.zeros((self.deep, self.size), jnp.float32)


def _forward(q: Any, k: Any, v: Any, end: Any, order: Any, count: Any, out: Any, norm: Any, *, size: int) -> None:
    tiles, heads = Tiles(size, q, k), q.shape[2]
    b, head, i = pl.program_id(0) // heads, pl.program_id(0) % heads, pl.program_id(1)
    kv, own = head // tiles.share, tiles.load(q, b, head, i)

    def step(x: jax.Array, carry: Any) -> Any:
        j = order[b, i, x]
        seen = tiles.load(k, b, kv, j), tiles.load(v, b, kv, j), tiles.ends(end, b, j)
        return fold(carry, own, *seen, tiles.first(j, i))

    row = jnp.zeros((1, size), jnp.float32)
    value, total = finish(jax.lax.fori_loop(0, count[b, i], step, (row + NEG, row, tiles.zeros())))
    tiles.store(out, b, head, i, value)
    at, real = tiles.of(i, norm.shape[2])
    triton.store(norm.at[b, head, at], total[0], mask=real)


def _to_queries(
    q: Any, k: Any, v: Any, do: Any, norm: Any, dot: Any, end: Any, order: Any, count: Any, dq: Any, *, size: int
) -> None:
    tiles, heads = Tiles(size, q, k), q.shape[2]
    b, head, i = pl.program_id(0) // heads, pl.program_id(0) % heads, pl.program_id(1)
    kv, own, pull = head // tiles.share, tiles.load(q, b, head, i), tiles.load(do, b, head, i)
    rows = tiles.row(norm, b, head, i), tiles.row(dot, b, head, i)

    def step(x: jax.Array, total: jax.Array) -> jax.Array:
        j = order[b, i, x]
        keys, values, ends = tiles.load(k, b, kv, j), tiles.load(v, b, kv, j), tiles.ends(end, b, j)
        _, ds = pulled(own, keys, values, pull, *rows, ends, tiles.first(j, i))
        return total + product(keys, ds, (1, 0))

    tiles.store(dq, b, head, i, jax.lax.fori_loop(0, count[b, i], step, tiles.zeros()))


def _to_keys(
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    norm: Any,
    dot: Any,
    end: Any,
    order: Any,
    count: Any,
    dk: Any,
    dv: Any,
    *,
    size: int,
) -> None:
    tiles, kvs = Tiles(size, q, k), k.shape[2]
    b, kv, j = pl.program_id(0) // kvs, pl.program_id(0) % kvs, pl.program_id(1)
    keys, values, ends = tiles.load(k, b, kv, j), tiles.load(v, b, kv, j), tiles.ends(end, b, j)

    def of_head(r: jax.Array, carry: Any) -> Any:
        head = kv * tiles.share + r

        def step(x: jax.Array, carry: Any) -> Any:
            i = order[b, j, x]
            own, pull = tiles.load(q, b, head, i), tiles.load(do, b, head, i)
            rows = tiles.row(norm, b, head, i), tiles.row(dot, b, head, i)
            p, ds = pulled(own, keys, values, pull, *rows, ends, tiles.first(j, i))
            return carry[0] + product(own, ds, (1, 1)), carry[1] + product(pull, p, (1, 1))

        return jax.lax.fori_loop(0, count[b, j], step, carry)

    to_keys, to_values = jax.lax.fori_loop(0, tiles.share, of_head, (tiles.zeros(), tiles.zeros()))
    tiles.store(dk, b, kv, j, to_keys)
    tiles.store(dv, b, kv, j, to_values)


def _call(body: Callable[..., None], size: int, args: tuple, like: list, interpret: bool) -> list:
    """A program for each block of each head of the first array of ``like``."""
    b, t, heads, h = like[0].shape
    return pl.pallas_call(
        functools.partial(body, size=size),
        grid=(b * heads, pl.cdiv(t, size)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        compiler_params=triton.CompilerParams(num_warps=4 if h <= 64 else 8, num_stages=2),
        interpret=interpret,
        name="tree_attention",
    )(*args)
