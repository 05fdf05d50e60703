"""No degenerate strategy may earn more than the median reference, under any shipped reward of text."""

import itertools
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.studies import red_team_coding, red_team_letters, red_team_table
from experiments.studies.red_team_assistant import assistant_table
from experiments.studies.red_team_calls import CALLS, calls_table
from experiments.studies.red_team_facts import facts_table
from experiments.studies.red_team_reference import game_table, writers_table
from experiments.studies.red_team_writing import WRITING_TASKS, writing_table
from jaxmarl_llm.envs.assistant import env as assistant
from jaxmarl_llm.envs.call_team import env as call_team
from jaxmarl_llm.envs.coding import env as coding
from jaxmarl_llm.envs.duet import array as duet
from jaxmarl_llm.envs.facts import text as facts
from jaxmarl_llm.envs.reference_game import env as reference_game
from jaxmarl_llm.envs.two_writers import env as two_writers
from jaxmarl_llm.envs.writing import env as writing
from tests.envs.test_coding_rewards import needs_sandbox

DATA = Path(os.environ.get("JAXMARL_DATA", "data"))


def check(table, least=1.0):
    """At least fifteen strategies, a reference that is worth more than ``least``, and nobody above it."""
    assert len(table.rewards) >= 15 and table.bar > least
    assert {len(values) for values in table.rewards.values()} == {len(table.reference)}
    assert table.winners() == [], red_team_table.markdown(table)


@pytest.mark.parametrize("name", WRITING_TASKS)
def test_writing(name):
    table = writing_table(name, writing.Config(count=8, **WRITING_TASKS[name]))
    check(table)
    # the paper's reward falls for some of them: the strategies are not idle
    assert table._replace(rewards=table.papers, reference=table.papers_reference).winners()


@pytest.mark.skipif(not (DATA / "scitldr").is_dir(), reason="needs the full data (JAXMARL_DATA)")
def test_writing_on_unseen_papers():
    check(writing_table("tldr", writing.Config(count=24, data=str(DATA), split="test")))


@pytest.mark.parametrize("domain", assistant.DOMAINS)
def test_assistant(domain):
    table = assistant_table(domain, assistant.Config(count=10))
    check(table)
    assert table.rewards["an answer at once: done"] == [0.0] * 10
    assert min(table.papers["an answer at once: done"]) >= 0.5  # what the paper's sum pays for it


@pytest.mark.parametrize("split", ["train", "test"])
def test_questions_about_passages(split):
    check(facts_table(facts.Config(split=split)), least=0.99)


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_reference_game(split):
    table = game_table(reference_game.Config(split=split))
    check(table, least=0.99)
    assert sum(table.rewards["first words of the abstract, words compared"]) > 0.4 * len(table.reference)


@pytest.mark.parametrize("split", ["train", "test"])
def test_two_writers(split):
    """Texts that do not depend on the abstract stay below a quarter of the reference."""
    table = writers_table(two_writers.Config(split=split))
    check(table, least=0.99)
    blind = ("fixed fluent sentence", "frequent words of summaries", "stopwords", "invention", "the instruction")
    assert all(np.mean(table.rewards[name]) < 0.25 for name in (*blind, "another task's reference"))
    assert np.mean(table.rewards["lead sentence"]) > np.mean(table.rewards["another task's reference"])


@pytest.mark.parametrize("conventions", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_function_calls(split, conventions):
    """Every mean is far below the reference, except that of the right call without the conventions."""
    table = calls_table(call_team.Config(split=split, conventions=conventions))
    check(table, least=0.99)
    means = {name: np.mean(values) for name, values in table.rewards.items()}
    assert max(means[name] for name in CALLS) < 0.6 and means["copied arguments"] > 0  # the strategies are not idle
    if conventions:
        assert 0.2 < means["the right call without the conventions"] < 0.9


@needs_sandbox
@pytest.mark.parametrize("benchmark", ["humaneval", "mbpp"])
def test_coding(benchmark):
    check(red_team_coding.coding_table(coding.Config(benchmark, count=6)))


@needs_sandbox
def test_a_constant_earns_less_than_a_right_program():
    """A question of yes or no: half of the tests expect True, and an idle helper takes part in the answer."""
    task = {
        "id": "even",
        "entry_point": "even",
        "prompt": 'def even(n: int) -> bool:\n    """Whether n is even."""\n',
        "test": "def check(candidate):\n    assert candidate(2)\n    assert candidate(4)\n    assert not candidate(3)",
    }
    grade = lambda pair: coding.grade(coding.Config(), task, *pair).rewards
    constant = red_team_coding.CODING["always True, through an idle helper"](task)
    right = (constant[0], constant[1].replace("return True", "return n % 2 == 0"))
    assert grade(constant)["tests"] == pytest.approx(2 / 3) and grade(constant)["cooperation"] == 0
    assert grade(right)["tests"] == 1 and grade(right)["cooperation"] == 1.5
    parity = coding.grade(coding.Config(reward="parity"), task, *constant).rewards
    assert parity["cooperation"] == 1.5  # one test is enough there


@pytest.mark.parametrize("name", red_team_letters.LETTERS)
def test_letters(name):
    table = red_team_letters.letters_table(name, 2 if name == "maze" else 10)
    check(table, least=0.2)
    assert min(table.reference) > 0 and len(set(table.rewards["always a"]) | set(table.reference)) > 1


def test_the_best_constant_pair_of_duet_earns_five_sixths():
    """Every pair of lengths and of numbers of distinct letters, on all 56 topics. Letters are alike."""
    topics = np.array([*itertools.combinations(duet.LETTERS.encode(), 3)])
    written = {
        (letters, size): (9 * duet.LETTERS[:letters])[:size]
        for size in range(2, 10)
        for letters in range(1, min(size, 8) + 1)
    }
    short = [text for (_, size), text in written.items() if size <= 4]
    pairs = [(first, second) for first in short for (_, size), second in written.items() if size >= 4]
    strings = np.array([[[*text.ljust(9).encode()] for text in pair] for pair in pairs])
    sizes = np.array([[len(text) for text in pair] for pair in pairs])
    of_topic = jax.vmap(duet.score, in_axes=(0, None, None, None))
    paid = jax.vmap(of_topic, in_axes=(None, 0, 0, None))(topics, strings, sizes, np.array([True, True]))
    total = np.asarray(sum(paid.values()))  # [pairs topics]
    assert total.mean(1).max() == pytest.approx(2.5) and np.median(total, axis=1).max() < 2.7
    assert np.where(total >= 2.75, total, 0.0).mean(1).max() == pytest.approx(3 * 4 / 56)  # with a bar of 2.75


def test_the_page_shows_the_reference_and_marks_winners():
    table = red_team_table.Table("a reward", {"copy": [2.0, 0.0, 0.0], "shout": [2.0, 2.0, 0.0]}, [1.0, 1.0, 3.0])
    assert table.bar == 1.0 and table.winners() == ["shout"]
    page = red_team_table.markdown(table)
    assert "## a reward (3 tasks)" in page and "| **reference** | 1.00 | 1.67 |" in page
    assert "| shout (beats the reference) | 2.00 | 1.33 |" in page and "| copy | 0.00 | 0.67 |" in page
    assert "Strategies above the median reference of 1.00: shout." in page
