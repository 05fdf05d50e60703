"""What graphs of `debate` reach: figures by hand, the environment's own votes, and bounds by another sum."""

import itertools

import jax
import numpy as np
import pytest

from experiments.studies import debate_graphs
from jaxmarl_llm.envs.debate import array as debate
from jaxmarl_llm.envs.debate.array import Config


def test_votes_are_those_of_the_environment():
    config, rng = Config(answers=3, rounds=2), np.random.default_rng(0)
    graphs = rng.choice([0, 0, 1, 2, 9], size=(12, 4, 4)) * (1 - np.eye(4, dtype=int))
    first = debate_graphs.all_first(config)
    own = jax.jit(jax.vmap(lambda graph, row: debate.debate(graph, row, 3, 2)[1], in_axes=(None, 0)))
    for graph in graphs:
        np.testing.assert_array_equal(debate_graphs.votes(graph, first, 3, 2), own(graph, first))


def test_all_rings():
    """3! orders of the others, and each speaker hears one and is heard by one."""
    made = [ring for ring in debate_graphs.rings(4, (2,))]
    assert len({ring.tobytes() for ring in made}) == len(made) == 6
    for ring in made:
        assert (ring.sum(0) == 2).all() and (ring.sum(1) == 2).all() and not np.diag(ring).any()
        assert np.linalg.matrix_power(ring > 0, 4).trace() == 4 and not np.linalg.matrix_power(ring > 0, 2).trace()


def test_figures_by_hand():
    """Two answers: the complete graph takes the majority. .95 (.5 + .375 / 2) + .05 (.125 + .375 / 2) = .66875."""
    config = Config(answers=2)
    complete = debate.first_graph(config)
    assert debate_graphs.accuracy(config, complete, config.accuracies) == pytest.approx(0.66875)
    for place in range(4):
        heard = complete.copy()
        heard[place] = 9 * (np.arange(4) != place)
        order = np.full(4, 0.5)
        order[place] = 0.95
        assert debate_graphs.accuracy(config, heard, order) == pytest.approx(0.95)
        assert debate_graphs.accuracy(config, heard, np.roll(order, 1)) == pytest.approx(0.5)


def bayes(config, known):
    """The best rule of first answers: for each of them the answer that is right most often."""
    orders = sorted(set(itertools.permutations(config.accuracies)))
    total = 0.0
    for chosen in [[o] for o in orders] if known else [orders]:
        for first in itertools.product(range(config.answers), repeat=len(config.accuracies)):
            joint = []
            for right in range(config.answers):
                sure = 0.0
                for order in chosen:
                    p = 1.0
                    for answer, chance in zip(first, order):
                        p *= chance if answer == right else (1 - chance) / (config.answers - 1)
                    sure += p / len(chosen)
                joint.append(sure / config.answers)
            total += max(joint) / (len(orders) if known else 1)
    return total


@pytest.mark.parametrize(
    "config", (Config(), Config(accuracies=(0.8, 0.3, 0.6), answers=4, rounds=1)), ids=("own", "3")
)
def test_bounds(config):
    found = debate_graphs.bounds(config)
    assert found.known == pytest.approx(bayes(config, True)) and found.blind == pytest.approx(bayes(config, False))
    assert max(found.complete, found.ring) <= found.blind + 1e-12 <= found.known + 2e-12


def test_the_command(capsys):
    debate_graphs.main()
    assert capsys.readouterr().out.splitlines() == [
        "complete graph: 0.7625; best ring: 0.7625",
        "best possible, with the expert known: 0.9500; not known: 0.7625",
        "to be won: 0.1875",
    ]
