"""Rewards of records: golden numbers of two workflows, a slow twin on random ragged trees, several seats, bad input."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.credit.assign import assign
from jaxmarl_llm.credit.differences import PayRecords, PayTeam
from jaxmarl_llm.credit.rules import GroupRelative, PerCompletion, Sizes, chain
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.training.actor_critic import advantages_of
from tests.recipes.test_fidelity import ROWS, Table

pytestmark = pytest.mark.usefixtures("numpy_tables")

A = 5
SIZES = Sizes(8, 4, A)
PLAN, SEARCH, SUMMARY, UPDATE, ANSWER = range(A)
CODER, REFLECTION = 1, 2
CODE, MASK, TEAM = PayRecords("score", (CODER,)), PayRecords("score", (ANSWER,), (PLAN, ANSWER)), PayTeam("f1")


def table():
    out = Table(())
    out.rewards = {name: np.zeros((ROWS, A), np.float32) for name in ("score", "invalid", "f1")}
    return out


def episode(out, records, task=0):
    """Records (role, score, form) one behind the other; the last score is paid to all roles at the end."""
    parent = -1
    for turn, (role, score, form) in enumerate(records):
        parent = out.act(role, task, turn, parent, score=score or 0.0, invalid=form)
    out.rewards["f1"][parent] = [score for _, score, _ in records if score is not None][-1]
    return out


def credited(paid, tree, weight=0.5):
    rule = chain(paid, PerCompletion(), GroupRelative("node", "none", "none"))
    return assign(rule, tree, weights={"invalid": weight}, sizes=SIZES)


def paid_of(paid, records, weight=0.5):
    out = episode(table(), records)
    got = credited(paid, out.tree(), weight)
    n = len(records)
    assert np.asarray(got.valid[:n]).all() and not np.asarray(got.valid[n:]).any()
    np.testing.assert_array_equal(got.advantage, got.returns)
    return np.asarray(got.returns[:n])


RATES = [0.2, 0.5, 0.4, 1.0]
CODING = [(PLAN, None, 0.0)]
for rate in RATES:
    CODING += [(CODER, rate, 0.0), (REFLECTION, None, 0.0)]
CODING.pop()  # nobody reflects on the last program
ASKED = [
    (PLAN, 0.2, 0.0), (ANSWER, 0.4, 0.0), (SEARCH, None, 0.0), (SUMMARY, None, 0.0), (UPDATE, None, 0.0),
    (ANSWER, 0.7, 0.0), (SEARCH, None, 0.0),
]  # fmt: skip


def test_golden_rewards_of_a_code_workflow():
    """R = .2, .5, .4, 1: the planner and coders get R_i - R_(i-1), and reflections R_(i+1) - R_i."""
    got = paid_of(CODE, CODING)
    np.testing.assert_allclose(got[[0, *range(1, 8, 2)]], [0.2, 0.2, 0.3, -0.1, 0.6], atol=1e-6)
    np.testing.assert_allclose(got[2::2], [0.3, -0.1, 0.6], atol=1e-6)


def test_golden_rewards_of_mask():
    """F1 of the plan .2, of answers .4 and .7, then a search that ends: absolute F1, changes of .3, and 0."""
    np.testing.assert_allclose(paid_of(MASK, ASKED), [0.2, 0.4, 0.3, 0.3, 0.3, 0.7, 0.0], atol=1e-6)


def test_a_malformed_record_pays_the_weight_and_no_other_does():
    for k in range(len(ASKED)):
        records = [(role, score, -1.0 if i == k else 0.0) for i, (role, score, _) in enumerate(ASKED)]
        difference = paid_of(MASK, records, 0.7) - paid_of(MASK, ASKED)
        np.testing.assert_allclose(difference, -0.7 * (np.arange(len(ASKED)) == k), atol=1e-6)


def test_one_reward_for_all_records():
    records = [(role, score, -1.0 * (i == 3)) for i, (role, score, _) in enumerate(ASKED)]
    np.testing.assert_allclose(paid_of(TEAM, records), [0.7, 0.7, 0.7, 0.2, 0.7, 0.7, 0.7], atol=1e-6)


def test_without_a_first_answer_the_change_is_the_answer():
    records = [(PLAN, 0.2, 0.0), *ASKED[2:]]
    np.testing.assert_allclose(paid_of(MASK, records), [0.2, 0.7, 0.7, 0.7, 0.7, 0.0], atol=1e-6)


def grown(rng):
    """A random forest of records with invalid ones: the table, its rows, and which rewards are known."""
    out, rows = table(), []
    for task in range(4):
        begin = len(rows)
        for _ in range(rng.integers(3, 22)):
            above = [j for j in range(begin, len(rows)) if rows[j]["turn"] < 7]
            up = int(rng.choice(above)) if above and rng.random() < 0.85 else -1
            row = {"up": up, "turn": rows[up]["turn"] + 1 if up >= 0 else 0, "role": int(rng.integers(A))}
            row |= {"score": float(rng.integers(9)) / 8, "form": -float(rng.integers(2)), "f1": float(rng.integers(3))}
            out.act(row["role"], task, row["turn"], up, score=row["score"], invalid=row["form"])
            out.rewards["f1"][len(rows)] = row["f1"]  # of all roles
            rows.append(row)
    valid = rng.random(len(rows)) < 0.85
    tree = out.tree()
    return tree.replace(transitions=tree.transitions.replace(valid=np.pad(valid, (0, ROWS - len(rows))))), rows, valid


def twin(rows, valid, scored, absolute):
    """Rewards of records from the docstring, one after another; None where unknown."""

    def last_score(j):
        """The last score above a record, 0 without one, None where it is unknown."""
        while (j := rows[j]["up"]) >= 0:
            if rows[j]["role"] in scored:
                return rows[j]["score"] if valid[j] else None
        return 0.0

    def change(j):
        before = last_score(j)
        if not valid[j] or before is None:
            return None
        if rows[j]["role"] in scored:
            return rows[j]["score"] - before
        children = [k for k, row in enumerate(rows) if row["up"] == j]
        known = [c for c in map(change, children) if c is not None]
        if children and not known:
            return None
        return math.fsum(known) / len(known) if known else 0.0

    out = []
    for j, row in enumerate(rows):
        worth = (row["score"] if valid[j] else None) if row["role"] in absolute else change(j)
        out.append(None if worth is None else worth + 0.5 * row["form"])
    return out


@pytest.mark.parametrize("paid", [CODE, MASK, PayRecords("score", (1, 4), (2,))], ids=["code", "mask", "several"])
def test_random_ragged_trees_are_those_of_a_slow_twin(paid):
    seen = np.zeros(4, int)
    for seed in range(25):
        tree, rows, valid = grown(np.random.default_rng(seed))
        got = credited(paid, tree)
        want = twin(rows, valid, paid.scored, paid.absolute)
        n = len(rows)
        np.testing.assert_array_equal(got.valid[:n], [w is not None for w in want])
        np.testing.assert_allclose(got.returns[:n], [w or 0.0 for w in want], atol=1e-5)
        branches = [row["up"] for row in rows if row["up"] >= 0]
        seen += [
            len(branches) - len({*branches}),
            sum(w is None for w in want),
            sum(valid),
            sum((w or 0) < 0 for w in want),
        ]
    assert seen.min() > 100, "the trees are not ragged"


def test_the_team_reward_of_random_trees_is_a_mean_over_what_follows():
    for seed in range(10):
        tree, rows, valid = grown(np.random.default_rng(seed))
        got = credited(TEAM, tree)

        def to_go(j, rows=rows, valid=valid):
            children = [k for k, row in enumerate(rows) if row["up"] == j]
            known = [r for r in map(to_go, children) if r is not None]
            if not valid[j] or (children and not known):
                return None
            return rows[j]["f1"] + (math.fsum(known) / len(known) if known else 0.0)

        for j, row in enumerate(rows):
            value = to_go(j)
            assert bool(got.valid[j]) == (value is not None)
            if value is not None:
                assert float(got.returns[j]) == pytest.approx(value + 0.5 * row["form"], abs=1e-4)


def test_roles_that_act_at_once_share_the_change_and_scores_are_averaged():
    """Two answerers at one turn: the change is that of their mean; each of them is paid its own score."""
    out = table()
    first = out.act(SEARCH, 0, 0)
    steps = []
    for role in (PLAN, ANSWER):
        out.nodes.append((role, 0, 1, first))
        out.steps.append(len(out.nodes) - 1)
        steps.append(len(out.steps) - 1)
    out.move(steps, 0, 1, first, {"score": {PLAN: 0.2, ANSWER: 0.6}})
    got = credited(PayRecords("score", (PLAN, ANSWER), (ANSWER,)), out.tree())
    np.testing.assert_allclose(got.returns[:3], [0.4, 0.4, 0.6], atol=1e-6)


def advantages(paid, tree, value, gae_lambda, discount=0.0):
    return jax.jit(
        lambda tree, value: advantages_of(
            tree,
            value,
            {"invalid": 0.5},
            roles=A,
            max_turns=SIZES.max_turns,
            discount=discount,
            gae_lambda=gae_lambda,
            whiten=False,
            paid=paid,
            num_tasks=4,
        )
    )(tree, value)


@pytest.mark.parametrize("gae_lambda", [0.0, 1.0])
def test_a_critic_takes_the_value_off_the_reward_of_the_record(gae_lambda):
    """Without a discount each record is an episode of one completion, for every lambda, on any tree."""
    tree, rows, valid = grown(np.random.default_rng(3))
    want, n = twin(rows, valid, MASK.scored, MASK.absolute), len(rows)
    value = jnp.asarray(np.random.default_rng(0).normal(size=ROWS), jnp.float32)
    gain, has, target, known = advantages(MASK, tree, value, gae_lambda)
    there = np.array([w is not None for w in want])
    np.testing.assert_array_equal(has[:n], there)
    np.testing.assert_array_equal(known[:n], there)
    reward = np.array([w or 0.0 for w in want])
    np.testing.assert_allclose(gain[:n], np.where(there, reward - value[:n], 0), atol=1e-5)
    np.testing.assert_allclose(target[:n], reward, atol=1e-5)


def test_bad_rules():
    with pytest.raises(ConfigError, match=r"^PayRecords\.scored: expected one or several roles, got none$"):
        PayRecords("score", ())
    pays = "the environment pays no 'bleu'; it pays f1, invalid, score"
    for paid, key in ((PayRecords("bleu", (0,)), "PayRecords.score"), (PayTeam("bleu"), "PayTeam.team")):
        with pytest.raises(ConfigError, match=f"^{key}: {pays}"):
            credited(paid, episode(table(), ASKED).tree())
