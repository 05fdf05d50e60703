"""Generation: prefill each node's prompt once, or extend its cached prefix, then decode its G samples in lock step.

A launch may have several parts: nodes with equally many samples each. All parts are decoded in one loop, in which a
token of every sample takes one pass over the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmarl_llm.distributed.heads import cut_attention
from jaxmarl_llm.distributed.sharding import attention_rows, by_device, cut_rows, meshed, put_rows
from jaxmarl_llm.generation.decoding import (
    LOOP_STATE,
    Decoding,
    exceeds,
    gather_lanes,
    join,
    launch_sizes,
    on_own_rows,
    scatter_back,
    select_fields,
    split,
    unfinished,
)
from jaxmarl_llm.generation.sampling import Sampling, sample, sample_hidden
from jaxmarl_llm.types import Params, Policy, PyTree, Unembed

LONG_COMPLETION = 64  # tokens: for more of them, unfinished lanes are compacted; each size is one more loop to compile


class Rows:
    """Application of functions to the rows of a launch: to all of them at once. `blocks.Blocks` divides them."""

    def over(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """``function(variables, *trees of rows)``, applied to all rows."""
        return function

    def unstack(self, policy: Policy, variables: Params) -> Params:
        """`Policy.unstack` of the variables of all rows."""
        return policy.unstack(variables)

    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that split each leading axis of caches; those of attention."""
        return (attention_rows(),)

    def put(self, tables: PyTree) -> PyTree:
        """Copy of host tables [N ...] on the devices, with the leading axes of ``over``."""
        return put_rows(tables)


TOGETHER = Rows()


class PromptRows(NamedTuple):
    """One part of a launch: N prompts of G samples each. Fields are the arguments of `sample_completions`."""

    tokens: Int[Array, "N P"]
    length: Int[Array, " N"]
    keys: Key[Array, "N G"]
    active: Bool[Array, " N"]
    prefix: PyTree = None
    start: Any = None  # [N]
    limit: Any = None  # [N]
    adapter: Any = None  # [N], for `Policy.choose_adapters`; None: all rows have the adapter of the variables


def sample_completions(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N P"],
    length: Int[Array, " N"],
    keys: Key[Array, "N G"],
    active: Bool[Array, " N"],
    *,
    prefix: PyTree = None,
    start: Int[Array, " N"] | None = None,
    limit: Int[Array, " N"] | None = None,
    **more: Any,
) -> Any:
    """Sample G completions for each prompt. Pure: call it inside a larger program, or `generate` from the host.

    Generation ends when every sample is done: by a stop id, or at the limit of its row.

    Args:
        policy: functions of the model.
        variables: variables of the model.
        tokens: prompts [N P], right-padded. With ``prefix`` they are the tokens behind the filled slots.
        length: tokens of each prompt [N], at least 1.
        keys: one typed key for each sample [N G]. Token t is drawn from ``fold_in(key, t)`` alone, hence the same
            completion in any batch or bucket.
        active: False for rows [N] that are padding. They are done from the start.
        prefix: cache whose first ``start`` slots are filled, or None.
        start: filled slots of each row of ``prefix`` [N], or None.
        limit: largest number of tokens of a completion of each row [N], from 1 to ``max_new_tokens``. None: it is
            ``max_new_tokens`` in all rows. A limit does not change the tokens before it.
        more: keyword arguments of `sample_launch`.

    Returns:
        Completions, or with ``keep`` completions and caches.
    """
    rows = PromptRows(tokens, length, keys, active, prefix, start, limit)
    return sample_launch(policy, variables, (rows,), **more)[0]


