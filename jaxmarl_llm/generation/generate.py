"""Generation: prefill each node's prompt once, or extend its cached prefix, then decode its G samples in lock step.

A *lane* is one sample of one node in the decoding loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmarl_llm.distributed.sharding import by_device, cut_rows, meshed
from jaxmarl_llm.generation.sampling import Sampling, sample, sample_hidden
from jaxmarl_llm.types import Params, Policy, PyTree, Unembed


class Completions(struct.PyTreeNode):
    """G completions for each of N nodes. The sampled tokens are those at ``arange(R) < length``, whatever their ids."""

    tokens: Int[Array, "N G R"]  # pad_id behind the end
    length: Int[Array, "N G"]  # number of sampled tokens, the stop id included
    logprobs: Float[Array, "N G R"]  # 0 behind the end
    truncated: Bool[Array, "N G"]  # ended by the length limit of its row, not by a stop id


class Decoding(struct.PyTreeNode):
    """State of generation between two tokens. R is the largest number of tokens of a completion."""

    done: Bool[Array, "N G"]
    count: Int[Array, "N G"]  # sampled tokens
    tokens: Int[Array, "N G R"]
    logprobs: Float[Array, "N G R"]
    hidden: Float[Array, "N G D"]  # hidden state that predicts the next token
    keys: Key[Array, "N G"]
    length: Int[Array, " N"]  # filled slots of the prefix
    prefix: PyTree  # cache of the prompts
    suffix: PyTree  # cache of the samples
    limit: Int[Array, " N"] | None = None  # largest number of tokens of each row; None: R for all rows
    cut: Bool[Array, "N G"] | None = None  # done because of ``limit``; None without it

    @property
    def completions(self) -> Completions:
        """The completions so far."""
        truncated = ~self.done if self.cut is None else ~self.done | self.cut
        return Completions(self.tokens, self.count, self.logprobs, truncated)


LOOP_STATE = ("done", "count", "tokens", "logprobs", "hidden", "suffix", "cut")  # fields that a decode step changes
MIN_COMPACT_LANES = 16  # lanes from which a quarter of them takes clearly less time
SHORT_COMPLETION = 32  # tokens: up to so many, layers are not unstacked and lanes not compacted


def select_fields(state: Decoding, names: tuple[str, ...]) -> dict[str, Any]:
    """Select fields of a state by name.

    Args:
        state: state of generation.
        names: names of the fields, in the order of the result.
    """
    return {name: getattr(state, name) for name in names}


def sample_completions(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N P"],
    length: Int[Array, " N"],
    keys: Key[Array, "N G"],
    active: Bool[Array, " N"],
    *,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    pad_id: int,
    sampling: Sampling,
    prefix: PyTree = None,
    start: Int[Array, " N"] | None = None,
    limit: Int[Array, " N"] | None = None,
    layers: Params | None = None,
    compact: bool = False,
    keep: bool = False,
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
        max_new_tokens: largest number of tokens of a completion, R.
        stop_ids: tokens that end a completion.
        pad_id: token behind the end of a completion.
        sampling: the distribution to sample from.
        prefix: cache whose first ``start`` slots are filled, or None.
        start: filled slots of each row of ``prefix`` [N], or None.
        limit: largest number of tokens of a completion of each row [N], from 1 to ``max_new_tokens``. None: it is
            ``max_new_tokens`` in all rows. A limit does not change the tokens before it.
        layers: `Policy.unstack` of the variables; None computes it.
        compact: whether unfinished samples are gathered into a smaller loop once few are left; see
            `compaction_sizes`. Not for `by_row`, whose rows have weights of their own.
        keep: whether to return (Completions, prefix, suffix). Suffix slots 0 to length - 2 of a sample are filled; its
            last token is never read.

    Returns:
        Completions, or with ``keep`` completions and caches.
    """
    if policy.draw is not None and meshed():  # `invariant`: products split over devices are summed in another order
        fixed = functools.partial(
            sample_completions,
            policy,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            pad_id=pad_id,
            sampling=sampling,
            keep=keep,
        )

        def on_device(variables: Params, *rows: Any) -> Any:
            return fixed(variables, *rows[:4], prefix=rows[4], start=rows[5], limit=rows[6])

        return by_device(on_device, variables, tokens, length, keys, active, prefix, start, limit)
    rows = (tokens, length, keys, active, prefix, start, limit)
    state = begin(policy, variables, *rows, max_new_tokens=max_new_tokens, pad_id=pad_id)
    advanced = functools.partial(
        advance,
        policy,
        policy.unstack(variables) if layers is None else layers,
        stop_ids=stop_ids,
        pad_id=pad_id,
        sampling=sampling,
    )
    state = decode_to_the_end(state, advanced, compaction_sizes(*keys.shape) if compact else ())
    return (state.completions, state.prefix, state.suffix) if keep else state.completions


