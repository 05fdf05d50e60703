"""Placement of rows on the parts of a mesh: beside a slow form in plain Python, and beside all placements there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.generation.placement import in_order, place_rows


@st.composite
def launches(draw, rows=12, parts=5):
    """Tokens that each part knows of each row, mostly few, and the room of each part, equal or not."""
    n, d = draw(st.integers(1, rows)), draw(st.integers(1, parts))
    known = draw(
        st.lists(st.lists(st.sampled_from([0, 0, 0, 9, 10, 11, 40]), min_size=d, max_size=d), min_size=n, max_size=n)
    )
    equal = np.full(d, -(-n // d) + draw(st.integers(0, 2)))
    unequal = np.array(draw(st.lists(st.integers(0, 4), min_size=d, max_size=d)))
    return np.array(known), unequal if unequal.sum() >= n else equal


def reused(known, parts):
    return sum(int(row[part]) for row, part in zip(known, parts, strict=True))


def slowly_in_order(count, room):
    """One row after another is counted for the part with the most room, the last of equal ones; then in order."""
    room, taken = list(room), [0] * len(room)
    for _ in range(count):
        part = max(range(len(room)), key=lambda p: (room[p], -p))
        room[part] -= 1
        taken[part] += 1
    return [part for part, rows in enumerate(taken) for _ in range(rows)]


def slowly(known, capacity):
    n, d = known.shape
    pairs = [(row, part) for row in range(n) for part in range(d) if known[row, part]]
    best = [sorted(row, reverse=True) + [0] for row in known.tolist()]
    by_loss = sorted(pairs, key=lambda x: (best[x[0]][1] - best[x[0]][0], x[0], -known[x]))
    by_size = sorted(pairs, key=lambda x: -known[x])
    tried = []
    for order in (by_loss, by_size):
        chosen, room = {}, list(capacity)
        for row, part in order:
            if row not in chosen and room[part]:
                chosen[row] = part
                room[part] -= 1
        rest = iter(slowly_in_order(n - len(chosen), room))
        tried.append([chosen[row] if row in chosen else next(rest) for row in range(n)])
    tried.append(slowly_in_order(n, capacity))
    return max(tried, key=lambda parts: reused(known, parts))


@given(launches())
def test_every_row_has_a_part_with_room_and_reuses_as_much_as_in_order(case):
    known, capacity = case
    parts = place_rows(known, capacity)
    assert parts.tolist() == slowly(known, capacity)
    assert parts.shape == (len(known),) and np.all(np.bincount(parts, minlength=known.shape[1]) <= capacity)
    assert reused(known, parts) >= reused(known, in_order(len(known), capacity))


@given(launches(rows=5, parts=3))
def test_half_of_what_any_placement_reuses_is_reused(case):
    """The best placement is found by enumeration."""
    known, capacity = case
    n, d = known.shape
    every = (p for p in itertools.product(range(d), repeat=n) if np.all(np.bincount(p, minlength=d) <= capacity))
    assert 2 * reused(known, place_rows(known, capacity)) >= max(reused(known, parts) for parts in every)


def test_no_order_of_rows_is_always_the_best_one():
    """By loss: the first row loses 1 token on the other part, the second one 9. By size: the last row has 40 twice."""
    one = lambda known: place_rows(np.array(known), np.ones(len(known[0]), int)).tolist()
    assert one([[9, 10], [9, 0]]) == [1, 0]
    assert one([[9, 0, 0], [0, 9, 0], [40, 40, 0]]) == [2, 1, 0]
    both = np.zeros((5, 5), int)  # the two cases side by side: each order is wrong in one of them
    both[:2, :2], both[2:, 2:] = [[9, 0], [10, 9]], [[40, 40, 0], [0, 9, 0], [9, 0, 0]]
    assert one(both) == [0, 1, 2, 3, 4]


@given(st.integers(0, 30), st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_rows_in_order_leave_room_as_evenly_as_possible(count, room):
    if count > sum(room):
        return
    parts = in_order(count, np.array(room))
    assert parts.tolist() == slowly_in_order(count, room)
    taken = np.bincount(parts, minlength=len(room))
    assert len(parts) == count and (taken <= room).all() and (np.diff(parts) >= 0).all()
    left = [r - t for r, t in zip(room, taken) if t]
    assert not left or max(r - t for r, t in zip(room, taken)) <= min(left) + 1


@pytest.mark.parametrize("rows,parts,expected", [(3, 8, [0, 1, 2]), (9, 4, [0, 0, 0, 1, 1, 2, 2, 3, 3])])
def test_new_rows_are_divided_evenly(rows, parts, expected):
    assert in_order(rows, np.full(parts, 4)).tolist() == expected
