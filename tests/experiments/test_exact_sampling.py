"""Exact quality of sampling plans: against plans that are played out move by move, and against the recorded study.

`Played` plays every plan literally, with one chooser for all moves. The enumeration visits all choices with their
probabilities. The Monte Carlo witness draws them.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from experiments.studies import exact_chains, exact_report, exact_sampling
from experiments.studies.gradient_report import noise

STUDY = Path(__file__).parents[2] / "docs/results/study.json"


def chain(turns, moves=2, tasks=1, seed=0):
    rng = np.random.default_rng(seed)
    logits = [rng.normal(size=(moves**t, moves)) for t in range(turns)]
    return exact_chains.make_chain(logits, rng.random((tasks, moves**turns)))


class Played:
    """Estimates of one task by groups that are played out; ``choose(history)`` is the next move."""

    def __init__(self, game, choose, task=0):
        self.game, self.choose, self.task = game, choose, task
        self.start = np.cumsum([0, *(pi.size for pi in game.policy)])
        self.moves = 0

    def number(self, history):
        """Index of a history among those of its turn."""
        m = self.game.policy[0].shape[1]
        return sum(a * m ** (len(history) - 1 - i) for i, a in enumerate(history))

    def draw(self, history):
        self.moves += 1
        return (*history, self.choose(history))

    def end(self, history):
        """Return of an episode that is played on from ``history``."""
        while len(history) < self.game.turns:
            history = self.draw(history)
        return self.game.value[-1][self.task, self.number(history)]

    def score(self, history):
        """Gradient of the log-probability of the last move of ``history``, to all logits."""
        t, s = len(history) - 1, self.number(history[:-1])
        pi, out = self.game.policy[t][s], np.zeros(self.start[-1])
        out[self.start[t] + s * len(pi) :][: len(pi)] = -pi
        out[self.start[t] + s * len(pi) + history[-1]] += 1
        return out

    def group(self, samples, returns):
        """Group estimate, by the definition."""
        base = sum(returns) / len(returns)
        return sum((x - base) * self.score(s) for x, s in zip(returns, samples)) / (len(returns) - 1)

    def flat(self, size):
        episodes = []
        for _ in range(size):
            history = ()
            while len(history) < self.game.turns:
                history = self.draw(history)
            episodes.append(history)
        paid = [self.end(h) for h in episodes]
        base = sum(paid) / size
        scores = [sum(self.score(h[: t + 1]) for t in range(len(h))) for h in episodes]
        return sum((x - base) * s for x, s in zip(paid, scores)) / (size - 1)

    def continued(self, sizes, history=()):
        """Estimate from here on, and the mean return of the group at ``history``."""
        samples = [self.draw(history) for _ in range(sizes[len(history)])]
        later, first = 0, self.end(samples[0]) if len(samples[0]) == self.game.turns else None
        if first is None:
            later, first = self.continued(sizes, samples[0])
        returns = [first, *(self.end(s) for s in samples[1:])]
        here = self.group(samples, returns) + later
        return (here, sum(returns) / len(returns)) if history else here

    def restarted(self, sizes):
        found = 0
        for t, size in enumerate(sizes):
            history = ()
            for _ in range(t):
                history = self.draw(history)
            samples = [self.draw(history) for _ in range(size)]
            found = found + self.group(samples, [self.end(s) for s in samples])
        return found

    def tree(self, size, weighted, history=()):
        samples = [self.draw(history) for _ in range(size)]
        later, returns = 0, []
        for s in samples:
            if len(s) == self.game.turns:
                returns.append(self.end(s))
            else:
                below, mean = self.tree(size, weighted, s)
                later, returns = later + below, [*returns, mean]
        here = self.group(samples, returns) * (size ** -len(history) if weighted else 1) + later
        return (here, sum(returns) / size) if history else here

    def judged(self, sizes, verdicts):
        found, history = 0, ()
        for t, size in enumerate(sizes):
            samples = [self.draw(history) for _ in range(size)]
            found = found + self.group(samples, [verdicts[t + 1][self.task, self.number(s)] for s in samples])
            history = samples[0]
        return found


PLANS = {
    "flat": (lambda c: exact_chains.flat(c, 2), lambda p: p.flat(2)),
    "flat, 3": (lambda c: exact_chains.flat(c, 3), lambda p: p.flat(3)),
    "continued": (lambda c: exact_chains.continued(c, (2, 3)), lambda p: p.continued((2, 3))),
    "continued, other sizes": (lambda c: exact_chains.continued(c, (3, 2)), lambda p: p.continued((3, 2))),
    "continued, three turns": (lambda c: exact_chains.continued(c, (2, 2, 2)), lambda p: p.continued((2, 2, 2))),
    "restarted": (lambda c: exact_chains.restarted(c, (3, 2)), lambda p: p.restarted((3, 2))),
    "tree": (lambda c: exact_chains.tree(c, 2, False), lambda p: p.tree(2, False)),
    "tree, weighted": (lambda c: exact_chains.tree(c, 2, True), lambda p: p.tree(2, True)),
    "tree, 3": (lambda c: exact_chains.tree(c, 3, True), lambda p: p.tree(3, True)),
    "judged": (
        lambda c: exact_chains.judged(c, (3, 2), exact_chains.best_payoffs(c)),
        lambda p: p.judged((3, 2), exact_chains.best_payoffs(p.game)),
    ),
}


def enumerated(game, play):
    """Mean, trace of the covariance, and moves of a plan, over all choices of all moves."""
    counter = Played(game, lambda history: 0)
    play(counter)
    mean, second, whole = 0, 0.0, 0.0
    for digits in itertools.product(range(game.policy[0].shape[1]), repeat=counter.moves):
        left, p = iter(digits), [1.0]

        def choose(history, left=left, p=p):
            move = next(left)
            p[0] *= game.policy[len(history)][counter.number(history), move]
            return move

        found = play(Played(game, choose))
        mean, second, whole = mean + p[0] * found, second + p[0] * (found @ found), whole + p[0]
    assert whole == pytest.approx(1)
    return mean, second - mean @ mean, counter.moves


@pytest.mark.parametrize("name", PLANS)
def test_the_forms_are_the_enumeration_of_all_samples(name):
    form, play = PLANS[name]
    game = chain(3 if "three" in name else 2, seed=len(name))
    found = form(game)
    mean, variance, moves = enumerated(game, play)
    np.testing.assert_allclose(found.mean[0], mean, atol=1e-12)
    assert found.variance[0] == pytest.approx(variance, rel=1e-10) and found.variance[0] > 1e-3
    assert found.sampled == moves
    biased = name in ("tree", "judged")
    assert np.allclose(found.mean, exact_chains.gradient(game)) != biased


@pytest.mark.parametrize("name", ["continued, three moves", "tree, three moves", "flat, three moves"])
def test_draws_have_the_forms_moments(name):
    """Three turns of three moves, drawn: mean and variance within five standard errors."""
    form, play = {
        "continued": (lambda c: exact_chains.continued(c, (3, 2, 4)), lambda p: p.continued((3, 2, 4))),
        "tree": (lambda c: exact_chains.tree(c, 2, False), lambda p: p.tree(2, False)),
        "flat": (lambda c: exact_chains.flat(c, 4), lambda p: p.flat(4)),
    }[name.partition(",")[0]]
    game, rng, count = chain(3, moves=3, seed=5), np.random.default_rng(1), 1500
    player = Played(game, None)
    player.choose = lambda history: rng.choice(3, p=game.policy[len(history)][player.number(history)])
    draws = np.stack([play(player) for _ in range(count)])
    exact = form(game)
    off = draws.mean(0) - exact.mean[0]
    assert off @ off < 5 * exact.variance[0] / count
    squares = ((draws - exact.mean[0]) ** 2).sum(1)
    assert abs(squares.mean() - exact.variance[0]) < 5 * squares.std() / count**0.5


def test_the_gradient_is_the_finite_difference():
    rng, step = np.random.default_rng(3), 1e-6
    logits, payoff = [rng.normal(size=(2**t, 2)) for t in range(3)], rng.random((2, 8))
    found = exact_chains.gradient(exact_chains.make_chain(logits, payoff))
    for i, (t, at) in enumerate((turn, at) for turn in range(3) for at in np.ndindex(2**turn, 2)):
        moved = [[x.copy() for x in logits] for _ in range(2)]
        moved[0][t][at] += step
        moved[1][t][at] -= step
        up, down = (exact_chains.make_chain(x, payoff).value[0][:, 0] for x in moved)
        np.testing.assert_allclose(found[:, i], (up - down) / 2 / step, atol=1e-8)


@pytest.mark.parametrize(
    "cell, plan",
    [
        ("flat/2", "flat"),
        ("flat/8", "flat"),
        ("node-wise continued/2", "node-wise continued"),
        ("node-wise continued/8", "node-wise continued"),
        ("product/4", "full tree"),
        ("node-wise local/4", "node-wise local, best payoffs"),
    ],
)
def test_the_recorded_study_has_the_exact_noise_and_bias(cell, plan):
    """The study measured the project's own rollouts; ten seeds of 256 batches leave its noise some 5 % apart."""
    ratios, off = [], []
    for row in json.loads(STUDY.read_text())["seeds"]:
        rng = np.random.default_rng([row["seed"], 3])
        logits, payoff = rng.normal(size=(13, 3)), rng.random(27).astype(np.float32).astype(float)
        game = exact_chains.make_chain([logits[:1], logits[1:4], logits[4:]], payoff[None])
        exact = exact_chains.quality(exact_chains.PLANS[plan](game, int(cell[-1])), exact_chains.gradient(game))
        seen = row["plans"][f"line/{cell}"]["mean"]
        ratios.append(noise(seen) / (exact.noise * exact.sampled))
        off.append(seen["bias"] / (1 + seen["bias"]) - exact.across)
    assert len(ratios) == 10 and np.mean(ratios) == pytest.approx(1, abs=0.06)
    assert np.mean(off) == pytest.approx(0, abs=0.005)


