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


def visits(
    end: Int[Array, "B T"], size: int, queries: int
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """For each block of the last ``queries`` tokens the blocks of keys it sees, for each of those the former ones.

    Each as (list [B n m], how many of it count [B n]); behind them the last one is repeated.
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


def _gpu_forward(q: Any, k: Any, v: Any, end: Any, order: Any, count: Any, out: Any, norm: Any, *, size: int) -> None:
    tiles, heads = _Tiles(size, q, k), q.shape[2]
    b, head, i = pl.program_id(0) // heads, pl.program_id(0) % heads, pl.program_id(1)
    kv, own = head // tiles.share, tiles.load(q, b, head, i)

    def step(x: jax.Array, carry: Any) -> Any:
        j = order[b, i, x]
        seen = tiles.load(k, b, kv, j), tiles.load(v, b, kv, j), tiles.ends(end, b, j)
        return _fold(carry, own, *seen, tiles.first(j, i))

    row = jnp.zeros((1, size), jnp.float32)
    value, total = _finish(jax.lax.fori_loop(0, count[b, i], step, (row + NEG, row, tiles.zeros())))
    tiles.store(out, b, head, i, value)
    at, real = tiles.of(i, norm.shape[2])
    triton.store(norm.at[b, head, at], total[0], mask=real)


def _gpu_to_queries(
    q: Any, k: Any, v: Any, do: Any, norm: Any, dot: Any, end: Any, order: Any, count: Any, dq: Any, *, size: int
) -> None:
    tiles, heads = _Tiles(size, q, k), q.shape[2]
    b, head, i = pl.program_id(0) // heads, pl.program_id(0) % heads, pl.program_id(1)
    kv, own, pull = head // tiles.share, tiles.load(q, b, head, i), tiles.load(do, b, head, i)
    rows = tiles.row(norm, b, head, i), tiles.row(dot, b, head, i)

    def step(x: jax.Array, total: jax.Array) -> jax.Array:
        j = order[b, i, x]
        keys, values, ends = tiles.load(k, b, kv, j), tiles.load(v, b, kv, j), tiles.ends(end, b, j)
        _, ds = _pull(own, keys, values, pull, *rows, ends, tiles.first(j, i))
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
    tiles, kvs = _Tiles(size, q, k), k.shape[2]
    b, kv, j = pl.program_id(0) // kvs, pl.program_id(0) % kvs, pl.program_id(1)
    keys, values, ends = tiles.load(k, b, kv, j), tiles.load(v, b, kv, j), tiles.ends(end, b, j)

    def of_head(r: jax.Array, carry: Any) -> Any:
        head = kv * tiles.share + r

        def step(x: jax.Array, carry: Any) -> Any:
            i = order[b, j, x]
            own, pull = tiles.load(q, b, head, i), tiles.load(do, b, head, i)
            rows = tiles.row(norm, b, head, i), tiles.row(dot, b, head, i)
            p, ds = _pull(own, keys, values, pull, *rows, ends, tiles.first(j, i))
            return carry[0] + product(own, ds, (1, 1)), carry[1] + product(pull, p, (1, 1))

        return jax.lax.fori_loop(0, count[b, j], step, carry)

    to_keys, to_values = jax.lax.fori_loop(0, tiles.share, of_head, (tiles.zeros(), tiles.zeros()))
    tiles.store(dk, b, kv, j, to_keys)
    tiles.store(dv, b, kv, j, to_values)


def _triton(body: Callable[..., None], size: int, args: tuple, like: list, interpret: bool) -> list:
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


# ---------------------------------------------------------------------------------------------------- TPU (Mosaic)


def _tpu_forward(
    order: Any, count: Any, q: Any, k: Any, v: Any, end: Any, out: Any, norm: Any, top: Any, total: Any, *, before: int
) -> None:
    i, j, m, size = pl.program_id(2), pl.program_id(3), pl.num_programs(3), q.shape[3]
    row = pl.program_id(0) * pl.num_programs(2) + i

    @pl.when(j == 0)
    def start() -> None:
        top[...] = jnp.full(top.shape, NEG, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        out[...] = jnp.zeros(out.shape, jnp.float32)

    @pl.when(j < count[row])
    def more() -> None:
        first = order[row * m + j] * size, before + i * size
        carry = top[...], total[...], out[0, 0]
        top[...], total[...], out[0, 0] = _fold(carry, q[0, 0], k[0, 0], v[0, 0], end[0], first)

    @pl.when(j == m - 1)
    def finish() -> None:
        out[0, 0], norm[0, 0] = _finish((top[...], total[...], out[0, 0]))


def _tpu_to_queries(
    order: Any, count: Any, q: Any, k: Any, v: Any, do: Any, norm: Any, dot: Any, end: Any, dq: Any, *, before: int
) -> None:
    i, j, m, size = pl.program_id(2), pl.program_id(3), pl.num_programs(3), q.shape[3]
    row = pl.program_id(0) * pl.num_programs(2) + i

    @pl.when(j == 0)
    def start() -> None:
        dq[...] = jnp.zeros(dq.shape, jnp.float32)

    @pl.when(j < count[row])
    def more() -> None:
        first = order[row * m + j] * size, before + i * size
        _, ds = _pull(q[0, 0], k[0, 0], v[0, 0], do[0, 0], norm[0, 0], dot[0, 0], end[0], first)
        dq[0, 0] += product(k[0, 0], ds, (1, 0))


def _tpu_to_keys(
    order: Any,
    count: Any,
    q: Any,
    k: Any,
    v: Any,
    do: Any,
    norm: Any,
    dot: Any,
    end: Any,
    dk: Any,
    dv: Any,
    *,
    before: int,
) -> None:
    j, x, n, size = pl.program_id(2), pl.program_id(4), pl.num_programs(4), q.shape[3]
    row = pl.program_id(0) * pl.num_programs(2) + j

    @pl.when((x == 0) & (pl.program_id(3) == 0))
    def start() -> None:
        dk[...] = jnp.zeros(dk.shape, jnp.float32)
        dv[...] = jnp.zeros(dv.shape, jnp.float32)

    @pl.when(x < count[row])
    def more() -> None:
        first = j * size, before + order[row * n + x] * size
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
    """Blocks of arrays [B heads H T], [B heads 1 T] and [B T 1], by grid index and lists (``order`` [B n m], flat)."""

    def __init__(self, size: int, n: int, m: int, share: int) -> None:
        self.size, self.n, self.m, self.share = size, n, m, share

    def own(self, h: int) -> pl.BlockSpec:
        """The block of its head that a program owns."""
        return pl.BlockSpec((1, 1, h, self.size), lambda b, head, i, *_: (b, head, 0, i))

    def own_ends(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.size, 1), lambda b, head, i, *_: (b, i, 0))

    def listed(self, order: Any, b: Any, i: Any, x: Any) -> Any:
        return order[(b * self.n + i) * self.m + x]

    def keys(self, h: int) -> pl.BlockSpec:
        """A block that the program's queries see."""
        head_of = lambda head: jax.lax.div(head, self.share)
        at = lambda b, head, i, x, order, count: (b, head_of(head), 0, self.listed(order, b, i, x))
        return pl.BlockSpec((1, 1, h, self.size), at)

    def ends(self) -> pl.BlockSpec:
        at = lambda b, head, i, x, order, count: (b, self.listed(order, b, i, x), 0)
        return pl.BlockSpec((1, self.size, 1), at)

    def queries(self, h: int) -> pl.BlockSpec:
        """A block that sees the program's keys, of head r among those that share them."""
        at = lambda b, kv, i, r, x, order, count: (b, kv * self.share + r, 0, self.listed(order, b, i, x))
        return pl.BlockSpec((1, 1, h, self.size), at)


# ----------------------------------------------------------------------------------------------------- the function


def _lay(x: jax.Array, size: int) -> jax.Array:
    """[B T heads H] -> [B heads H T], T rounded up to whole blocks."""
    return _whole(jnp.transpose(x, (0, 2, 3, 1)), size)


def _whole(x: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])