def decode_to_the_end(
    state: Decoding, advanced: Callable[..., tuple[Any, Decoding]], sizes: Sequence[tuple[int, int]]
) -> Decoding:
    """Advance until every sample is done.

    Args:
        state: state of generation.
        advanced: `advance` with all but the state, the first token's place and ``until``.
        sizes: (nodes, samples), smaller and smaller. Once the unfinished samples fit, they go on alone in a loop of it.
    """
    t: jax.Array | int = 0
    larger: list[tuple[Decoding, jax.Array, jax.Array]] = []  # states, and the lanes gathered from each of them
    for size in sizes:
        t, state = advanced(state, t, until=size)
        nodes, samples = unfinished(state.done, size)
        larger.append((state, nodes, samples))
        state = gather_lanes(state, nodes, samples)
    _, state = advanced(state, t)
    while larger:
        state = scatter_back(*larger.pop(), state)
    return state


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
    *,
    max_new_tokens: int,
    pad_id: int,
) -> Decoding:
    """Fill the cache with the prompts and make the state before the first token.

    Arguments are those of `sample_completions`.
    """
    n, g = keys.shape
    tokens, length, keys, active, limit = cut_rows((tokens, length, keys, active, limit))
    hidden, prefix, length = fill(policy, variables, tokens, length, prefix, start)
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
    )
    return state.replace(**cut_rows(select_fields(state, LOOP_STATE)))


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
    """Decode until the unfinished lanes fit ``until``, or R tokens are sampled. A lane ends at the limit of its row.

    Args:
        policy: functions of the model.
        layers: `Policy.unstack` of the variables.
        state: state before token ``t``.
        t: index of the next token, the same for all lanes.
        until: (n, g): the loop ends when at most n nodes are unfinished, with at most g unfinished samples each. (0, 0)
            is when all lanes are done.
        stop_ids: tokens that end a completion.
        pad_id: token behind the end of a completion.
        sampling: the distribution to sample from.

    Returns:
        Index of the next token, and the state before it.
    """
    max_new_tokens, prefix, length = state.tokens.shape[2], state.prefix, state.length
    stops = jnp.array(stop_ids, jnp.int32)

    def goes_on(loop: tuple) -> jax.Array:
        return (loop[0] < max_new_tokens) & _exceeds(loop[1], until)

    def step(loop: tuple) -> tuple:
        t, done, count, out_tokens, out_logprobs, hidden, suffix, cut = loop
        token, logprob = _draw(policy, layers, sampling, hidden, state.keys, t)
        token, logprob = jnp.where(done, pad_id, token), jnp.where(done, 0.0, logprob)
        now_done = done | jnp.isin(token, stops)
        if state.limit is not None:
            cut = cut | (~now_done & (t + 1 >= state.limit[:, None]))
            now_done = now_done | cut
        out_tokens = jax.lax.dynamic_update_slice_in_dim(out_tokens, token[:, :, None], t, axis=2)
        out_logprobs = jax.lax.dynamic_update_slice_in_dim(out_logprobs, logprob[:, :, None], t, axis=2)
        # No hidden state is needed behind the last token.
        hidden, suffix = jax.lax.cond(
            (t + 1 < max_new_tokens) & ~jnp.all(now_done),
            lambda: policy.decode(layers, token, prefix, length, suffix, t),
            lambda: (hidden, suffix),
        )
        return t + 1, now_done, count + ~done, out_tokens, out_logprobs, hidden, suffix, cut

    now, *changed = jax.lax.while_loop(goes_on, step, (jnp.int32(t), *select_fields(state, LOOP_STATE).values()))
    return now, state.replace(**dict(zip(LOOP_STATE, changed, strict=True)))


def _exceeds(done: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Whether unfinished lanes are more than n nodes, or more than g samples of a node. (0, 0): whether any is."""
    if size == (0, 0):
        return ~jnp.all(done)
    return (jnp.sum(~jnp.all(done, 1)) > size[0]) | (jnp.max(jnp.sum(~done, 1)) > size[1])


def _draw(
    policy: Policy, layers: Params, sampling: Sampling, hidden: jax.Array, keys: jax.Array, t: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Draw token t of every lane: ids and log-probs [N G]."""
    u = jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, t)))(keys.reshape(-1)).reshape(keys.shape)
    if policy.draw is not None:
        return policy.draw(layers, hidden, u, sampling)
    if isinstance(policy.unembed, Unembed) and not meshed():
        return sample_hidden(hidden, policy.unembed.head(layers), u, sampling)
    return sample(policy.unembed(layers, hidden), u, sampling)


