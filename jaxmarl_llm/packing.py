"""From the trained steps of a tree to micro-batches of a few fixed shapes, each shared token once.

The prompt of a group goes through the trunk once (`Policy.hidden`). Nodes of one conversation share more: a later
prompt begins with an earlier one and what was said there. Their prompts and completions are then laid out as one
`Forest` (`Policy.hidden_tree`), in which every token of an episode's tree of turns stands once, so that an update costs
what a rollout costs: the tree's tokens, not the sum of all prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxmarl_llm.advantages import step_episodes
from jaxmarl_llm.generate import bucket
from jaxmarl_llm.losses import Loss
from jaxmarl_llm.prefixes import common
from jaxmarl_llm.train import Batch, Forest, NodeTargets, token_weights
from jaxmarl_llm.types import Nodes, Steps, Tree

GAIN = 1.3  # how many times the forest's tokens the groups must have, for its attention over all of a row to pay
ROW = 2048  # tokens of a forest, if no sequence has more: every token is scored against all of its row

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
) -> list[Batch]:
    """Micro-batches of the steps of ``model`` marked in ``trained`` [C]; ``advantages`` [C] or [C R].

    Nodes are grouped by the bucket of their number of trained steps, prompt and completion length (from ``smallest``
    on). A micro-batch holds as many nodes, a power of two, as fit ``micro_tokens`` trunk tokens P + G R, at least one;
    what remains goes into one of a quarter, a sixteenth, ... of that size, or of one node, so that few programs are
    compiled.
    ``values`` of all nodes of the tree go along with the nodes that have a trained step. ``parts``: devices that share
    the rows of a micro-batch; each has ``micro_tokens``.

    ``trees``: as forests where these have fewer than 1 / 1.3 of the tokens. A completion is then a group of its own
    (dpo, which compares samples of a node, keeps its groups), and a forest of more than ``micro_tokens`` or 2048 tokens
    is cut between sequences; what both sides share then stands in both.
    """
    nodes, steps = jax.tree.map(np.asarray, (tree.nodes, tree.steps))
    trained = trained & steps.valid & (nodes.model[steps.node] == model) & (steps.loss_mask.any(-1))
    rows = np.flatnonzero(trained)
    if not len(rows):
        return []
    # Over the padded table: its shapes are few, those of the trained rows are not.
    counted = trained.astype(np.float32)
    moves, episode = tree.transitions, None
    if loss.aggregate == "trajectory":
        episode = _step_episodes(moves.steps, moves.parent, num_steps=len(counted))
    weights = np.asarray(token_weights(steps.loss_mask, counted, loss.aggregate, loss.constant, episode))[rows]
    adv = np.broadcast_to(np.asarray(advantages, np.float32).reshape(len(counted), -1)[rows], weights.shape)
    of_node: dict[int, list[int]] = {}
    for i, c in enumerate(rows):
        of_node.setdefault(int(steps.node[c]), []).append(i)

    given = _Trained(nodes, steps, rows, weights, adv, values)
    if trees and loss.objective == "policy":
        grown = grow(given.lines(), min(micro_tokens, ROW))
        groups = sum(int(nodes.length[n]) for n in of_node) + int((steps.length[rows] - 1).sum())
        if groups > GAIN * sum(len(one.tokens) for one in grown):
            return [given.forest(one, smallest) for one in grown]

    shapes: dict[tuple[int, int, int], list[int]] = {}
    for n, members in of_node.items():
        p = min(bucket(int(nodes.length[n]), smallest[0]), nodes.tokens.shape[1])
        r = min(bucket(int(steps.length[rows[members]].max()), smallest[1]), steps.tokens.shape[1])
        shapes.setdefault((bucket(len(members)), p, r), []).append(n)

    batches = []
    for (g, p, r), members in sorted(shapes.items()):
        full = 1 << max(0, (micro_tokens // (p + g * r)).bit_length() - 1)
        while members:
            size = full
            while size > 1 and (fewer := max(size // 4, 1)) * parts >= len(members):
                size = fewer
            size *= parts
            part, members = members[:size], members[size:]
            tokens, length = np.zeros((size, p), np.int32), np.ones((size,), np.int32)
            completions = np.zeros((size, g, r), np.int32)
            w, a, b = (np.zeros((size, g, r), np.float32) for _ in range(3))
            for k, n in enumerate(part):
                tokens[k], length[k] = nodes.tokens[n, :p], nodes.length[n]
                own = np.array(of_node[n])
                completions[k, : len(own)] = steps.tokens[rows[own], :r]
                w[k, : len(own)], a[k, : len(own)] = weights[own, :r], adv[own, :r]
                b[k, : len(own)] = steps.logprobs[rows[own], :r]
            targets = None
            if values is not None:
                rows_of = lambda x, part=part, size=size: np.concatenate([x[part], np.zeros(size - len(part), x.dtype)])
                targets = jax.tree.map(rows_of, values)
            batches.append(Batch(tokens, length, completions, w, a, b, values=targets))
    return batches


class _Trained(NamedTuple):
    """Trained steps (rows of the table of steps), their weights and advantages, values of nodes."""

    nodes: Nodes
    steps: Steps
    rows: np.ndarray
    weights: np.ndarray
    advantages: np.ndarray
    values: NodeTargets | None

    def lines(self) -> list[tuple[int, np.ndarray]]:
        """(task, prompt and completion) of each; nothing asks for the hidden state of a completion's last token."""
        nodes, steps = self.nodes, self.steps
        said = [steps.tokens[c, : steps.length[c] - 1] for c in self.rows]
        of = steps.node[self.rows]
        return [(int(nodes.task[n]), np.concatenate([nodes.tokens[n, : nodes.length[n]], x])) for n, x in zip(of, said)]

    def forest(self, grown: Grown, smallest: tuple[int, int]) -> Batch:
        """One micro-batch of the sequences of ``grown``, numbered as in ``lines``."""
        steps, own = self.steps, np.array([number for number, _ in grown.paths])
        rows = self.rows[own]
        n, t = bucket(len(own), 4), bucket(len(grown.tokens), smallest[0])
        r = min(bucket(int(steps.length[rows].max()), smallest[1]), steps.tokens.shape[1])
        pad = lambda x: np.concatenate([x, np.zeros((n - len(x), *x.shape[1:]), x.dtype)])
        at = np.zeros((n, 1, r), np.int32)
        for k, (size, (_, path)) in enumerate(zip(steps.length[rows], grown.paths)):
            at[k, 0, :size] = path[len(path) - size :]
        values = None
        if self.values is not None:  # with the first completion of each node
            node = steps.node[self.rows]
            first = np.isin(own, np.unique(node, return_index=True)[1])
            values = jax.tree.map(lambda x: pad(x[node[own]]), self.values)
            values = values.replace(weight=np.where(pad(first), values.weight, 0).astype(np.float32))
        grid = lambda x: pad(x[:, None, :r])
        fill = lambda x: np.array(x + [0] * (t - len(x)), np.int32)
        return Batch(
            tokens=np.zeros((n, 0), np.int32),
            length=np.zeros((n,), np.int32),
            completions=grid(steps.tokens[rows]),
            weights=grid(self.weights[own].astype(np.float32)),
            advantages=grid(self.advantages[own].astype(np.float32)),
            behaviour=grid(steps.logprobs[rows]),
            values=values,
            forest=Forest(fill(grown.tokens), fill(grown.position), fill(grown.end), at),
        )


