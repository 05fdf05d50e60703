"""Micro-batches of a few fixed shapes from the trained steps of a tree; a shared prompt is computed once.

The prompt of a group goes through the trunk once (`Policy.hidden`). Nodes share more. A later prompt of a conversation
begins with an earlier prompt and its completion. All prompts of a role begin with what the role is told. Their prompts
and completions then become one `Forest` (`Policy.hidden_tree`), which holds each shared beginning once. An update then
costs as many tokens as there are, not the sum of all prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxmarl_llm.credit.advantages import step_episodes
from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.generation.prefix_cache import common
from jaxmarl_llm.training.learner import Batch, Forest, NodeTargets, token_weights
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.types import Tree

# A forest is used where the groups have more than GAIN times its tokens. Its attention reads whole rows, which costs
# more for each token.
GAIN = 1.3
ROW = 2048  # tokens of a forest, if no sequence has more: every token attends over all of its row
FOREST = 256  # smallest number of tokens of a forest of samples that were not played
HALVES = 5  # sizes of forests that are tried for several devices, each half of the one before

_Node = tuple[int, list[int]]  # a node, and its trained steps as positions in `_Samples`

_step_episodes = jax.jit(step_episodes, static_argnames=("num_steps",))


def pack(
    tree: Tree,
    model: int,
    advantages: np.ndarray,
    trained: np.ndarray,
    loss: Loss,
    *,
    micro_tokens: int,
    smallest: tuple[int, int] = (16, 8),
    values: NodeTargets | None = None,
    trees: bool = False,
    parts: int = 1,
    imitation: np.ndarray | None = None,
) -> list[Batch]:
    """Micro-batches of the trained steps of one model.

    ``tree``: of numpy arrays. ``model``: index into ``Team.models``. ``advantages``: [C] or [C R]. ``trained``: [C],
    which steps are trained. ``loss``: sets the token weights.

    ``micro_tokens``: trunk tokens P + G R of a micro-batch, on each device. A micro-batch holds as many nodes as fit, a
    power of two, and at least one. The rest goes into one of a quarter, a sixteenth, ... of that size, or of one node,
    so that few programs are compiled.
    ``smallest``: smallest bucket of prompt and of completion length. Nodes of one bucket of trained steps, prompt
    length and completion length share a micro-batch.
    ``values``: targets of all nodes of the tree; those of nodes with a trained step become a part of the batches.
    ``parts``: devices that share the rows of a micro-batch. Each has a forest of its own, or as many rows as another.
    ``imitation``: [C R], weights of tokens that experts wrote. Steps with such a token are in the batches too.

    ``trees``: use forests where these have fewer than 1 / 1.3 of the tokens. A device counts as many tokens as the one
    with most of them. Each completion is then a group of its own; a loss of unit "group", as dpo, compares the samples
    of a node, and keeps groups. A forest of more than ``micro_tokens`` or 2048 tokens is split between sequences.
    Tokens that both parts share are then in both. For several devices smaller forests are tried too, so that each
    device has one.
    """
    nodes, steps = jax.tree.map(np.asarray, (tree.nodes, tree.steps))
    trained = trained & steps.loss_mask.any(-1)
    if imitation is not None:
        trained = trained | (imitation > 0).any(-1)
    trained = trained & steps.valid & (nodes.model[steps.node] == model)
    if not trained.any():
        return []
    samples = _Samples.select(tree, advantages, trained, loss, values, imitation)
    groups = _plan_groups(samples, micro_tokens, smallest, parts)
    if trees and loss.unit != "group":
        forests, tokens = share_sequences(samples.sequences(), min(micro_tokens, ROW), parts)
        if sum(samples.waited(part, size // parts) * parts for part, size, _ in groups) > GAIN * tokens:
            return [samples.forests(some, parts, smallest) for some in forests]
    return [samples.groups(*group) for group in groups]


def as_forest(batch: Batch, size: np.ndarray) -> Batch:
    """``batch``, which has one completion of each prompt, as one forest on one device.

    It stays as it is where the forest would have more than 2048 tokens, or more than 1 / 1.3 of those of the rows.

    ``batch``: numpy arrays; its rows were not sampled. ``size``: tokens of each completion [N].
    """
    n, p = batch.tokens.shape
    r, rows = batch.completions.shape[-1], np.arange(n)
    only = lambda x: np.asarray(x)[:, 0]  # of the completions of a prompt
    samples = _Samples(
        prompts=np.asarray(batch.tokens),
        length=np.asarray(batch.length),
        task=np.zeros((n,), np.int32),
        node=rows,
        row=rows,
        completions=only(batch.completions),
        size=size,
        logprobs=only(batch.sampler_logprobs),
        weights=only(batch.weights),
        advantages=only(batch.advantages),
    )
    forests = pack_sequences(samples.sequences(), ROW)
    if len(forests) > 1 or GAIN * bucket(len(forests[0].tokens), FOREST) > n * (p + r):
        return batch
    return samples.forests(forests, 1, (FOREST, r)).replace(rows=None)


def _plan_groups(
    samples: _Samples, micro_tokens: int, smallest: tuple[int, int], parts: int
) -> list[tuple[list[_Node], int, tuple[int, int, int]]]:
    """Nodes with their trained steps, rows and shape (G, P, R) of each micro-batch. Arguments as in `pack`."""
    shapes: dict[tuple[int, int, int], list[_Node]] = {}
    for n, members in samples.of_node().items():
        shapes.setdefault(samples.shape(n, members, smallest), []).append((n, members))
    groups = []
    for (g, p, r), nodes in sorted(shapes.items()):
        while nodes:
            size = micro_rows(micro_tokens // (p + g * r), len(nodes), parts) * parts
            part, nodes = nodes[:size], nodes[size:]
            groups.append((part, size, (g, p, r)))
    return groups


def micro_rows(most: int, nodes: float, parts: int) -> int:
    """Nodes of a micro-batch on one device: a power of two, the largest that fits, or less where that is enough.

    ``most``: nodes that fit. ``nodes``: nodes that are left. ``parts``: devices that share the rows.
    """
    size = 1 << max(0, most.bit_length() - 1)
    while size > 1 and (fewer := max(size // 4, 1)) * parts >= nodes:
        size = fewer
    return size


def micro_sizes(most: int, nodes: int) -> list[int]:
    """Nodes of all micro-batches that up to ``nodes`` nodes may be cut into on one device, the largest first.

    ``most``: nodes that fit.
    """
    sizes = [micro_rows(most, nodes, 1)]
    while sizes[-1] > 1:
        sizes.append(max(sizes[-1] // 4, 1))
    return sizes


class _Samples(NamedTuple):
    """The trained steps of one model, in numpy arrays.

    Attributes:
        prompts: Prompts of all nodes of the tree [N P].
        length: Tokens of each prompt [N].
        task: Task of each node [N].
        node: Node of each trained step [K].
        row: Its place in the table of steps [K].
        completions: [K R].
        size: Tokens of each completion [K].
        logprobs: Of the sampler [K R].
        weights: Of the loss [K R].
        advantages: [K R].
        values: Targets of all nodes; None: without a critic.
        imitation: Weights of tokens that experts wrote [K R]; None: there are none.
    """

    prompts: np.ndarray
    length: np.ndarray
    task: np.ndarray
    node: np.ndarray
    row: np.ndarray
    completions: np.ndarray
    size: np.ndarray
    logprobs: np.ndarray
    weights: np.ndarray
    advantages: np.ndarray
    values: NodeTargets | None = None
    imitation: np.ndarray | None = None

    @staticmethod
    def select(
        tree: Tree,
        advantages: np.ndarray,
        trained: np.ndarray,
        loss: Loss,
        values: NodeTargets | None,
        imitation: np.ndarray | None = None,
    ) -> _Samples:
        """The steps marked in ``trained`` [C]. Other arguments as in `pack`."""
        nodes, steps = jax.tree.map(np.asarray, (tree.nodes, tree.steps))
        rows = np.flatnonzero(trained)
        # Weights are computed for the padded table: it has few shapes, the trained rows have many.
        counted = trained.astype(np.float32)
        transitions, episode = tree.transitions, None
        if loss.reads_episodes:
            episode = _step_episodes(transitions.steps, transitions.parent, num_steps=len(counted))
        weights = np.asarray(token_weights(steps.loss_mask, counted, loss.aggregation, loss.loss_length, episode))[rows]
        return _Samples(
            prompts=nodes.tokens,
            length=nodes.length,
            task=nodes.task,
            node=steps.node[rows],
            row=rows,
            completions=steps.tokens[rows],
            size=steps.length[rows],
            logprobs=steps.logprobs[rows],
            weights=weights,
            advantages=np.broadcast_to(
                np.asarray(advantages, np.float32).reshape(len(counted), -1)[rows], weights.shape
            ),
            values=values,
            imitation=None if imitation is None else np.asarray(imitation, np.float32)[rows],
        )

    def of_node(self) -> dict[int, list[int]]:
        """Node -> positions of its trained steps."""
        out: dict[int, list[int]] = {}
        for i, n in enumerate(self.node.tolist()):
            out.setdefault(n, []).append(i)
        return out

    def shape(self, node: int, members: list[int], smallest: tuple[int, int]) -> tuple[int, int, int]:
        """Buckets (G, P, R) of a node's trained steps ``members``."""
        p = min(bucket(int(self.length[node]), smallest[0]), self.prompts.shape[1])
        return bucket(len(members)), p, self._response(members, smallest[1])

    def _response(self, members: Sequence[int] | np.ndarray, smallest: int) -> int:
        """Bucket R of the completions of the trained steps ``members``."""
        return min(bucket(int(self.size[members].max()), smallest), self.completions.shape[1])

    def groups(self, part: list[_Node], size: int, shape: tuple[int, int, int]) -> Batch:
        """One micro-batch of the nodes ``part`` with all their trained steps: ``size`` rows of ``shape`` (G, P, R)."""
        g, p, r = shape
        tokens, length = np.zeros((size, p), np.int32), np.ones((size,), np.int32)
        completions = np.zeros((size, g, r), np.int32)
        weights, advantages, behaviour, imitation = (np.zeros((size, g, r), np.float32) for _ in range(4))
        rows = np.zeros((size, g), np.int32)
        for k, (n, own) in enumerate(part):
            tokens[k], length[k] = self.prompts[n, :p], self.length[n]
            completions[k, : len(own)] = self.completions[own, :r]
            weights[k, : len(own)] = self.weights[own, :r]
            advantages[k, : len(own)] = self.advantages[own, :r]
            behaviour[k, : len(own)] = self.logprobs[own, :r]
            rows[k, : len(own)] = self.row[own]
            if self.imitation is not None:
                imitation[k, : len(own)] = self.imitation[own, :r]
        of = [n for n, _ in part]
        values = None if self.values is None else jax.tree.map(lambda x: _pad(x[of], size), self.values)
        batch = Batch(tokens, length, completions, weights, advantages, behaviour, values=values, rows=rows)
        return batch if self.imitation is None else batch.replace(imitation=imitation)

    def waited(self, part: list[_Node], rows: int) -> int:
        """Tokens, without padding, of the device with most of them; each device has ``rows`` of ``part``."""
        sent = [int(self.length[n] + (self.size[own] - 1).sum()) for n, own in part]
        return max(sum(sent[k : k + rows]) for k in range(0, len(sent), rows))

    def sequences(self) -> list[tuple[int, np.ndarray]]:
        """(task, prompt and completion) of each trained step, without the completion's last token.

        No loss reads the hidden state of that token.
        """
        out = []
        for n, said, size in zip(self.node.tolist(), self.completions, self.size.tolist(), strict=True):
            ids = np.concatenate([self.prompts[n, : self.length[n]], said[: size - 1]])
            out.append((int(self.task[n]), ids))
        return out

    def forests(self, some: Sequence[PackedSequences], parts: int, smallest: tuple[int, int]) -> Batch:
        """One micro-batch of the sequences in ``some``, whose numbers are positions in `sequences`.

        ``some``: one forest for each of the first devices. ``parts``: number of devices. The others have padding alone.
        """
        own, most = np.array([n for one in some for n, _ in one.paths]), bucket(max(len(one.paths) for one in some), 4)
        t, r = bucket(max(len(one.tokens) for one in some), smallest[0]), self._response(own, smallest[1])
        place = np.array([f * most + k for f, one in enumerate(some) for k in range(len(one.paths))])

        def lay(x: np.ndarray) -> np.ndarray:  # [K ...] of the sequences -> [N ...]
            out = np.zeros((parts * most, *x.shape[1:]), x.dtype)
            out[place] = x
            return out

        at = np.zeros((len(own), 1, r), np.int32)
        paths = [path for one in some for _, path in one.paths]
        for k, (size, path) in enumerate(zip(self.size[own], paths, strict=True)):
            at[k, 0, :size] = path[len(path) - size :]
        values = None
        if self.values is not None:  # on the first completion of each node
            first = np.isin(own, np.unique(self.node, return_index=True)[1])
            values = jax.tree.map(lambda x: lay(x[self.node[own]]), self.values)
            values = values.replace(weight=np.where(lay(first), values.weight, 0).astype(np.float32))
        grid = lambda x: lay(x[own][:, None, :r])
        return Batch(
            tokens=np.zeros((parts * most, 0), np.int32),
            length=np.zeros((parts * most,), np.int32),
            completions=grid(self.completions),
            weights=grid(self.weights.astype(np.float32)),
            advantages=grid(self.advantages.astype(np.float32)),
            sampler_logprobs=grid(self.logprobs),
            values=values,
            forest=Forest(
                _table([one.tokens for one in some], parts, t),
                _table([one.position for one in some], parts, t),
                _table([one.end for one in some], parts, t),
                predictor=lay(at),
            ),
            rows=lay(self.row[own][:, None].astype(np.int32)),
            imitation=None if self.imitation is None else grid(self.imitation),
        )


