"""What teams reach on facts: the perfect one everything, and each role has something to win."""

import pytest

from experiments.studies.facts_bounds import DEMONSTRATORS, PERFECT, TEAMS, main, reached
from jaxmarl_llm.envs.facts.array import Config
from jaxmarl_llm.envs.facts.pipeline import Settings

CONFIG = Config()
RATES = [name for name in Settings.__annotations__ if name.endswith("_rate")]


def test_a_perfect_team_reaches_everything():
    assert reached(CONFIG, PERFECT, 100) == (1.0, 0.0)
    faultless = Config(pipeline=Settings(**dict.fromkeys(RATES, 0.0)))
    assert reached(faultless, DEMONSTRATORS, 100) == (1.0, 0.0)


def test_each_role_has_something_to_win():
    """More than twice the .05 of F1 between a perfect team and a perfect generator among demonstrators."""
    f1 = {name: reached(CONFIG, team, 500).f1 for name, team in TEAMS.items()}
    assert all(f1[f"perfect {role}"] > f1["demonstrators"] + 0.03 for role in ("rewriter", "selector", "generator"))
    assert f1["perfect"] - f1["perfect generator"] > 0.15
    assert f1["demonstrators"] == pytest.approx(0.53, abs=0.05)


def test_penalties_are_those_of_the_planted_mistakes():
    """Half of five queries, one of a repeated id, one of a long answer: ids and answers may be empty."""
    settings, penalty = CONFIG.pipeline, reached(CONFIG, DEMONSTRATORS, 1000).penalty
    most = 0.5 * settings.flood_rate + settings.repeat_rate + settings.long_rate
    assert -most - 0.03 < penalty < -most + 0.03


def test_the_command(capsys):
    main()
    assert "perfect generator" in capsys.readouterr().out