def sample_launch(
    policy: Policy,
    variables: Params,
    parts: Sequence[PromptRows],
    *,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
    sampling: Sampling,
    layers: Params | None = None,
    compact: bool = False,
    keep: bool = False,
    applied: Rows = TOGETHER,
) -> tuple[Any, ...]:
    """Sample the completions of all parts of a launch in one decoding loop.

    Each part is prefilled by itself. A sample does not depend on the other parts, as it does not on the other rows.

    Args:
        policy: functions of the model.
        variables: variables of the model.
        parts: prompts, in parts with equally many samples. On a mesh, N of each part of several is a multiple of
            `sharding.row_parts`.
        max_new_tokens: largest number of tokens of a completion, R.
        stop_ids: tokens that end a completion.
        pad_id: token behind the end of a completion.
        sampling: the distribution to sample from.
        layers: `Policy.unstack` of the variables; None computes it. A program that is given it compiles faster,
            because it cuts no layer out of a stack.
        compact: whether unfinished samples are gathered into a smaller loop once few are left; see
            `compaction_sizes`. Not for `by_row`, whose rows have weights of their own.
        keep: whether to return (Completions, prefix, suffix). Suffix slots 0 to length - 2 of a sample are filled; its
            last token is never read.
        applied: how functions are applied to rows. With blocks, every array of the parts and of the result has a
            leading axis [blocks].

    Returns:
        For each part its completions, or with ``keep`` completions and caches.
    """
    if policy.draw is not None and meshed():  # `invariant`: products split over devices are summed in another order
        fixed = functools.partial(
            sample_launch,
            policy,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            pad_id=pad_id,
            sampling=sampling,
            keep=keep,
        )
        on_device = lambda variables, *rows: fixed(variables, (PromptRows(*rows),))[0]
        # A device takes its own rows of one table. So the parts are decoded one after another.
        return tuple(by_device(on_device, variables, *rows) for rows in parts)
    first = functools.partial(begin, policy, max_new_tokens=max_new_tokens, pad_id=pad_id)
    states = tuple(applied.over(first)(to_fill(rows.prefix, variables, layers), *rows) for rows in parts)
    advanced = functools.partial(
        advance,
        policy,
        applied.unstack(policy, variables) if layers is None else layers,
        stop_ids=stop_ids,
        pad_id=pad_id,
        sampling=sampling,
        applied=applied,
    )
    states = decode_to_the_end(states, advanced, launch_sizes([rows.keys.shape for rows in parts]) if compact else ())
    return tuple((state.completions, state.prefix, state.suffix) if keep else state.completions for state in states)


def decode_to_the_end(
    states: tuple[Decoding, ...],
    advanced: Callable[..., tuple[Any, tuple[Decoding, ...]]],
    sizes: Sequence[Sequence[tuple[int, ...]]],
) -> tuple[Decoding, ...]:
    """Advance until every sample is done.

    Args:
        states: state of each part of the launch.
        advanced: `advance` with all but the states, the first token's place and ``until``.
        sizes: (nodes, samples) of each part on one device, smaller and smaller. Once the unfinished samples fit on all
            devices, they go on alone in a loop of it.
    """
    t: jax.Array | int = 0
    larger: list[list[tuple[Decoding, jax.Array, jax.Array]]] = []  # states, and the lanes gathered from each of them
    for size in sizes:
        t, states = advanced(states, t, until=size)
        chosen = [
            on_own_rows(functools.partial(unfinished, size=own), s.done) for s, own in zip(states, size, strict=True)
        ]
        larger.append([(state, *lanes) for state, lanes in zip(states, chosen, strict=True)])
        states = tuple(laid(on_own_rows(gather_lanes, *lanes)) for lanes in larger[-1])
    _, states = advanced(states, t)
    while larger:
        pairs = zip(larger.pop(), states, strict=True)
        states = tuple(laid(on_own_rows(scatter_back, *lanes, state)) for lanes, state in pairs)
    return states


def begin(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N P"],
    length: Int[Array, " N"],
    keys: Key[Array, "N G"],
    active: Bool[Array, " N"],
    prefix: PyTree = None,
    start: Int[Array, " N"] | None = None,
    limit: Int[Array, " N"] | None = None,
    adapter: Int[Array, " N"] | None = None,
    *,
    max_new_tokens: int,
    pad_id: int,
) -> Decoding:
    """Fill the cache with the prompts and make the state before the first token.

    Arguments are those of `sample_completions`, of `PromptRows`: ``adapter``, and of `sample_launch`:
    ``max_new_tokens`` and ``pad_id``.
    """
    n, g = keys.shape
    tokens, length, keys, active, limit = cut_rows((tokens, length, keys, active, limit))
    hidden, prefix, length = fill(policy, variables, tokens, length, prefix, start, adapter)
    hidden = jnp.broadcast_to(hidden[:, None], (n, g, hidden.shape[-1]))
    state = Decoding(
        done=jnp.broadcast_to(~active[:, None], (n, g)),
        count=jnp.zeros((n, g), jnp.int32),
        tokens=jnp.full((n, g, max_new_tokens), pad_id, jnp.int32),
        logprobs=jnp.zeros((n, g, max_new_tokens), jnp.float32),
        hidden=hidden,
        keys=keys,
        length=length,
        prefix=prefix,
        suffix=policy.init_suffix(prefix, g, max(max_new_tokens - 1, 1)),
        limit=limit,
        cut=None if limit is None else jnp.zeros((n, g), bool),
        adapter=adapter,
    )
    return laid(state)


