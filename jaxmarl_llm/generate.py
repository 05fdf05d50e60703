"""Prefill each node's prompt once, or go on behind what is cached of it, then decode its G samples in lock step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmarl_llm.sampling import Sampling, sample, sample_hidden
from jaxmarl_llm.sharding import cut_rows, meshed
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
STILL = ("keys", "length", "prefix")


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
    keep: bool = False,
) -> Any:
    """Completions. Pure; call it inside a larger program, or `generate`, its form for the host.

    tokens: prompts, right-padded. keys: one key per sample; token t is drawn from ``fold_in(key, t)`` alone, hence
    the same completion in any batch or bucket. active: rows that are not (padding) are done from the start. Ends when
    every sample is done, after at most ``max_new`` tokens.

    prefix: a cache whose first ``start`` slots are filled; ``tokens`` and ``length`` are then what follows there, at
    least one token each. keep: also return the caches, (Completions, prefix, suffix): suffix slots 0 to length - 2 of
    a sample are filled, its last token is never read.
    """
    state = begin(policy, variables, tokens, length, keys, active, prefix, start, max_new=max_new, pad_id=pad_id)
    layers = policy.unstack(variables)
    state = advance(policy, layers, state, 0, max_new, stop_ids=stop_ids, pad_id=pad_id, sampling=sampling)
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
    until: jax.Array | int,
    *,
    stop_ids: tuple[int, ...],
    pad_id: int,
    sampling: Sampling,
) -> Decoding:
    """From ``t`` up to ``until`` tokens of every sample. ``layers``: `Policy.unstack` of the variables."""
    n, g, max_new = state.tokens.shape
    stops, keys, prefix, length = jnp.array(stop_ids, jnp.int32), state.keys, state.prefix, state.length

    def draw(hidden: jax.Array, t: jax.Array | int, done: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        u = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, t)))(keys.reshape(-1)).reshape(n, g)
        if isinstance(policy.unembed, Unembed) and not meshed():
            token, logprob = sample_hidden(hidden, policy.unembed.head(layers), u, sampling)
        else:
            token, logprob = sample(policy.unembed(layers, hidden), u, sampling)
        token = jnp.where(done, pad_id, token)
        return token, jnp.where(done, 0.0, logprob), done | jnp.isin(token, stops)

    def unfinished(state: tuple) -> jax.Array:
        return (state[0] < jnp.minimum(until, max_new)) & ~jnp.all(state[1])

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

    _, *moved = jax.lax.while_loop(unfinished, step, (jnp.int32(t), *fields(state, MOVING).values()))
    return state.replace(**dict(zip(MOVING, moved, strict=True)))


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


CHUNK = 32  # tokens between two looks at what is done


def one_program(max_new: int, chunk: int = CHUNK) -> bool:
    """Whether `generate` decodes ``max_new`` tokens in a single program."""
    return max_new <= chunk or meshed()


def generate(
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
    keep: bool = False,
    layers: Params | None = None,
    chunk: int = CHUNK,
) -> Any:
    """`sample_completions` from the host, the same results. Donates ``prefix``.

    More than ``chunk`` tokens are decoded in chunks of so many steps. Which samples are done is read while the next
    chunk is already under way, and when a quarter of the nodes would do for those that are alive, they go on in a
    program of that size. On a mesh it is one program to the end. ``layers``: `unstacked` variables, to make them once
    for several launches.
    """
    rows, size = (tokens, length, keys, active), dict[str, Any](max_new=max_new, pad_id=pad_id)
    stops = dict[str, Any](stop_ids=stop_ids, sampling=sampling)
    if one_program(max_new, chunk):
        return _at_once(policy, variables, *rows, **size, **stops, prefix=prefix, start=start, keep=keep)
    layers = unstacked(policy, variables) if layers is None else layers
    state, late = _begin(policy, variables, *rows, prefix, start, **size), None
    whole: Decoding | None = None  # every sample, once some have been left behind
    nodes, samples = np.zeros(0, np.int32), np.zeros((0, 0), np.int32)  # where in `whole` those of `state` stand
    for until in range(chunk, max_new + chunk, chunk):
        moving, still = fields(state, MOVING), fields(state, STILL)
        moved, done = _advance(policy, layers, moving, still, until - chunk, until, **stops, pad_id=pad_id)
        state, late, before = state.replace(**moved), done, late
        fewer = None if before is None else alive(np.asarray(before))
        if fewer is None:
            continue
        if not fewer.samples.size:
            break
        if whole is None:
            whole, (nodes, samples) = state, fewer
        else:
            whole = whole.replace(**_put_back(fields(whole, MOVING), fields(state, MOVING), nodes, samples))
            samples = np.where(fewer.samples < 0, -1, samples[fewer.nodes[:, None], fewer.samples])
            nodes = nodes[fewer.nodes]
        state, late = _pick(state, *fewer)
    if whole is not None:
        state = whole.replace(**_put_back(fields(whole, MOVING), fields(state, MOVING), nodes, samples))
    return (state.completions, state.prefix, state.suffix) if keep else state.completions


class Alive(NamedTuple):
    nodes: np.ndarray  # [N']
    samples: np.ndarray  # [N', G'] of each of these nodes, -1: none


def alive(done: np.ndarray) -> Alive | None:
    """The samples that are not done, out of [N G]; None when they need more than a quarter of N.

    Every shape is a program, so there are few: N is cut to a quarter (rounded up) again and again, G once N is 1.
    ``samples`` is empty when all are done.
    """
    going = ~done
    nodes, most = np.flatnonzero(going.any(1)), int(going.sum(1).max(initial=0))
    if not most:
        return Alive(np.zeros(0, np.int32), np.zeros((0, 0), np.int32))
    n = quarters(done.shape[0], len(nodes))
    g = quarters(done.shape[1], most) if n == 1 else done.shape[1]
    if (n, g) == done.shape:
        return None
    samples = np.full((n, g), -1, np.int32)
    for row, node in enumerate(nodes):
        which = np.flatnonzero(going[node])
        samples[row, : len(which)] = which
    return Alive(np.resize(nodes, n).astype(np.int32), samples)


def quarters(size: int, needed: int) -> int:
    """``size`` cut to a quarter, rounded up, as often as that leaves what is needed."""
    while (less := -(-size // 4)) >= needed and less < size:
        size = less
    return size


_at_once = jax.jit(
    sample_completions,
    static_argnames=("policy", "max_new", "stop_ids", "pad_id", "sampling", "keep"),
    donate_argnames=("prefix",),
)
_begin = jax.jit(begin, static_argnames=("policy", "max_new", "pad_id"), donate_argnames=("prefix",))
unstacked = jax.jit(lambda policy, variables: policy.unstack(variables), static_argnums=(0,))


@functools.partial(jax.jit, static_argnames=("policy", "stop_ids", "pad_id", "sampling"), donate_argnames=("moving",))
def _advance(
    policy: Policy, layers: Params, moving: dict, still: dict, t: int, until: int, **fixed: Any
) -> tuple[dict, jax.Array]:
    """What has moved, and which samples are done once more: that stays when the next chunk is given the rest."""
    state = advance(policy, layers, Decoding(**moving, **still), t, until, **fixed)
    return fields(state, MOVING), state.done


@jax.jit
def _pick(state: Decoding, nodes: jax.Array, samples: jax.Array) -> tuple[Decoding, jax.Array]:
    lanes = lambda tree: jax.tree.map(lambda x: x[nodes[:, None], jnp.maximum(samples, 0)], tree)
    of_nodes = lambda tree: jax.tree.map(lambda x: x[nodes], tree)
    done = lanes(state.done) | (samples < 0)
    picked = Decoding(**lanes(fields(state, (*MOVING, "keys"))), **of_nodes(fields(state, ("length", "prefix"))))
    return picked.replace(done=done), done


@functools.partial(jax.jit, donate_argnames=("whole",))
def _put_back(whole: dict, moved: dict, nodes: jax.Array, samples: jax.Array) -> dict:
    nowhere = jnp.where(samples < 0, whole["done"].shape[1], samples)
    return jax.tree.map(lambda x, new: x.at[nodes[:, None], nowhere].set(new, mode="drop"), whole, moved)


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