def _unlay(x: jax.Array, t: int, dtype: Any) -> jax.Array:
    return jnp.transpose(x[..., :t].astype(dtype), (0, 3, 1, 2))


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
    """`tree_attention` of queries that are already scaled, those of the last S tokens, in blocks of ``size`` tokens."""
    return _forward(impl, size, interpret, q, k, v, end)[0]


def _forward(
    impl: str, size: int, interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array
) -> tuple[jax.Array, tuple]:
    (b, s, heads, h), (_, t, kvs, _), end = q.shape, k.shape, end.astype(jnp.int32)
    seen, _ = visits(end, size, s)
    if impl == "gpu":
        norm = jax.ShapeDtypeStruct((b, heads, s), jnp.float32)
        out, norm = _triton(_gpu_forward, size, (q, k, v, end, *seen), [q, norm], interpret)
        return out, (q, k, v, end, out, norm)
    n, m = pl.cdiv(s, size), pl.cdiv(t, size)
    specs = _Specs(size, n, m, heads // kvs)
    out, norm = _mosaic(
        functools.partial(_tpu_forward, before=t - s),
        (b, heads, n, m),
        seen,
        (*(_lay(x, size) for x in (q, k, v)), _whole(end, size)[..., None]),
        [specs.own(h), specs.keys(h), specs.keys(h), specs.ends()],
        [specs.own(h), specs.own(1)],
        [(b, heads, h, n * size), (b, heads, 1, n * size)],
        scratch=[mosaic.VMEM((1, size), jnp.float32)] * 2,
        interpret=interpret,
    )
    out = _unlay(out, s, q.dtype)
    return out, (q, k, v, end, out, norm[:, :, 0, :s])


def _backward(impl: str, size: int, interpret: bool, saved: tuple, do: jax.Array) -> tuple:
    q, k, v, end, out, norm = saved
    (b, s, heads, h), (_, t, kvs, _) = q.shape, k.shape
    seen, seers = visits(end, size, s)
    dot = jnp.einsum("bsqh,bsqh->bqs", do, out, preferred_element_type=jnp.float32)
    if impl == "gpu":
        given = q, k, v, do, norm, dot, end
        (dq,) = _triton(_gpu_to_queries, size, (*given, *seen), [q], interpret)
        dk, dv = _triton(_gpu_to_keys, size, (*given, *seers), [k, v], interpret)
        return dq, dk, dv, None
    n, m, share = pl.cdiv(s, size), pl.cdiv(t, size), heads // kvs
    rows = (_whole(x, size)[:, :, None] for x in (norm, dot))
    args = *(_lay(x, size) for x in (q, k, v, do)), *rows, _whole(end, size)[..., None]
    by_query, by_key = _Specs(size, n, m, share), _Specs(size, m, n, share)
    own, keys, queries = by_query.own, by_query.keys, by_key.queries
    (dq,) = _mosaic(
        functools.partial(_tpu_to_queries, before=t - s),
        (b, heads, n, m),
        seen,
        args,
        [own(h), keys(h), keys(h), own(h), own(1), own(1), by_query.ends()],
        [own(h)],
        [(b, heads, h, n * size)],
        interpret=interpret,
    )
    dk, dv = _mosaic(
        functools.partial(_tpu_to_keys, before=t - s),
        (b, kvs, m, share, n),
        seers,
        args,
        [queries(h), own(h), own(h), queries(h), queries(1), queries(1), by_key.own_ends()],
        [own(h), own(h)],
        [(b, kvs, h, m * size)] * 2,
        interpret=interpret,
    )
    return _unlay(dq, s, q.dtype), _unlay(dk, t, k.dtype), _unlay(dv, t, v.dtype), None


attend.defvjp(_forward, _backward)