def laid(state: Decoding) -> Decoding:
    """Constrain what a decode step changes to the layout of rows on a mesh.

    Args:
        state: state of generation.
    """
    fields = select_fields(state, LOOP_STATE)
    suffix = cut_attention(fields.pop("suffix"))
    return state.replace(suffix=suffix, **cut_rows(fields))


def advance(
    policy: Policy,
    layers: Params,
    states: tuple[Decoding, ...],
    t: jax.Array | int,
    *,
    until: Sequence[tuple[int, ...]] | None = None,
    stop_ids: tuple[int, ...],
    pad_id: int,
    sampling: Sampling,
    applied: Rows = TOGETHER,
) -> tuple[jax.Array, tuple[Decoding, ...]]:
    """Decode until the unfinished lanes fit ``until``, or R tokens are sampled. A lane ends at the limit of its row.

    Args:
        policy: functions of the model.
        layers: `Policy.unstack` of the variables.
        states: state of each part of the launch before token ``t``.
        t: index of the next token, the same for all lanes.
        until: (n, g) for each part. The loop ends when each device has at most n unfinished nodes of the part, with at
            most g unfinished samples each. None is when all lanes are done.
        stop_ids: tokens that end a completion.
        pad_id: token behind the end of a completion.
        sampling: the distribution to sample from.
        applied: how functions are applied to rows.

    Returns:
        Index of the next token, and the states before it.
    """
    max_new_tokens = states[0].tokens.shape[-1]
    of_rows = [state.adapter for state in states if state.adapter is not None]
    if policy.choose_adapters is not None and of_rows:
        lanes = [jnp.broadcast_to(own[:, None], s.done.shape) for own, s in zip(of_rows, states, strict=True)]
        layers = policy.choose_adapters(layers, join(lanes)[..., None])
    sizes: Sequence[tuple[int, ...]] = [(0, 0)] * len(states) if until is None else until
    fixed = tuple(tuple(getattr(state, name) for state in states) for name in ("prefix", "length"))

    def goes_on(loop: tuple) -> jax.Array:
        more = [exceeds(changed["done"], size) for changed, size in zip(loop[1], sizes, strict=True)]
        return (loop[0] < max_new_tokens) & functools.reduce(jnp.logical_or, more)

    def step(loop: tuple) -> tuple:
        t, changed = loop
        now = [state.replace(**fields) for state, fields in zip(states, changed)]

        def draw(layers: Params, *now: Decoding) -> tuple[list[Decoding], tuple[jax.Array, ...]]:
            drawn = draw_tokens(policy, layers, sampling, now, [t] * len(now), pad_id)
            after = [record(state, *of_part, t, t, stop_ids) for state, of_part in zip(now, drawn)]
            return after, tuple(token for token, _ in drawn)

        now, tokens = applied.over(draw)(layers, *now)
        before = tuple(state.hidden for state in now), tuple(state.suffix for state in now)
        # No hidden state is needed behind the last token.
        hidden, suffix = jax.lax.cond(
            (t + 1 < max_new_tokens) & ~functools.reduce(jnp.logical_and, [jnp.all(state.done) for state in now]),
            lambda: applied.over(lambda *rows: policy.decode(*rows, t))(layers, tokens, *fixed, before[1]),
            lambda: before,
        )
        now = [state.replace(hidden=h, suffix=s) for state, h, s in zip(now, hidden, suffix, strict=True)]
        return t + 1, tuple(select_fields(state, LOOP_STATE) for state in now)

    start = tuple(select_fields(state, LOOP_STATE) for state in states)
    after, changed = jax.lax.while_loop(goes_on, step, (jnp.int32(t), start))
    return after, tuple(state.replace(**fields) for state, fields in zip(states, changed, strict=True))


