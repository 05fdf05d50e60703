"""What graphs of `debate` reach, exactly, by enumeration of all first answers:

    python -m experiments.studies.debate_graphs

The debate is deterministic once the first answers are known. So the accuracy of a graph is a sum over K^S first answers
of S speakers, for each of K right answers. Rings are the cycles in which each speaker hears one other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxmarl_llm.envs.debate.array import OWN, Config, first_graph

Graph = np.ndarray  # [S S] weights, from row to column


def rings(speakers: int, weights: Sequence[int] = (1, 2)) -> Iterator[Graph]:
    """Every directed ring. A weight of 1 is that of a speaker's own answer, and any larger one outweighs it.

    Args:
        speakers: S.
        weights: Weight of all edges of a ring, one ring for each of them.
    """
    for rest in itertools.permutations(range(1, speakers)):
        order = (0, *rest)
        for weight in weights:
            graph = np.zeros((speakers, speakers), int)
            for start, to in zip(order, (*rest, 0), strict=True):
                graph[start, to] = weight
            yield graph


def votes(graph: Graph, first: np.ndarray, answers: int, rounds: int) -> np.ndarray:
    """The vote of each debate [n].

    Args:
        graph: Weights of the edges.
        first: First answers of the speakers [n S].
        answers: K.
        rounds: Rounds after the first answers.
    """
    rows = np.eye(answers, dtype=int)
    now = first
    for _ in range(rounds):
        support = OWN * rows[now] + np.einsum("ij,nik->njk", graph, rows[now])
        own = np.take_along_axis(support, now[..., None], 2)[..., 0]
        now = np.where(own == support.max(2), now, support.argmax(2))
    return rows[now].sum(1).argmax(1)


def all_first(config: Config) -> np.ndarray:
    """All first answers of the speakers [n S]. ``config``: settings of the environment."""
    return np.array(list(itertools.product(range(config.answers), repeat=len(config.accuracies))))


def probability(config: Config, first: np.ndarray, right: int, accuracies: Sequence[float]) -> np.ndarray:
    """The probability of each row of first answers, [n].

    Args:
        config: Settings of the environment.
        first: First answers [n S].
        right: The right answer.
        accuracies: Accuracies of the speakers, in their order.
    """
    chance = np.array(accuracies)
    return np.where(first == right, chance, (1 - chance) / (config.answers - 1)).prod(1)


def accuracy(config: Config, graph: Graph, accuracies: Sequence[float]) -> float:
    """Probability that the vote on a graph is right. Each answer is the right one as often.

    Args:
        config: Settings of the environment.
        graph: Weights of the edges.
        accuracies: Accuracies of the speakers, in their order.
    """
    first = all_first(config)
    vote = votes(graph, first, config.answers, config.rounds)
    each = [(probability(config, first, right, accuracies) * (vote == right)).sum() for right in range(config.answers)]
    return float(np.mean(each))


class Bounds(NamedTuple):
    """What is reached, as means over the orders of the speakers.

    Attributes:
        complete: the complete graph with weights of 1
        ring: the best ring, one for all orders
        known: the best possible rule of first answers, for one who knows the order
        blind: the best possible rule for one who does not know the order
    """

    complete: float
    ring: float
    known: float
    blind: float


def bounds(config: Config) -> Bounds:
    """What graphs and rules reach. ``config``: settings of the environment."""
    orders = sorted(set(itertools.permutations(config.accuracies)))
    mean = lambda graph: float(np.mean([accuracy(config, graph, order) for order in orders]))
    first, right = all_first(config), range(config.answers)
    table = np.array([[probability(config, first, r, order) for r in right] for order in orders])  # [orders K n]
    complete = mean(first_graph(Config(accuracies=config.accuracies)))
    known = table.max(1).sum(1).mean() / config.answers
    blind = table.mean(0).max(0).sum() / config.answers
    return Bounds(complete, max(map(mean, rings(len(config.accuracies)))), float(known), float(blind))


def main() -> None:
    """Print the bounds of the environment as it is."""
    found = bounds(Config())
    print(f"complete graph: {found.complete:.4f}; best ring: {found.ring:.4f}")
    print(f"best possible, with the expert known: {found.known:.4f}; not known: {found.blind:.4f}")
    print(f"to be won: {found.known - found.complete:.4f}")


if __name__ == "__main__":
    main()
