"""Agreement without labels: votes against a slow twin, worth on random forests, ties."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.credit.agreement import Agreement, behind, majority
from jaxmarl_llm.credit.rules import GroupRelative, chain
from jaxmarl_llm.errors import ConfigError
from tests.recipes.test_fidelity import Table

K, OUTCOMES = 4, 5


def slow_vote(outcome, group, valid, k):
    """Label, share and count of group ``k``, by a count of each answer."""
    members = [o for o, g, v in zip(outcome, group, valid) if g == k and v]
    votes = Counter(o for o in members if 0 <= o < OUTCOMES)
    if not votes:
        return -1, 0.0, len(members)
    most = max(votes.values())
    return min(o for o, n in votes.items() if n == most), most / len(members), len(members)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, OUTCOMES), st.integers(0, K - 1), st.booleans()), min_size=24, max_size=24))
def test_votes_are_those_of_a_slow_twin(rows):
    outcome, group, valid = (np.array(column) for column in zip(*rows))
    vote = majority(outcome, group, valid, num_groups=K, num_outcomes=OUTCOMES)
    want = [slow_vote(outcome, group, valid, k) for k in range(K)]
    for got, column in zip(vote, zip(*want)):
        np.testing.assert_allclose(got, column, rtol=1e-6)


def test_the_smaller_of_equally_frequent_answers_is_the_label():
    """Answers 4 4 2 2 and none: label 2, and two of five agree."""
    vote = majority(np.array([4, 4, 2, 2, -1]), np.zeros(5, int), np.ones(5, bool), num_groups=1, num_outcomes=OUTCOMES)
    assert (int(vote.label[0]), int(vote.members[0])) == (2, 5) and float(vote.share[0]) == pytest.approx(0.4)


def forest(rng):
    """Questions with answers below them: a table, and for each completion (kind, question, outcome)."""
    table, said = Table(("answer", "malformed", "truth")), []
    for task in range(4):
        bad = rng.random() < 0.25
        root = table.act(0, task, 0, malformed=float(bad))
        said.append(("malformed" if bad else "question", task, None))
        answers = 0 if bad or rng.random() < 0.2 else int(rng.integers(1, 7))
        for k in range(answers):
            outcome = int(rng.integers(-1, 3))
            pay = {"answer": outcome, "truth": rng.random()}
            if k:
                table.steps.append(len(table.nodes) - 1)
                table.move([len(table.steps) - 1], task, 1, root, {n: {1: v} for n, v in pay.items()})
            else:
                table.act(1, task, 1, root, **pay)
            said.append(("answer", task, outcome))
    return table, said


@pytest.mark.parametrize("seed", range(8))
def test_worth_on_random_forests_is_that_of_a_slow_twin(seed):
    """Questions without an answer, with one and with several; the weights and the truth change nothing."""
    table, said = forest(np.random.default_rng(seed))
    rule = chain(Agreement(outcomes=3, cost=0.3), GroupRelative("node", singleton="raw"))
    worth, advantage = table.credit(rule, truth=1.0)
    for name in table.rewards:
        if name == "truth":
            table.rewards[name] = 7 - table.rewards[name]
    again, same = table.credit(rule, answer=2.0)
    np.testing.assert_array_equal(worth, again)
    np.testing.assert_array_equal(advantage, same)
    for task in range(4):
        rows = [i for i, (kind, t, _) in enumerate(said) if t == task and kind == "answer"]
        at = next(i for i, (kind, t, _) in enumerate(said) if t == task and kind != "answer")
        outcomes = [said[i][2] for i in rows]
        votes = Counter(o for o in outcomes if o >= 0)
        label = min((o for o in votes if votes[o] == max(votes.values())), default=None)
        agrees = np.array([1.0 if o == label and label is not None else -1.0 for o in outcomes])
        if len(rows) > 1:
            np.testing.assert_allclose(worth[rows], agrees)
            std = agrees.std()
            np.testing.assert_allclose(
                advantage[rows], (agrees - agrees.mean()) / (std + 1e-6) if std else 0, rtol=1e-4
            )
            want = (agrees > 0).mean()
        else:
            want = -0.3 if said[at][0] == "malformed" else 0.0
        assert worth[at] == pytest.approx(want, abs=1e-6) and advantage[at] == pytest.approx(want, abs=1e-6)


def test_a_completion_that_leads_to_several_votes_has_their_mean():
    """Two joint actions of one completion lead to nodes of value 1 and .5; the third node is not counted."""
    table = Table()
    first = table.act(0, 0, 0)
    second = table.move([0], 0, 0, -1, {})
    for before in (first, second, second):
        table.act(1, 0, 1, before)
    tree = table.tree()
    value = jnp.zeros(len(tree.nodes.role)).at[jnp.array([1, 2, 3])].set(jnp.array([1.0, 0.5, 9.0]))
    counted = jnp.zeros(len(tree.nodes.role), bool).at[jnp.array([1, 2])].set(True)
    got = behind(tree, value, counted)
    assert float(got[0]) == 0.75 and not np.asarray(got[1:]).any()


def credited_by(rule):
    table = Table()
    table.act(0, 0, 0, pay=1.0)
    return table.credit(chain(rule, GroupRelative()))


BAD = [
    (lambda: Agreement(outcomes=1), r"^Agreement\.outcomes: expected >= 2, got 1$"),
    (lambda: Agreement(cost=-0.1), r"^Agreement\.cost: expected >= 0, got -0\.1$"),
    (
        lambda: credited_by(Agreement(outcome="digit")),
        r"^Agreement: the environment pays no 'digit'; it pays pay",
    ),
]


@pytest.mark.parametrize("make, message", BAD, ids=[m for _, m in BAD])
def test_bad_settings(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
