"""Prefill each node's prompt once, or go on behind what is cached of it, then decode its G samples in lock step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmarl_llm.sampling import Sampling, sample, sample_hidden
from jaxmarl_llm.sharding import by_device, cut_rows, meshed
from jaxmarl_llm.types import Params, Policy, PyTree, Unembed


class Completions(struct.PyTreeNode):
    """G completions for each of N nodes. Which tokens were sampled is ``arange(R) < length``, whatever their values."""

    tokens: Int[Array, "N G R"]  # pad_id behind the end
    length: Int[Array, "N G"]  # sampled tokens, the stop id included
    logprobs: Float[Array, "N G R"]  # 0 behind the end
    truncated: Bool[Array, "N G"]  # the limit came before a stop id


class Decoding(struct.PyTreeNode):
    """Generation after some tokens of every sample that is not done. R: the most tokens of a completion."""

    done: Bool[Array, "N G"]
    count: Int[Array, "N G"]
    tokens: Int[Array, "N G R"]
    logprobs: Float[Array, "N G R"]
    hidden: Float[Array, "N G D"]
    keys: Key[Array, "N G"]
    length: Int[Array, "N"]  # filled slots of the prefix
    prefix: PyTree
    suffix: PyTree

    @property
    def completions(self) -> Completions:
        return Completions(self.tokens, self.count, self.logprobs, ~self.done)


MOVING = ("done", "count", "tokens", "logprobs", "hidden", "suffix")  # what a decode step changes


def fields(state: Decoding, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(state, name) for name in names}


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
    prefix: PyTree = None,
    start: Int[Array, "N"] | None = None,
    layers: Params | None = None,
    compact: bool = False,
    keep: bool = False,
) -> Any:
    """Completions. Pure; call it inside a larger program, or `generate`, its form for the host.

    tokens: prompts, right-padded. keys: one key per sample; token t is drawn from ``fold_in(key, t)`` alone, hence
    the same completion in any batch or bucket. active: rows that are not (padding) are done from the start. Ends when
    every sample is done, after at most ``max_new`` tokens.

    prefix: a cache whose first ``start`` slots are filled; ``tokens`` and ``length`` are then what follows there, at
    least one token each. layers: `Policy.unstack` of the variables. compact: samples that are not done go on alone once
    there are few of them (`smaller`); not for `by_row`, whose rows have weights of their own. keep: also return the
    caches, (Completions, prefix, suffix): suffix slots 0 to length - 2 of a sample are filled, its last token is never
    read.
    """
    if policy.draw is not None and meshed():  # `invariant`: products that are cut over devices add up in another order
        fixed = {"max_new": max_new, "stop_ids": stop_ids, "pad_id": pad_id, "sampling": sampling, "keep": keep}

        def own(variables: Params, *rows: Any) -> Any:
            return sample_completions(policy, variables, *rows[:4], prefix=rows[4], start=rows[5], **fixed)

        return by_device(own, variables, tokens, length, keys, active, prefix, start)
    state = begin(policy, variables, tokens, length, keys, active, prefix, start, max_new=max_new, pad_id=pad_id)
    advanced = functools.partial(
        advance,
        policy,
        policy.unstack(variables) if layers is None else layers,
        stop_ids=stop_ids,
        pad_id=pad_id,
        sampling=sampling,
    )
    t: jax.Array | int = 0
    left: list[tuple[Decoding, jax.Array, jax.Array]] = []  # whom the samples of the next one are of, and where
    for size in smaller(*keys.shape) if compact else ():
        t, state = advanced(state, t, until=size)
        nodes, samples = unfinished(state.done, size)
        left.append((state, nodes, samples))
        state = pick(state, nodes, samples)
    _, state = advanced(state, t)
    while left:
        state = put_back(*left.pop(), state)
    return (state.completions, state.prefix, state.suffix) if keep else state.completions


def begin(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N P"],
    length: Int[Array, "N"],
    keys: Key[Array, "N G"],
    active: Bool[Array, "N"],
    prefix: PyTree = None,
    start: Int[Array, "N"] | None = None,
    *,
    max_new: int,
    pad_id: int,
) -> Decoding:
    """The prompts are in the cache, nothing is sampled yet."""
    n, g = keys.shape
    tokens, length, keys, active = cut_rows((tokens, length, keys, active))
    hidden, prefix, length = fill(policy, variables, tokens, length, prefix, start)
    hidden = jnp.broadcast_to(hidden[:, None], (n, g, hidden.shape[-1]))
    state = Decoding(
        done=jnp.broadcast_to(~active[:, None], (n, g)),
        count=jnp.zeros((n, g), jnp.int32),
        tokens=jnp.full((n, g, max_new), pad_id, jnp.int32),
        logprobs=jnp.zeros((n, g, max_new), jnp.float32),
        hidden=hidden,
        keys=keys,
        length=length,
        prefix=prefix,
        suffix=policy.init_suffix(prefix, g, max(max_new - 1, 1)),
    )
    return state.replace(**cut_rows(fields(state, MOVING)))


def advance(
    policy: Policy,
    layers: Params,
    state: Decoding,
    t: jax.Array | int,
    *,
    until: tuple[int, int] = (0, 0),
    stop_ids: tuple[int, ...],
    pad_id: int,
    sampling: Sampling,
) -> tuple[jax.Array, Decoding]:
    """From token ``t`` of every sample until (n, g) hold all that are not done: (0, 0) when all are. Where it is then.

    ``layers``: `Policy.unstack` of the variables.
    """
    n, g, max_new = state.tokens.shape
    stops, keys, prefix, length = jnp.array(stop_ids, jnp.int32), state.keys, state.prefix, state.length

    def draw(hidden: jax.Array, t: jax.Array | int, done: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        u = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, t)))(keys.reshape(-1)).reshape(n, g)
        if policy.draw is not None:
            token, logprob = policy.draw(layers, hidden, u, sampling)
        elif isinstance(policy.unembed, Unembed) and not meshed():
            token, logprob = sample_hidden(hidden, policy.unembed.head(layers), u, sampling)
        else:
            token, logprob = sample(policy.unembed(layers, hidden), u, sampling)
        token = jnp.where(done, pad_id, token)
        return token, jnp.where(done, 0.0, logprob), done | jnp.isin(token, stops)

    def too_many(done: jax.Array) -> jax.Array:
        if until == (0, 0):
            return ~jnp.all(done)
        return (jnp.sum(~jnp.all(done, 1)) > until[0]) | (jnp.max(jnp.sum(~done, 1)) > until[1])

    def goes_on(state: tuple) -> jax.Array:
        return (state[0] < max_new) & too_many(state[1])

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

    now, *moved = jax.lax.while_loop(goes_on, step, (jnp.int32(t), *fields(state, MOVING).values()))
    return now, state.replace(**dict(zip(MOVING, moved, strict=True)))


FEW = 16  # samples from which a quarter of them takes clearly less time


def smaller(n: int, g: int) -> list[tuple[int, int]]:
    """The sizes at which samples out of [n g] go on alone when they fit: a quarter (rounded up) of the nodes, or of the
    samples of a single one, and a quarter of that. Two at most: each is a loop more to compile.
    """
    sizes: list[tuple[int, int]] = []
    while n * g >= FEW and len(sizes) < 2:
        n, g = (-(-n // 4), g) if n > 1 else (n, -(-g // 4))
        sizes.append((n, g))
    return sizes


def unfinished(done: jax.Array, size: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """Nodes [n] and samples of each [n g] that are not done, of those that fit; where there are none -1."""
    n, g = size
    going = ~done
    (nodes,) = jnp.nonzero(going.any(1), size=n, fill_value=-1)
    samples = jnp.argsort(done[nodes], axis=1, stable=True)[:, :g]
    there = jnp.take_along_axis(going[nodes], samples, 1) & (nodes >= 0)[:, None]
    return nodes, jnp.where(there, samples, -1)


def pick(state: Decoding, nodes: jax.Array, samples: jax.Array) -> Decoding:
    """Only these samples of these nodes; what stands for none is done."""
    lanes = lambda tree: jax.tree.map(lambda x: x[nodes[:, None], samples], tree)
    same = len(nodes) == len(state.length) == 1  # their prefix need not be copied
    rows = lambda tree: tree if same else jax.tree.map(lambda x: x[nodes], tree)
    picked = Decoding(**lanes(fields(state, (*MOVING, "keys"))), **rows(fields(state, ("length", "prefix"))))
    return picked.replace(done=picked.done | (samples < 0))


def put_back(state: Decoding, nodes: jax.Array, samples: jax.Array, picked: Decoding) -> Decoding:
    """``state`` with what has become of the samples that were picked."""
    nowhere = jnp.where(samples < 0, state.done.shape[1], samples)
    put = lambda x, new: x.at[nodes[:, None], nowhere].set(new, mode="drop")
    return state.replace(**jax.tree.map(put, fields(state, MOVING), fields(picked, MOVING)))


def fill(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N E"],
    length: Int[Array, "N"],
    prefix: PyTree = None,
    start: Int[Array, "N"] | None = None,
) -> tuple[Float[Array, "N D"], PyTree, Int[Array, "N"]]:
    """Prompts into the cache, from nothing or behind the ``start`` slots of ``prefix`` that are filled.

    Hidden state of the last token, the cache and how many of its slots are filled now."""
    length = jnp.maximum(length, 1)
    if prefix is None or start is None:
        return *policy.prefill(variables, tokens, length), length
    assert policy.extend is not None  # or nothing would have been kept
    return *policy.extend(variables, tokens, length, start, prefix), start + length


SHORT = 32  # tokens of a completion for which nothing is copied or moved


def alone(max_new: int) -> bool:
    """Whether `generate` reads layers by themselves (`unstacked`) and lets unfinished samples go on alone."""
    return max_new > SHORT and not meshed()


def generate(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N P"],
    length: Int[Array, "N"],
    keys: Key[Array, "N G"],
    active: Bool[Array, "N"],
    *,
    max_new: int,
    layers: Params | None = None,
    **more: Any,
) -> Any:
    """`sample_completions` from the host, a program for each shape. Donates ``prefix``.

    ``layers``: `unstacked` variables, to make them once for several launches. Without a mesh more than `SHORT` tokens
    are decoded with `compact`.
    """
    compact = alone(max_new)
    if compact and layers is None:
        layers = unstacked(policy, variables)
    rows = (tokens, length, keys, active)
    return _generate(policy, variables, *rows, max_new=max_new, layers=layers, compact=compact, **more)


_generate = jax.jit(
    sample_completions,
    static_argnames=("policy", "max_new", "stop_ids", "pad_id", "sampling", "compact", "keep"),
    donate_argnames=("prefix",),
)
unstacked = jax.jit(lambda policy, variables: policy.unstack(variables), static_argnums=(0,))


@functools.cache
def by_row(policy: Policy, own: tuple[str, ...]) -> Policy:
    """``policy`` for rows that each have parameters of their own: one program for many models of one architecture.

    The collections of its variables named in ``own`` (params, lora) have a leading axis N in every leaf, one entry a
    row; the others are shared. What `sample_completions` needs, no training. A row's numbers are those of ``policy``.
    Raises ValueError for an `invariant` policy: rows of different variables are one product.
    """
    if policy.draw is not None:
        raise ValueError("a policy of invariant generation: expected another where each row has its own variables")

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
        extend=None if policy.extend is None else over_rows(policy.extend),
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
