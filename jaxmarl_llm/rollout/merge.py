"""One rollout out of tasks of several rollouts, for training steps that play more tasks than they train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.rollout.env_runner import RolloutResult
from jaxmarl_llm.types import Tree


class _Part(NamedTuple):
    """Rows of one rollout that are kept, and the new number of every row; -1 where a row is left out."""

    tree: Tree
    rows: dict[str, np.ndarray]  # table -> rows that are kept
    new: dict[str, np.ndarray]  # table -> new numbers, with -1 behind the last row: row -1 stays -1
    task: np.ndarray  # old position of a task -> new one


def merge_tasks(plays: Sequence[RolloutResult], chosen: Sequence[tuple[int, int]]) -> RolloutResult:
    """Make one rollout of chosen tasks. Rows without a node, a completion or a played joint action are left out.

    Tables have as many rows as the largest table of the plays, or a larger bucket where that is too small. Costs and
    failures are those of all plays. Figures of the environment are means over plays.

    Args:
        plays: rollouts of one team and environment.
        chosen: number of the rollout and position of the task there, in the order of the new tasks. No pair twice.
    """
    start = {"nodes": 0, "steps": 0, "transitions": 0}
    parts: list[_Part] = []
    for number, play in enumerate(plays):
        parts.append(_part(play.tree, {t: i for i, (p, t) in enumerate(chosen) if p == number}, start))
        start = {name: n + len(parts[-1].rows[name]) for name, n in start.items()}
    trees = [_renumbered(part) for part in parts]
    sizes = {name: bucket(n, max(_rows(p.tree, name) for p in plays)) for name, n in start.items()}
    tables = {name: _stack([getattr(tree, name) for tree in trees], size) for name, size in sizes.items()}
    tables["nodes"] = tables["nodes"].replace(parent=_none_behind(tables["nodes"].parent, start["nodes"]))
    moves, count = tables["transitions"], start["transitions"]
    seats, parent = (_none_behind(x, count) for x in (moves.steps, moves.parent))
    tables["transitions"] = moves.replace(steps=seats, parent=parent)
    counts = jax.tree.map(lambda *x: np.asarray(sum(x)), *(play.tree.counts for play in plays))
    return _with_texts(Tree(**tables, counts=counts), plays, [part.rows["steps"] for part in parts])


def _rows(tree: Tree, table: str) -> int:
    return len(getattr(tree, table).valid)


def _part(tree: Tree, places: dict[int, int], start: dict[str, int]) -> _Part:
    """The kept rows of ``tree``: those of the tasks ``places`` (old -> new position), numbered from ``start`` on."""
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    old = np.array(sorted(places), np.int32)
    kept_nodes = np.asarray(nodes.valid) & np.isin(nodes.task, old)
    kept = {
        "nodes": kept_nodes,
        "steps": np.asarray(steps.valid) & kept_nodes[np.asarray(steps.node)],
        "transitions": np.asarray(moves.played) & np.isin(moves.task, old),
    }
    rows = {name: np.flatnonzero(mask) for name, mask in kept.items()}
    new = {name: np.full(len(mask) + 1, -1, np.int32) for name, mask in kept.items()}
    for name, of in rows.items():
        new[name][of] = start[name] + np.arange(len(of))
    task = np.zeros(max(places, default=0) + 1, np.int32)
    for before, after in places.items():
        task[before] = after
    return _Part(tree, rows, new, task)


def _renumbered(part: _Part) -> Tree:
    """The kept rows of a part, which name rows and tasks by their new numbers."""
    take = lambda table, name: jax.tree.map(lambda x: np.asarray(x)[part.rows[name]], table)
    nodes, steps, moves = (take(getattr(part.tree, name), name) for name in part.rows)
    nodes = nodes.replace(task=part.task[nodes.task], parent=part.new["transitions"][nodes.parent])
    steps = steps.replace(node=part.new["nodes"][steps.node])
    moves = moves.replace(
        task=part.task[moves.task],
        parent=part.new["transitions"][moves.parent],
        steps=part.new["steps"][moves.steps],
    )
    return Tree(nodes, steps, moves, part.tree.counts)


def _stack(tables: Sequence[Any], size: int) -> Any:
    """One table below another, padded with zeros to ``size`` rows and to the widest table."""

    def column(*parts: np.ndarray) -> np.ndarray:
        width = np.max([part.shape[1:] for part in parts], axis=0).astype(int)
        out = np.zeros((size, *width), parts[0].dtype)
        at = 0
        for part in parts:
            out[(slice(at, at + len(part)), *(slice(0, n) for n in part.shape[1:]))] = part
            at += len(part)
        return out

    return jax.tree.map(column, *tables)


def _none_behind(column: np.ndarray, count: int) -> np.ndarray:
    """``column`` with -1, the number of no row, from row ``count`` on."""
    behind = (np.arange(len(column)) >= count).reshape(-1, *[1] * (column.ndim - 1))
    return np.where(behind, -1, column)


def _with_texts(tree: Tree, plays: Sequence[RolloutResult], kept: Sequence[np.ndarray]) -> RolloutResult:
    """The rollout of ``tree``, whose completions are the rows ``kept`` of each of ``plays``."""
    origin = [(play, int(row)) for play, rows in zip(plays, kept, strict=True) for row in rows]
    hosts = [play.records for play in plays if play.records is not None]
    records = None
    if hosts:
        names = sorted({name for host in hosts for name in host.cut_prompts})
        records = hosts[0]._replace(
            tree=tree,
            records=[play.records.records[row] for play, row in origin if play.records is not None],
            failures=[failure for host in hosts for failure in host.failures],
            cut_tokens=sum(host.cut_tokens for host in hosts),
            cut_prompts={name: sum(host.cut_prompts.get(name, 0) for host in hosts) for name in names},
            unplayed=sum(host.unplayed for host in hosts),
        )
    figures = {name for play in plays for name in play.watched}
    mean = lambda name: float(np.mean([play.watched[name] for play in plays if name in play.watched]))
    return RolloutResult(
        tree,
        lambda row: origin[row][0].prompt_text(origin[row][1]),
        lambda row: origin[row][0].completion_text(origin[row][1]),
        [failure for play in plays for failure in play.failures],
        records,
        {name: mean(name) for name in sorted(figures)},
    )
