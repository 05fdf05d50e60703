"""Micro-batches of a few fixed shapes from the trained steps of a tree; a shared prompt is computed once.

The prompt of a group goes through the trunk once (`Policy.hidden`). Nodes of one conversation share more: a later
prompt begins with an earlier prompt and its completion. Their prompts and completions then become one `Forest`
(`Policy.hidden_tree`), which holds every token of an episode's tree of turns once. An update then costs as many tokens
as the rollout: those of the tree, not the sum of all prompts.
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
from jaxmarl_llm.types import Nodes, Steps, Tree

# A forest is used where the groups have more than GAIN times its tokens. Its attention reads whole rows, which costs
# more for each token.
GAIN = 1.3
ROW = 2048  # tokens of a forest, if no sequence has more: every token attends over all of its row

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
    ``parts``: devices that share the rows of a micro-batch.
    ``imitation``: [C R], weights of tokens that experts wrote. Steps with such a token are in the batches too.

    ``trees``: use forests where these have fewer than 1 / 1.3 of the tokens. Each completion is then a group of its
    own; a loss of unit "group", as dpo, compares the samples of a node, and keeps groups. A forest of more than
    ``micro_tokens`` or 2048 tokens is split between sequences. Tokens that both parts share are then in both.
    """
    nodes, steps = jax.tree.map(np.asarray, (tree.nodes, tree.steps))
    trained = trained & steps.loss_mask.any(-1)
    if imitation is not None:
        trained = trained | (imitation > 0).any(-1)
    trained = trained & steps.valid & (nodes.model[steps.node] == model)
    if not trained.any():
        return []
    samples = _Samples.select(tree, advantages, trained, loss, values, imitation)
    if trees and loss.unit != "group":
        packed = pack_sequences(samples.sequences(), min(micro_tokens, ROW))
        if samples.group_tokens() > GAIN * sum(len(one.tokens) for one in packed):
            return [samples.forest(one, smallest) for one in packed]
    shapes: dict[tuple[int, int, int], list[int]] = {}
    for n, members in samples.of_node.items():
        shapes.setdefault(samples.shape(n, members, smallest), []).append(n)
    batches = []
    for (g, p, r), nodes in sorted(shapes.items()):
        while nodes:
            size = micro_rows(micro_tokens // (p + g * r), len(nodes), parts) * parts
            part, nodes = nodes[:size], nodes[size:]
            batches.append(samples.groups(part, size, (g, p, r)))
    return batches


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
    """The trained steps of one model. Arrays by trained step have axes [K] or [K R]."""

    nodes: Nodes  # numpy arrays
    steps: Steps
    rows: np.ndarray  # [K] of the steps table
    of_node: dict[int, list[int]]  # node -> its trained steps, as positions in ``rows``
    weights: np.ndarray  # [K R]
    advantages: np.ndarray  # [K R]
    values: NodeTargets | None  # of all nodes
    imitation: np.ndarray | None  # [K R]

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
        adv = np.broadcast_to(np.asarray(advantages, np.float32).reshape(len(counted), -1)[rows], weights.shape)
        of_node: dict[int, list[int]] = {}
        for i, c in enumerate(rows):
            of_node.setdefault(int(steps.node[c]), []).append(i)
        experts = None if imitation is None else np.asarray(imitation, np.float32)[rows]
        return _Samples(nodes, steps, rows, of_node, weights, adv, values, experts)

    def shape(self, node: int, members: list[int], smallest: tuple[int, int]) -> tuple[int, int, int]:
        """Buckets (G, P, R) of a node's trained steps ``members``."""
        p = min(bucket(int(self.nodes.length[node]), smallest[0]), self.nodes.tokens.shape[1])
        return bucket(len(members)), p, self._response(self.rows[members], smallest[1])

    def _response(self, rows: np.ndarray, smallest: int) -> int:
        """Bucket R of the completions ``rows`` of the steps table."""
        return min(bucket(int(self.steps.length[rows].max()), smallest), self.steps.tokens.shape[1])

    def groups(self, part: list[int], size: int, shape: tuple[int, int, int]) -> Batch:
        """One micro-batch of the nodes ``part`` with all their trained steps: ``size`` rows of ``shape`` (G, P, R)."""
        nodes, steps, (g, p, r) = self.nodes, self.steps, shape
        tokens, length = np.zeros((size, p), np.int32), np.ones((size,), np.int32)
        completions = np.zeros((size, g, r), np.int32)
        weights, advantages, behaviour, imitation = (np.zeros((size, g, r), np.float32) for _ in range(4))
        rows = np.zeros((size, g), np.int32)
        for k, n in enumerate(part):
            own = np.array(self.of_node[n])
            tokens[k], length[k] = nodes.tokens[n, :p], nodes.length[n]
            completions[k, : len(own)] = steps.tokens[self.rows[own], :r]
            weights[k, : len(own)] = self.weights[own, :r]
            advantages[k, : len(own)] = self.advantages[own, :r]
            behaviour[k, : len(own)] = steps.logprobs[self.rows[own], :r]
            rows[k, : len(own)] = self.rows[own]
            if self.imitation is not None:
                imitation[k, : len(own)] = self.imitation[own, :r]
        values = None if self.values is None else jax.tree.map(lambda x: _pad(x[part], size), self.values)
        batch = Batch(tokens, length, completions, weights, advantages, behaviour, values=values, rows=rows)
        return batch if self.imitation is None else batch.replace(imitation=imitation)

    def group_tokens(self) -> int:
        """Tokens that the groups send through the trunk, without padding."""
        prompts = sum(int(self.nodes.length[n]) for n in self.of_node)
        return prompts + int((self.steps.length[self.rows] - 1).sum())

    def sequences(self) -> list[tuple[int, np.ndarray]]:
        """(task, prompt and completion) of each trained step, without the completion's last token.

        No loss reads the hidden state of that token.
        """
        nodes, steps, out = self.nodes, self.steps, []
        for c in self.rows:
            n = steps.node[c]
            ids = np.concatenate([nodes.tokens[n, : nodes.length[n]], steps.tokens[c, : steps.length[c] - 1]])
            out.append((int(nodes.task[n]), ids))
        return out

    def forest(self, packed: PackedSequences, smallest: tuple[int, int]) -> Batch:
        """One micro-batch of the sequences in ``packed``, whose numbers are positions in `sequences`."""
        steps, own = self.steps, np.array([number for number, _ in packed.paths])
        rows = self.rows[own]
        n, t, r = bucket(len(own), 4), bucket(len(packed.tokens), smallest[0]), self._response(rows, smallest[1])
        at = np.zeros((n, 1, r), np.int32)
        for k, (size, (_, path)) in enumerate(zip(steps.length[rows], packed.paths)):
            at[k, 0, :size] = path[len(path) - size :]
        values = None
        if self.values is not None:  # on the first completion of each node
            node = steps.node[self.rows]
            first = np.isin(own, np.unique(node, return_index=True)[1])
            values = jax.tree.map(lambda x: _pad(x[node[own]], n), self.values)
            values = values.replace(weight=np.where(_pad(first, n), values.weight, 0).astype(np.float32))
        grid = lambda x: _pad(x[:, None, :r], n)
        fill = lambda x: np.array(x + [0] * (t - len(x)), np.int32)
        return Batch(
            tokens=np.zeros((n, 0), np.int32),
            length=np.zeros((n,), np.int32),
            completions=grid(steps.tokens[rows]),
            weights=grid(self.weights[own].astype(np.float32)),
            advantages=grid(self.advantages[own].astype(np.float32)),
            sampler_logprobs=grid(steps.logprobs[rows]),
            values=values,
            forest=Forest(fill(packed.tokens), fill(packed.position), fill(packed.end), at),
            rows=_pad(rows[:, None].astype(np.int32), n),
            imitation=None if self.imitation is None else grid(self.imitation[own]),
        )


def _pad(x: np.ndarray, size: int) -> np.ndarray:
    """``x`` and zeros, ``size`` rows in all."""
    return np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])


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

    def close(self) -> None:
        """End the subtrees of the last sequence. No sequence can be added afterwards."""
        self._close(self.paths[-1][1])

    def _close(self, path: np.ndarray) -> None:
        for i in path.tolist():
            self.end[i] = len(self.tokens)


def pack_sequences(sequences: Sequence[tuple[int, np.ndarray]], max_tokens: int) -> list[PackedSequences]:
    """Pack ``sequences`` (task, ids) into forests. Only sequences of one task share their beginnings.

    ``max_tokens``: largest number of tokens of a forest, unless a single sequence has more.
    """
    order = sorted(range(len(sequences)), key=lambda i: (sequences[i][0], sequences[i][1].tolist()))
    out: list[PackedSequences] = []
    before: tuple[int, np.ndarray] | None = None
    for i in order:
        task, ids = sequences[i]
        shared = common(before[1], ids) if before is not None and before[0] == task else 0
        if not out or len(out[-1].tokens) + len(ids) - shared > max_tokens:
            out.append(PackedSequences())
            shared = 0
        out[-1].add(i, ids, shared)
        before = task, ids
    for packed in out:
        packed.close()
    return out
