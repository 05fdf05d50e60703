"""Completions of a step as a table, for the backends of metrics that show texts: TensorBoard and W&B."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from jaxmarl_llm.telemetry.rollouts import Completion, Node, Row

COLUMNS = ("task", "turn", "role", "prompt", "completion", "return", "advantage", "why")
LARGEST = 64  # rows of a table; a tree may have thousands of completions
LONGEST = 500  # characters of a text


class Table(NamedTuple):
    """A table of completions.

    Attributes:
        rows: Values in the order of `COLUMNS`, at most `LARGEST` rows.
        found: Completions there were.
    """

    rows: list[tuple[Any, ...]]
    found: int


def table_of(rows: Iterable[Row]) -> Table:
    """Make the table of one step, task by task.

    Args:
        rows: Rows of the step's rollout, of any kinds. Prompts keep their last characters, completions their first.
    """
    rows = list(rows)
    nodes = {row.node: row for row in rows if isinstance(row, Node)}
    pairs = [(nodes[row.node], row) for row in rows if isinstance(row, Completion)]
    pairs.sort(key=lambda pair: pair[0].task)
    shown = [
        (node.task, node.turn, node.role, _cut(node.prompt, tail=True), _cut(step.text))
        + (step.returns, step.advantage, step.why)
        for node, step in pairs[:LARGEST]
    ]
    return Table(shown, len(pairs))


def markdown(table: Table) -> str:
    """Write a table in Markdown. Its texts stay text: no character of them is markup.

    Args:
        table: The table. A value that is None is unknown.
    """
    lines = [COLUMNS, ("---",) * len(COLUMNS), *([_cell(value) for value in row] for row in table.rows)]
    left_out = f"\n\n{len(table.rows)} of {table.found} completions." if len(table.rows) < table.found else ""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + left_out


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.3g}"
    return "".join(c if c.isalnum() or c in " -⏎" else f"&#{ord(c)};" for c in str(value).replace("\n", "⏎"))


def _cut(text: str, *, tail: bool = False) -> str:
    """At most `LONGEST` characters of ``text``, without halves of surrogate pairs. ``tail``: the last ones."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= LONGEST:
        return text
    return f"…{text[-LONGEST:]}" if tail else f"{text[:LONGEST]}…"
