"""Lengths that are possible on `segments`: figures by hand, a closed form, and demonstrations that are drawn."""

import numpy as np
import pytest

from experiments.studies import segment_bounds
from jaxmarl_llm.envs.segments.array import Config, demonstrations

CONFIGS = {
    "default": Config(largest=2),
    "four terms": Config(terms=4, largest=1, filler=2, filler_rate=0.4, skip_rate=0.3, step_error_rate=0.25),
    "no filler": Config(largest=3, filler_rate=0.0, skip_rate=0.0, step_error_rate=0.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_figures_are_those_of_drawn_demonstrations(name):
    config, n = CONFIGS[name], 3000
    found, taught = segment_bounds.bounds(config), demonstrations(config, 0, n)["reasoner"]
    lengths = taught["completion_length"] - 1  # without eos
    assert abs(lengths.mean() - found.demonstrated) < 4 * lengths.std() / np.sqrt(n) + 1e-6
    assert lengths.min() >= found.derivation or config.skip_rate


@pytest.mark.parametrize("name", CONFIGS)
def test_lengths_are_those_of_a_closed_form(name):
    """Steps of four tokens, half of F + 1 letters for each filler sentence, and one separator less than sentences."""
    config = CONFIGS[name]
    steps = 1 + (1 - config.skip_rate) * (config.needed - 1)
    fillers = config.filler_rate * config.terms
    found = segment_bounds.bounds(config)
    assert found.without_filler == pytest.approx(4 * steps + steps - 1)
    assert found.demonstrated == pytest.approx(4 * steps + fillers * (config.filler + 1) / 2 + steps + fillers - 1)
    assert found.derivation == 5 * config.needed - 1 and found.answer == 2


def test_accuracy_by_hand():
    """Of the numbers 0 to 2 an error matters for 1 and 2. Two errors that matter cancel in 1 of 4 cases."""
    rate = 0.1 * 2 / 3
    want = (1 - rate) ** 2 + rate**2 / 4
    assert segment_bounds.bounds(Config(largest=2)).accuracy == pytest.approx(want)
    assert segment_bounds.bounds(CONFIGS["no filler"]).accuracy == pytest.approx(1.0)


def test_a_third_can_be_saved():
    found = segment_bounds.bounds(Config())
    assert found.reduction > 0.35 and found.without_filler < found.derivation < found.demonstrated


def test_the_command(capsys):
    segment_bounds.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "shortest derivation 9, shortest right answer 2"
    assert lines[2:] == [
        "the shortest derivation saves 0.450 of the demonstrated length",
        "accuracy of demonstrations 0.8722",
    ]