def record(
    state: Decoding,
    token: jax.Array,
    logprob: jax.Array,
    place: jax.Array | int,
    slot: jax.Array | int,
    stop_ids: tuple[int, ...],
) -> Decoding:
    """Write a drawn token of every lane. Hidden states and caches are still those before it.

    Args:
        state: state before the token.
        token: ids [N G].
        logprob: their log-probs [N G].
        place: index of the token in its completion: one for all lanes, or of each node [N 1].
        slot: column of ``state.tokens`` that it is written to, the same for all lanes.
        stop_ids: tokens that end a completion.
    """
    done: jax.Array = state.done
    cut: Any = state.cut
    now_done = done | jnp.isin(token, jnp.array(stop_ids, jnp.int32))
    if state.limit is not None:
        cut = cut | (~now_done & (place + 1 >= state.limit[:, None]))
        now_done = now_done | cut
    return state.replace(
        done=now_done,
        cut=cut,
        count=state.count + ~done,
        tokens=jax.lax.dynamic_update_slice_in_dim(state.tokens, token[:, :, None], slot, axis=2),
        logprobs=jax.lax.dynamic_update_slice_in_dim(state.logprobs, logprob[:, :, None], slot, axis=2),
    )


def draw_tokens(
    policy: Policy,
    layers: Params,
    sampling: Sampling,
    states: Sequence[Decoding],
    places: Sequence[jax.Array | int],
    pad_id: int,
) -> list[tuple[jax.Array, jax.Array]]:
    """Draw the next token of every lane: ids and log-probs [N G] of each part. They are ``pad_id`` and 0 of done lanes.

    Args:
        policy: functions of the model.
        layers: `Policy.unstack` of the variables.
        sampling: the distribution to sample from.
        states: state of each part.
        places: for each part the index of the token in its completion: one for all lanes, or of each node [N 1].
        pad_id: token of lanes that are done.
    """
    u = join([_uniform(state.keys, place) for state, place in zip(states, places, strict=True)])
    hidden = join([state.hidden for state in states])
    if policy.draw is not None:
        drawn = policy.draw(layers, hidden, u, sampling)
    elif isinstance(policy.unembed, Unembed) and not meshed():
        drawn = sample_hidden(hidden, policy.unembed.head(layers), u, sampling)
    else:
        drawn = sample(policy.unembed(layers, hidden), u, sampling)
    of_parts = zip(states, *(split(x, [state.done.shape for state in states]) for x in drawn), strict=True)
    return [(jnp.where(s.done, pad_id, token), jnp.where(s.done, 0.0, logprob)) for s, token, logprob in of_parts]


def _uniform(keys: jax.Array, place: jax.Array | int) -> jax.Array:
    """One uniform number for each lane [N G], from its key and the index of its next token."""
    if jnp.ndim(place) == 0:
        return jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, place)))(keys.reshape(-1)).reshape(
            keys.shape
        )
    own = jnp.broadcast_to(place, keys.shape)
    return jax.vmap(jax.vmap(lambda k, t: jax.random.uniform(jax.random.fold_in(k, t))))(keys, own)


def fill(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N E"],
    length: Int[Array, " N"],
    prefix: PyTree = None,
    start: Int[Array, " N"] | None = None,
    adapter: Int[Array, " N"] | None = None,
) -> tuple[Float[Array, "N D"], PyTree, Int[Array, " N"]]:
    """Fill the cache with prompts, from nothing or behind the filled slots of ``prefix``.

    Args:
        policy: functions of the model.
        variables: variables of the model; with ``prefix`` they may be those of `Policy.unstack`.
        tokens: prompts, or what follows the filled slots [N E], right-padded.
        length: tokens of each row [N]; 0 is taken for 1.
        prefix: cache whose first ``start`` slots are filled, or None.
        start: filled slots of each row [N], or None.
        adapter: index of the adapter of each row [N], see `PromptRows`; or None.

    Returns:
        Hidden state of the last token, the cache, and its number of filled slots.
    """
    if policy.choose_adapters is not None and adapter is not None:
        variables = policy.choose_adapters(variables, adapter[:, None])
    length = jnp.maximum(length, 1)
    if prefix is None or start is None:
        return *policy.prefill(variables, tokens, length), length
    assert policy.extend is not None  # `prefix_cache` keeps nothing without it
    return *policy.extend(variables, tokens, length, start, prefix), start + length


def to_fill(prefix: PyTree, variables: Params, layers: Params | None) -> Params:
    """The form of the variables that `fill` compiles fastest with.

    Args:
        prefix: cache that the prompts continue, or None.
        variables: variables of the model.
        layers: `Policy.unstack` of them, or None.
    """
    return variables if prefix is None or layers is None else layers


