"""The stream of statements of the protocol `remember`, its rules in plain Python, and demonstrators with mistakes.

A stream has eight different statements of three characters. A statement is one of

    current    a1c    a fact of the task; the facts of the gold path are among them
    outdated   a1f    an earlier version of a current fact, with another entity at its end, before it in the stream
    chatter    bdh    three letters, which say nothing

The order is random otherwise. A later fact about the same relation of the same entity replaces an earlier one.

Shared arguments: ``rng`` (NumPy) determines what is drawn. ``settings`` are those of `facts.remember`. ``task`` is the
task of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmarl_llm.envs.facts.tasks import LETTERS, Task

STATEMENTS = 8  # of a stream


def draw(rng: np.random.Generator, task: Task, outdated: int, chatter: int) -> tuple[str, ...]:
    """A stream in its order.

    Args:
        rng: See above.
        task: See above.
        outdated: Number of outdated facts.
        chatter: Number of statements without a fact; the rest of the stream are current facts.
    """
    current = list(task.path)
    others = [fact for fact in task.facts if fact not in current]
    extra = STATEMENTS - outdated - chatter - len(current)
    current += [others[i] for i in rng.permutation(len(others))[:extra]]
    replaced = [current[i] for i in rng.permutation(len(current))[:outdated]]
    earlier = [fact[:2] + _letter(rng, fact[0] + fact[2]) for fact in replaced]
    empty: list[str] = []
    while len(empty) < chatter:
        said = "".join(_letter(rng, "") for _ in range(3))
        empty += [said] * (said not in empty)
    every = [*current, *earlier, *empty]
    stream = [every[i] for i in rng.permutation(STATEMENTS)]
    for old, new in zip(earlier, replaced, strict=True):
        i, j = stream.index(old), stream.index(new)
        stream[min(i, j)], stream[max(i, j)] = old, new
    return tuple(stream)


def _letter(rng: np.random.Generator, but: str) -> str:
    others = [letter for letter in LETTERS if letter not in but]
    return others[rng.integers(len(others))]


def is_fact(statement: str) -> bool:
    """Whether a statement is a fact, current or outdated."""
    return statement[1].isdigit()


def latest(statements: Sequence[str]) -> list[str]:
    """The profile that follows from a store: its facts without those that a later one replaces.

    Args:
        statements: The store, in the order of the stream.
    """
    newest = {fact[:2]: fact for fact in statements if is_fact(fact)}
    return [fact for fact in statements if newest.get(fact[:2]) == fact]


def walk(question: str, facts: Sequence[str]) -> str:
    """The entity to which a question leads; "" where a fact is missing. Of several facts the first one counts.

    Args:
        question: An entity and one or two relations.
        facts: Facts in the order of the retriever's quotes.
    """
    entity = question[0]
    for relation in question[1:]:
        entity = next((fact[2] for fact in facts if fact.startswith(entity + relation)), "") if entity else ""
    return entity


# -- demonstrations ----------------------------------------------------------------------------------------------------


def kept(rng: np.random.Generator, settings: Any, statements: Sequence[str]) -> list[str]:
    """The ``statements`` that a demonstrated extractor keeps. It misses some facts, and keeps some chatter."""
    rate = lambda statement: 1 - settings.miss_rate if is_fact(statement) else settings.chatter_rate
    return [statement for statement in statements if rng.random() < rate(statement)]


def profile(rng: np.random.Generator, settings: Any, store: Sequence[str]) -> list[str]:
    """The profile that a demonstrated profiler writes of a ``store``. Some replaced facts stay, beside later ones."""
    right = latest(store)
    stays = lambda fact: is_fact(fact) and rng.random() < settings.outdated_rate
    return [statement for statement in store if statement in right or stays(statement)]


def retrieved(rng: np.random.Generator, settings: Any, task: Task, entries: Sequence[str]) -> list[str]:
    """The entries that a demonstrated retriever quotes. It may miss the last fact of a path, and may add another entry.

    Args:
        rng: See above.
        settings: See above.
        task: See above.
        entries: The profile.
    """
    path = list(task.path)
    if len(path) > 1 and rng.random() < settings.hop_error_rate:
        path = path[:1]
    quotes = [fact for fact in path if fact in entries]
    others = [entry for entry in entries if entry not in task.path]
    if others and rng.random() < settings.extra_rate:
        quotes.append(others[rng.integers(len(others))])
    return quotes