def _pad(x: np.ndarray, size: int) -> np.ndarray:
    """``x`` and zeros, ``size`` rows in all."""
    return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])


def _table(rows: Sequence[list[int]], height: int, width: int) -> np.ndarray:
    """``rows`` of different lengths as one table [height width], filled with zeros."""
    out = np.zeros((height, width), np.int32)
    for row, values in zip(out, rows, strict=False):
        row[: len(values)] = values
    return out


class PackedSequences:
    """Sequences in the layout of `Forest`: each is added after one with which it shares its beginning.

    ``tokens``, ``position``, ``end``: columns of the forest. ``paths``: number of each sequence, and the indices of its
    tokens in the forest.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.position: list[int] = []
        self.end: list[int] = []
        self.paths: list[tuple[int, np.ndarray]] = []

    def add(self, number: int, ids: np.ndarray, shared: int) -> None:
        """Add the sequence ``ids``. Its first ``shared`` tokens are those of the sequence before."""
        path = self.paths[-1][1] if self.paths else np.zeros((0,), np.int64)
        here = len(self.tokens)
        self._close(path[shared:])
        self.tokens += ids[shared:].tolist()
        self.position += range(shared, len(ids))
        self.end += [0] * (len(ids) - shared)
        self.paths.append((number, np.concatenate([path[:shared], np.arange(here, len(self.tokens))])))

    def join(self, other: PackedSequences) -> None:
        """Append the closed ``other``, which shares no token with the sequences here."""
        here = len(self.tokens)
        self.tokens += other.tokens
        self.position += other.position
        self.end += [here + i for i in other.end]
        self.paths += [(number, here + path) for number, path in other.paths]

    def close(self) -> None:
        """End the subtrees of the last sequence. No sequence can be added afterwards."""
        self._close(self.paths[-1][1])

    def _close(self, path: np.ndarray) -> None:
        for i in path.tolist():
            self.end[i] = len(self.tokens)


def pack_sequences(
    sequences: Sequence[tuple[int, np.ndarray]], max_tokens: int, *, apart: bool = False
) -> list[PackedSequences]:
    """Pack ``sequences`` (task, ids) into forests. Sequences of one forest share their beginnings.

    ``max_tokens``: largest number of tokens of a forest, unless a single sequence has more. ``apart``: whether each
    task begins a forest.
    """
    of = lambda task: task if apart else 0
    order = sorted(range(len(sequences)), key=lambda i: (of(sequences[i][0]), sequences[i][1].tolist()))
    out: list[PackedSequences] = []
    before: tuple[int, np.ndarray] | None = None
    for i in order:
        task, ids = of(sequences[i][0]), sequences[i][1]
        new = before is None or before[0] != task
        shared = 0 if before is None or new else common(before[1], ids)
        if not out or (apart and new) or len(out[-1].tokens) + len(ids) - shared > max_tokens:
            out.append(PackedSequences())
            shared = 0
        out[-1].add(i, ids, shared)
        before = task, ids
    for packed in out:
        packed.close()
    return out


def share_sequences(
    sequences: Sequence[tuple[int, np.ndarray]], most: int, parts: int
) -> tuple[list[list[PackedSequences]], int]:
    """Pack ``sequences`` (task, ids) into forests for ``parts`` devices.

    ``most``: largest number of tokens of a forest, unless a single sequence has more.

    Returns the forests of each micro-batch, at most one for each device, and the tokens of all micro-batches. There a
    device counts as many tokens as the one with the largest forest, because it waits for that one.
    """
    if parts == 1:
        forests = pack_sequences(sequences, most)
        return [[one] for one in forests], sum(len(one.tokens) for one in forests)
    limits = [most >> k for k in range(HALVES)]
    shares = (_balance(pack_sequences(sequences, limit, apart=True), most, parts) for limit in limits)
    return min(shares, key=lambda shared: shared[1])


def _balance(pieces: list[PackedSequences], most: int, parts: int) -> tuple[list[list[PackedSequences]], int]:
    """Join ``pieces`` into forests of about the same size, see `share_sequences`.

    The largest piece comes first, each one into the smallest forest. There are as few micro-batches as ``most`` allows.
    """
    pieces = sorted(pieces, key=lambda one: -len(one.tokens))
    sizes, count = [0], 0
    while count == 0 or (max(sizes) > max(most, len(pieces[0].tokens)) and count * parts < len(pieces)):
        count += 1
        sizes = [0] * (count * parts)
        forests = [PackedSequences() for _ in sizes]
        for piece in pieces:
            smallest = sizes.index(min(sizes))
            sizes[smallest] += len(piece.tokens)
            forests[smallest].join(piece)
    forests = sorted((one for one in forests if one.tokens), key=lambda one: -len(one.tokens))
    batches = [forests[k : k + parts] for k in range(0, len(forests), parts)]
    return batches, sum(parts * len(some[0].tokens) for some in batches)
