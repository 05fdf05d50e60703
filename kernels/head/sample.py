"""Sampling from hidden states: inversion of the cumulative distribution at one uniform number per row.

With z = h W / temperature, top = max z and e_j = exp(z_j - top), the token is the least j with
``e_0 + ... + e_j > u sum e``, its log-prob ``z_j - top - log sum e``. The sums of blocks of e choose a block (through
groups of blocks where there are many), the running sum inside it the token. A row's token depends on its own uniform
number and not on batch or mesh.

`sample_logits` reads the logits twice, for their maximum and for the sums of blocks of exponentials. It writes no array
of their size; e is computed again for the chosen block alone. The portable form of `head_sample` computes logits and
calls it; filters (top-k, top-p, min-p) and greedy sampling always take this form. The Pallas forms (`sample_pallas`)
compute the sums of blocks without logits in memory, and the logits of the chosen block once more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.kernels.head.head import NEG, Head, logits
from jaxmarl_llm.kernels.select_impl import WITH_MOSAIC, choose

BLOCK = 256  # entries of one block of the inverse CDF, or 128 or 64 where that divides the vocabulary and 256 does not
PAYS = {"tpu": 16_384}  # ids from which auto takes a kernel; that for GPU saves 1 % of a step, hence is not taken
FEW = 64  # entries up to which one triangular product finds the index

Keep = Callable[[Float[Array, "*B V"]], Bool[Array, "*B V"]]  # which of the scaled logits may be drawn


def _of_few(weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute `first_over` by one triangular product."""
    positions = jnp.arange(weights.shape[-1])
    # A cumulative sum as a triangular product: it compiles ten times faster than a scan, in every generation program.
    upper = (positions[:, None] <= positions).astype(weights.dtype)
    running = jnp.matmul(weights, upper, precision="highest")
    positive = weights > 0
    over = positive & (running > target[..., None])
    final = jnp.max(jnp.where(positive, positions, 0), axis=-1)
    index = jnp.where(over.any(-1), jnp.argmax(over, axis=-1), final)
    at = lambda x: jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]
    return index, at(running) - at(weights)


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Select block ``index`` [*B] of x [*B blocks size]: [*B size]."""
    return jnp.take_along_axis(x, index[..., None, None], axis=-2)[..., 0, :]


def _blocks(x: jax.Array, size: int, fill: float) -> jax.Array:
    """Cut [*B V] into [*B blocks size], padded at the end with ``fill``."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)], constant_values=fill)
    return x.reshape(*x.shape[:-1], -1, size)


def first_over(
    weights: Float[Array, "*B V"], target: Float[Array, "*B"]
) -> tuple[Int[Array, "*B"], Float[Array, "*B"]]:
    """Find the first index at which the running sum of weights exceeds a target, and the sum before that index.

    With a target of u times the sum of weights this is the inverse CDF at u. The weight at the index is never 0,
    whatever rounding does.

    Args:
        weights: weights, at least 0.
        target: target of each row.
    """
    n = weights.shape[-1]
    if n <= FEW:
        return _of_few(weights, target)
    size = 1 << math.ceil(math.log2(n) / 2)
    groups = _blocks(weights, size, 0.0)
    group, before = first_over(groups.sum(-1), target)
    index, inside = _of_few(_take(groups, group), target - before)
    return group * size + index, before + inside


def _draw(
    sums: Float[Array, "*B blocks"], u: Float[Array, "*B"], size: int, block_at: Callable[[jax.Array], jax.Array]
) -> tuple[Int[Array, "*B"], Float[Array, "*B"]]:
    """Draw token and log-prob from the sums of blocks of e. ``block_at`` gives log e [*B size] of the chosen blocks."""
    total = sums.sum(-1)
    block, before = first_over(sums, u * total)
    inside = block_at(block)
    index, _ = _of_few(jnp.exp(inside), u * total - before)
    logprob = jnp.take_along_axis(inside, index[..., None], axis=-1)[..., 0] - jnp.log(total)
    return (block * size + index).astype(jnp.int32), logprob