def test_tasks_that_differ_add_their_variance_to_that_of_the_samples():
    """A batch of two tasks drawn with replacement, each with an enumerated estimate: moments by hand."""
    game = chain(2, tasks=2, seed=9)
    plays = [enumerated(game, lambda p, task=task: setattr(p, "task", task) or p.flat(2)) for task in range(2)]
    mean = (plays[0][0] + plays[1][0]) / 2
    second = sum(variance + m @ m for m, variance, _ in plays) / 2
    found = exact_chains.quality(exact_chains.flat(game, 2), exact_chains.gradient(game))
    assert found.noise == pytest.approx((second - mean @ mean) / (mean @ mean))
    assert found.across == pytest.approx(0, abs=1e-12)
    half = found.aligned(7)
    assert half == pytest.approx(mean @ mean / (mean @ mean + (second - mean @ mean) / 7))
    assert found.needed(half) == pytest.approx(7)
    assert found._replace(across=0.5).needed(0.6) == float("inf")


def test_a_chain_of_one_turn_has_one_kind_of_sampling():
    found = exact_sampling.compared(exact_sampling.drawn(0, "random", 0.25, 1))
    assert {round(x.tokens / exact_sampling.BUDGET, 9) for n, x in found["sampled"].items() if "local" not in n} == {
        1.0
    }


