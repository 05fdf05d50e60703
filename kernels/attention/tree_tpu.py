"""`tree_pallas` on TPU (Mosaic). The last grid axis walks the list of a block; running sums stay in on-chip memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as mosaic

from jaxmarl_llm.kernels.attention.constants import NEG
from jaxmarl_llm.kernels.attention.group_decode_pallas import product
from jaxmarl_llm.kernels.attention.tree_tiles import Lists, finish, fold, pulled


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array, seen: Lists, size: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Run the forward pass. Arguments and results are those of `tree_gpu.forward`."""
    (b, s, heads, h), (_, t, kvs, _) = q.shape, k.shape
    n, m = pl.cdiv(s, size), pl.cdiv(t, size)
    specs = Specs(size, n, m, heads // kvs)
    out, norm = _call(
        functools.partial(_forward, before=t - s),
        (b, heads, n, m),
        seen,
        (*(_lay(x, size) for x in (q, k, v)), _whole(end, size)[..., None]),
        [specs.own(h), specs.keys(h), specs.keys(h), specs.ends()],
        [specs.own(h), specs.own(1)],
        [(b, heads, h, n * size), (b, heads, 1, n * size)],
        scratch=[mosaic.VMEM((1, size), jnp.float32)] * 2,
        interpret=interpret,
    )
    return _unlay(out, s, q.dtype), norm[:, :, 0, :s]


def backward(
    saved: tuple, do: jax.Array, dot: jax.Array, seen: Lists, seers: Lists, size: int, interpret: bool
) -> tuple:
    """Run the backward pass. Arguments and results are those of `tree_gpu.backward`."""
    q, k, v, end, norm = saved
    (b, s, heads, h), (_, t, kvs, _) = q.shape, k.shape
    n, m, share = pl.cdiv(s, size), pl.cdiv(t, size), heads // kvs
    rows = (_whole(x, size)[:, :, None] for x in (norm, dot))
    args = *(_lay(x, size) for x in (q, k, v, do)), *rows, _whole(end, size)[..., None]
    by_query, by_key = Specs(size, n, m, share), Specs(size, m, n, share)
    own, keys, queries = by_query.own, by_query.keys, by_key.queries
    (dq,) = _call(
        functools.partial(_to_queries, before=t - s),
        (b, heads, n, m),
        seen,
        args,
        [own(h), keys(h), keys(h), own(h), own(1), own(1), by_query.ends()],
        [own(h)],
        [(b, heads, h, n * size)],
        interpret=interpret,
    )
    dk, dv = _call(
        functools.partial(_to_keys, before=t - s),
        (b, kvs, m, share, n),
        seers,
        args,
        [queries(h), own(h), own(h), queries(h), queries(1), queries(1), by_key.own_ends()],
        [own(h), own(h)],
        [(b, kvs, h, m * size)] * 2,
        interpret=interpret,
    )
    return _unlay(dq, s, q.dtype), _unlay(dk, t, k.dtype), _unlay(dv, t, v.dtype)


def _lay(x: jax.Array, size: int) -> jax.Array:
    """Transpose [B T heads H] to [B heads H T], with T padded to whole blocks."""
    return _whole(jnp.transpose(x, (0, 2, 3, 1)), size)


def _whole(x: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])


def _unlay(x: jax.Array, t: int, dtype: Any) -> jax.Array:
    return jnp.transpose(x[..., :t].astype(dtype), (0, 3, 1, 2))


def _forward(
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
        top[...], total[...], out[0, 0] = fold(carry, q[0, 0], k[0, 0], v[0, 0], end[0], first)

    @pl.when(j == m - 1)
    def last() -> None:
        out[0, 0], norm[0, 0] = finish((top[...], total[...], out[0, 0]))


def _to_queries(
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
        _, ds = pulled(q[0, 0], k[0, 0], v[0, 0], do[0, 0], norm[0, 0], dot[0, 0], end[0], first)
        dq[0, 0] += product(k[0, 0], ds, (1, 0))


def _to_keys(
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
        p, ds = pulled(q[0, 0], k[0, 0], v[0, 0], do[0, 0], norm[0, 0], dot[0, 0], end[0], first)
        dk[0, 0] += product(q[0, 0], ds, (1, 1))
        dv[0, 0] += product(do[0, 0], p, (1, 1))


def _call(
    body: Callable[..., None],
    grid: tuple,
    lists: tuple,
    args: tuple,
    specs: list,
    outs: list,
    shapes: list,
    **more: Any,
) -> list:
    sequential: list[Literal["parallel", "arbitrary"]] = ["arbitrary" for _ in grid[3:]]
    semantics: list[Literal["parallel", "arbitrary"]] = ["parallel", "parallel", "parallel", *sequential]
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


class Specs:
    """Block specifications of arrays [B heads H T], [B heads 1 T] and [B T 1].

    They map a grid index and the lists of blocks (``order`` [B n m], flat) to a block.

    Args:
        size: tokens of a block.
        n: number of blocks that own a list.
        m: number of blocks that a list can hold.
        share: query heads of one key/value head.
    """

    def __init__(self, size: int, n: int, m: int, share: int) -> None:
        self.size, self.n, self.m, self.share = size, n, m, share

    def own(self, h: int) -> pl.BlockSpec:
        """The block, of height ``h``, that a program owns."""
        return pl.BlockSpec((1, 1, h, self.size), lambda b, head, i, *_: (b, head, 0, i))

    def own_ends(self) -> pl.BlockSpec:
        return pl.BlockSpec((1, self.size, 1), lambda b, head, i, *_: (b, i, 0))

    def listed(self, order: Any, b: Any, i: Any, x: Any) -> Any:
        return order[(b * self.n + i) * self.m + x]

    def keys(self, h: int) -> pl.BlockSpec:
        """A block of keys or values that the program's queries see."""
        head_of = lambda head: jax.lax.div(head, self.share)
        at = lambda b, head, i, x, order, count: (b, head_of(head), 0, self.listed(order, b, i, x))
        return pl.BlockSpec((1, 1, h, self.size), at)

    def ends(self) -> pl.BlockSpec:
        at = lambda b, head, i, x, order, count: (b, self.listed(order, b, i, x), 0)
        return pl.BlockSpec((1, self.size, 1), at)

    def queries(self, h: int) -> pl.BlockSpec:
        """A block of queries that sees the program's keys, of the r-th query head that shares them."""
        at = lambda b, kv, i, r, x, order, count: (b, kv * self.share + r, 0, self.listed(order, b, i, x))
        return pl.BlockSpec((1, 1, h, self.size), at)
