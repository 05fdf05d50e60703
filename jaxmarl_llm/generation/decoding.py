"""State of generation between two tokens, and which of its lanes a decode step computes.

A *lane* is one sample of one node. Nodes with equally many samples are one part of a launch and have one `Decoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from jaxmarl_llm.distributed import sharding
from jaxmarl_llm.types import PyTree


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
    adapter: Int[Array, " N"] | None = None  # index of each row's adapter; None: all rows have one

    @property
    def completions(self) -> Completions:
        """The completions so far."""
        truncated = ~self.done if self.cut is None else ~self.done | self.cut
        return Completions(self.tokens, self.count, self.logprobs, truncated)


LOOP_STATE = ("done", "count", "tokens", "logprobs", "hidden", "suffix", "cut")  # fields that a decode step changes
MIN_COMPACT_LANES = 16  # lanes from which a quarter of them takes clearly less time


def select_fields(state: Decoding, names: tuple[str, ...]) -> dict[str, Any]:
    """Select fields of a state by name.

    Args:
        state: state of generation.
        names: names of the fields, in the order of the result.
    """
    return {name: getattr(state, name) for name in names}


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


def launch_sizes(shapes: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Choose the sizes of smaller states for all parts of a launch: those of `compaction_sizes`, side by side.

    A part with fewer sizes than another one keeps its last size. On a mesh a size is that of the lanes which one device
    has. None is chosen where nodes cannot be divided evenly.

    Args:
        shapes: (nodes, samples) of each part.
    """
    devices = sharding.row_parts()
    if any(n % devices for n, _ in shapes):
        return []
    own = [(n // devices, g) for n, g in shapes]
    sizes: list[list[tuple[int, ...]]] = [[shape, *compaction_sizes(*shape)] for shape in own]
    return [tuple(own[min(k, len(own) - 1)] for own in sizes) for k in range(1, max(map(len, sizes)))]


def join(parts: Sequence[jax.Array]) -> jax.Array:
    """Lay the lanes of all parts [N G ...] side by side, [S C ...]. A single part stays as it is.

    S is the number of parts into which a mesh splits rows, which divides every N. So no lane moves between devices.

    Args:
        parts: one array for each part of a launch.
    """
    if len(parts) == 1:
        return parts[0]
    s = sharding.row_parts()
    return jnp.concatenate([x.reshape(s, -1, *x.shape[2:]) for x in parts], axis=1)


def split(lanes: jax.Array, shapes: Sequence[tuple[int, ...]]) -> tuple[jax.Array, ...]:
    """Cut what `join` laid side by side: an array [N G ...] for each part.

    Args:
        lanes: result of `join`, or of a function of every lane [S C ...].
        shapes: (nodes, samples) of each part.
    """
    if len(shapes) == 1:
        return (lanes,)
    ends = [sum(n * g for n, g in shapes[: k + 1]) // len(lanes) for k in range(len(shapes))]
    cut = [lanes[:, end - n * g // len(lanes) : end] for end, (n, g) in zip(ends, shapes)]
    return tuple(x.reshape(*shape, *lanes.shape[2:]) for x, shape in zip(cut, shapes))


def on_own_rows(function: Callable[..., PyTree], *trees: PyTree) -> PyTree:
    """Apply ``function`` to the rows of each part of a mesh by themselves, so that no row moves between devices.

    Args:
        function: takes and returns trees of arrays [n ...].
        trees: arrays [N ...], with equally many rows in each part.
    """
    devices = sharding.row_parts()
    if devices == 1:
        return function(*trees)
    cut = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), trees)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.vmap(function)(*cut))


def exceeds(done: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Whether unfinished lanes of any device are more than n nodes, or more than g samples of a node.

    Args:
        done: which lanes are done [N G].
        size: (n, g). (0, 0): whether any lane is unfinished.
    """
    if size == (0, 0):
        return ~jnp.all(done)
    nodes = jnp.sum((~jnp.all(done, 1)).reshape(sharding.row_parts(), -1), 1)
    return (jnp.max(nodes) > size[0]) | (jnp.max(jnp.sum(~done, 1)) > size[1])


def unfinished(done: jax.Array, size: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
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
        select_fields(state, ("length", "prefix", "limit", "adapter")),
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
