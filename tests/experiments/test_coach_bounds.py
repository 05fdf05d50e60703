"""Bounds of `chain_coach`: votes by enumeration of every sequence of answers, accuracy by demonstrations."""

import itertools
from collections import Counter

import numpy as np
import pytest

from experiments.configs.cpmobius import tiny
from experiments.studies import coach_bounds
from jaxmarl_llm.envs.chain import coach
from jaxmarl_llm.models.tokenizer import ByteTokenizer


@pytest.mark.parametrize("right, truth", [(0.46, 0), (0.46, 2), (0.3, 1), (1.0, 1)])
def test_votes_are_those_of_all_sequences_of_answers(right, truth):
    outcomes, n, band = 4, 5, (0.4, 0.8)
    label = inside = 0.0
    for answers in itertools.product(range(outcomes), repeat=n):
        weight = np.prod([right if a == truth else (1 - right) / (outcomes - 1) for a in answers])
        votes = Counter(answers)
        most = max(votes.values())
        label += weight * (min(a for a in votes if votes[a] == most) == truth)
        inside += weight * (band[0] <= most / n <= band[1])
    got = coach_bounds.vote(right, truth, outcomes, n, band)
    assert got.right == pytest.approx(label, abs=1e-9) and got.in_band == pytest.approx(inside, abs=1e-9)


def test_the_imitating_player_is_as_right_as_the_demonstrations():
    config = coach.Config()
    shown = coach.demonstrations(config, 3, 3000)
    text = lambda of, i: ByteTokenizer().decode(of[i])
    asked = [text(shown["player"]["tokens"], i)[1:-1] for i in range(3000)]
    right = [text(shown["player"]["completion"], i) == str(eval(q) % 10) for i, q in enumerate(asked)]
    chance = [coach_bounds.chance(config, q) for q in coach.questions(config.terms, config.largest)]
    assert abs(np.mean(right) - np.mean(chance)) < 0.04
    weights = {q.text: coach_bounds.written_by(config, q) for q in coach.questions(config.terms, config.largest)}
    written = Counter(text(shown["coach"]["completion"], i) for i in range(3000))
    side = coach.sides(config.terms, config.largest) == coach.TRAINING
    total = sum(w for w, mine in zip(weights.values(), side) if mine)
    hard = sum(w for (q, w), mine in zip(weights.items(), side) if mine and "-" in q) / total
    assert abs(sum(n for q, n in written.items() if "-" in q) / 3000 - hard) < 0.04


def test_most_can_be_won_and_labels_are_nearly_always_right():
    found = coach_bounds.bounds(coach.Config(**tiny().env.args), tiny())
    assert found.won == pytest.approx(1 - found.accuracy) and 0.24 < found.won < 0.28
    assert found.label > 0.99 and 0.1 < found.useful < 0.3
