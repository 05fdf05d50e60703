"""Prefill each node's prompt once, then decode its G samples in lock step against the shared prefix."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmarl_llm.sampling import Sampling, sample
from jaxmarl_llm.sharding import cut_rows
from jaxmarl_llm.types import Params, Policy, PyTree


class Completions(struct.PyTreeNode):
    """G completions for each of N nodes. Which tokens were sampled is ``arange(R) < length``, whatever their values."""

    tokens: Int[Array, "N G R"]  # pad_id behind the end
    length: Int[Array, "N G"]  # sampled tokens, the stop id included
    logprobs: Float[Array, "N G R"]  # 0 behind the end
    truncated: Bool[Array, "N G"]  # the limit came before a stop id


def sample_completions(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N P"],
    length: Int[Array, "N"],
    keys: Key[Array, "N G"],
    active: Bool[Array, "N"],
    *,
    max_new: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
    sampling: Sampling,
) -> Completions:
    """Pure; call it inside a larger program, or `generate`, its jitted form, from the host.

    tokens: prompts, right-padded. keys: one key per sample; token t is drawn from ``fold_in(key, t)`` alone, hence
    the same completion in any batch or bucket. active: rows that are not (padding) are done from the start. Ends when
    every sample is done, after at most ``max_new`` tokens.
    """
    n, g = keys.shape
    tokens, length, keys, active = cut_rows((tokens, jnp.maximum(length, 1), keys, active))
    stops = jnp.array(stop_ids, jnp.int32)
    layers = policy.unstack(variables)
    hidden, prefix = policy.prefill(variables, tokens, length)

    def draw(hidden: jax.Array, t: jax.Array | int, done: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        u = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, t)))(keys.reshape(-1)).reshape(n, g)
        token, logprob = sample(policy.unembed(layers, hidden), u, sampling)
        token = jnp.where(done, pad_id, token)
        return token, jnp.where(done, 0.0, logprob), done | jnp.isin(token, stops)

    idle = jnp.broadcast_to(~active[:, None], (n, g))
    out_tokens = jnp.full((n, g, max_new), pad_id, jnp.int32)
    out_logprobs = jnp.zeros((n, g, max_new), jnp.float32)
    hidden = jnp.broadcast_to(hidden[:, None], (n, g, hidden.shape[-1]))
    suffix = policy.init_suffix(prefix, g, max(max_new - 1, 1))

    def unfinished(state: tuple) -> jax.Array:
        return (state[0] < max_new) & ~jnp.all(state[1])

    def step(state: tuple) -> tuple:
        t, done, count, out_tokens, out_logprobs, hidden, suffix = state
        token, logprob, now_done = draw(hidden, t, done)
        out_tokens = jax.lax.dynamic_update_slice_in_dim(out_tokens, token[:, :, None], t, axis=2)
        out_logprobs = jax.lax.dynamic_update_slice_in_dim(out_logprobs, logprob[:, :, None], t, axis=2)
        # The last token needs no hidden state behind it.
        hidden, suffix = jax.lax.cond(
            (t + 1 < max_new) & ~jnp.all(now_done),
            lambda: policy.decode(layers, token, prefix, length, suffix, t),
            lambda: (hidden, suffix),
        )
        return t + 1, now_done, count + ~done, out_tokens, out_logprobs, hidden, suffix

    rows = cut_rows((idle, jnp.zeros((n, g), jnp.int32), out_tokens, out_logprobs, hidden, suffix))
    state = (jnp.int32(0), *rows)
    _, done, count, out_tokens, out_logprobs, _, _ = jax.lax.while_loop(unfinished, step, state)
    return Completions(tokens=out_tokens, length=count, logprobs=out_logprobs, truncated=~done)


generate = functools.partial(jax.jit, static_argnames=("policy", "max_new", "stop_ids", "pad_id", "sampling"))(
    sample_completions
)


@functools.cache
def by_row(policy: Policy, own: tuple[str, ...]) -> Policy:
    """``policy`` for rows that each have parameters of their own: one program for many models of one architecture.

    The collections of its variables named in ``own`` (params, lora) have a leading axis N in every leaf, one entry a
    row; the others are shared. What `sample_completions` needs, no training. A row's numbers are those of ``policy``.
    """

    def over_rows(function: Callable) -> Callable:
        """function(variables, *arrays of rows, a batch of one)."""

        def call(variables: Params, *rows: PyTree) -> PyTree:
            axes = {name: 0 if name in own else None for name in variables}
            one = lambda v, *x: jax.tree.map(lambda y: y[0], function(v, *jax.tree.map(lambda y: y[None], x)))
            return jax.vmap(one, in_axes=(axes, *[0] * len(rows)))(variables, *rows)

        return call

    def decode(variables: Params, tokens: jax.Array, prefix: PyTree, length: jax.Array, suffix: PyTree, t: jax.Array):
        step = lambda v, tok, pre, size, suf: policy.decode(policy.unstack(v), tok, pre, size, suf, t)
        return over_rows(step)(variables, tokens, prefix, length, suffix)

    return policy._replace(
        prefill=over_rows(policy.prefill),
        decode=decode,
        unembed=over_rows(policy.unembed),
        embed=over_rows(policy.embed),
        unstack=lambda variables: variables,
    )


def up_to(n: int, multiple: int) -> int:
    """The least multiple that holds n."""
    return -(-n // multiple) * multiple


def bucket(n: int, smallest: int = 1) -> int:
    """The least of smallest * {1, 1.5} * 2^i (rounded up) that holds n: at most 1/3 waste, two sizes an octave."""
    size = max(smallest, 1)
    while size < n:
        half = size + (size + 1) // 2
        if half >= n:
            return half
        size *= 2
    return size
