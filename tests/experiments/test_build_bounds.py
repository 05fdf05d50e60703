"""The best graphs of `build`: figures by hand, and the worth of graphs against all outcomes of their workers."""

import itertools
import math

import pytest

from experiments.studies import build_bounds
from jaxmarl_llm.envs.build.array import Config


def enumerated(config, nodes, hard):
    """Probability of a right answer, summed over all outcomes (in luck or not) of every worker."""
    depth, total = [], 0.0
    for node in nodes:
        depth.append(1 + (depth[int(node[1]) - 1] if node[1] != "0" else 0))
    rates = [config.solver[hard] if node[0] == "s" else config.repair for node in nodes]
    for luck in itertools.product((True, False), repeat=len(nodes)):
        right = []
        for node, lucky in zip(nodes, luck, strict=True):
            right.append(lucky or (node[0] == "c" and right[int(node[1]) - 1]))
        if nodes and right[depth.index(max(depth))]:
            total += math.prod(rate if lucky else 1 - rate for rate, lucky in zip(rates, luck, strict=True))
    return total


@pytest.mark.parametrize("hard", (0, 1))
def test_the_chance_of_every_small_graph_is_that_of_all_outcomes(hard):
    config = Config(solver=(0.7, 0.2), repair=0.6)
    every = list(build_bounds.graphs(4))
    assert len(every) == len(set(every)) == 1 + 1 + 3 + 15 + 105
    for nodes in every:
        assert build_bounds.chance(config, nodes, hard) == pytest.approx(enumerated(config, nodes, hard), abs=1e-9)


def test_the_best_graphs():
    """.5 (.998 + .95) - .2 = .774 for a solver and its checker; .88 and .75 by query."""
    found = build_bounds.best(Config())
    assert found.fixed == ("s0", "c1") and found.of_type == (("s0",), ("s0", "c1"))
    assert found.fixed_worth == pytest.approx(0.774) and found.worth == pytest.approx(0.815)


def test_other_costs_and_shares_have_other_best_graphs():
    assert build_bounds.best(Config(cost=2.0)).fixed == ()
    assert build_bounds.best(Config(hard_share=0.0)).fixed == ("s0",)
    deep = build_bounds.best(Config(cost=0.0, repair=0.5, actions=4))
    assert deep.fixed == ("s0", "c1", "c2", "c3")
    cheap = build_bounds.best(Config(cost=0.05, solver=(0.95, 0.5)))  # little can be won
    assert cheap.worth - cheap.fixed_worth == pytest.approx(0.0025)


def test_the_command(capsys):
    build_bounds.main()
    assert capsys.readouterr().out.splitlines() == [
        "best fixed graph: s0c1, 0.7740",
        "by query: s0 for easy and s0c1 for hard queries, 0.8150",
        "to be won: 0.0410",
    ]
