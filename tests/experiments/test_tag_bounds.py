"""Tokens and answers of players of `tags`: golden counts of a written trace, perfect players, demonstrators."""

import numpy as np
import pytest

from experiments.studies import tag_bounds
from jaxmarl_llm.envs.facts import tags, tasks
from jaxmarl_llm.envs.facts.array import Config

CONFIG = Config(protocol="tags")
PERFECT = (0.0, 0.0, 0.0)
# Tokens of the team, of the agent, and of the agent without a plan. Two hops: the planner 5 + 7, the searcher
# 12 + 4 + 4 + 4, the answerer 28 + 3; the agent 5 + 7 + 4 + 4 + 4 + 4 + 3.
WANT = {2: (67, 31, 24), 1: (39, 19, 15)}


@pytest.mark.parametrize("hops", WANT)
def test_golden_counts_of_perfect_players(hops):
    facts = ("a1c", "c2x", "d3e")
    path = facts[:hops]
    task = tasks.Task(facts, "a12"[: 1 + hops], path)
    said = tags.demonstrated(np.random.default_rng(0), CONFIG.tags, task, *PERFECT)
    of = lambda turns, players: tag_bounds.tokens_read(tag_bounds.turns_of(turns, players))
    short = tag_bounds.without_plan(task, said)
    assert (of(said, "team"), of(said, "agent"), of(short, "agent")) == WANT[hops]
    assert short[-1][0].startswith(task.question + ">Sa1/a1c>") and "P" not in short[-1][0]


def test_a_place_that_is_read_twice_counts_once_and_another_role_reads_for_itself():
    read = tag_bounds.tokens_read
    assert read([(0, [1, 2], [3])]) == read([(0, [1, 2], [3]), (0, [1, 2, 3], [])]) == 3
    assert read([(0, [1, 2], [3]), (0, [1, 9], [3])]) == 5  # what stands behind another token is another place
    assert read([(0, [1, 2], [3]), (1, [1, 2], [3])]) == 6


def test_what_can_be_won():
    """The figures of the docstring of the claims: less than half of what can be won is claimed of tokens."""
    best = tag_bounds.reached(CONFIG, PERFECT)
    assert best.em == 1 and best.team == pytest.approx(53.2, abs=0.05)
    assert 1 - best.agent / best.team == pytest.approx(0.53, abs=0.005)
    assert 1 - best.short / best.team == pytest.approx(0.63, abs=0.005) and 0.3 < 0.63 / 2


def test_the_command(capsys):
    tag_bounds.main()
    assert "EM 0.429" in capsys.readouterr().out
