"""Radix tree of token sequences: which of their tokens have a slot in a cache, and which one."""

from __future__ import annotations

import numpy as np


class _Edge:
    """Edge of a `Trie`: consecutive tokens, their slots, and the edges that follow, by their first token."""

    __slots__ = ("ids", "next", "slots")

    def __init__(self, ids: np.ndarray, slots: np.ndarray, following: dict[int, _Edge]) -> None:
        self.ids, self.slots, self.next = ids, slots, following


class Trie:
    """Radix tree of token sequences with a slot for each token. Sequences share the edges of a common prefix."""

    def __init__(self) -> None:
        none = np.zeros((0,), np.int32)
        self._root = _Edge(none, none, {})

    def _walk(self, ids: np.ndarray) -> tuple[list[np.ndarray], int, _Edge, int]:
        """Follow ``ids`` as far as they are known.

        Returns:
            Slots of the longest known prefix, its length, the edge it ends in, and its number of tokens in that edge.
        """
        edge, inside, known, slots = self._root, 0, 0, []
        while inside == len(edge.ids) and known < len(ids) and int(ids[known]) in edge.next:
            edge = edge.next[int(ids[known])]
            inside = common(edge.ids, ids[known:])
            slots.append(edge.slots[:inside])
            known += inside
        return slots, known, edge, inside

    def find(self, ids: np.ndarray) -> np.ndarray:
        """Return the slots of the longest known prefix of ``ids``."""
        return np.concatenate([*self._walk(ids)[0], np.zeros((0,), np.int32)])

    def add(self, ids: np.ndarray, free: int) -> tuple[np.ndarray, int]:
        """Add a sequence.

        Args:
            ids: its tokens.
            free: slot of the first token that is not known yet; the next ones get ``free + 1``, ...

        Returns:
            Slots of all tokens, and how many of the tokens were known before.
        """
        slots, known, edge, inside = self._walk(ids)
        rest = np.arange(free, free + len(ids) - known, dtype=np.int32)
        if len(rest):
            if inside < len(edge.ids):
                behind = _Edge(edge.ids[inside:], edge.slots[inside:], edge.next)
                edge.next = {int(behind.ids[0]): behind}
                edge.ids, edge.slots = edge.ids[:inside], edge.slots[:inside]
            edge.next[int(ids[known])] = _Edge(ids[known:], rest, {})
        return np.concatenate([*slots, rest]), known


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix of two token sequences, ``a`` and ``b``."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
