"""A decoding loop that nodes enter and leave while others are decoded (continuous batching).

The loop of one model has tables of slots, one table for each number of samples of a node. A slot holds a node. The
token of time t of every sample is in column t mod R, whatever the place of the token in its completion. So one column
is written at a time, and a node may begin at any time. Completions are those of `generate.generate`: a token depends on
the key of its sample and on its place alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, Key

from jaxmarl_llm.generation.buckets import coarse
from jaxmarl_llm.generation.decoding import LOOP_STATE, MIN_COMPACT_LANES, Completions, Decoding, select_fields
from jaxmarl_llm.generation.generate import PromptRows, draw_tokens, fill, record, unstacked
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.types import Params, Policy, PyTree

CHUNK = 32  # tokens after which the loop returns to the host, at most


class Slots(struct.PyTreeNode):
    """A table of S slots. A slot without a node is a row whose lanes are done."""

    rows: Decoding  # S nodes with G samples each; columns of tokens and of the suffix are a ring
    begun: Int[Array, " S"]  # time of the first token of each node


class Left(NamedTuple):
    """Nodes that have left a table: their completions, and their caches as `Prefixes.store` takes them."""

    tickets: list[Any]  # as they were handed in
    completions: Completions  # numpy, one row for each ticket and rows of padding
    prefix: PyTree
    suffix: PyTree


class SlotLoop:
    """The decoding loop of one model.

    Args:
        policy: functions of the model; `Policy.decode_slots` is one of them.
        variables: variables of the model.
        lanes: samples that are decoded at once, at most; a table of nodes with G samples has lanes / G slots.
        max_new_tokens: largest number of tokens of a completion, R.
        stop_ids: tokens that end a completion.
        pad_id: token behind the end of a completion.
        sampling: the distribution to sample from.

    ``time``: tokens that the loop has decoded for every sample.
    """

    def __init__(
        self,
        policy: Policy,
        variables: Params,
        *,
        lanes: int,
        max_new_tokens: int,
        stop_ids: tuple[int, ...],
        pad_id: int,
        sampling: Sampling,
    ) -> None:
        self._policy, self._variables, self._lanes = policy, variables, lanes
        self._fixed: dict[str, Any] = {"stop_ids": stop_ids, "pad_id": pad_id, "sampling": sampling}
        self._response = max_new_tokens
        self._layers = unstacked(policy, variables)
        self._tables: dict[int, Slots] = {}  # by number of samples
        self._tickets: dict[int, list[Any]] = {}  # of each slot; None: the slot is free
        self.time = jnp.int32(0)

    def _most(self, group: int) -> int:
        """Largest number of nodes with ``group`` samples."""
        return max(1, self._lanes // group)

    def _taken(self, group: int) -> int:
        """Number of nodes with ``group`` samples."""
        return sum(ticket is not None for ticket in self._tickets.get(group, ()))

    def room(self, group: int) -> int:
        """Number of nodes with ``group`` samples that may enter."""
        return self._most(group) - self._taken(group)

    @property
    def taken(self) -> int:
        """Number of nodes in the loop."""
        return sum(map(self._taken, self._tickets))

    def enter(self, tickets: Sequence[Any], rows: PromptRows) -> None:
        """Read the prompts of nodes and put the nodes into free slots.

        Args:
            tickets: names of the nodes, not None; at most `room` of them.
            rows: prompts of the nodes, padded, with limits.
        """
        group = rows.keys.shape[1]
        filled = _fill(self._policy, self._variables, rows.tokens, rows.length, rows.prefix, rows.start)
        if group not in self._tables:
            size = self._size(group, len(tickets))
            self._tickets[group] = [None] * size
            self._tables[group] = _empty(self._policy, filled, rows.keys, size=size, response=self._response)
        self._resize(group, max(len(self._tickets[group]), self._size(group, self._taken(group) + len(tickets))))
        columns = jax.tree.leaves(filled[1])[0].shape[1]
        if columns > jax.tree.leaves(self._tables[group].rows.prefix)[0].shape[1]:
            self._tables[group] = _widen(self._tables[group], columns=columns)
        free = [k for k, ticket in enumerate(self._tickets[group]) if ticket is None][: len(tickets)]
        for slot, ticket in zip(free, tickets, strict=True):
            self._tickets[group][slot] = ticket
        slots = np.full(len(rows.length), len(self._tickets[group]), np.int32)  # padding has none, and is dropped
        slots[: len(free)] = free
        own = rows.keys, rows.active, rows.limit
        self._tables[group] = _write(self._tables[group], filled, own, slots, self.time)

    def advance(self, finished: int) -> list[Left]:
        """Decode until some nodes are finished, and take these out. There is a node in the loop.

        Args:
            finished: number of finished nodes at which decoding stops; it stops after `CHUNK` tokens, too, if one is.
        """
        groups = [g for g in sorted(self._tables) if self._taken(g)]
        for group in groups:
            self._resize(group, self._size(group, self._taken(group)))
        states = tuple(self._tables[g] for g in groups)
        taken = tuple(np.array([ticket is not None for ticket in self._tickets[g]]) for g in groups)
        self.time, states, ended = _advance(
            self._policy, self._layers, states, taken, self.time, min(finished, self.taken), **self._fixed
        )
        out = []
        for group, state, done in zip(groups, states, jax.device_get(ended), strict=True):
            self._tables[group] = state
            slots = np.flatnonzero(done)
            if len(slots):
                out.append(self._leave(group, slots))
        return out

    def _size(self, group: int, nodes: int) -> int:
        """Slots of a table that holds ``nodes`` nodes: all, or a quarter of them. Each size is one more program."""
        most = self._most(group)
        quarter = -(-most // 4)
        return quarter if nodes <= quarter and most * group >= MIN_COMPACT_LANES else most

    def _resize(self, group: int, size: int) -> None:
        """Move the nodes of a table into one of ``size`` slots."""
        names = self._tickets[group]
        if len(names) == size:
            return
        held = [slot for slot, ticket in enumerate(names) if ticket is not None]
        slots = np.array(held + [-1] * (size - len(held)), np.int32)
        self._tables[group] = _gather(self._tables[group], slots)
        self._tickets[group] = [names[slot] for slot in held] + [None] * (size - len(held))

    def _leave(self, group: int, slots: np.ndarray) -> Left:
        """Take the nodes of ``slots`` out of a table."""
        padded = np.concatenate([slots, np.repeat(slots[-1:], coarse(len(slots), 4) - len(slots))])
        completions, prefix, suffix = _leave(self._tables[group], padded, pad_id=self._fixed["pad_id"])
        names = self._tickets[group]
        tickets = [ticket for slot in slots if (ticket := names[slot]) is not None]
        for slot in slots:
            names[slot] = None
        return Left(tickets, jax.device_get(completions), prefix, suffix)


_fill = jax.jit(fill, static_argnames=("policy",))


@functools.partial(jax.jit, static_argnames=("policy", "size", "response"))
def _empty(policy: Policy, filled: PyTree, keys: Key[Array, "N G"], *, size: int, response: int) -> Slots:
    """A table of ``size`` slots for nodes like those of ``filled``, a result of `fill`; all slots are free."""
    hidden, prefix, _ = filled
    group = keys.shape[1]
    like = lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype)
    prefix = jax.tree.map(like, prefix)
    return Slots(
        rows=Decoding(
            done=jnp.ones((size, group), bool),
            count=jnp.zeros((size, group), jnp.int32),
            tokens=jnp.zeros((size, group, response), jnp.int32),
            logprobs=jnp.zeros((size, group, response), jnp.float32),
            hidden=jnp.zeros((size, group, hidden.shape[1]), hidden.dtype),
            keys=jnp.broadcast_to(keys[:1], (size, group)),
            length=jnp.ones(size, jnp.int32),
            prefix=prefix,
            suffix=policy.init_suffix(prefix, group, response),
            limit=jnp.ones(size, jnp.int32),
            cut=jnp.zeros((size, group), bool),
        ),
        begun=jnp.zeros(size, jnp.int32),
    )


@jax.jit
def _gather(state: Slots, slots: Int[Array, " T"]) -> Slots:
    """A table of the nodes in ``slots``; -1 is a free slot."""
    moved = jax.tree.map(lambda x: x[slots], state)
    return moved.replace(rows=moved.rows.replace(done=moved.rows.done | (slots < 0)[:, None]))


@functools.partial(jax.jit, static_argnames=("columns",))
def _widen(state: Slots, *, columns: int) -> Slots:
    """The table with room for prompts of ``columns`` tokens."""
    wide = lambda x: jnp.pad(x, ((0, 0), (0, columns - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
    return state.replace(rows=state.rows.replace(prefix=jax.tree.map(wide, state.rows.prefix)))


@functools.partial(jax.jit, donate_argnames=("state",))
def _write(state: Slots, filled: PyTree, own: tuple, slots: Int[Array, " N"], time: Int[Array, ""]) -> Slots:
    """Write nodes to ``slots``; slot S is none.

    ``filled``: result of `fill`. ``own``: keys [N G], whether a row is no padding [N], and limits [N].
    """
    (hidden, prefix, length), (keys, active, limit) = filled, own
    n, group = keys.shape
    put = lambda x, new: x.at[slots].set(jnp.asarray(new).astype(x.dtype), mode="drop")
    short = lambda x, new: x.at[slots, : new.shape[1]].set(new, mode="drop")
    old = state.rows
    now = old.replace(
        done=put(old.done, jnp.broadcast_to(~active[:, None], (n, group))),
        count=put(old.count, jnp.zeros((n, group), jnp.int32)),
        hidden=put(old.hidden, jnp.broadcast_to(hidden[:, None], (n, group, hidden.shape[1]))),
        keys=old.keys.at[slots].set(keys, mode="drop"),
        length=put(old.length, length),
        prefix=jax.tree.map(short, old.prefix, prefix),
        limit=put(old.limit, limit),
        cut=put(old.cut, jnp.zeros((n, group), bool)),
    )
    return Slots(rows=now, begun=put(state.begun, jnp.full(n, time)))


@functools.partial(jax.jit, static_argnames=("policy", "stop_ids", "pad_id", "sampling"), donate_argnames=("states",))
def _advance(
    policy: Policy,
    layers: Params,
    states: tuple[Slots, ...],
    taken: tuple[Bool[Array, " S"], ...],
    time: Int[Array, ""],
    finished: Int[Array, ""],
    *,
    stop_ids: tuple[int, ...],
    pad_id: int,
    sampling: Sampling,
) -> tuple[jax.Array, tuple[Slots, ...], tuple[jax.Array, ...]]:
    """Decode until ``finished`` nodes of ``taken`` slots are, or some after `CHUNK` tokens: time, tables, and which."""
    assert policy.decode_slots is not None  # the caller has asked
    decode, fixed = policy.decode_slots, [state.rows for state in states]
    begun, prefix, length = [state.begun for state in states], [x.prefix for x in fixed], [x.length for x in fixed]
    response = fixed[0].tokens.shape[2]

    def ended(changed: Sequence[dict[str, Any]]) -> list[jax.Array]:
        return [own & jnp.all(fields["done"], 1) for own, fields in zip(taken, changed, strict=True)]

    def goes_on(loop: tuple) -> jax.Array:
        now, changed = loop
        over = ended(changed)
        count = functools.reduce(jnp.add, [jnp.sum(x) for x in over])
        # The next token would be written over the first one of a finished node that is still here.
        full = [jnp.any(x & (now - b >= response)) for x, b in zip(over, begun, strict=True)]
        late = (now - time >= CHUNK) & (count > 0)
        return (count < finished) & ~late & ~functools.reduce(jnp.logical_or, full)

    def step(loop: tuple) -> tuple:
        now, changed = loop
        slot = now % response
        rows = [state.replace(**fields) for state, fields in zip(fixed, changed, strict=True)]
        places = [(now - b)[:, None] for b in begun]
        drawn = draw_tokens(policy, layers, sampling, rows, places, pad_id)
        rows = [
            record(state, *of_part, place, slot, stop_ids)
            for state, of_part, place in zip(rows, drawn, places, strict=True)
        ]
        tokens, suffix = tuple(token for token, _ in drawn), tuple(state.suffix for state in rows)
        hidden, suffix = decode(layers, tokens, tuple(prefix), tuple(length), suffix, now, tuple(begun))
        rows = [state.replace(hidden=h, suffix=s) for state, h, s in zip(rows, hidden, suffix, strict=True)]
        return now + 1, tuple(select_fields(state, LOOP_STATE) for state in rows)

    start = jnp.asarray(time, jnp.int32), tuple(select_fields(state, LOOP_STATE) for state in fixed)
    time, changed = jax.lax.while_loop(goes_on, step, start)
    after = tuple(
        state.replace(rows=state.rows.replace(**fields)) for state, fields in zip(states, changed, strict=True)
    )
    return time, after, tuple(ended(changed))


@functools.partial(jax.jit, static_argnames=("pad_id",))
def _leave(state: Slots, slots: Int[Array, " M"], *, pad_id: int) -> tuple[Completions, PyTree, PyTree]:
    """Completions and caches of the nodes in ``slots``, with the columns of the ring in the order of the tokens."""
    rows, response = state.rows, state.rows.tokens.shape[2]
    order = (state.begun[slots][:, None] + jnp.arange(response)) % response  # [M R]
    in_order = lambda x: jnp.take_along_axis(x[slots], order[:, None, :], 2)
    count = rows.count[slots]
    written = jnp.arange(response) < count[..., None]
    m, group = count.shape
    at = jnp.arange(m)[:, None, None], jnp.arange(group)[:, None], order[:, None, :]
    completions = Completions(
        tokens=jnp.where(written, in_order(rows.tokens), pad_id),
        length=count,
        logprobs=jnp.where(written, in_order(rows.logprobs), 0.0),
        truncated=rows.cut[slots] if rows.cut is not None else jnp.zeros((m, group), bool),
    )
    take = lambda x: x[slots]
    return completions, jax.tree.map(take, rows.prefix), jax.tree.map(lambda x: x[slots][at], rows.suffix)
