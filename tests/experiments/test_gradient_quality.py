"""The statistical study: enumeration against finite differences, and laws of estimators on games of a few moves.

Samples come from fixed keys; what is random is tested at five standard errors.
"""

import functools

import jax
import numpy as np
import pytest

from experiments.studies import gradient_estimators, gradient_report
from experiments.studies.enumerable_games import chicken, exact, line
from experiments.studies.gradient_estimators import Arm, direction, quality
from jaxmarl_llm.rollout import plans

COUNT = 512


def drawn(game, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(len(game.prompts), game.moves)), game.tasks(rng)


@functools.cache
def short():
    """Two turns, two moves."""
    return line(turns=2, moves=2)


@functools.cache
def found(kind):
    """(cell, logits, task, gradients [n E D]) of a plan on the short game."""
    plan = {"flat": plans.flat(3), "continued": plans.node_wise(3), "local": plans.node_wise(3, "local")}[kind]
    top = () if kind != "local" else (Arm("mean top 1", gradient_estimators.Credit(normalise="none"), 1),)
    cell = gradient_estimators.cell(kind, short(), plan, 3, top)
    cell = cell._replace(batch=2, tokens=cell.tokens // cell.batch * 2)
    logits, task = drawn(short())
    aim = exact(short(), logits, task).gradient
    seen = gradient_estimators.sampler(cell, COUNT)(np.float32(logits), task, np.float32(aim), jax.random.key(3))
    return cell, logits, task, jax.device_get(seen)


def standing(g, aim):
    """How many standard errors the mean of g lies from ``aim``, at most, over its coordinates."""
    g = g.reshape(len(g), -1).astype(np.float64)
    error = g.std(0, ddof=1) / len(g) ** 0.5
    off = np.abs(g.mean(0) - aim.ravel())
    assert (off[error == 0] < 1e-9).all()
    return (off[error > 0] / error[error > 0]).max()


@pytest.mark.parametrize("game", [line(), chicken(), short()], ids=["line", "matrix", "short"])
def test_enumeration_is_the_finite_difference(game):
    logits, task = drawn(game, 4)
    found = exact(game, logits, task)
    by_hand = np.zeros_like(logits)
    for at in np.ndindex(*logits.shape):
        step = np.zeros_like(logits)
        step[at] = 1e-5
        by_hand[at] = (exact(game, logits + step, task).value - exact(game, logits - step, task).value) / 2e-5
    np.testing.assert_allclose(found.gradient, by_hand, atol=1e-8)
    assert np.linalg.norm(found.gradient) > 0.01
    assert [int(text[1:-1] != "") for text in game.prompts] == [min(t, 1) for t in found.turn]


def test_chicken_is_worth_what_its_table_says():
    game = chicken(rounds=1)
    sure = np.array([[50.0, 0.0], [0.0, 50.0]])  # first plays C, second D
    assert exact(game, sure, game.tasks(None)).value == pytest.approx(7)
    even = np.zeros((2, 2))
    assert exact(game, even, game.tasks(None)).value == pytest.approx((10 + 7 + 7 + 0) / 4)


def test_rollouts_earn_the_exact_value():
    """The enumeration and the environment are the same game: mean pay of the rollout against the expected return."""
    for game in (line(), chicken()):
        logits, task = drawn(game, 1)
        tasks = jax.tree.map(lambda x: np.broadcast_to(x, (4000, *np.shape(x))), task)
        play = gradient_estimators.make_rollout(game.team, game.env, plans.flat(1), gradient_estimators.Sampling())
        tree = jax.jit(play)(gradient_estimators.params(np.float32(logits)), {}, tasks, jax.random.key(0), 0)
        moves = tree.transitions
        pay = np.asarray(moves.rewards[game.component])[:, 0].reshape(game.turns, -1).sum(0)
        assert np.asarray(moves.valid).all()
        error = pay.std() / len(pay) ** 0.5
        assert abs(pay.mean() - exact(game, logits, task).value) < 5 * error


def test_flat_is_unbiased_and_a_mean_of_g_takes_one_gth():
    cell, logits, task, seen = found("flat")
    aim = exact(short(), logits, task).gradient / short().turns  # a mean over turns too
    names = [arm.name for arm in cell.arms]
    g = lambda name: seen.gradient[:, names.index(name)]
    assert standing(g("none"), aim) < 5
    assert standing(g("mean"), aim * 2 / 3) < 5
    assert standing(g("mean"), aim) > 8  # the test can tell the two
    np.testing.assert_allclose(cell.own(logits, task).gradient, aim * 2 / 3, atol=1e-12)


def test_node_wise_continued_is_unbiased_up_to_its_scale():
    cell, logits, task, seen = found("continued")
    own = cell.own(logits, task).gradient
    share = 2 / (3 + 2 + 3)  # G - 1, of 3 + 2 continuations + 3 sampled steps
    np.testing.assert_allclose(own, exact(short(), logits, task).gradient * share, atol=1e-12)
    assert standing(seen.gradient[:, 0], own) < 5
    assert standing(seen.gradient[:, 0], 1.5 * own) > 5


def test_local_node_wise_estimates_its_verdicts():
    cell, logits, task, seen = found("local")
    true = exact(short(), logits, task).gradient
    verdicts = exact(short(), logits, task, short().judge).gradient
    assert standing(seen.gradient[:, 0], verdicts * 2 / 6) < 5
    assert standing(seen.gradient[:, 0], true * 2 / 6) > 5


def test_worth_and_variance_by_group():
    """A batch's gradient is the mean of its groups' own terms, so its slope is the mean of their worths."""
    cell, logits, task, seen = found("local")
    aim = exact(short(), logits, task).gradient
    along = (seen.gradient[:, :2].astype(np.float64) * aim).sum((2, 3))
    there = seen.size >= 2
    np.testing.assert_allclose((seen.benefit * there[:, None]).sum(2) / there.sum(1)[:, None], along, atol=1e-6)
    # The largest variance of each task alone: what is left of a batch where the others count for nothing.
    names = [arm.name for arm in cell.arms]
    turn = seen.turn[0]
    assert turn.tolist() == [0, 0, 1, 1]
    best = np.maximum(seen.variance[:, :2], seen.variance[:, 2:])
    chosen = (seen.variance == np.tile(best, 2)) & (seen.variance > 0)
    only = chosen.sum(1) == (best > 0).sum(1)  # without ties
    worth = (seen.benefit[:, 0] * chosen).sum(1) / np.maximum(chosen.sum(1), 1)
    got = (seen.gradient[:, names.index("mean top 1")].astype(np.float64) * aim).sum((1, 2))
    assert only.mean() > 0.5
    np.testing.assert_allclose(got[only], worth[only], atol=1e-6)


def test_bias_and_noise_of_known_gradients():
    """Gaussian rows of a known mean: squared bias, scale, noise and cosine are what they were made with."""
    rng = np.random.default_rng(0)
    aim = np.array([3.0, 0, 0, 0])
    rows = np.array([1.5, 0.3, 0.4, 0]) + 0.5 * rng.normal(size=(20_000, 4))
    found = quality(rows, aim, tokens=10)
    assert found["scale"] == pytest.approx(0.5, abs=5 * found["scale_error"])
    assert found["bias"] == pytest.approx((0.09 + 0.16) / 1.5**2, abs=5 * found["bias_error"])
    assert found["noise"] == pytest.approx(10 * 4 * 0.25 / 1.5**2, rel=0.05)
    # Without a bias the estimate is as often negative, and its standard error is right.
    many = [direction(np.array([1.0, 0, 0]) + rng.normal(size=(50, 3)), np.array([1.0, 0, 0])) for _ in range(400)]
    z = np.array([m["bias"] / m["bias_error"] for m in many])
    assert abs(z.mean()) < 0.2 and 0.6 < z.std() < 1.3
    three = quality(np.array([[2.0, 0], [3.0, 3.0], [0, 0]]), np.array([5.0, 0]), 10)
    assert three["cosine"] == pytest.approx((1 + 0.5**0.5 + 0) / 3) and three["empty"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_groups_without_a_variance(p):
    tasks, g = 2048, 4
    share = gradient_estimators.equal_groups(line(turns=1, moves=2), g, p, jax.random.key(7), tasks)
    law = p**g + (1 - p) ** g
    assert abs(share - law) < 5 * (law * (1 - law) / tasks) ** 0.5


def test_the_report_of_known_records():
    """Intervals of Student's t by hand; a squared tangent of 1 is half of the squared length."""
    rows = [{"x": x} for x in (1.0, 2.0, 4.0)]
    assert gradient_report.over(rows, lambda row: row["x"]) == pytest.approx(
        (7 / 3, 4.302653 * (7 / 3) ** 0.5 / 3**0.5)
    )
    assert gradient_report.ratio(rows, lambda row: row["x"]).startswith("2.00 (")
    found = {"bias": 1.0, "noise": 300.0}
    assert gradient_report.across(found) == 0.5 and gradient_report.noise(found) == 150