def compaction_sizes(n: int, g: int) -> list[tuple[int, int]]:
    """Choose the sizes (nodes, samples) of smaller states into which unfinished lanes are gathered once they fit.

    The first is a quarter (rounded up) of the nodes, or of the samples of a single node. The second is a quarter of the
    first. There are two at most, because each is one more loop to compile.

    Args:
        n: nodes.
        g: samples of each node.
    """
    sizes: list[tuple[int, int]] = []
    while n * g >= MIN_COMPACT_LANES and len(sizes) < 2:
        n, g = (-(-n // 4), g) if n > 1 else (n, -(-g // 4))
        sizes.append((n, g))
    return sizes


def unfinished(done: jax.Array, size: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """List the unfinished lanes: indices of nodes [n] and of samples of each [n g], filled up with -1.

    Args:
        done: which lanes are done [N G].
        size: (n, g), which the unfinished lanes fit.
    """
    n, g = size
    going = ~done
    (nodes,) = jnp.nonzero(going.any(1), size=n, fill_value=-1)
    samples = jnp.argsort(done[nodes], axis=1, stable=True)[:, :g]
    there = jnp.take_along_axis(going[nodes], samples, 1) & (nodes >= 0)[:, None]
    return nodes, jnp.where(there, samples, -1)


def gather_lanes(state: Decoding, nodes: jax.Array, samples: jax.Array) -> Decoding:
    """Gather the given samples into a smaller state. Index -1 is an empty lane and is marked done.

    Args:
        state: state of N nodes with G samples each.
        nodes: indices of nodes [n].
        samples: indices of samples of each of these nodes [n g].
    """
    lanes = lambda tree: jax.tree.map(lambda x: x[nodes[:, None], samples], tree)
    same = len(nodes) == len(state.length) == 1  # one node before and after: its prefix need not be copied
    rows = lambda tree: tree if same else jax.tree.map(lambda x: x[nodes], tree)
    per_lane, per_node = (
        select_fields(state, (*LOOP_STATE, "keys")),
        select_fields(state, ("length", "prefix", "limit")),
    )
    gathered = Decoding(**lanes(per_lane), **rows(per_node))
    return gathered.replace(done=gathered.done | (samples < 0))


def scatter_back(state: Decoding, nodes: jax.Array, samples: jax.Array, gathered: Decoding) -> Decoding:
    """Write the lanes of a gathered state back to their places. The inverse of `gather_lanes`.

    Args:
        state: the state that lanes were gathered from.
        nodes: indices of nodes [n], as for `gather_lanes`.
        samples: indices of samples [n g], as for `gather_lanes`.
        gathered: the smaller state, after more tokens.
    """
    places = jnp.where(samples < 0, state.done.shape[1], samples)  # an empty lane has none, and is dropped
    put = lambda x, new: x.at[nodes[:, None], places].set(new, mode="drop")
    return state.replace(**jax.tree.map(put, select_fields(state, LOOP_STATE), select_fields(gathered, LOOP_STATE)))


def fill(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N E"],
    length: Int[Array, " N"],
    prefix: PyTree = None,
    start: Int[Array, " N"] | None = None,
) -> tuple[Float[Array, "N D"], PyTree, Int[Array, " N"]]:
    """Fill the cache with prompts, from nothing or behind the filled slots of ``prefix``.

    Args:
        policy: functions of the model.
        variables: variables of the model.
        tokens: prompts, or what follows the filled slots [N E], right-padded.
        length: tokens of each row [N]; 0 is taken for 1.
        prefix: cache whose first ``start`` slots are filled, or None.
        start: filled slots of each row [N], or None.

    Returns:
        Hidden state of the last token, the cache, and its number of filled slots.
    """
    length = jnp.maximum(length, 1)
    if prefix is None or start is None:
        return *policy.prefill(variables, tokens, length), length
    assert policy.extend is not None  # `prefix_cache` keeps nothing without it
    return *policy.extend(variables, tokens, length, start, prefix), start + length


def use_compaction(max_new_tokens: int) -> bool:
    """Whether `generate` unstacks layers and gathers unfinished samples into smaller loops: for long completions.

    Args:
        max_new_tokens: largest number of tokens of a completion.
    """
    return max_new_tokens > SHORT_COMPLETION and not meshed()


def generate(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N P"],
    length: Int[Array, " N"],
    keys: Key[Array, "N G"],
    active: Bool[Array, " N"],
    *,
    max_new_tokens: int,
    layers: Params | None = None,
    **more: Any,
) -> Any:
    """Call `sample_completions` from the host, with one compiled program for each shape. Donates ``prefix``.

    Arguments are those of `sample_completions`, except that ``compact`` is chosen by `use_compaction`. ``layers`` are
    `unstacked` variables, to make them once for several launches. ``more``: the other arguments by name.
    """
    compact = use_compaction(max_new_tokens)
    if compact and layers is None:
        layers = unstacked(policy, variables)
    rows = (tokens, length, keys, active)
    return _generate(policy, variables, *rows, max_new_tokens=max_new_tokens, layers=layers, compact=compact, **more)


_generate = jax.jit(
    sample_completions,
    static_argnames=("policy", "max_new_tokens", "stop_ids", "pad_id", "sampling", "compact", "keep"),
    donate_argnames=("prefix",),
)
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
