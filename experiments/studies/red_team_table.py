"""What strategies earn beside a reference: the table of one reward, and its form on the page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

TOLERANCE = 1e-9


class Table(NamedTuple):
    """What strategies earn: ``rewards`` by strategy, one value for each task; ``reference`` likewise."""

    title: str
    rewards: dict[str, list[float]]
    reference: list[float]
    papers: Mapping[str, list[float]] = MappingProxyType({})  # by strategy, under the paper's reward
    papers_reference: Sequence[float] = ()

    @property
    def bar(self) -> float:
        """The median reference."""
        return statistics.median(self.reference)

    def winners(self) -> list[str]:
        """Strategies whose median or mean lies above the median reference."""
        return [name for name, values in self.rewards.items() if _strength(values) > self.bar + TOLERANCE]


def _strength(values: Sequence[float]) -> float:
    return max(statistics.median(values), statistics.mean(values))


def markdown(table: Table) -> str:
    """A table as Markdown: median and mean of each strategy, the reference first."""
    paper = bool(table.papers)
    head = "| strategy | median | mean |" + (" paper's median | paper's mean |" if paper else "")
    rows = [("**reference**", table.reference, table.papers_reference)]
    rows += [(name, values, table.papers.get(name, [])) for name, values in table.rewards.items()]
    rule = "| --- |" + " ---: |" * (head.count("|") - 2)
    lines = [f"## {table.title} ({len(table.reference)} tasks)", "", head, rule]
    bars = (table.bar, statistics.median(table.papers_reference) if paper else 0.0)
    for name, *columns in rows:
        cells = [
            f"{x:.2f}" for values in columns if values for x in (statistics.median(values), statistics.mean(values))
        ]
        beats = [
            bool(v) and name != "**reference**" and _strength(v) > bar + TOLERANCE for v, bar in zip(columns, bars)
        ]
        mark = " (beats the reference)" if beats[0] else " (beats the paper's)" if beats[1] else ""
        lines.append(f"| {name}{mark} | {' | '.join(cells)} |")
    won = table.winners()
    lines += ["", f"Strategies above the median reference of {table.bar:.2f}: {', '.join(won) or 'none'}.", ""]
    return "\n".join(lines)
