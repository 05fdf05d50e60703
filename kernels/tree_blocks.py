"""Attention over ancestors, block by block and without scores in memory, forward and backward (Pallas).

For query i and key j with s_ij = q_i k_j (q already scaled), visible iff j <= i < end[j]:

    L_i = log sum_j exp(s_ij)      p_ij = exp(s_ij - L_i)      out_i = sum_j p_ij v_j
    D_i = dout_i out_i             dv_j = sum_i p_ij dout_i    ds_ij = p_ij (dout_i v_j - D_i)
                                   dq_i = sum_j ds_ij k_j      dk_j = sum_i ds_ij q_i

(FlashAttention-2, arXiv 2307.08691.) The forward pass keeps L, in float32; the backward pass forms p again. A block of
keys is visited by a block of queries only if one of its keys has an ``end`` beyond the first of them, so samples never
meet the blocks of their siblings: of [prompt | G responses] remain the prompt and one response each. Which blocks are
left is data: XLA makes lists of them, and a program goes through its list. The gradients of keys and values are summed
over the query heads that share them in the program that owns the keys.

GPU (Triton) and TPU (Mosaic) share the mathematics of a block. Tiles are [H tokens], so that the tokens lie along the
lanes of a TPU (none is empty at H = 64) and what there is one of per query is a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as mosaic
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxmarl_llm.kernels.group_attention import NEG
from jaxmarl_llm.kernels.group_blocks import product

LARGEST = {"gpu": 128, "tpu": 256}  # head size


def refused(impl: str, h: int, block: int | None = None) -> str | None:
    """Why ``impl`` has no form for heads of size ``h`` in blocks of ``block`` tokens; None where it has one."""
    if h % 8 or h > LARGEST[impl]:
        return f"does not take heads of size {h}"
    fits = block is None or (block % 128 == 0 if impl == "tpu" else block >= 16 and block & (block - 1) == 0)
    return None if fits else f"does not take blocks of {block}"


def block_size(impl: str, t: int, dtype: Any) -> int:
    """Tokens of a block: GPU, what registers hold; TPU, as many as leave four blocks in a row of ``t`` tokens."""
    if impl == "gpu":
        return 64 if jnp.dtype(dtype).itemsize == 2 else 16
    return next((size for size in (512, 256) if t >= 4 * size), 128)


def visits(end: Int[Array, "B T"], size: int) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """For each block of queries the blocks of keys it sees, and for each block of keys those of queries that see it.

    Each as (list [B n n], how many of it count [B n]); behind them the last one is repeated.
    """
    n = -(-end.shape[1] // size)
    last = jnp.pad(end, ((0, 0), (0, n * size - end.shape[1]))).reshape(-1, n, size).max(-1)
    i, j = jnp.arange(n)[:, None], jnp.arange(n)
    need = (j <= i) & (last[:, None] > i * size)

    def listed(need: jax.Array) -> tuple[jax.Array, jax.Array]:
        count = need.sum(-1, dtype=jnp.int32)
        order = jnp.argsort(~need, axis=-1, stable=True).astype(jnp.int32)
        return jnp.take_along_axis(order, jnp.minimum(j, jnp.maximum(count - 1, 0)[..., None]), axis=-1), count

    return listed(need), listed(jnp.swapaxes(need, 1, 2))


# ----------------------------------------------- a block of keys and one of queries: tiles [H tokens], ends [keys 1]


def _scores(q: jax.Array, k: jax.Array, end: jax.Array, first: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """Scores [keys queries], and which count."""
    shape = k.shape[1], q.shape[1]
    key = first[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    query = first[1] + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return product(k, q, (0, 0)), (key <= query) & (query < end)


def _fold(carry: Any, q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array, first: tuple[Any, Any]) -> Any:
    """The running maximum [1 queries], sum [1 queries] and output [H queries] with a block of keys more."""
    top, total, out = carry
    score, see = _scores(q, k, end, first)
    most = jnp.maximum(top, jnp.where(see, score, NEG).max(0, keepdims=True))
    weight, keep = jnp.where(see, jnp.exp(score - most), 0.0), jnp.exp(top - most)
    total = total * keep + weight.sum(0, keepdims=True)
    return most, total, out * keep + product(v, weight.astype(v.dtype), (1, 0))


def _finish(carry: Any) -> tuple[jax.Array, jax.Array]:
    """(output, L); 0 for queries that see nothing."""
    top, total, out = carry
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    return out / total, jnp.where(seen, top + jnp.log(total), 0.0)


def _pull(
    q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, norm: jax.Array, dot: jax.Array, end: jax.Array, first: Any
) -> tuple[jax.Array, jax.Array]:
    """p and ds [keys queries], in the dtype of the keys."""
    score, see = _scores(q, k, end, first)
    p = jnp.where(see, jnp.exp(score - norm), 0.0)
    ds = p * (product(v, do, (0, 0)) - dot)
    return p.astype(k.dtype), ds.astype(k.dtype)


# ---------------------------------------------------------------------------------------------------- GPU (Triton)


class _Tiles:
    """Loads and stores of tiles of arrays [B T heads H] and [B heads T], whose shapes need not fit blocks."""

    def __init__(self, size: int, t: int, h: int) -> None:
        self.size, self.t, self.deep = size, t, max(16, pl.next_power_of_2(h))
        self.unit = jnp.arange(self.deep) < h

    def of(self, block: jax.Array) -> tuple[Any, jax.Array]:
        return pl.ds(block * self.size, self.size), block * self.size + jnp.arange(self.size) < self.t

    def load(self, ref: Any, b: jax.Array, head: jax.Array, block: jax.Array) -> jax.Array:
        at, real = self.of(block)
        return triton.load(ref.at[b, at, head, pl.ds(0, self.deep)], mask=real[:, None] & self.unit, other=0).T

    def store(self, ref: Any, b: jax.Array, head: jax.Array, block: jax.Array, x: jax.Array) -> None:
        at, real = self.of(block)
        x = x.astype(ref.dtype).T
        triton.store(ref.at[b, at, head, pl.ds(0, self.deep)], x, mask=real[:, None] & self.unit)

    def row(self, ref: Any, b: jax.Array, head: jax.Array, block: jax.Array) -> jax.Array:
        at, real = self.of(block)
        return triton.load(ref.at[b, head, at], mask=real, other=0)[None]

    def ends(self, ref: Any, b: jax.Array, block: jax.Array) -> jax.Array:
        at, real = self.of(block)
        return triton.load(ref.at[b, at], mask=real, other=0)[:, None]

    def zeros(self) -> jax.Array:
        return jnp.zeros((self.deep, self.size), jnp.float32)


def _gpu_forward(q: Any, k: Any, v: Any, end: Any, order: Any, count: Any, out: Any, norm: Any, *, size: int) -> None:
    tiles, heads = _Tiles(size, q.shape[1], q.shape[3]), q.shape[2]
    b, head, i = pl.program_id(0) // heads, pl.program_id(0) % heads, pl.program_id(1)
    kv = head // (heads // k.shape[2])
    own = tiles.load(q, b, head, i)

    def step(x: jax.Array, carry: Any) -> Any:
        j = order[b, i, x]
        seen = tiles.load(k, b, kv, j), tiles.load(v, b, kv, j), tiles.ends(end, b, j)
        return _fold(carry, own, *seen, (j * size, i * size))

    row = jnp.zeros((1, size), jnp.float32)
    value, total = _finish(jax.lax.fori_loop(0, count[b, i], step, (row + NEG, row, tiles.zeros())))
    tiles.store(out, b, head, i, value)
    at, real = tiles.of(i)
    triton.store(norm.at[b, head, at], total[0], mask=real)


def _gpu_to_queries(
    q: Any, k: Any, v: Any, do: Any, norm: Any, dot: Any, end: Any, order: Any, count: Any, dq: Any, *, size: int
) -> None:
    tiles, heads = _Tiles(size, q.shape[1], q.shape[3]), q.shape[2]
    b, head, i = pl.program_id(0) // heads, pl.program_id(0) % heads, pl.program_id(1)
    kv = head // (heads // k.shape[2])
    own, pull = tiles.load(q, b, head, i), tiles.load(do, b, head, i)
    rows = tiles.row(norm, b, head, i), tiles.row(dot, b, head, i)

    def step(x: jax.Array, total: jax.Array) -> jax.Array:
        j = order[b, i, x]
        keys = tiles.load(k, b, kv, j)
        first = j * size, i * size
        _, ds = _pull(own, keys, tiles.load(v, b, kv, j), pull, *rows, tiles.ends(end, b, j), first)
        return total + product(keys, ds, (1, 0))

    tiles.store(dq, b, head, i, jax.lax.fori_loop(0, count[b, i], step, tiles.zeros()))


def _gpu_to_keys(
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
    tiles, heads, kvs = _Tiles(size, q.shape[1], q.shape[3]), q.shape[2], k.shape[2]
    b, kv, j = pl.program_id(0) // kvs, pl.program_id(0) % kvs, pl.program_id(1)
    keys, values, ends = tiles.load(k, b, kv, j), tiles.load(v, b, kv, j), tiles.ends(end, b, j)

    def of_head(r: jax.Array, carry: Any) -> Any:
        head = kv * (heads // kvs) + r

        def step(x: jax.Array, carry: Any) -> Any:
            i = order[b, j, x]
            own, pull = tiles.load(q, b, head, i), tiles.load(do, b, head, i)
            rows = tiles.row(norm, b, head, i), tiles.row(dot, b, head, i)
            p, ds = _pull(own, keys, values, pull, *rows, ends, (j * size, i * size))
            return carry[0] + product(own, ds, (1, 1)), carry[1] + product(pull, p, (1, 1))

        return jax.lax.fori_loop(0, count[b, j], step, carry)

    to_keys, to_values = jax.lax.fori_loop(0, heads // kvs, of_head, (tiles.zeros(), tiles.zeros()))
    tiles.store(dk, b, kv, j, to_keys)
    tiles.store(dv, b, kv, j, to_values)


def _triton(body: Callable[..., None], size: int, heads: int, args: tuple, like: list, interpret: bool) -> list:
    b, t, _, h = args[0].shape
    return pl.pallas_call(
        functools.partial(body, size=size),
        grid=(b * heads, pl.cdiv(t, size)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        compiler_params=triton.CompilerParams(num_warps=4 if h <= 64 else 8, num_stages=2),
        interpret=interpret,
        name="tree_attention",
    )(*args)


# ---------------------------------------------------------------------------------------------------- TPU (Mosaic)


def _tpu_forward(
    order: Any, count: Any, q: Any, k: Any, v: Any, end: Any, out: Any, norm: Any, top: Any, total: Any
) -> None:
    i, j, n, size = pl.program_id(2), pl.program_id(3), pl.num_programs(3), q.shape[3]
    row = pl.program_id(0) * n + i

    @pl.when(j == 0)
    def start() -> None:
        top[...] = jnp.full(top.shape, NEG, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        out[...] = jnp.zeros(out.shape, jnp.float32)

    @pl.when(j < count[row])
    def more() -> None:
        first = order[row * n + j] * size, i * size
        carry = top[...], total[...], out[0, 0]
        top[...], total[...], out[0, 0] = _fold(carry, q[0, 0], k[0, 0], v[0, 0], end[0], first)

    @pl.when(j == n - 1)
    def finish() -> None:
        out[0, 0], norm[0, 0] = _finish((top[...], total[...], out[0, 0]))


def _tpu_to_queries(
    order: Any, count: Any, q: Any, k: Any, v: Any, do: Any, norm: Any, dot: Any, end: Any, dq: Any
) -> None:
    i, j, n, size = pl.program_id(2), pl.program_id(3), pl.num_programs(3), q.shape[3]
    row = pl.program_id(0) * n + i

    @pl.when(j == 0)
    def start() -> None:
        dq[...] = jnp.zeros(dq.shape, jnp.float32)

    @pl.when(j < count[row])
    def more() -> None:
        first = order[row * n + j] * size, i * size
        _, ds = _pull(q[0, 0], k[0, 0], v[0, 0], do[0, 0], norm[0, 0], dot[0, 0], end[0], first)
        dq[0, 0] += product(k[0, 0], ds, (1, 0))


def _tpu_to_keys(
    order: Any, count: Any, q: Any, k: Any, v: Any, do: Any, norm: Any, dot: Any, end: Any, dk: Any, dv: Any
) -> None:
    j, x, n, size = pl.program_id(2), pl.program_id(4), pl.num_programs(4), q.shape[3]
    row = pl.program_id(0) * n + j

    @pl.when((x == 0) & (pl.program_id(3) == 0))
    def start() -> None:
        dk[...] = jnp.zeros(dk.shape, jnp.float32)
        dv[...] = jnp.zeros(dv.shape, jnp.float32)

    @pl.when(x < count[row])
    def more() -> None:
        first = j * size, order[row * n + x] * size
        p, ds = _pull(q[0, 0], k[0, 0], v[0, 0], do[0, 0], norm[0, 0], dot[0, 0], end[0], first)
        dk[0, 0] += product(q[0, 0], ds, (1, 1))
        dv[0, 0] += product(do[0, 0], p, (1, 1))


def _mosaic(
    body: Callable[..., None],
    grid: tuple,
    lists: tuple,
    args: tuple,
    specs: list,
    outs: list,
    shapes: list,
    **more: Any,
) -> list:
    semantics = ("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)
    return pl.pallas_call(
        body,
        grid_spec=mosaic.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=grid, in_specs=specs, out_specs=outs, scratch_shapes=more.pop("scratch", ())
        ),
        out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes],
        compiler_params=mosaic.CompilerParams(dimension_semantics=semantics),
        name="tree_attention",
        **more,
    )(*(x.reshape(-1) for x in lists), *args)


class _Specs:
    """Blocks of arrays [B heads H T], [B heads 1 T] and [B T 1], by grid index and list."""

    def __init__(self, size: int, n: int, share: int) -> None:
        self.size, self.n, self.share = size, n, share

    def own(self, h: int) -> pl.BlockSpec:
        """What a program owns: block i (or j) of its head."""
        return pl.BlockSpec((1, 1, h, self.size), lambda b, head, i, *_: (b, head, 0, i))

    def listed_keys(self, h: int) -> pl.BlockSpec:
        at = lambda b, head, i, j, order, count: (
            b,
            jax.lax.div(head, self.share),
            0,
            order[(b * self.n + i) * self.n + j],
        )
        return pl.BlockSpec((1, 1, h, self.size), at)

    def listed_ends(self) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, self.size, 1), lambda b, head, i, j, order, count: (b, order[(b * self.n + i) * self.n + j], 0)
        )

    def listed_queries(self, h: int) -> pl.BlockSpec:
        at = lambda b, kv, j, r, x, order, count: (b, kv * self.share + r, 0, order[(b * self.n + j) * self.n + x])
        return pl.BlockSpec((1, 1, h, self.size), at)

    def own_ends(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.size, 1), lambda b, head, j, *_: (b, j, 0))


# ----------------------------------------------------------------------------------------------------- the function


def _lay(x: jax.Array, size: int) -> jax.Array:
    """[B T heads H] -> [B heads H T], T rounded up to whole blocks."""
    return jnp.pad(jnp.transpose(x, (0, 2, 3, 1)), ((0, 0), (0, 0), (0, 0), (0, -x.shape[1] % size)))


def _unlay(x: jax.Array, t: int, dtype: Any) -> jax.Array:
    return jnp.transpose(x[..., :t].astype(dtype), (0, 3, 1, 2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend(
    impl: str,
    size: int,
    interpret: bool,
    q: Float[Array, "B T Q H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    end: Int[Array, "B T"],
) -> Float[Array, "B T Q H"]:
    """`tree_attention` of queries that are already scaled, in blocks of ``size`` tokens."""
    return _forward(impl, size, interpret, q, k, v, end)[0]


def _forward(
    impl: str, size: int, interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array
) -> tuple[jax.Array, tuple]:
    (b, t, heads, h), end = q.shape, end.astype(jnp.int32)
    lists, n = visits(end, size)[0], -(-t // size)
    if impl == "gpu":
        norm = jax.ShapeDtypeStruct((b, heads, t), jnp.float32)
        out, norm = _triton(_gpu_forward, size, heads, (q, k, v, end, *lists), [q, norm], interpret)
        return out, (q, k, v, end, out, norm)
    specs = _Specs(size, n, heads // k.shape[2])
    ends = jnp.pad(end, ((0, 0), (0, n * size - t)))[..., None]
    out, norm = _mosaic(
        _tpu_forward,
        (b, heads, n, n),
        lists,
        (*(_lay(x, size) for x in (q, k, v)), ends),
        [specs.own(h), specs.listed_keys(h), specs.listed_keys(h), specs.listed_ends()],
        [specs.own(h), specs.own(1)],
        [(b, heads, h, n * size), (b, heads, 1, n * size)],
        scratch=[mosaic.VMEM((1, size), jnp.float32)] * 2,
        interpret=interpret,
    )
    out = _unlay(out, t, q.dtype)
    return out, (q, k, v, end, out, norm[:, :, 0, :t])


def _backward(impl: str, size: int, interpret: bool, saved: tuple, do: jax.Array) -> tuple:
    q, k, v, end, out, norm = saved
    (b, t, heads, h), kvs = q.shape, k.shape[2]
    seen, seers = visits(end, size)
    n = -(-t // size)
    dot = jnp.einsum("btqh,btqh->bqt", do, out, preferred_element_type=jnp.float32)
    if impl == "gpu":
        given = q, k, v, do, norm, dot, end
        (dq,) = _triton(_gpu_to_queries, size, heads, (*given, *seen), [q], interpret)
        dk, dv = _triton(_gpu_to_keys, size, kvs, (*given, *seers), [k, v], interpret)
        return dq, dk, dv, None
    specs = _Specs(size, n, heads // kvs)
    to_blocks = ((0, 0), (0, 0), (0, n * size - t))
    rows = (jnp.pad(x, to_blocks)[:, :, None] for x in (norm, dot))
    args = *(_lay(x, size) for x in (q, k, v, do)), *rows, jnp.pad(end, to_blocks[1:])[..., None]
    own, keys, queries = specs.own, specs.listed_keys, specs.listed_queries
    (dq,) = _mosaic(
        _tpu_to_queries,
        (b, heads, n, n),
        seen,
        args,
        [own(h), keys(h), keys(h), own(h), own(1), own(1), specs.listed_ends()],
        [own(h)],
        [(b, heads, h, n * size)],
        interpret=interpret,
    )
    dk, dv = _mosaic(
        _tpu_to_keys,
        (b, kvs, n, heads // kvs, n),
        seers,
        args,
        [queries(h), own(h), own(h), queries(h), queries(1), queries(1), specs.own_ends()],
        [own(h), own(h)],
        [(b, kvs, h, n * size)] * 2,
        interpret=interpret,
    )
    return *(_unlay(x, t, q.dtype) for x in (dq, dk, dv)), None


attend.defvjp(_forward, _backward)