@pytest.mark.parametrize("kind, share", [("additive", 0.5), ("random", 0.0)])
def test_each_plan_is_compared_at_its_own_best(kind, share):
    """Sizes by turn need at most as much as one size; no other size of flat needs less than the budget."""
    game = exact_sampling.drawn(1, kind, share, 3)
    aim = exact_chains.gradient(game)
    found = exact_sampling.compared(game)["sampled"]
    assert found["flat"].tokens == pytest.approx(exact_sampling.BUDGET)
    q = found["flat"].quality
    others = [exact_chains.quality(exact_chains.flat(game, g), aim) for g in exact_sampling.SIZES]
    assert q.noise * q.sampled == pytest.approx(min(x.noise * x.sampled for x in others))
    assert found[exact_sampling.BY_TURN].tokens <= found["node-wise continued"].tokens
    every = [exact_chains.continued(game, sizes) for sizes in itertools.product(exact_sampling.SIZES[:4], repeat=3)]
    least = min(x.noise * x.sampled for x in (exact_chains.quality(e, aim) for e in every))
    assert found[exact_sampling.BY_TURN].tokens == pytest.approx(least / (q.noise * q.sampled) * exact_sampling.BUDGET)


def test_payoffs_have_the_spread_that_their_share_says():
    """Half of the variance by task: payoffs of two tasks correlate by a half; the first move decides an opening."""
    rng = np.random.default_rng(0)
    paid = np.stack([exact_sampling.opening(rng, 4) for _ in range(4000)])
    first = paid.reshape(-1, 2, 8).mean(2)
    whole = paid.var(0).mean()
    assert np.cov(paid[:, 0], paid[:, 1])[0, 1] / whole == pytest.approx(0.75, abs=0.05)
    assert abs(np.corrcoef(first.T)[0, 1]) < 0.1
    assert (exact_sampling.sparse(rng, 3).sum(), exact_sampling.sparse(rng, 3).size) == (1, 8)
    tables = np.stack([exact_sampling.drawn(s, "random", 0.5, 6).value[-1] for s in range(40)])  # [seeds tasks 64]
    between = np.corrcoef(tables[:, 0].ravel(), tables[:, 1].ravel())[0, 1]
    assert between == pytest.approx(0.5, abs=0.06)


def test_the_tables_of_a_known_record():
    row = {"payoff": "random", "share": 0.5, "cost": "sampled", "sizes": [2, 3], "across": 0.1, "noise": 50, "snr": 20}
    rows = [row | {"turns": 3, "plan": "node-wise continued", "ratio": [2.0, None, 4.0]}]
    assert exact_report.spread(rows[0]) == "4.00 (2.00 to never)"
    record = {"rows": rows, "command": "c", "date": "d", "commit": "e", "machine": "m", "cpu_seconds": 1, "seeds": 3}
    text = "\n".join(exact_report.section(record))
    assert "| random, 50% | 4.00 (2.00 to never) |" in text
    assert "| random, 3 | node-wise continued | 2, 3 | 0.100 | 50 | 20 |" in text
