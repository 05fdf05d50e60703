"""Generation in which every number depends on the tokens before it alone: on no batch, bucket, cache or mesh.

XLA's product of a row with weights has other bits among 16 rows than among 64, its sum over 96 keys others than over
64, so that by default the same sample has almost always the same tokens in every launch (float32), and log-probs that
differ in the seventh digit. `invariant` gives a policy that computes what `qwen.make_policy` does in pieces of one
shape: products of `ROWS` rows, whatever tokens or samples these are, and attention of each query to one block of `KEYS`
keys after another, counted from the conversation's first token, whichever cache holds them. A piece is a loop's body,
compiled once for its shape; how often it runs is data. So a token's keys, its hidden state and its log-prob are the
same to the bit, prefilled, gone on to or sampled, alone or among others; on a mesh every device does so with its own
rows and whole weights. (The aim is that of the batch-invariant modes of vLLM and SGLang; He et al., "Defeating
Nondeterminism in LLM Inference", 2025.)

Equal bits are those of one kind of machine and one version of JAX. They are shown on CPU devices; programs for TPUs are
compiled and have not run, those for GPUs are lowered, where equal shapes may not suffice (kernels are chosen by
timing). What it costs: rows *invariant* of docs/performance.md. Training is as it was.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmarl_llm import qwen
from jaxmarl_llm.sampling import Sampling, sample_hidden
from jaxmarl_llm.types import Params, Policy, PyTree, Unembed

ROWS = 16  # rows of every product: as fast as one where weights come from memory
KEYS = 64  # keys of one block of attention

# Positions [KEYS] -> the keys and values of every row there [ROWS KEYS K H]
Keys = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def attend_to(q: Float[Array, "ROWS Q H"], keys: Keys, last: Int[Array, "ROWS"]) -> Float[Array, "ROWS Q H"]:
    """Softmax attention of each query to positions 0 to ``last``, block after block (arXiv 2205.14135, algorithm 1).

    A block that lies behind ``last`` changes nothing: its weights are 0, and what was summed up is multiplied by 1.
    """
    h = q.shape[-1]
    kv = jax.eval_shape(keys, jnp.arange(KEYS))[0].shape[2]
    rows = (q.astype(jnp.float32) * h**-0.5).reshape(len(q), kv, -1, h)

    def block(i: jax.Array, state: tuple) -> tuple:
        top, total, out = state
        at = i * KEYS + jnp.arange(KEYS)
        # Rows of a prompt have the same keys: a product of all of them with these would have another shape.
        k, v = jax.lax.optimization_barrier(keys(at))
        see = (at <= last[:, None])[:, None, None]
        score = jnp.where(see, jnp.einsum("nkrh,nskh->nkrs", rows, k.astype(jnp.float32)), -jnp.inf)
        new = jnp.maximum(top, score.max(-1))
        scale, weight = jnp.exp(top - new), jnp.exp(score - new[..., None])
        add = jnp.einsum("nkrs,nskh->nkrh", weight, v.astype(jnp.float32))
        return new, total * scale + weight.sum(-1), out * scale[..., None] + add

    none = jnp.full(rows.shape[:-1], -jnp.inf), jnp.zeros(rows.shape[:-1]), jnp.zeros(rows.shape)
    _, total, out = jax.lax.fori_loop(0, jnp.max(last) // KEYS + 1, block, none)
    return (out / total[..., None]).reshape(q.shape).astype(q.dtype)


def in_tiles(function: Callable, *rows: jax.Array) -> PyTree:
    """``function`` of `ROWS` rows after another, of arrays with equal leading axes; the last tile is filled up."""
    n = len(rows[0])
    fill = lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], -n % ROWS, 0)]).reshape(-1, ROWS, *x.shape[1:])
    out = jax.lax.map(lambda tile: _apart(function, tile), tuple(map(fill, rows)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:n], out)


def _apart(function: Callable, args: tuple) -> PyTree:
    """Not fused with what is around it, which a loop that runs once does not keep away."""
    return jax.lax.optimization_barrier(function(*jax.lax.optimization_barrier(args)))


@functools.cache
def invariant(policy: Policy) -> Policy:
    """``policy`` (`qwen.make_policy`) with generation as described above: prefill, extend, decode and draw."""
    cfg: qwen.Config = policy.config
    block, freq = qwen.Block(cfg), qwen.rope_frequencies(cfg)
    unembed = policy.unembed
    assert isinstance(unembed, Unembed)

    def trunk(layers: Params, tokens: jax.Array, at: jax.Array, caches: PyTree, attend: Callable) -> tuple:
        """Tokens [ROWS] at positions ``at`` -> hidden [ROWS D], and for each layer what ``attend`` keeps.

        attend(cache, q [ROWS Q H], k [ROWS K H], v) -> (out [ROWS Q H], what to keep).
        """
        x, kept = policy.embed(layers, tokens), []
        for layer, cache in zip(layers["params"]["layers"], caches, strict=True):
            step = lambda x, at, layer=layer, cache=cache: block.apply(
                layer, x, at[:, None].astype(jnp.float32) * freq, functools.partial(attend, cache)
            )
            x, own = _apart(step, (x, at))
            kept.append(own)
        return qwen.rms_norm(x, layers["params"]["norm"]["scale"], cfg.rms_norm_eps), tuple(kept)

    def extend(
        variables: Params, tokens: jax.Array, count: jax.Array, start: jax.Array, prefix: PyTree
    ) -> tuple[jax.Array, PyTree]:
        layers = policy.unstack(variables)
        tokens = jnp.pad(tokens, [(0, 0), (0, -tokens.shape[1] % ROWS)])

        def node(row: tuple) -> tuple[jax.Array, PyTree]:
            tokens, count, start, prefix = row

            def tile(i: jax.Array, state: tuple) -> tuple:
                hidden, prefix = state
                at = start + i * ROWS + jnp.arange(ROWS)

                def attend(cache: tuple, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
                    # Padding behind `count` is written behind what is read, or beyond the cache and dropped.
                    cache = tuple(x.at[at].set(y, mode="drop") for x, y in zip(cache, (k, v)))
                    of_each = lambda x: jnp.broadcast_to(x, (ROWS, *x.shape))
                    keys = lambda at: tuple(of_each(x.at[at].get(mode="clip")) for x in cache)
                    return attend_to(q, keys, at), cache

                x, prefix = trunk(layers, jax.lax.dynamic_slice_in_dim(tokens, i * ROWS, ROWS), at, prefix, attend)
                last = count - 1 - i * ROWS
                return jnp.where((last >= 0) & (last < ROWS), x[jnp.clip(last, 0, ROWS - 1)], hidden), prefix

            hidden = jnp.zeros((cfg.hidden_size,), cfg.dtype)
            return jax.lax.fori_loop(0, (count - 1) // ROWS + 1, tile, (hidden, prefix))

        return jax.lax.map(node, (tokens, count, start, prefix))

    def prefill(variables: Params, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, PyTree]:
        empty = jnp.zeros((*tokens.shape, cfg.num_kv_heads, cfg.head_dim), cfg.dtype)
        none = tuple((empty, empty) for _ in range(cfg.num_layers))
        return extend(variables, tokens, length, jnp.zeros_like(length), none)

    def decode(
        layers: Params, tokens: jax.Array, prefix: PyTree, length: jax.Array, suffix: PyTree, t: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        n, g = tokens.shape
        of = jnp.broadcast_to(jnp.arange(n)[:, None], (n, g))
        sample = jnp.broadcast_to(jnp.arange(g), (n, g))

        def tile(tokens: jax.Array, of: jax.Array, sample: jax.Array) -> tuple[jax.Array, PyTree]:
            filled = length[of]

            def attend(cache: tuple, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
                def keys(at: jax.Array) -> tuple[jax.Array, ...]:
                    behind = at - filled[:, None]  # position in the suffix
                    where = lambda test, x, y: jnp.where(test[..., None, None], x, y)
                    before = lambda x: x.at[of[:, None], at].get(mode="clip")
                    own = lambda x: x.at[of[:, None], sample[:, None], jnp.maximum(behind, 0)].get(mode="clip")
                    cached = [where(behind < 0, before(x), own(z)) for x, z in zip(*cache)]
                    return tuple(where(behind == t, new[:, None], x) for new, x in zip((k, v), cached))

                return attend_to(q, keys, filled + t), (k, v)

            return trunk(layers, tokens, filled + t, tuple(zip(prefix, suffix)), attend)

        flat = lambda x: x.reshape(-1)
        hidden, new = in_tiles(tile, flat(tokens), flat(of), flat(sample))
        write = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y.reshape(n, g, 1, *y.shape[1:]), t, axis=2)
        return hidden.reshape(n, g, -1), jax.tree.map(write, suffix, new)

    def draw(layers: Params, hidden: jax.Array, u: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
        one = lambda hidden, u: sample_hidden(hidden, unembed.head(layers), u, sampling)
        return jax.tree.map(
            lambda x: x.reshape(u.shape), in_tiles(one, hidden.reshape(-1, hidden.shape[-1]), u.reshape(-1))
        )

    return policy._replace(prefill=prefill, extend=extend, decode=decode, draw=draw)
