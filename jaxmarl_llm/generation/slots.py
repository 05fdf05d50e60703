"""A decoding loop that nodes enter and leave while others are decoded (continuous batching).

The loop of one model has tables of slots, one table for each number of samples of a node. A slot holds a node. The
token of time t of every sample is in column t mod R, whatever the place of the token in its completion. So one column
is written at a time, and a node may begin at any time. Completions are those of `generate.generate`: a token depends on
the key of its sample and on its place alone.

On a mesh each part of the rows has equally many slots of a table. A node enters a slot of the part that has read its
prompt, and no lane moves to another device.
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

from jaxmarl_llm.distributed.heads import cut_attention
from jaxmarl_llm.distributed.sharding import UNCONSTRAINED, attention_rows, meshed, row_parts, settle
from jaxmarl_llm.generation.buckets import coarse, doubled
from jaxmarl_llm.generation.decoding import (
    LOOP_STATE,
    MIN_COMPACT_LANES,
    Completions,
    Decoding,
    on_own_rows,
    select_fields,
)
from jaxmarl_llm.generation.generate import PromptRows, draw_tokens, fill, record, unstacked
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.types import Params, Policy, PyTree

COLUMNS = 128  # columns of a table for prompts, at least; they are doubled where needed, and each width is a program
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
    rows: np.ndarray  # row of each ticket


class SlotLoop:
    """The decoding loop of one model.

    Args:
        policy: functions of the model; `Policy.decode_slots` is one of them.
        variables: variables of the model.
        lanes: samples that are decoded at once, at most; a table of nodes with G samples has lanes / G slots. On a mesh
            each part of the rows has one slot at least, and all parts have equally many.
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
        self._response, self._parts = max_new_tokens, row_parts()
        # On a mesh a copy of a model's layers would stay for the whole rollout, so each program cuts them out.
        self._layers = variables if meshed() else unstacked(policy, variables)
        self._tables: dict[int, Slots] = {}  # by number of samples
        self._tickets: dict[int, list[list[Any]]] = {}  # of each part and slot; None: the slot is free
        self._few = 0  # calls of `advance` in a row at which all tables could be a quarter
        self.time = jnp.int32(0)

    def _most(self, group: int) -> int:
        """Slots of a part of the rows for nodes with ``group`` samples, at most."""
        return max(1, self._lanes // (group * self._parts))

    def _of_parts(self, group: int) -> np.ndarray:
        """Whether slots of a table are taken [parts, slots of a part]."""
        tickets = self._tickets.get(group, [[]] * self._parts)
        return np.array([[ticket is not None for ticket in own] for own in tickets], bool)

    def room(self, group: int) -> np.ndarray:
        """Number of nodes with ``group`` samples that may enter each part of the rows [parts]."""
        return self._most(group) - self._of_parts(group).sum(1)

    @property
    def taken(self) -> int:
        """Number of nodes in the loop."""
        return sum(int(self._of_parts(group).sum()) for group in self._tickets)

    def enter(self, tickets: Sequence[Any], rows: PromptRows, places: np.ndarray | None = None) -> None:
        """Read the prompts of nodes and put the nodes into free slots.

        Args:
            tickets: names of the nodes, not None; at most `room` of them in each part of the rows.
            rows: prompts of the nodes, padded, with limits.
            places: row of each node; None: they are in order.
        """
        of_part, group = len(rows.length) // self._parts, rows.keys.shape[1]
        of_ticket = np.arange(len(tickets)) if places is None else places
        filled = _fill(self._policy, self._variables, rows.tokens, rows.length, rows.prefix, rows.start)
        self._make_room(group, np.bincount(of_ticket // of_part, minlength=self._parts), filled, rows.keys)
        taken = self._of_parts(group)
        size = taken.shape[1]
        slots = np.full(len(rows.length), size, np.int32)  # padding has none, and is dropped
        free = [list(np.flatnonzero(~own)) for own in taken]
        for row, ticket in zip(of_ticket, tickets, strict=True):
            part = row // of_part
            slots[row] = free[part].pop(0)
            self._tickets[group][part][slots[row]] = ticket
        own = rows.keys, rows.active, rows.limit
        self._tables[group] = settle(_write(self._tables[group], filled, own, slots, self.time))

    def _make_room(self, group: int, entering: np.ndarray, filled: PyTree, keys: Key[Array, "N G"]) -> None:
        """Give a table free slots, and columns for the prompts of ``filled``, a result of `fill`.

        ``entering``: nodes that will enter each part of the rows [parts]. ``keys``: like those of the nodes.
        """
        columns = doubled(jax.tree.leaves(filled[1])[0].shape[1], COLUMNS)
        if group not in self._tables:
            size = self._size(group)
            self._tickets[group] = [[None] * size for _ in range(self._parts)]
            fixed = {"size": size * self._parts, "columns": columns, "response": self._response}
            self._tables[group] = _empty(self._policy, filled, keys, **fixed)
        taken = self._of_parts(group)
        if (taken.sum(1) + entering).max() > taken.shape[1]:
            self._resize(group, self._most(group))
        if columns > jax.tree.leaves(self._tables[group].rows.prefix)[0].shape[1]:
            self._tables[group] = _widen(self._tables[group], columns=columns)

    def advance(self, finished: int) -> list[Left]:
        """Decode until some nodes are finished, and take these out. There is a node in the loop.

        Args:
            finished: number of finished nodes at which decoding stops; it stops after `CHUNK` tokens, too, if one is.
        """
        taken = {group: of for group in sorted(self._tables) if (of := self._of_parts(group)).any()}
        fits = all(of.sum(1).max() <= self._quarter(group) for group, of in taken.items())
        self._few = self._few + 1 if fits else 0
        for group in taken:
            self._resize(group, self._size(group))
        states = tuple(self._tables[group] for group in taken)
        now_taken = tuple(self._of_parts(group).reshape(-1) for group in taken)
        self.time, states, ended = settle(
            _advance(self._policy, self._layers, states, now_taken, self.time, min(finished, self.taken), **self._fixed)
        )
        out = []
        for group, state, done in zip(taken, states, jax.device_get(ended), strict=True):
            self._tables[group] = state
            if done.any():
                out.append(self._leave(group, done.reshape(self._parts, -1)))
        return out

    def _quarter(self, group: int) -> int:
        """Slots of a part in a table that is a quarter of the whole one. A table of few lanes has no such form."""
        most = self._most(group)
        return -(-most // 4) if most * group >= MIN_COMPACT_LANES else most

    def _size(self, group: int) -> int:
        """Slots of a part: all, or a quarter once few nodes are left. The sizes of all tables are one more program."""
        return self._quarter(group) if self._few > 1 else self._most(group)

    def _resize(self, group: int, size: int) -> None:
        """Move the nodes of a table into one with ``size`` slots in each part."""
        taken = self._of_parts(group)
        if taken.shape[1] == size:
            return
        slots = np.full((self._parts, size), -1, np.int32)
        for part, own in enumerate(taken):
            held = np.flatnonzero(own)
            slots[part, : len(held)] = held
            names = self._tickets[group][part]
            self._tickets[group][part] = [names[slot] for slot in held] + [None] * (size - len(held))
        self._tables[group] = settle(_gather(self._tables[group], slots.reshape(-1)))

    def _leave(self, group: int, done: np.ndarray) -> Left:
        """Take the nodes of the slots ``done`` [parts, slots of a part] out of a table."""
        slots, rows, tickets = np.zeros((self._parts, coarse(int(done.sum(1).max()), 4)), np.int32), [], []
        for part, names in enumerate(self._tickets[group]):
            held = np.flatnonzero(done[part])
            slots[part, : len(held)] = held
            for row, slot in enumerate(held):
                rows.append(part * slots.shape[1] + row)
                tickets.append(names[slot])
                names[slot] = None
        fixed = {"pad_id": self._fixed["pad_id"]}
        completions, prefix, suffix = settle(_leave(self._tables[group], slots.reshape(-1), **fixed))
        return Left(tickets, jax.device_get(completions), prefix, suffix, np.array(rows))


def _on_parts(state: Slots) -> Slots:
    """Cut every array of a table into the parts of the rows, on a mesh.

    The programs below write rows into tables that are cut already. XLA for CPU may merge a cut with a scatter's slice.
    A row that is dropped would then take the values of another part (docs/log.md).
    """
    if not meshed():
        return state

    def cut(x: jax.Array) -> jax.Array:
        place = jax.sharding.PartitionSpec(attention_rows(), *[UNCONSTRAINED] * (x.ndim - 1))
        return jax.lax.with_sharding_constraint(x, place)

    rows = state.rows
    fields = {name: value for name, value in vars(rows).items() if name not in ("prefix", "suffix")}
    caches = cut_attention({"prefix": rows.prefix, "suffix": rows.suffix})
    return Slots(rows=rows.replace(**jax.tree.map(cut, fields), **caches), begun=cut(state.begun))


_fill = jax.jit(fill, static_argnames=("policy",))


@functools.partial(jax.jit, static_argnames=("policy", "size", "columns", "response"))
def _empty(policy: Policy, filled: PyTree, keys: Key[Array, "N G"], *, size: int, columns: int, response: int) -> Slots:
    """A table of ``size`` slots for nodes like those of ``filled``, a result of `fill`; all slots are free."""
    hidden, prefix, _ = filled
    group = keys.shape[1]
    like = lambda x: jnp.zeros((size, columns, *x.shape[2:]), x.dtype)
    prefix = jax.tree.map(like, prefix)
    state = Slots(
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
    return _on_parts(state)


@jax.jit
def _gather(state: Slots, slots: Int[Array, " T"]) -> Slots:
    """A table of the nodes in ``slots`` of each part, the first part's before the second's; -1 is a free slot."""

    def gather(state: Slots, slots: jax.Array) -> Slots:
        moved = jax.tree.map(lambda x: x[slots], state)
        return moved.replace(rows=moved.rows.replace(done=moved.rows.done | (slots < 0)[:, None]))

    return _on_parts(on_own_rows(gather, state, slots))


@functools.partial(jax.jit, static_argnames=("columns",))
def _widen(state: Slots, *, columns: int) -> Slots:
    """The table with room for prompts of ``columns`` tokens."""
    wide = lambda x: jnp.pad(x, ((0, 0), (0, columns - x.shape[1]), *[(0, 0)] * (x.ndim - 2)))
    return _on_parts(state.replace(rows=state.rows.replace(prefix=jax.tree.map(wide, state.rows.prefix))))


@functools.partial(jax.jit, donate_argnames=("state",))
def _write(state: Slots, filled: PyTree, own: tuple, slots: Int[Array, " N"], time: Int[Array, ""]) -> Slots:
    """Write nodes to ``slots`` of their part; the number of its slots is none of them.

    ``filled``: result of `fill`. ``own``: keys [N G], whether a row is no padding [N], and limits [N].
    """
    write = functools.partial(_write_part, time)
    return _on_parts(on_own_rows(write, state, filled, jax.tree.map(jnp.asarray, own), slots))


def _write_part(time: jax.Array, state: Slots, filled: PyTree, own: tuple, slots: jax.Array) -> Slots:
    """`_write` of one part of the rows."""
    (hidden, prefix, length), (keys, active, limit) = filled, own
    n, group = keys.shape
    put = lambda x, new: x.at[slots].set(new.astype(x.dtype), mode="drop")
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
    """Decode until ``finished`` nodes of ``taken`` slots are, or some after `CHUNK` tokens: time, tables, and which.

    ``layers``: of `Policy.unstack`; on a mesh the variables.
    """
    assert policy.decode_slots is not None  # the caller has asked
    if meshed():
        layers = policy.unstack(layers)
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
        _on_parts(state.replace(rows=state.rows.replace(**fields)))
        for state, fields in zip(states, changed, strict=True)
    )
    return time, after, tuple(ended(changed))


@functools.partial(jax.jit, static_argnames=("pad_id",))
def _leave(state: Slots, slots: Int[Array, " M"], *, pad_id: int) -> tuple[Completions, PyTree, PyTree]:
    """Completions and caches of the nodes in ``slots`` of each part: the columns of the ring in the order of tokens."""
    return on_own_rows(functools.partial(_leave_part, pad_id), state, slots)


def _leave_part(pad_id: int, state: Slots, slots: jax.Array) -> tuple[Completions, PyTree, PyTree]:
    """`_leave` of one part of the rows."""
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
