"""Generation whose every number depends only on the tokens before it: not on the batch, bucket, cache or mesh.

XLA's product of a row with weights has other bits among 16 rows than among 64. Its sum over 96 keys has other bits than
over 64. By default the same sample therefore has almost always the same tokens in every launch (float32), and log-probs
that differ in the seventh digit.

`invariant` makes a policy that computes what `decoder.make_policy` does in pieces of one shape. Products have `ROWS`
rows, whatever tokens or samples these are. Attention takes one block of `KEYS` keys after another for each query,
counted from the conversation's first token, whichever cache holds them. A piece is the body of a loop, compiled once
for its shape; the number of iterations is data. A token's keys, its hidden state and its log-prob are then the same to
the bit: prefilled, extended or sampled, alone or among others. On a mesh every device computes its own rows with whole
weights. (The aim is that of the batch-invariant modes of vLLM and SGLang; He et al., "Defeating Nondeterminism in LLM
Inference", 2025.)

Bits are equal on one kind of machine with one version of JAX. This is tested on CPU devices. Programs for TPUs are
compiled and have not run. Those for GPUs are lowered, where equal shapes may not suffice (kernels are chosen by
timing). For the cost see the rows *invariant* of docs/bench/cpu.md. Training is unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmarl_llm.generation.sampling import Sampling, sample_hidden
from jaxmarl_llm.kernels.quantized import Cached, ScaledVectors, dequantize, stored
from jaxmarl_llm.models import decoder, rope
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.layers import Block, rms_norm
from jaxmarl_llm.types import Params, Policy, PyTree, Unembed

ROWS = 16  # rows of every product: as fast as one row where weights come from memory
KEYS = 64  # keys of one block of attention

# Positions [KEYS] -> the keys and values of every row at these positions [ROWS KEYS K H]
Keys = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def attend_to(q: Float[Array, "ROWS Q H"], keys: Keys, last: Int[Array, "ROWS"]) -> Float[Array, "ROWS Q H"]:
    """Attend to positions 0 to ``last`` by softmax, block after block (arXiv 2205.14135, algorithm 1).

    A block behind ``last`` changes nothing: its weights are 0, and the sums so far are multiplied by 1.

    Args:
        q: one query for each row.
        keys: reads the keys and values of every row at given positions.
        last: position of each row's query.
    """
    h = q.shape[-1]
    kv = jax.eval_shape(keys, jnp.arange(KEYS))[0].shape[2]
    rows = (q.astype(jnp.float32) * h**-0.5).reshape(len(q), kv, -1, h)

    def block(i: jax.Array, state: tuple) -> tuple:
        top, total, out = state
        positions = i * KEYS + jnp.arange(KEYS)
        # All rows of a prompt have the same keys. Without the barrier they would become one product of another shape.
        k, v = jax.lax.optimization_barrier(keys(positions))
        visible = (positions <= last[:, None])[:, None, None]
        score = jnp.where(visible, jnp.einsum("nkrh,nskh->nkrs", rows, k.astype(jnp.float32)), -jnp.inf)
        new = jnp.maximum(top, score.max(-1))
        scale, weight = jnp.exp(top - new), jnp.exp(score - new[..., None])
        add = jnp.einsum("nkrs,nskh->nkrh", weight, v.astype(jnp.float32))
        return new, total * scale + weight.sum(-1), out * scale[..., None] + add

    none = jnp.full(rows.shape[:-1], -jnp.inf), jnp.zeros(rows.shape[:-1]), jnp.zeros(rows.shape)
    _, total, out = jax.lax.fori_loop(0, jnp.max(last) // KEYS + 1, block, none)
    return (out / total[..., None]).reshape(q.shape).astype(q.dtype)


def in_tiles(function: Callable, *rows: jax.Array) -> PyTree:
    """Apply ``function`` to `ROWS` rows at a time. The last tile is filled up with copies of the last row.

    Args:
        function: takes arrays of `ROWS` rows and returns a tree of such arrays.
        rows: arrays with equal leading axes.
    """
    n = len(rows[0])
    fill = lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], -n % ROWS, 0)]).reshape(-1, ROWS, *x.shape[1:])
    out = jax.lax.map(lambda tile: _isolated(function, tile), tuple(map(fill, rows)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n], out)


def _isolated(function: Callable, args: tuple) -> PyTree:
    """Put optimization barriers around ``function``.

    XLA inlines a loop that runs once and would fuse its body with the surrounding code.
    """
    return jax.lax.optimization_barrier(function(*jax.lax.optimization_barrier(args)))


@functools.cache
def invariant(policy: Policy) -> Policy:
    """Replace the generation of a policy (prefill, extend, decode and draw) by the form described above.

    Args:
        policy: a policy of `decoder.make_policy`.
    """
    bind = functools.partial
    return policy._replace(
        prefill=bind(prefill, policy),
        extend=bind(extend, policy),
        decode=bind(decode, policy),
        draw=bind(draw, policy),
        decode_slots=None,
    )


def _trunk(
    policy: Policy, layers: Params, tokens: jax.Array, positions: jax.Array, caches: PyTree, attend: Callable
) -> tuple[jax.Array, PyTree]:
    """Send one tile of tokens [ROWS] through all layers.

    Args:
        policy: a policy of `decoder.make_policy`.
        layers: `Policy.unstack` of the variables.
        tokens: one token for each row.
        positions: position of each token.
        caches: cache of each layer.
        attend: function of (cache, q [ROWS Q H], k [ROWS K H], v) to (out [ROWS Q H], what to keep).

    Returns:
        Hidden states [ROWS D], and for each layer what ``attend`` keeps.
    """
    cfg: Config = policy.config
    block, freq = Block(cfg), rope.frequencies(cfg)
    x, kept = policy.embed(layers, tokens), []
    for layer, cache in zip(layers["params"]["layers"], caches, strict=True):
        step = lambda x, positions, layer=layer, cache=cache: block.apply(
            layer, x, positions[:, None].astype(jnp.float32) * freq, functools.partial(attend, cache)
        )
        x, new = _isolated(step, (x, positions))
        kept.append(new)
    return rms_norm(x, layers["params"]["norm"]["scale"], cfg.rms_norm_eps), tuple(kept)


def extend(
    policy: Policy, variables: Params, tokens: jax.Array, count: jax.Array, start: jax.Array, prefix: PyTree
) -> tuple[jax.Array, PyTree]:
    """Append new tokens to cached prompts: hidden state [N D] of the last new token, and the new cache.

    Args:
        policy: a policy of `decoder.make_policy`.
        variables: as for `decoder.prefill`.
        tokens: new tokens [N E], right-padded.
        count: new tokens of each row [N], at least 1.
        start: filled slots of each row [N].
        prefix: keys and values (k, v) [N P K H] of each layer.
    """
    rope.check_positions(policy.config, prefix[0][0].shape[1])
    layers = policy.unstack(variables)
    tokens = jnp.pad(tokens, [(0, 0), (0, -tokens.shape[1] % ROWS)])
    return jax.lax.map(functools.partial(_extend_row, policy, layers), (tokens, count, start, prefix))


def _extend_row(policy: Policy, layers: Params, row: tuple) -> tuple[jax.Array, PyTree]:
    """Append ``count`` new tokens to one cached prompt, `ROWS` tokens at a time."""
    tokens, count, start, prefix = row

    def tile(i: jax.Array, state: tuple) -> tuple:
        hidden, prefix = state
        positions = start + i * ROWS + jnp.arange(ROWS)

        def attend(cache: tuple, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
            # Padding behind `count` is written behind what is read, or beyond the cache and dropped.
            write = lambda x, y: x.at[positions].set(y, mode="drop")
            cached_k, cached_v = (jax.tree.map(write, x, stored(y, x)) for x, y in zip(cache, (k, v)))
            repeat = lambda x: jnp.broadcast_to(x, (ROWS, *x.shape))
            read = lambda x, at: repeat(_whole(jax.tree.map(lambda y: y.at[at].get(mode="clip"), x)))
            return attend_to(q, lambda at: (read(cached_k, at), read(cached_v, at)), positions), (cached_k, cached_v)

        ids = jax.lax.dynamic_slice_in_dim(tokens, i * ROWS, ROWS)
        x, prefix = _trunk(policy, layers, ids, positions, prefix, attend)
        last = count - 1 - i * ROWS
        return jnp.where((last >= 0) & (last < ROWS), x[jnp.clip(last, 0, ROWS - 1)], hidden), prefix

    hidden = jnp.zeros((policy.config.hidden_size,), policy.config.dtype)
    return jax.lax.fori_loop(0, (count - 1) // ROWS + 1, tile, (hidden, prefix))


def _whole(x: Cached) -> jax.Array:
    """Keys or values that were read from a cache, as numbers to compute with."""
    return dequantize(x, jnp.float32) if isinstance(x, ScaledVectors) else x


def prefill(
    policy: Policy,
    variables: Params,
    tokens: jax.Array,
    length: jax.Array,
    *,
    keep: decoder.Keep | None = None,
) -> tuple[jax.Array, PyTree]:
    """Extend empty caches by prompts: hidden state [N D] of the last token, and the cache (k, v) of each layer.

    Args:
        policy: a policy of `decoder.make_policy`.
        variables: as for `decoder.prefill`.
        tokens: prompts [N P], right-padded.
        length: tokens of each prompt [N], at least 1.
        keep: form of the cache, as for `decoder.prefill`.
    """
    cfg: Config = policy.config
    zeros = jnp.zeros((*tokens.shape, cfg.num_kv_heads, cfg.head_dim), cfg.dtype)
    empty = zeros if keep is None else keep(zeros)
    none = tuple((empty, empty) for _ in range(cfg.num_layers))
    return extend(policy, variables, tokens, length, jnp.zeros_like(length), none)


def decode(
    policy: Policy,
    layers: Params,
    tokens: Sequence[jax.Array],
    prefix: Sequence[PyTree],
    length: Sequence[jax.Array],
    suffix: Sequence[PyTree],
    t: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[PyTree, ...]]:
    """Append one token to every sample of each part of a launch: `decode_part` of one part after another.

    Args:
        policy: a policy of `decoder.make_policy`.
        layers: `Policy.unstack` of the variables.
        tokens: for each part, the token of each sample [N G].
        prefix: for each part, the cache of the prompts.
        length: for each part, tokens of each prompt [N].
        suffix: for each part, the cache of the samples.
        t: slot of the token in the suffix, one scalar for all samples.
    """
    parts = zip(tokens, prefix, length, suffix, strict=True)
    hidden, grown = zip(*(decode_part(policy, layers, *part, t) for part in parts), strict=True)
    return hidden, grown


def decode_part(
    policy: Policy,
    layers: Params,
    tokens: jax.Array,
    prefix: PyTree,
    length: jax.Array,
    suffix: PyTree,
    t: jax.Array,
) -> tuple[jax.Array, PyTree]:
    """Append one token to every sample of one part: hidden states [N G D], and the new suffix cache.

    Args:
        policy: a policy of `decoder.make_policy`.
        layers: `Policy.unstack` of the variables.
        tokens: the token of each sample [N G].
        prefix: cache of the prompts, (k, v) [N P K H] of each layer.
        length: tokens of each prompt [N].
        suffix: cache of the samples, (k, v) [N G R K H] of each layer.
        t: slot of the token in the suffix, one scalar for all samples.
    """
    rope.check_positions(policy.config, prefix[0][0].shape[1] + suffix[0][0].shape[2])
    n, g = tokens.shape
    node = jnp.broadcast_to(jnp.arange(n)[:, None], (n, g))
    sample = jnp.broadcast_to(jnp.arange(g), (n, g))

    def tile(tokens: jax.Array, node: jax.Array, sample: jax.Array) -> tuple[jax.Array, PyTree]:
        filled = length[node]

        def attend(cache: tuple, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
            now = stored(k, cache[0][0]), stored(v, cache[0][1])

            def keys(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
                slot = positions - filled[:, None]  # in the suffix
                where = lambda test, x, y: jnp.where(test[..., None, None], x, y)
                of_prompt = lambda x: x.at[node[:, None], positions].get(mode="clip")
                of_sample = lambda x: x.at[node[:, None], sample[:, None], jnp.maximum(slot, 0)].get(mode="clip")
                cached = lambda x, y: where(slot < 0, of_prompt(x), of_sample(y))
                read = lambda x, y, new: where(slot == t, new[:, None], cached(x, y))
                found_k, found_v = (_whole(jax.tree.map(read, *of)) for of in zip(*cache, now, strict=True))
                return found_k, found_v

            return attend_to(q, keys, filled + t), now

        return _trunk(policy, layers, tokens, filled + t, tuple(zip(prefix, suffix)), attend)

    flat = lambda x: x.reshape(-1)
    hidden, new = in_tiles(tile, flat(tokens), flat(node), flat(sample))
    write = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y.reshape(n, g, 1, *y.shape[1:]), t, axis=2)
    return hidden.reshape(n, g, -1), jax.tree.map(write, suffix, new)


def draw(
    policy: Policy, layers: Params, hidden: jax.Array, u: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Draw one token for each sample, `ROWS` samples at a time: ids and log-probs [N G].

    Args:
        policy: a policy of `decoder.make_policy`.
        layers: `Policy.unstack` of the variables.
        hidden: hidden states [N G D].
        u: uniform numbers in [0, 1) [N G].
        sampling: the distribution to sample from.
    """
    unembed = policy.unembed
    assert isinstance(unembed, Unembed)
    one = lambda hidden, u: sample_hidden(hidden, unembed.head(layers), u, sampling)
    tiles = in_tiles(one, hidden.reshape(-1, hidden.shape[-1]), u.reshape(-1))
    return jax.tree.map(lambda x: x.reshape(u.shape), tiles)
