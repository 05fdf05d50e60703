"""What the best graphs of `build` reach, exactly, by enumeration of every graph that a builder can make:

    python -m experiments.studies.build_bounds

A graph's worth is the probability that its answer is right, minus the cost of its nodes. The best fixed graph is one
graph for all queries. By query means the best graph for easy queries, and the best one for hard ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from jaxmarl_llm.envs.build.array import Config, additions

Nodes = tuple[str, ...]  # the actions that added the nodes, such as s0 and c1


class Best(NamedTuple):
    """The best graphs and their worth.

    Attributes:
        fixed: the graph of largest mean worth
        fixed_worth: its mean worth
        of_type: the best graph for easy queries, and that for hard ones
        worth: mean worth of those two
    """

    fixed: Nodes
    fixed_worth: float
    of_type: tuple[Nodes, Nodes]
    worth: float


def graphs(most: int) -> Iterator[Nodes]:
    """Every graph of at most ``most`` nodes, the one without nodes included."""
    for size in range(most + 1):
        yield from itertools.product(*(additions(k) for k in range(size)))


def chain_of(nodes: Nodes, number: int) -> list[str]:
    """Roles from the node of ``number`` (from 1) of ``nodes`` to the end of its chain, which listens to nobody."""
    roles = []
    while number:
        node = nodes[number - 1]
        roles.append(node[0])
        number = int(node[1])
    return roles


def chance(config: Config, nodes: Nodes, hard: int) -> float:
    """Probability that the answer of a graph is right: 1 minus the probability that all workers that matter err.

    Args:
        config: Settings of the workers.
        nodes: The graph.
        hard: Type of the query.
    """
    if not nodes:
        return 0.0
    chain = max((chain_of(nodes, k + 1) for k in range(len(nodes))), key=len)  # the first of the longest ones
    wrong = 1.0
    for role in chain:
        wrong *= 1 - (config.repair if role == "c" else config.solver[hard])
        if role == "s":
            break  # a solver ignores what it hears
    return 1 - wrong


def best(config: Config) -> Best:
    """The best graphs; of equal ones the smallest. ``config``: settings of the environment."""
    every = list(graphs(config.actions))
    worth = {g: [chance(config, g, hard) - config.cost * len(g) for hard in (0, 1)] for g in every}
    share = 1 - config.hard_share, config.hard_share
    mean = {g: share[0] * easy + share[1] * hard for g, (easy, hard) in worth.items()}
    fixed = max(every, key=lambda g: mean[g])
    easy, hard = max(every, key=lambda g: worth[g][0]), max(every, key=lambda g: worth[g][1])
    return Best(fixed, mean[fixed], (easy, hard), share[0] * worth[easy][0] + share[1] * worth[hard][1])


def main() -> None:
    """Print the best graphs of the environment as it is."""
    found = best(Config())
    fixed, easy, hard = ("".join(nodes) or "none" for nodes in (found.fixed, *found.of_type))
    print(f"best fixed graph: {fixed}, {found.fixed_worth:.4f}")
    print(f"by query: {easy} for easy and {hard} for hard queries, {found.worth:.4f}")
    print(f"to be won: {found.worth - found.fixed_worth:.4f}")


if __name__ == "__main__":
    main()
