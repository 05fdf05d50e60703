"""Tables of the record of `experiments.studies.exact_sampling`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.studies.gradient_report import table

Row = dict[str, Any]
SHOWN = (3, 10)  # numbers of turns in the tables of all plans
NEVER = float("inf")


def ratios(row: Row) -> list[float]:
    """Tokens as multiples of flat's, by seed; infinite where no number of tokens is enough."""
    return [NEVER if x is None else float(x) for x in row["ratio"]]


def shown(value: float) -> str:
    return "never" if value == NEVER else f"{value:.2f}"


def spread(row: Row) -> str:
    """Median over seeds, with the lowest and the highest seed."""
    found = ratios(row)
    return f"{shown(statistics.median(found))} ({shown(min(found))} to {shown(max(found))})"


def find(record: Row, **which: Any) -> Row | None:
    """The row of a record whose fields equal ``which``; None where the plan did not fit into the budget."""
    return next((row for row in record["rows"] if all(row[k] == v for k, v in which.items())), None)


def _distinct(record: Row, key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in record["rows"]))


def section(record: Row) -> list[str]:
    """Lines of the section of the page, for one ``record``."""
    head = (
        f"`{record['command']}`, {record['date']}, commit `{record['commit']}`, {record['machine']}, "
        f"{record['cpu_seconds']} CPU seconds, {record['seeds']} seeds. Medians over seeds (lowest to highest)."
    )
    return [head, "", *_by_turns(record), "", *_by_plan(record), "", *_quality(record)]


def _by_turns(record: Row) -> list[str]:
    """Node-wise continued relative to flat by number of turns; the last columns count updated tokens."""
    turns = [k for k in _distinct(record, "turns") if k > 1]
    lines = []
    for payoff in _distinct(record, "payoff"):
        for share in _distinct(record, "share"):
            at = {"payoff": payoff, "share": share, "plan": "node-wise continued"}
            cells = [find(record, turns=k, cost="sampled", **at) for k in turns]
            cells += [find(record, turns=k, cost="updated", **at) for k in SHOWN]
            lines.append([f"{payoff}, {share:.0%}", *(spread(cell) if cell else "" for cell in cells)])
    heads = [*(f"k = {k}" for k in turns), *(f"updated, k = {k}" for k in SHOWN)]
    return table(["payoff, drawn by task", *heads], lines)


def _by_plan(record: Row) -> list[str]:
    """Every plan relative to flat, by payoff, for tasks that are equal and tasks that differ most."""
    shares, payoffs = _distinct(record, "share"), _distinct(record, "payoff")
    lines = []
    for share in (shares[0], shares[-1]):
        for k in SHOWN:
            for plan in [name for name in _distinct(record, "plan") if name != "flat"]:
                cells = [find(record, payoff=p, share=share, turns=k, cost="sampled", plan=plan) for p in payoffs]
                medians = [shown(statistics.median(ratios(cell))) if cell else "" for cell in cells]
                lines.append([f"{share:.0%}, {k}", plan, *medians])
    return table(["drawn by task, k", "plan", *payoffs], lines)


def _quality(record: Row) -> list[str]:
    """Sizes, bias and noise of every plan at its best, where tasks differ most."""
    share, lines = _distinct(record, "share")[-1], []
    for payoff in ("random", "additive"):
        for k in SHOWN:
            for plan in _distinct(record, "plan"):
                row = find(record, payoff=payoff, share=share, turns=k, cost="sampled", plan=plan)
                if row is not None:
                    lines.append([f"{payoff}, {k}", plan, *_figures(row)])
    heads = ["size of a group", "across the gradient", "noise, tokens", "signal ÷ noise of 1,000 tokens"]
    return table(["payoff, k", "plan", *heads], lines)


def _figures(row: Row) -> Sequence[str]:
    sizes = ", ".join(f"{size:g}" for size in row["sizes"])
    return sizes, f"{row['across']:.3f}", f"{row['noise']:.0f}", f"{row['snr']:.3g}"
