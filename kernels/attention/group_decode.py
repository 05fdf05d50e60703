"""One step of decoding: G samples against one shared prefix and G private suffixes.

    out[n,g] = softmax([ q k_prefix^T | q k_own^T ] / sqrt(H)) [ v_prefix ; v_own ]     own slots 0 .. t are filled

The portable form is `group_attention` with one query per sample. The Pallas forms (`group_decode_pallas`) work on
parts of the keys. A part j gives, in float32, its largest score m_j, the sum of exponentials l_j and the weighted sum
of values o_j. The parts are merged by

    m = max_j m_j        out = sum_j exp(m_j - m) o_j / sum_j exp(m_j - m) l_j

(Hydragen, arXiv 2402.05099; FlashDecoding). The G Q/K query rows that share a prefix and a key head are the rows of one
matrix product. A key of the prefix is therefore read once per group, and only keys below ``prefix_length`` are read.
Own keys are one more part, read up to t in the form gpu; in the forms tpu and mosaic XLA computes it. Few keys need no
parts in the form gpu: one operation computes all. The backward pass of a Pallas form runs the portable form.

Both caches may be quantized (`quantized.ScaledVectors`). The portable form and that for TPU convert the values beside
the products, and no form copies a cache in another dtype. The forms for GPU take none, and there is no gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmarl_llm.kernels import quantized
from jaxmarl_llm.kernels.attention.constants import NEG
from jaxmarl_llm.kernels.attention.group import attend_by_einsum, group_attention
from jaxmarl_llm.kernels.quantized import Cached, ScaledVectors
from jaxmarl_llm.kernels.select_impl import WITH_MOSAIC, choose

PAYS = {"tpu": 256, "gpu": 256}  # keys of the prefix from which auto takes a kernel


def group_decode_attention(
    q: Float[Array, "N G 1 Q H"],
    prefix_k: Float[Array, "N P K H"] | ScaledVectors,
    prefix_v: Float[Array, "N P K H"] | ScaledVectors,
    prefix_length: Int[Array, " N"],
    own_k: Float[Array, "N G S K H"] | ScaledVectors,
    own_v: Float[Array, "N G S K H"] | ScaledVectors,
    t: Int[Array, ""] | int,
    *,
    impl: str = "auto",
    interpret: bool = False,
) -> Float[Array, "N G 1 Q H"]:
    """Attend from one token of each sample to the shared prefix and own slots 0 to t.

    Raises ValueError for shapes that do not fit each other or the impl, and where there is no key at all. Errors that
    depend on data give NaN, not a wrong number. They are a cache that is too small (t or ``prefix_length`` beyond it),
    and a row without keys. With impl xla they are not checked, and the caller must avoid them.

    Args:
        q: query of each sample.
        prefix_k: keys of the shared prefix.
        prefix_v: values of the shared prefix.
        prefix_length: filled slots of the prefix.
        own_k: keys of each sample.
        own_v: values of each sample.
        t: slot of the present token, which is already written; -1 for none.
        impl: xla, gpu, tpu, mosaic or auto. auto is tpu or gpu where the program is lowered for it and the prefix has
            room for 256 keys, else xla. mosaic is for Hopper GPUs and bfloat16, and no GPU has run it.
        interpret: run a Pallas form, other than mosaic, in Pallas' interpreter, on any machine.
    """
    n, g, one, heads, h = q.shape
    (p, kv), s = prefix_k.shape[1:3], own_k.shape[2]
    fits = one == 1 and prefix_k.shape == prefix_v.shape == (n, p, kv, h) and heads % kv == 0
    if not fits or own_k.shape != own_v.shape or own_k.shape != (n, g, s, kv, h) or prefix_length.shape != (n,):
        shapes = ", ".join(str(x.shape) for x in (q, prefix_k, prefix_v, prefix_length, own_k, own_v))
        raise ValueError(f"shapes do not fit [N G 1 Q H], [N P K H] twice, [N], [N G S K H] twice: {shapes}")
    scaled = isinstance(prefix_k, ScaledVectors)
    if any(isinstance(x, ScaledVectors) != scaled for x in (prefix_v, own_k, own_v)):
        raise ValueError("keys and values of prefix and suffix are all arrays or all quantized, not some of them")
    if p + s == 0:
        raise ValueError("there are no keys: prefix and suffix are both empty")
    if not isinstance(t, jax.core.Tracer) and not -1 <= int(t) < s:
        raise ValueError(f"the suffix cache has {s} slots, no slot {int(t)}")

    def refused(impl: str) -> str | None:
        from jaxmarl_llm.kernels.attention import group_decode_pallas  # loads Pallas, which takes as long as JAX

        if impl == "mosaic" and not isinstance(prefix_k, ScaledVectors):
            from jaxmarl_llm.kernels.attention import group_decode_mosaic

            return group_decode_mosaic.refused(q, prefix_k, interpret)
        return group_decode_pallas.refused(impl, h, scaled)

    t = jnp.asarray(t, jnp.int32)
    out = choose(
        impl,
        (q, prefix_k, prefix_v, prefix_length, own_k, own_v, t),
        portable=functools.partial(group_attention, impl="xla"),
        pallas=lambda impl: functools.partial(_merged if scaled else _by_parts, impl, interpret),
        refused=refused,
        pays=[impl for impl, keys in PAYS.items() if p >= keys],
        platforms=WITH_MOSAIC,
    )
    if impl == "xla":
        return out  # a guard around it would cost a third more memory traffic a token on a mesh (docs/log.md)
    sound = (t < s) & (prefix_length <= p) & ((prefix_length > 0) | (t >= 0))
    return jnp.where(sound[:, None, None, None, None], out, jnp.nan)


def ring_decode_attention(
    q: Float[Array, "N G 1 Q H"],
    prefix_k: Float[Array, "N P K H"] | ScaledVectors,
    prefix_v: Float[Array, "N P K H"] | ScaledVectors,
    prefix_length: Int[Array, " N"],
    own_k: Float[Array, "N G S K H"] | ScaledVectors,
    own_v: Float[Array, "N G S K H"] | ScaledVectors,
    t: Int[Array, ""],
    begun: Int[Array, " N"],
) -> Float[Array, "N G 1 Q H"]:
    """Attend as `group_decode_attention`, where the own slots are a ring and nodes have begun at different times.

    The token of time t is in slot t mod S of every sample. A sample of node n sees the slots of times begun[n] to t.
    There is the portable form alone.

    Args:
        q: query of each sample.
        prefix_k: keys of the shared prefix.
        prefix_v: values of the shared prefix.
        prefix_length: filled slots of the prefix.
        own_k: keys of each sample.
        own_v: values of each sample.
        t: time of the present token, which is already written.
        begun: time of each node's first token, from t - S + 1 to t.
    """
    slots = own_k.shape[2]
    see = (jnp.arange(slots) - begun[:, None]) % slots <= (t - begun)[:, None]
    see = see[:, None, None, None, None]
    return attend_by_einsum(q * q.shape[-1] ** -0.5, prefix_k, prefix_v, prefix_length, own_k, own_v, see)


def _merged(
    impl: str,
    interpret: bool,
    q: jax.Array,
    prefix_k: Any,
    prefix_v: Any,
    prefix_length: jax.Array,
    own_k: Any,
    own_v: Any,
    t: jax.Array,
) -> jax.Array:
    """Attend by a Pallas form: compute parts of the keys and merge them. The caches may be quantized."""
    from jaxmarl_llm.kernels.attention.group_decode_pallas import WHOLE, parts, whole

    n, g, _, heads, h = q.shape
    kv, s = prefix_k.shape[2], own_k.shape[2]
    rows = (q * h**-0.5).reshape(n, g, kv, heads // kv, h)
    if impl == "gpu" and prefix_k.shape[1] + s <= WHOLE:
        out = whole(rows, prefix_k, prefix_v, prefix_length, own_k, own_v, t + 1, interpret=interpret)
        return out.reshape(q.shape)
    found = []  # (m, l, o) with axes N G parts K Q/K
    if prefix_k.shape[1]:
        of_node = jnp.moveaxis(rows, 1, 2).reshape(n, kv, g * heads // kv, h)
        got = parts(of_node, prefix_k, prefix_v, prefix_length, impl=impl, interpret=interpret)
        by_sample = lambda x: jnp.moveaxis(x.reshape(*x.shape[:3], g, heads // kv, *x.shape[4:]), 3, 1)
        found.append([by_sample(x) for x in got])
    if s and impl != "gpu":
        # On TPU XLA chooses a layout for writing to this cache; for a kernel it would copy all of it at every step.
        found.append([x[:, :, None] for x in _part(rows, own_k, own_v, t)])
    elif s:
        flat = lambda x: x.reshape(n * g, *x.shape[2:])
        filled = jnp.full((n * g,), t + 1)
        got = parts(flat(rows), flat(own_k), flat(own_v), filled, impl=impl, interpret=interpret)
        found.append([x.reshape(n, g, *x.shape[1:]) for x in got])
    top, total, out = (jnp.concatenate(x, axis=2) for x in zip(*found))
    scale = jnp.exp(top - top.max(2, keepdims=True))
    out = (out * scale[..., None]).sum(2) / (total * scale).sum(2)[..., None]
    return out.reshape(q.shape).astype(q.dtype)


def _part(rows: jax.Array, k: Cached, v: Cached, t: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the part of the own keys by XLA."""
    see = jnp.arange(k.shape[2]) <= t
    score = jnp.where(see, quantized.scores("ngkrh,ngskh->ngkrs", rows, k), NEG)
    top = score.max(-1)
    weight = jnp.where(see, jnp.exp(score - top[..., None]), 0.0)
    return top, weight.sum(-1), quantized.weighted("ngkrs,ngskh->ngkrh", weight, v, rows.dtype)


_by_parts = jax.custom_vjp(_merged, nondiff_argnums=(0, 1))


def _forward(impl: str, interpret: bool, *args: jax.Array) -> tuple[jax.Array, tuple]:
    return _merged(impl, interpret, *args), args


def _backward(impl: str, interpret: bool, args: tuple, cotangent: jax.Array) -> tuple:
    q, pk, pv, length, ok, ov, t = args
    form = lambda q, pk, pv, ok, ov: group_attention(q, pk, pv, length, ok, ov, t, impl="xla")
    dq, dpk, dpv, dok, dov = jax.vjp(form, q, pk, pv, ok, ov)[1](cotangent)
    return dq, dpk, dpv, None, dok, dov, None


_by_parts.defvjp(_forward, _backward)