def use_compaction(max_new_tokens: int) -> bool:
    """Whether `generate` gathers unfinished samples into smaller loops: for long completions.

    Args:
        max_new_tokens: largest number of tokens of a completion.
    """
    return max_new_tokens > LONG_COMPLETION


def generate(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N P"],
    length: Int[Array, " N"],
    keys: Key[Array, "N G"],
    active: Bool[Array, " N"],
    *,
    prefix: PyTree = None,
    start: Int[Array, " N"] | None = None,
    limit: Int[Array, " N"] | None = None,
    **more: Any,
) -> Any:
    """Call `sample_completions` from the host: `generate_launch` of one part.

    Arguments are those of `sample_completions`. ``more``: keyword arguments of `generate_launch`.
    """
    rows = PromptRows(tokens, length, keys, active, prefix, start, limit)
    return generate_launch(policy, variables, (rows,), **more)[0]


def generate_launch(
    policy: Policy,
    variables: Params,
    parts: Sequence[PromptRows],
    *,
    max_new_tokens: int,
    layers: Params | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    """Call `sample_launch` from the host, with one compiled program for each shape. Donates the prefixes.

    Arguments are those of `sample_launch`. ``compact`` is chosen by `use_compaction`, and is false with blocks.
    ``layers`` are `unstacked` variables, to make them once for several launches. ``more``: the other arguments by name.
    """
    compact = use_compaction(max_new_tokens) and more.get("applied", TOGETHER) is TOGETHER
    if layers is None and not meshed():
        layers = unstacked(policy, variables)
    rows, prefixes = tuple(part._replace(prefix=None) for part in parts), tuple(part.prefix for part in parts)
    fixed = {"max_new_tokens": max_new_tokens, "layers": layers, "compact": compact, **more}
    return _generate(policy, variables, rows, prefixes, **fixed)


@functools.partial(
    jax.jit,
    static_argnames=("policy", "max_new_tokens", "stop_ids", "pad_id", "sampling", "compact", "keep", "applied"),
    donate_argnames=("prefixes",),
)
def _generate(
    policy: Policy, variables: Params, parts: Sequence[PromptRows], prefixes: Sequence[PyTree], **more: Any
) -> tuple[Any, ...]:
    """`sample_launch`, where the prefixes of the parts stand apart because they are donated."""
    parts = [part._replace(prefix=prefix) for part, prefix in zip(parts, prefixes, strict=True)]
    return sample_launch(policy, variables, parts, **more)


unstacked = jax.jit(lambda policy, variables: policy.unstack(variables), static_argnums=(0,))


@functools.cache
def by_row(policy: Policy, own: tuple[str, ...]) -> Policy:
    """Make a policy whose rows have parameters of their own: one program for many models of one architecture.

    It has what `sample_completions` needs, and is not for training. The results of a row are those of ``policy``.
    Raises ValueError for an `invariant` policy, because rows of different variables would be one product.

    Args:
        policy: functions of the architecture.
        own: collections of the variables (params, lora) with a leading axis N in every leaf, one entry for each row.
            The other collections are shared.
    """
    if policy.draw is not None:
        raise ValueError("a policy of invariant generation: expected another where each row has its own variables")

    def over_rows(function: Callable) -> Callable:
        """Map ``function(variables, *arrays with one row)`` over rows and their variables."""

        def call(variables: Params, *rows: PyTree) -> PyTree:
            axes = {name: 0 if name in own else None for name in variables}
            one = lambda v, *x: jax.tree.map(lambda y: y[0], function(v, *jax.tree.map(lambda y: y[None], x)))
            return jax.vmap(one, in_axes=(axes, *[0] * len(rows)))(variables, *rows)

        return call

    def decode(variables: Params, tokens: Any, prefix: PyTree, length: Any, suffix: PyTree, t: jax.Array) -> PyTree:
        step = lambda v, tok, pre, size, suf: policy.decode(policy.unstack(v), tok, pre, size, suf, t)
        return over_rows(step)(variables, tokens, prefix, length, suffix)

    return policy._replace(
        prefill=over_rows(policy.prefill),
        extend=None if policy.extend is None else over_rows(policy.extend),
        decode=decode,
        decode_slots=None,
        unembed=over_rows(policy.unembed),
        embed=over_rows(policy.embed),
        unstack=lambda variables: variables,
    )
