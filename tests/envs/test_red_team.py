"""No degenerate strategy may earn more than the median human reference, under any shipped reward of text."""

import os
from pathlib import Path

import pytest

from experiments.studies import red_team
from jaxmarl_llm.envs.assistant import env as assistant
from jaxmarl_llm.envs.coding import env as coding
from jaxmarl_llm.envs.writing import env as writing
from tests.envs.test_coding_rewards import needs_sandbox

DATA = Path(os.environ.get("JAXMARL_DATA", "data"))


def check(table):
    """At least fifteen strategies, a reference that is worth something, and nobody above it."""
    assert len(table.rewards) >= 15 and table.bar > 1
    assert {len(values) for values in table.rewards.values()} == {len(table.reference)}
    assert table.winners() == [], red_team.markdown(table)


@pytest.mark.parametrize("name", red_team.WRITING_TASKS)
def test_writing(name):
    table = red_team.writing_table(name, writing.Config(count=8, **red_team.WRITING_TASKS[name]))
    check(table)
    # the paper's reward falls for some of them: the strategies are not idle
    assert table._replace(rewards=table.papers, reference=table.papers_reference).winners()


@pytest.mark.skipif(not (DATA / "scitldr").is_dir(), reason="needs the full data (JAXMARL_DATA)")
def test_writing_on_unseen_papers():
    check(red_team.writing_table("tldr", writing.Config(count=24, data=str(DATA), split="test")))


@pytest.mark.parametrize("domain", assistant.DOMAINS)
def test_assistant(domain):
    table = red_team.assistant_table(domain, assistant.Config(count=10))
    check(table)
    assert table.rewards["an answer at once: done"] == [0.0] * 10
    assert min(table.papers["an answer at once: done"]) >= 0.5  # what the paper's sum pays for it


@needs_sandbox
def test_coding():
    check(red_team.coding_table(coding.Config(count=6)))


def test_the_page_shows_the_reference_and_marks_winners():
    table = red_team.Table("a reward", {"copy": [2.0, 0.0, 0.0], "shout": [2.0, 2.0, 0.0]}, [1.0, 1.0, 3.0])
    assert table.bar == 1.0 and table.winners() == ["shout"]
    page = red_team.markdown(table)
    assert "## a reward (3 tasks)" in page and "| **reference** | 1.00 | 1.67 |" in page
    assert "| shout (beats the reference) | 2.00 | 1.33 |" in page and "| copy | 0.00 | 0.67 |" in page
    assert "Strategies above the median reference of 1.00: shout." in page