def argmax(x: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """Find the lowest index of the maximum, by two reductions.

    On CPU this is many times faster than one reduction that carries the index.

    Args:
        x: numbers to compare.
    """
    ids = jnp.arange(x.shape[-1], dtype=jnp.int32)
    return jnp.min(jnp.where(x < x.max(-1, keepdims=True), x.shape[-1] - 1, ids), axis=-1)


def sample_logits(
    z: Float[Array, "*B V"],
    u: Float[Array, "*B"],
    *,
    temperature: float = 1.0,
    keep: Keep | None = None,
    parts: int = 1,
) -> tuple[Int[Array, "*B"], Float[Array, "*B"]]:
    """Draw token and float32 log-prob from logits; see `head_sample`.

    Args:
        z: logits.
        u: uniform numbers in [0, 1).
        temperature: divisor of the logits; 0 is greedy.
        keep: see `head_sample`.
        parts: devices that V is sharded over. No block crosses devices where a block of 8 ids or more divides a shard.
    """
    if temperature == 0:
        token = argmax(z)
        return token, jnp.zeros(token.shape, jnp.float32)
    z = z.astype(jnp.float32) / temperature
    if keep is not None:
        z = jnp.where(keep(z), z, -jnp.inf)
    sizes = [BLOCK >> i for i in range(3 if parts == 1 else 6)]
    size = next((s for s in sizes if z.shape[-1] % (s * parts) == 0), BLOCK)
    blocks = _blocks(z, size, -jnp.inf)
    top = blocks.max((-2, -1))
    sums = jnp.exp(blocks - top[..., None, None]).sum(-1)
    return _draw(sums, u, size, lambda block: _take(blocks, block) - top[..., None])


def head_sample(
    hidden: Float[Array, "*B D"],
    head: Head,
    u: Float[Array, "*B"],
    *,
    temperature: float = 1.0,
    keep: Keep | None = None,
    impl: str = "auto",
    interpret: bool = False,
) -> tuple[Int[Array, "*B"], Float[Array, "*B"]]:
    """Draw one token per row, with its float32 log-prob. Padding ids are never drawn.

    Raises ValueError for an impl that cannot do what is asked.

    Args:
        hidden: hidden states.
        head: the linear map to logits.
        u: one uniform number in [0, 1) per row.
        temperature: divisor of the logits. 0 is greedy: the lowest id of the largest logit, with log-prob 0.
        keep: function that marks which of the logits, already divided by the temperature, may be drawn (top-k, top-p,
            min-p). The distribution is renormalised over them. None keeps all.
        impl: xla, gpu, tpu, mosaic or auto. auto is tpu where the program is lowered for it, the vocabulary has 16,384
            ids or more, and the form can do what is asked. Otherwise auto is xla. mosaic is for Hopper GPUs and
            bfloat16, and no GPU has run it.
        interpret: run a Pallas form, other than mosaic, in Pallas' interpreter, on any machine, slowly.
    """
    if hidden.shape[-1] != head.dim:
        raise ValueError(f"hidden states of size {hidden.shape[-1]} do not fit a head of {head.dim}")

    def refused(impl: str) -> str | None:
        from jaxmarl_llm.kernels.head import sample_pallas  # loads Pallas, which takes as long as JAX

        if keep is not None or temperature == 0:
            return "has no filters and no temperature 0"
        if impl == "mosaic":
            from jaxmarl_llm.kernels.head import sample_mosaic

            return sample_mosaic.refused(hidden, head, sample_pallas.BLOCK, interpret)
        return None if sample_pallas.takes(head, impl) else f"does not take hidden states of size {head.dim}"

    return choose(
        impl,
        (hidden, head, u),
        portable=lambda hidden, head, u: sample_logits(logits(hidden, head), u, temperature=temperature, keep=keep),
        pallas=lambda impl: functools.partial(_from_blocks, temperature=temperature, impl=impl, interpret=interpret),
        refused=refused,
        pays=[impl for impl, ids in PAYS.items() if head.vocab >= ids],
        platforms=WITH_MOSAIC,
    )


AT_ONCE = 64  # rows whose chosen blocks of the weight are gathered at once


def _from_blocks(
    hidden: jax.Array, head: Head, u: jax.Array, *, temperature: float, impl: str, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    from jaxmarl_llm.kernels.head.sample_pallas import BLOCK, block_stats

    flat, shape, u = hidden.reshape(-1, head.dim), u.shape, u.reshape(-1)
    tops, totals = block_stats(flat, head, temperature=temperature, impl=impl, interpret=interpret)
    top = tops.max(0)
    sums = (totals * jnp.exp(tops - top)).T

    def of_block(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, block = row
        ids = block * BLOCK + jnp.arange(BLOCK)
        own = jnp.take(head.weight, ids, axis=0 if head.rows else 1, mode="clip")
        z = logits(hidden, Head(own, head.rows)) / temperature
        return jnp.where(ids < (head.vocab if head.used is None else head.used), z, NEG)

    block_at = lambda block: jax.lax.map(of_block, (flat, block), batch_size=AT_ONCE) - top[:, None]
    token, logprob = _draw(sums, u, BLOCK, block_at)
    return token.reshape(shape), logprob.reshape(shape)
