"""Parts of a softmax over the first keys of a cache (Pallas), which `group_decode` merges.

For rows q [M H] of a key head, and part j of its keys:

    s = q k^T        m_j = max s        l_j = sum exp(s - m_j)        o_j = exp(s - m_j) v        all float32

GPU (Triton): a program takes one key head, up to 64 rows and a part of the keys. The keys are cut into as many parts as
keep a large GPU busy, of at least 256 keys. Few keys need no parts: there `whole` computes all of a sample in one
operation. Head sizes are rounded up to a power of two and rows to 16; the padding is masked. TPU (Mosaic): there is one
part. A program takes a block of keys of several heads at once. Running m, l and o stay in on-chip memory from block to
block. Blocks behind the last key are not fetched: the block index stays the same.

On TPU keys are [K H L], with tokens along the 128 lanes. XLA chooses this layout for a prefix of small heads in its own
programs. A decoding loop therefore copies nothing, and no lane is empty at H = 64. A cache [.., L H] would leave half
of the lanes empty. Half of the depth of a matrix product is unused at H = 64, which does not slow decoding down.

The form for Pallas' Mosaic GPU backend is in `group_decode_mosaic`.

Quantized keys and values are for TPU alone (`quantized.ScaledVectors`). Their scales are [K 1 L]. A program multiplies
scores with the scales of the keys, and weights with the scales of the values.

Compiler parameters are always given, because the default backend of Pallas on GPU differs between releases of JAX.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as mosaic
from jaxtyping import Array, Float, Int

from jaxmarl_llm.kernels.attention.constants import NEG
from jaxmarl_llm.kernels.pallas_triton import lacking, triton
from jaxmarl_llm.kernels.quantized import Cached, ScaledVectors

LARGEST = 256  # largest head size
ON_CHIP = 1 << 20  # TPU: largest size in bytes of the keys and rows of one program
KEYS, ROWS = 512, 512  # TPU: keys and rows of one block
PART = 256  # GPU: least number of keys of a part
PROGRAMS = 512  # GPU: number of programs that keeps it busy
WHOLE = 1024  # GPU: keys of prefix and suffix up to which `whole` takes them, rather than parts
WIDE, WARPS = 64, 2  # GPU: keys of a block of `whole` at heads of 64, and warps of a program; measured on an H200

Parts = tuple[Float[Array, "B J K M"], Float[Array, "B J K M"], Float[Array, "B J K M H"]]


def refused(impl: str, h: int, scaled: bool = False) -> str | None:
    """Say why ``impl`` has no kernel for heads of size ``h``, or return None where it has one.

    Args:
        impl: gpu, tpu or mosaic; of mosaic, which takes no quantized caches, the rest is in `group_decode_mosaic`.
        h: size of a head.
        scaled: whether keys and values are quantized.
    """
    if scaled and impl != "tpu":
        return "does not take quantized caches"
    fits = h % 8 == 0 and h <= LARGEST
    return lacking(impl) or (None if fits else f"does not take heads of size {h}")


def parts(
    q: Float[Array, "B K M H"],
    k: Float[Array, "B L K H"] | ScaledVectors,
    v: Float[Array, "B L K H"] | ScaledVectors,
    length: Int[Array, " B"],
    *,
    impl: str,
    interpret: bool = False,
) -> Parts:
    """Compute largest score, sum of exponentials and weighted values over parts J of the first keys.

    Args:
        q: scaled query rows M of each key head.
        k: keys of the cache; quantized for impl tpu alone.
        v: values of the cache, likewise.
        length: number of keys to read of each row.
        impl: gpu, tpu or mosaic.
        interpret: run in Pallas' interpreter; not for mosaic.
    """
    length = jnp.minimum(length, k.shape[1]).astype(jnp.int32)  # no read beyond the arrays
    if impl == "tpu":
        return _mosaic(q, k, v, length, interpret)
    assert not isinstance(k, ScaledVectors) and not isinstance(v, ScaledVectors)  # see `refused`
    if impl == "mosaic":
        from jaxmarl_llm.kernels.attention import group_decode_mosaic  # loads a backend that other forms do without

        return group_decode_mosaic.parts(q, k, v, length)
    return _triton(q, k, v, length, interpret)


def product(a: jax.Array, b: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Multiply two matrices with float32 sums. Float32 operands are not rounded to TF32 or bfloat16.

    Args:
        a: left operand.
        b: right operand.
        over: the contracted axis of each.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((over[0],), (over[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def fold(carry: Any, score: jax.Array, see: jax.Array, v: jax.Array, axis: int, scales: jax.Array | None = None) -> Any:
    """Add a block of keys to the running (m [M 1], l [M 1], o [M H]).

    Args:
        carry: the running sums.
        score: scores of the block [M keys].
        see: which scores are visible.
        v: values of the block.
        axis: axis of ``v`` that counts keys.
        scales: factor of each value [1 keys]; None: 1.
    """
    top, total, out = carry
    score = jnp.where(see, score, NEG)
    most = jnp.maximum(top, score.max(1, keepdims=True))
    weight = jnp.where(see, jnp.exp(score - most), 0.0)
    keep = jnp.exp(top - most)
    total = total * keep + weight.sum(1, keepdims=True)
    weight = weight if scales is None else weight * scales
    return most, total, out * keep + product(weight.astype(v.dtype), v, (1, axis))


# ------------------------------------------------------------------------------------------------------------- GPU


def _triton_body(
    q: Any, k: Any, v: Any, length: Any, top: Any, total: Any, out: Any, *, tall: int, wide: int, deep: int, part: int
) -> None:
    kv, size, h = q.shape[1:]
    b, head = pl.program_id(0) // kv, pl.program_id(0) % kv
    j, row = pl.program_id(1), pl.program_id(2) * tall
    last = jnp.minimum((j + 1) * part, length[b])
    units, is_row = jnp.arange(deep) < h, row + jnp.arange(tall) < size
    x = triton.load(q.at[b, head, pl.ds(row, tall), pl.ds(0, deep)], mask=is_row[:, None] & units, other=0)

    def step(i: jax.Array, carry: Any) -> Any:
        at = b, pl.ds(i * wide, wide), head, pl.ds(0, deep)
        see = i * wide + jnp.arange(wide) < last
        load = lambda ref: triton.load(ref.at[at], mask=see[:, None] & units, other=0)
        return fold(carry, product(x, load(k), (1, 1)), see[None], load(v), 0)

    empty = jnp.full((tall, 1), NEG, jnp.float32), jnp.zeros((tall, 1), jnp.float32)
    carry = *empty, jnp.zeros((tall, deep), jnp.float32)
    most, sums, values = jax.lax.fori_loop(j * (part // wide), pl.cdiv(last, wide), step, carry)
    at = b, j, head, pl.ds(row, tall)
    triton.store(top.at[at], most[:, 0], mask=is_row)
    triton.store(total.at[at], sums[:, 0], mask=is_row)
    triton.store(out.at[(*at, pl.ds(0, deep))], values, mask=is_row[:, None] & units)


def whole(
    q: Float[Array, "N G K M H"],
    prefix_k: Float[Array, "N P K H"],
    prefix_v: Float[Array, "N P K H"],
    length: Int[Array, " N"],
    own_k: Float[Array, "N G S K H"],
    own_v: Float[Array, "N G S K H"],
    filled: Int[Array, ""],
    *,
    interpret: bool = False,
) -> Float[Array, "N G K M H"]:
    """Compute the attention of one token of each sample on GPU, in one operation.

    A program takes one sample and key head, and walks all its keys. The G programs of a node read its prefix from the
    cache on the chip. A row without keys gives 0.

    Args:
        q: scaled query rows M of each key head.
        prefix_k: keys of the shared prefix.
        prefix_v: values of the shared prefix.
        length: keys of the prefix to read.
        own_k: keys of each sample.
        own_v: values of each sample.
        filled: keys of each sample to read.
        interpret: run in Pallas' interpreter.
    """
    n, g, kv, m, h = q.shape
    p, s = prefix_k.shape[1], own_k.shape[2]
    tall, deep = max(16, pl.next_power_of_2(m)), max(16, pl.next_power_of_2(h))
    wide = 16 if q.dtype.itemsize == 4 else max(16, min(WIDE, WIDE * 64 // deep))  # what registers hold
    stages = 4 if deep <= 64 else 2  # blocks that fit in the memory on the chip, of smaller GPUs too
    bounds = jnp.stack([jnp.minimum(length, p), jnp.broadcast_to(jnp.minimum(filled, s), (n,))], axis=1)
    # An array without elements has no address.
    some = lambda x: x if x.size else jnp.zeros([max(size, 1) for size in x.shape], x.dtype)
    return pl.pallas_call(
        functools.partial(_whole_body, tall=tall, wide=wide, deep=deep),
        grid=(g * kv, n),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=stages),
        interpret=interpret,
        name="group_decode",
    )(q, some(prefix_k), some(prefix_v), bounds.astype(jnp.int32), some(own_k), some(own_v))


def _whole_body(
    q: Any, pk: Any, pv: Any, bounds: Any, ok: Any, ov: Any, out: Any, *, tall: int, wide: int, deep: int
) -> None:
    kv, m, h = q.shape[2:]
    node, g, head = pl.program_id(1), pl.program_id(0) // kv, pl.program_id(0) % kv
    units, is_row = jnp.arange(deep) < h, jnp.arange(tall) < m
    mask, here = is_row[:, None] & units, (node, g, head, pl.ds(0, tall), pl.ds(0, deep))
    x = triton.load(q.at[here], mask=mask, other=0)

    def walk(k: Any, v: Any, last: jax.Array, at: Any, carry: Any) -> Any:
        def step(i: jax.Array, carry: Any) -> Any:
            see = i * wide + jnp.arange(wide) < last
            load = lambda ref: triton.load(ref.at[at(i)], mask=see[:, None] & units, other=0)
            return fold(carry, product(x, load(k), (1, 1)), see[None], load(v), 0)

        return jax.lax.fori_loop(0, pl.cdiv(last, wide), step, carry)

    empty = jnp.full((tall, 1), NEG, jnp.float32), jnp.zeros((tall, 1), jnp.float32)
    carry = *empty, jnp.zeros((tall, deep), jnp.float32)
    carry = walk(pk, pv, bounds[node, 0], lambda i: (node, pl.ds(i * wide, wide), head, pl.ds(0, deep)), carry)
    carry = walk(ok, ov, bounds[node, 1], lambda i: (node, g, pl.ds(i * wide, wide), head, pl.ds(0, deep)), carry)
    _, total, value = carry
    triton.store(out.at[here], (value / jnp.where(total > 0, total, 1.0)).astype(out.dtype), mask=mask)


def _triton(q: jax.Array, k: jax.Array, v: jax.Array, length: jax.Array, interpret: bool) -> Parts:
    (b, kv, m, h), keys = q.shape, k.shape[1]
    most, wide = (64, 64) if q.dtype.itemsize == 2 else (16, 32)  # what registers hold; a product has at least 16 rows
    tall, deep = min(most, max(16, pl.next_power_of_2(m))), max(16, pl.next_power_of_2(h))
    rows = pl.cdiv(m, tall)
    few = max(1, min(pl.cdiv(keys, PART), PROGRAMS // (b * kv * rows)))
    part = pl.cdiv(pl.cdiv(keys, few), wide) * wide
    count = pl.cdiv(keys, part)
    body = functools.partial(_triton_body, tall=tall, wide=wide, deep=deep, part=part)
    shape = lambda *rest: jax.ShapeDtypeStruct((b, count, kv, m, *rest), jnp.float32)
    top, total, out = pl.pallas_call(
        body,
        grid=(b * kv, count, rows),
        out_shape=[shape(), shape(), shape(h)],
        compiler_params=triton.CompilerParams(num_warps=4 if deep <= 128 else 8, num_stages=2),
        interpret=interpret,
        name="group_decode",
    )(q, k, v, length)
    return top, total, out


# ------------------------------------------------------------------------------------------------------------- TPU


def _mosaic_body(length: Any, blocks: Any, q: Any, k: Any, v: Any, *refs: Any) -> None:
    """``top``, ``total`` and ``out`` stay on the chip over the last axis of the grid: they are the running sums.

    ``refs``: these three; before them the scales of ``k`` and ``v`` where these are quantized.
    """
    *scales, top, total, out = refs
    block, (several, _, wide) = pl.program_id(2), k.shape
    first = pl.program_id(0) * several

    @pl.when(block == 0)
    def start() -> None:
        top[...] = jnp.full(top.shape, NEG, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        out[...] = jnp.zeros(out.shape, jnp.float32)

    for e in range(several):
        filled = length[first + e] - block * wide

        @pl.when(filled > 0)
        def more(e: int = e, filled: jax.Array = filled) -> None:
            see = jax.lax.broadcasted_iota(jnp.int32, (1, wide), 1) < filled
            carry = top[e], total[e], out[e]
            # A weight of 0 is not enough behind the last key: memory there may hold NaN.
            known = lambda x: jnp.where(see, x, jnp.zeros_like(x))
            if not scales:
                top[e], total[e], out[e] = fold(carry, product(q[e], k[e], (1, 0)), see, known(v[e]), 1)
                return
            of_keys, of_values = (x[e] for x in scales)
            float_ = lambda x: x.astype(jnp.float32).astype(q.dtype)
            score = product(q[e], float_(k[e]), (1, 0)) * of_keys
            top[e], total[e], out[e] = fold(carry, score, see, known(float_(v[e])), 1, known(of_values))


def _mosaic(q: jax.Array, k: Cached, v: Cached, length: jax.Array, interpret: bool) -> Parts:
    (b, kv, m, h), keys = q.shape, k.shape[1]
    tall, wide = min(m, ROWS), min(keys, KEYS)
    each = wide * h * q.dtype.itemsize + tall * h * 4
    several = next(s for s in (8, 4, 2, 1) if s == 1 or (b * kv % s == 0 and s * each <= ON_CHIP))
    length = jnp.repeat(length, kv)
    blocks = pl.cdiv(jnp.maximum(length.reshape(-1, several).max(1), 1), wide)  # to fetch
    by_head = lambda x: jnp.transpose(x, (0, 2, 3, 1)).reshape(b * kv, x.shape[3], keys)
    of_rows = lambda size: pl.BlockSpec((several, tall, size), lambda e, i, j, length, blocks: (e, i, 0))
    of_keys = lambda size: pl.BlockSpec(
        (several, size, wide), lambda e, i, j, length, blocks: (e, 0, jnp.minimum(j, blocks[e] - 1))
    )
    shape = lambda size: jax.ShapeDtypeStruct((b * kv, m, size), jnp.float32)
    cache: tuple[Any, ...] = k, v
    if isinstance(k, ScaledVectors) and isinstance(v, ScaledVectors):
        cache = k.values, v.values, k.scales, v.scales
    top, total, out = pl.pallas_call(
        _mosaic_body,
        grid_spec=mosaic.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(b * kv // several, pl.cdiv(m, tall), pl.cdiv(keys, wide)),
            in_specs=[of_rows(h), *(of_keys(x.shape[3]) for x in cache)],
            out_specs=[of_rows(1), of_rows(1), of_rows(h)],
        ),
        out_shape=[shape(1), shape(1), shape(h)],
        compiler_params=mosaic.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="group_decode",
    )(length, blocks, q.reshape(b * kv, m, h), *map(by_head, cache))
    return tuple(x.reshape(b, 1, kv, m, *rest) for x, rest in ((top, ()), (total, ()), (out, (h,))))
