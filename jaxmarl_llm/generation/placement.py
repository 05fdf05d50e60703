"""Which part of a mesh's rows has which prompt of a launch: the part whose devices hold most of its cached prefix.

The parts of a launch have room for equally many rows; those of a loop have their free slots. Pure functions of host
data, so that every process decides alike.
"""

from __future__ import annotations

import numpy as np


def place_rows(known: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Choose a part for each row: the best of three placements by the number of tokens that rows reuse.

    In two of them one row after another takes a part that knows its prefix and has room. The first row is the one that
    loses most without its best part, or the one with the longest prefix. The second way reuses at least half of what
    any placement reuses. Rows without such a part follow in order. In the third placement all rows are in order.

    Args:
        known: tokens of each row's prompt that each part holds [N D].
        capacity: rows for which each part has room [D]. N is at most their sum.

    Returns:
        Index of the part of each row [N].
    """
    rows, parts = np.nonzero(known)
    size = known[rows, parts]
    ascending = np.sort(known, axis=1)
    loss = ascending[:, -1] - (ascending[:, -2] if known.shape[1] > 1 else 0)
    tried = [
        _in_turn(len(known), capacity, rows[order], parts[order])
        for order in (np.lexsort((parts, -size, rows, -loss[rows])), np.lexsort((parts, rows, -size)))
    ]
    tried.append(in_order(len(known), capacity))
    return max(tried, key=lambda chosen: known[np.arange(len(known)), chosen].sum())


def _in_turn(count: int, capacity: np.ndarray, rows: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Take the pairs (row, part) in turn whose row has no part yet and whose part has room; other rows in order."""
    chosen, room = np.full(count, -1), capacity.copy()
    for row, part in zip(rows.tolist(), parts.tolist(), strict=True):
        if chosen[row] < 0 and room[part]:
            chosen[row] = part
            room[part] -= 1
    chosen[chosen < 0] = in_order(int((chosen < 0).sum()), room)
    return chosen


def in_order(count: int, room: np.ndarray) -> np.ndarray:
    """Divide rows among parts in order, so that the room that is left is as even as possible.

    Consecutive rows, which are often of one task, come to one part.

    Args:
        count: number of rows, at most the sum of ``room``.
        room: rows that each part can still take [D].

    Returns:
        Index of the part of each row [count], ascending.
    """
    level = int(room.max())  # the room that is left in parts that get rows; one more in the last ones
    while np.maximum(room - level, 0).sum() < count:
        level -= 1
    taken = np.maximum(room - level, 0)
    over = int(taken.sum()) - count
    taken[np.flatnonzero(taken)[::-1][:over]] -= 1
    return np.repeat(np.arange(len(room)), taken)
