"""The statistics of the claims of Search-R2, on episodes and curves that are written down."""

import numpy as np

from experiments.claims.search_r2 import ARMS, CLAIMS, Curve, at_equal_tokens, cut_shares


def episodes(*rows):
    """Components of episodes (cut, first_miss, searches, first_em) as arrays of one seed."""
    cut, miss, searches, right = np.array(rows, float).T
    return {"cut": cut[None], "first_miss": miss[None], "dropped_to": np.where(cut > 0, searches + 1, 0)[None],
            "first_em": right[None]}  # fmt: skip


def test_shares_of_cuts_by_hand():
    """Three cuts count: at the miss, behind it, before it. Right traces, accepted ones and traces without a miss do
    not."""
    counted = [(1, 1, 2, 0), (2, 1, 3, 0), (1, 2, 2, 0)]
    others = [(2, 1, 2, 1), (0, 1, 2, 0), (2, 0, 3, 0)]
    got = cut_shares(episodes(*counted, *others))
    np.testing.assert_allclose(got["early"], [2 / 3])
    np.testing.assert_allclose(got["exact"], [1 / 3])
    np.testing.assert_allclose(got["uniform"], [(1 / 2 + 1 / 3 + 1) / 3])


def test_shares_of_uniform_cuts_are_the_share_that_is_said_to_be_uniform():
    rng = np.random.default_rng(0)
    searches = rng.integers(1, 4, size=20000)
    miss, cut = (np.array([rng.integers(1, n + 1) for n in searches]) for _ in range(2))
    got = cut_shares(episodes(*zip(cut, miss, searches, 0 * cut)))
    assert abs(got["early"] - got["uniform"]).item() < 0.01 and got["exact"].item() < got["early"].item()


def test_a_seed_without_a_cut_has_no_share():
    assert np.isnan(cut_shares(episodes((0, 1, 2, 0)))["early"]).all()


def test_curves_are_read_at_the_smaller_number_of_tokens():
    """Seed 0 ends at 100 and 200 tokens, seed 1 at 300 and 100."""
    curve = lambda ends, em: Curve(np.stack([[0, 0], np.array(ends) / 2, ends]), np.array(em), {}, np.zeros(2))
    one = curve([100, 300], [[0.0, 0.0], [0.1, 0.3], [0.2, 0.4]])
    other = curve([200, 100], [[0.0, 0.5], [0.4, 0.6], [0.9, 0.7]])
    ours, control = at_equal_tokens(one, other)
    np.testing.assert_allclose(ours, [0.2, 0.2])
    np.testing.assert_allclose(control, [0.4, 0.7])


def test_arms_differ_in_what_the_claims_say():
    cut, em, whole = ARMS.values()
    assert em.reward == {"em": 1.0} and cut.reward == whole.reward == {"em": 1.0, "density": 1.0}
    assert whole.env.args["refine"] == {"second": "whole"} and cut.env == em.env
    assert {name: claim.delta for name, claim in CLAIMS.items()} == {
        "refines": 0.03, "early": 0.0, "uniform": 0.15, "density": 0.02,
    }  # fmt: skip
