"""What teams reach on facts: the perfect one everything, and each role has something to win."""

import pytest

from experiments.studies.facts_bounds import (
    DEMONSTRATORS,
    EVERY_RATE,
    MASK_RATES,
    PERFECT,
    TEAMS,
    main,
    reached,
    reached_by_mask,
)
from jaxmarl_llm.envs.facts import mask
from jaxmarl_llm.envs.facts.array import Config
from jaxmarl_llm.envs.facts.pipeline import Settings

CONFIG = Config()
RATES = [name for name in Settings.__annotations__ if name.endswith("_rate")]


def test_a_perfect_team_reaches_everything():
    assert reached(CONFIG, PERFECT, 100) == (1.0, 0.0)
    faultless = Config(pipeline=Settings(**dict.fromkeys(RATES, 0.0)))
    assert reached(faultless, DEMONSTRATORS, 100) == (1.0, 0.0)


def test_each_role_has_something_to_win():
    """Among perfect others each demonstrator costs F1. A perfect generator alone leaves more than twice .05."""
    for role in PERFECT._fields:
        assert reached(CONFIG, PERFECT._replace(**{role: getattr(DEMONSTRATORS, role)}), 400).f1 < 0.95
    assert reached(CONFIG, TEAMS["perfect generator"], 600).f1 < 0.85
    assert reached(CONFIG, DEMONSTRATORS, 600).f1 == pytest.approx(0.52, abs=0.06)


def test_penalties_are_those_of_the_planted_mistakes():
    """Half of five queries, one of a repeated quote, one of a long answer: quotes and answers may be empty."""
    settings, penalty = CONFIG.pipeline, reached(CONFIG, DEMONSTRATORS, 1000).penalty
    most = 0.5 * settings.flood_rate + settings.repeat_rate + settings.long_rate
    assert -most - 0.03 < penalty < -most + 0.03


def test_the_rates_of_mask_are_all_of_them():
    assert {*EVERY_RATE} == {name for name in mask.Settings.__annotations__ if name.endswith("_rate")}


def test_teams_of_mask():
    """A perfect team is right after its search, and at chance before. Demonstrators leave three roles much to win."""
    first, last = reached_by_mask(EVERY_RATE, 300)
    assert last == 1 and first < 0.2
    most = reached_by_mask((), 1000)[1]
    assert 0.3 < most < 0.6
    for role in ("searcher", "summarizer", "answerer"):
        assert reached_by_mask(MASK_RATES[role], 1000)[1] > most + 0.03, role


def test_the_command(capsys):
    main()
    assert "perfect generator" in capsys.readouterr().out