class Grown:
    """A forest while sequences are added to it, those that begin alike one after the other."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.position: list[int] = []
        self.end: list[int] = []
        self.paths: list[tuple[int, np.ndarray]] = []  # number of a sequence, the tokens it consists of

    def add(self, number: int, ids: np.ndarray, shared: int) -> None:
        """``shared``: tokens at its beginning that are those of the sequence before."""
        path = self.paths[-1][1] if self.paths else np.zeros((0,), np.int64)
        here = len(self.tokens)
        self._close(path[shared:])
        self.tokens += ids[shared:].tolist()
        self.position += range(shared, len(ids))
        self.end += [0] * (len(ids) - shared)
        self.paths.append((number, np.concatenate([path[:shared], np.arange(here, len(self.tokens))])))

    def close(self) -> None:
        self._close(self.paths[-1][1])

    def _close(self, path: np.ndarray) -> None:
        for i in path.tolist():
            self.end[i] = len(self.tokens)


def grow(lines: Sequence[tuple[int, np.ndarray]], most: int) -> list[Grown]:
    """Forests of (task, tokens) in at most ``most`` tokens each, if a single sequence has no more. Only sequences of
    one task share their beginnings.
    """
    order = sorted(range(len(lines)), key=lambda i: (lines[i][0], lines[i][1].tolist()))
    out: list[Grown] = []
    before: tuple[int, np.ndarray] | None = None
    for i in order:
        task, ids = lines[i]
        shared = common(before[1], ids) if before is not None and before[0] == task else 0
        if not out or len(out[-1].tokens) + len(ids) - shared > most:
            out.append(Grown())
            shared = 0
        out[-1].add(i, ids, shared)
        before = task, ids
    for one in out:
        one.close()
    return out
