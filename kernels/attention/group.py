"""Attention of G sequences that share one prefix.

Every sample g of node n has the same P prompt keys and its own S keys:

    out[n,g,t] = softmax([ q k_prefix^T | q k_own^T ] / sqrt(H)) [ v_prefix ; v_own ]

The portable form folds the G samples, and the query heads that share a key head, into the rows of one matrix product
per node. It reads the prefix once per node instead of once per sample, and never copies it. It is for decoding (T = 1,
own keys in a cache of S slots) and for training (T = S, all response tokens at once). Own key s is visible to query t
iff s <= t + offset. Scores and the softmax are float32. Gradients are autodiff's; that of the prefix is the sum over
the group.

In training [prompt | G responses] is a tree with one fork. The Pallas forms are those of `tree_pallas`, with the
response tokens as queries: no scores in memory, and no product between siblings.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmarl_llm.kernels import quantized
from jaxmarl_llm.kernels.attention.constants import NEG
from jaxmarl_llm.kernels.matmul import matmul
from jaxmarl_llm.kernels.quantized import Cached, ScaledVectors
from jaxmarl_llm.kernels.select_impl import choose

# Tokens of [prompt | responses] from which auto takes a kernel. That for GPU takes 1.1 to 1.2 times the time of XLA.
PAYS = {"tpu": 1024}


def group_attention(
    q: Float[Array, "N G T Q H"],
    prefix_k: Float[Array, "N P K H"] | ScaledVectors,
    prefix_v: Float[Array, "N P K H"] | ScaledVectors,
    prefix_length: Int[Array, " N"],
    own_k: Float[Array, "N G S K H"] | ScaledVectors,
    own_v: Float[Array, "N G S K H"] | ScaledVectors,
    offset: Int[Array, ""] | int = 0,
    *,
    impl: str = "auto",
    block: int | None = None,
    interpret: bool = False,
) -> Float[Array, "N G T Q H"]:
    """Attend over the shared prefix and a sample's own keys.

    Raises ValueError for an impl that does not take the shapes. The portable form also takes quantized caches: all
    four, or none.

    Args:
        q: queries of each sample.
        prefix_k: keys of the shared prefix.
        prefix_v: values of the shared prefix.
        prefix_length: filled slots of the prefix; those behind are masked.
        own_k: keys of each sample.
        own_v: values of each sample.
        offset: query t sees own keys 0 to t + offset.
        impl: xla, gpu, tpu or auto. auto is tpu where the program is lowered for it, in training (T = S, offset 0),
            with prompt and responses of 1024 tokens or more. Otherwise auto is xla.
        block: see `tree_attention`.
        interpret: see `tree_attention`.
    """
    training = own_k.shape[2] == q.shape[2] and isinstance(offset, int) and offset == 0
    tokens = prefix_k.shape[1] + own_k.shape[1] * own_k.shape[2]

    def refused(impl: str) -> str | None:
        if isinstance(prefix_k, ScaledVectors):
            return "does not take quantized caches"
        from jaxmarl_llm.kernels.attention import tree_pallas  # loads Pallas, which takes as long as JAX

        why = tree_pallas.refused(impl, q.shape[-1], block)
        return why if training else "is for training alone: as many queries as own keys, offset 0"

    return choose(
        impl,
        (q * q.shape[-1] ** -0.5, prefix_k, prefix_v, prefix_length, own_k, own_v, offset),
        portable=_by_einsum,
        pallas=lambda impl: functools.partial(_as_tree, impl, block, interpret),
        refused=refused,
        pays=[impl for impl, least in PAYS.items() if tokens >= least],
    )


def _as_tree(
    impl: str,
    block: int | None,
    interpret: bool,
    q: jax.Array,
    prefix_k: jax.Array,
    prefix_v: jax.Array,
    prefix_length: jax.Array,
    own_k: jax.Array,
    own_v: jax.Array,
    offset: jax.Array | int,
) -> jax.Array:
    from jaxmarl_llm.kernels.attention import tree_pallas

    (n, g, t, heads, h), p = q.shape, prefix_k.shape[1]
    tokens = p + g * t
    row = lambda prefix, own: jnp.concatenate([prefix, own.reshape(n, g * t, *own.shape[3:])], axis=1)
    prompt_end = jnp.where(jnp.arange(p) < prefix_length[:, None], tokens, 0)
    sample_end = jnp.broadcast_to(p + t * (1 + jnp.arange(g * t) // t), (n, g * t))
    end = jnp.concatenate([prompt_end, sample_end], axis=1)
    size = block or tree_pallas.block_size(impl, tokens, q.dtype)
    k, v = row(prefix_k, own_k), row(prefix_v, own_v)
    return tree_pallas.attend(impl, size, interpret, q.reshape(n, g * t, heads, h), k, v, end).reshape(q.shape)


def _by_einsum(
    q: jax.Array,
    prefix_k: jax.Array,
    prefix_v: jax.Array,
    prefix_length: jax.Array,
    own_k: jax.Array,
    own_v: jax.Array,
    offset: jax.Array | int,
) -> jax.Array:
    see_own = jnp.arange(own_k.shape[2]) <= jnp.arange(q.shape[2])[:, None] + offset
    return attend_by_einsum(q, prefix_k, prefix_v, prefix_length, own_k, own_v, see_own)


def attend_by_einsum(
    q: jax.Array,
    prefix_k: Cached,
    prefix_v: Cached,
    prefix_length: jax.Array,
    own_k: Cached,
    own_v: Cached,
    see_own: jax.Array,
) -> jax.Array:
    """Attend over the shared prefix and own keys, in the portable form. Both caches are arrays, or both quantized.

    Args:
        q: queries, already divided by sqrt(H) [N G T Q H].
        prefix_k: keys of the shared prefix [N P K H].
        prefix_v: values of the shared prefix [N P K H].
        prefix_length: filled slots of the prefix [N].
        own_k: keys of each sample [N G S K H].
        own_v: values of each sample [N G S K H].
        see_own: which own keys a query sees, as an array that broadcasts to [N K G Q/K T S].
    """
    args = q, prefix_k, prefix_v, prefix_length, own_k, own_v, see_own
    if q.shape[2] > 1 or isinstance(prefix_k, ScaledVectors):
        return _attend(*args)
    return jax.lax.platform_dependent(*args, cpu=_attend_one_on_cpu, default=_attend)


def _attend(
    q: jax.Array,
    prefix_k: Cached,
    prefix_v: Cached,
    prefix_length: jax.Array,
    own_k: Cached,
    own_v: Cached,
    see_own: jax.Array,
) -> jax.Array:
    """`attend_by_einsum`, in a form whose layouts the compiler chooses."""
    (n, g, t, heads, h), kv = q.shape, prefix_k.shape[2]
    if isinstance(prefix_k, ScaledVectors):
        # A prefix, which a decoding loop does not change, would be converted once before the loop. q changes in it.
        q, prefix_k, prefix_v = jax.lax.optimization_barrier((q, prefix_k, prefix_v))
    q = q.reshape(n, g, t, kv, heads // kv, h)
    by_head = jnp.transpose(q, (0, 3, 1, 4, 2, 5))  # [N K G R T H]

    def scores(letters: str, keys: Cached, order: tuple[int, ...]) -> jax.Array:
        if isinstance(keys, ScaledVectors):
            return quantized.scores(letters, by_head, keys)
        return matmul(by_head, jnp.transpose(keys, order), jnp.float32)

    score_p = scores("nkgrth,npkh->nkgrtp", prefix_k, (0, 2, 3, 1))
    score_s = scores("nkgrth,ngskh->nkgrts", own_k, (0, 3, 1, 4, 2))
    w_p, w_s, total = _exponentials(score_p, score_s, prefix_length, see_own)
    out = quantized.weighted("nkgrtp,npkh->ngtkrh", w_p, prefix_v, q.dtype)
    out += quantized.weighted("nkgrts,ngskh->ngtkrh", w_s, own_v, q.dtype)
    out /= jnp.transpose(total, (0, 2, 4, 1, 3))[..., None]
    return out.reshape(n, g, t, heads, h).astype(q.dtype)


def _attend_one_on_cpu(
    q: jax.Array,
    prefix_k: jax.Array,
    prefix_v: jax.Array,
    prefix_length: jax.Array,
    own_k: jax.Array,
    own_v: jax.Array,
    see_own: jax.Array,
) -> jax.Array:
    """`attend_by_einsum` for one query of each sample, in a form that XLA computes fast on CPU.

    Its products there read memory as the cache is laid out, and strided reads take several times longer. Behind the
    barrier a prefix has the layout that its product reads best: keys [N K H P], values [N K P H]. A decoding loop does
    not change a prefix, so XLA lays it out once, before the loop.
    """
    (n, g, _, heads, h), (p, kv) = q.shape, prefix_k.shape[1:3]
    r = heads // kv
    laid_out = lambda x, *order: jax.lax.optimization_barrier(jnp.transpose(x, order))
    rows = jnp.moveaxis(q.reshape(n, g, kv, r, h), 1, 2)  # N K G R H, R = Q/K
    score_p = matmul(rows.reshape(n, kv, g * r, h), laid_out(prefix_k, 0, 2, 3, 1), jnp.float32)
    score_s = matmul(rows, jnp.transpose(own_k, (0, 3, 1, 4, 2)), jnp.float32)
    score_p = score_p.reshape(n, kv, g, r, p)
    w_p, w_s, total = _exponentials(score_p, score_s, prefix_length, see_own[..., 0, :])
    of_prefix = w_p.reshape(n, kv, g * r, p).astype(q.dtype)
    out = matmul(of_prefix, laid_out(prefix_v, 0, 2, 1, 3), jnp.float32).reshape(rows.shape)
    out += jnp.einsum("nkgrs,ngskh->nkgrh", w_s.astype(q.dtype), own_v, preferred_element_type=jnp.float32)
    out /= total[..., None]
    return jnp.moveaxis(out, 2, 1).reshape(q.shape).astype(q.dtype)


def _exponentials(
    score_p: jax.Array, score_s: jax.Array, prefix_length: jax.Array, see_own: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights of the prefix [N ... P] and of own keys [N ... S] before they are divided by their sum, and that sum."""
    seen = jnp.arange(score_p.shape[-1]) < prefix_length[:, None]
    score_p = jnp.where(jnp.expand_dims(seen, range(1, score_p.ndim - 1)), score_p, NEG)
    score_s = jnp.where(see_own, score_s, NEG)
    top = jnp.maximum(score_p.max(-1, initial=NEG), score_s.max(-1, initial=NEG))[..., None]
    top = jax.lax.stop_gradient(top)
    w_p, w_s = jnp.exp(score_p - top), jnp.exp(score_s - top)
    return w_p, w_s, w_p.sum(-1) + w_s.sum(-1)
