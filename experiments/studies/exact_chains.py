"""Exact quality of sampled policy gradients on chains of k turns, by enumeration in float64 NumPy.

A team writes one of m moves in each turn, and sees all earlier moves. One table of logits serves all tasks, and every
task has its own payoff of the whole sequence. The objective is the mean return over tasks. Nothing here is sampled, and
nothing is used of the project's rollouts, credit or losses. The forms give the mean of an estimator and the trace of
its covariance.

Notation: s is a history, u_a = grad log pi(a | s), Q(a) the expected return after a, V = E Q. A group of G independent
samples (X_g, a_g) of one history estimates the gradient of its row by 1/(G - 1) sum_g (X_g - mean X) u_g. Its mean is
g = E Q u. With X_g = Q(a_g) + e_g, where e_g has mean 0 and variance v_g(a_g), the trace of its covariance is

    (E (Q - V)^2 |u|^2 - |g|^2) / G  +  (Var Q E|u|^2 + |g|^2) / (G (G - 1))
    +  1 / (G^2 (G - 1)) sum_g E v_g ((G - 1) |u|^2 + E|u|^2).

The first two terms are those of a sample covariance. The third one is the noise of the returns. Rows of different
histories are different coordinates, so the traces of all rows add up.

Arguments that mean the same everywhere: ``chain``, the policy and the payoffs; ``sizes``, samples of a group in each
turn [k], at least 2 each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Table = Float[np.ndarray, "..."]


class Chain(NamedTuple):
    """Policy and payoffs of a chain, with what the estimators need. Every field is a list over turns.

    policy: pi(a | s) [S m], S = m^t histories of turn t. reach: probability of a history [S]. squares: |u_a|^2 [S m].
    value: expected return of a history [B S], for B tasks; one more entry, for the end. spread: variance of the return
    after a history [B S]; one more entry, of zeros.
    """

    policy: list[Table]
    reach: list[Table]
    squares: list[Table]
    value: list[Table]
    spread: list[Table]

    @property
    def turns(self) -> int:
        return len(self.policy)

    def after(self, of: Sequence[Table], t: int) -> Table:
        """Values of the histories of turn t + 1 as [B S m], by history of turn t and move."""
        return of[t + 1].reshape(len(of[t + 1]), *self.policy[t].shape)

    def mean(self, t: int, values: Table) -> Table:
        """Expectation over the move of turn t of ``values`` [B S m]: [B S]."""
        return (self.policy[t] * values).sum(-1)


def make_chain(logits: Sequence[Table], payoff: Table) -> Chain:
    """The chain of one policy and many tasks.

    Args:
        logits: Logits of each turn [m^t m], histories in the order of base-m numbers.
        payoff: Return of each sequence [B m^k].
    """
    policy = [np.exp(x - x.max(-1, keepdims=True)) for x in logits]
    policy = [x / x.sum(-1, keepdims=True) for x in policy]
    if payoff.shape[1] != policy[-1].size:
        raise ValueError(f"payoff: expected {policy[-1].size} sequences, got {payoff.shape[1]}")
    reach = [np.ones(1)]
    for pi in policy[:-1]:
        reach.append((reach[-1][:, None] * pi).ravel())
    squares = [1 - 2 * pi + (pi**2).sum(-1, keepdims=True) for pi in policy]
    value, second = [payoff], [payoff**2]
    for pi in reversed(policy):
        value.insert(0, (pi * value[0].reshape(len(payoff), *pi.shape)).sum(-1))
        second.insert(0, (pi * second[0].reshape(len(payoff), *pi.shape)).sum(-1))
    return Chain(policy, reach, squares, value, [b - a**2 for a, b in zip(value, second)])


class Estimate(NamedTuple):
    """Moments of an estimator of one task, and its cost.

    mean: expectation for each task [B D]. variance: trace of the covariance for each task [B]. sampled, updated: tokens
    of one task that are sampled, and that the update trains on.
    """

    mean: Table
    variance: Table
    sampled: int
    updated: int


def _rows(chain: Chain, t: int, values: Table) -> Table:
    """Gradient g of each history of turn t [B S m], for Q = ``values`` [B S m]."""
    return chain.policy[t] * (values - chain.mean(t, values)[..., None])


def _flattened(rows: Sequence[Table]) -> Table:
    return np.concatenate([x.reshape(len(x), -1) for x in rows], axis=1)


def gradient(chain: Chain) -> Table:
    """The exact gradient of each task's expected return to all logits [B D]."""
    rows = [_rows(chain, t, chain.after(chain.value, t)) for t in range(chain.turns)]
    return _flattened([chain.reach[t][:, None] * x for t, x in enumerate(rows)])


def group_variance(chain: Chain, t: int, size: int, values: Table, noise: Table | float) -> Table:
    """Trace of the covariance of one group's estimate, given its history: [B S].

    Args:
        chain: See the module.
        t: Turn of the group.
        size: Samples of the group, G.
        values: Q [B S m].
        noise: Sum over the samples of the group of v_g [B S m]; 0 where returns are exact.
    """
    squares, length = chain.squares[t], chain.mean(t, chain.squares[t][None])
    off = values - chain.mean(t, values)[..., None]
    aim = (_rows(chain, t, values) ** 2).sum(-1)
    moment, var = chain.mean(t, off**2 * squares), chain.mean(t, off**2)
    noisy = chain.mean(t, noise * ((size - 1) * squares + length[..., None])) / (size - 1) / size**2
    return (moment - aim) / size + (var * length + aim) / size / (size - 1) + noisy


def flat(chain: Chain, size: int) -> Estimate:
    """GRPO: ``size`` whole episodes of a task, compared with each other; ``chain`` as above."""
    paid, p, score = chain.value[-1], np.ones((1, 1)), np.zeros((1, 1))
    for pi, squares in zip(chain.policy, chain.squares):
        p = (p.reshape(-1, 1) * pi).reshape(1, -1)
        score = (score.reshape(-1, 1) + squares).reshape(1, -1)
    aim = gradient(chain)
    squared = (aim**2).sum(1)
    off = paid - chain.value[0]
    moment = (p * off**2 * score).sum(1)
    both = chain.spread[0][:, 0] * (p * score).sum()
    variance = (moment - squared) / size + (both + squared) / size / (size - 1)
    return Estimate(aim, variance, size * chain.turns, size * chain.turns)


def _along_a_path(chain: Chain, rows: Sequence[Table], within: Sequence[Table]) -> tuple[Table, Table]:
    """Mean [B D] and variance [B] of a sum over turns of one group each, at a history that the policy draws.

    ``rows``: g of each history. ``within``: the variance of a group given its history.
    """
    mean, variance = [], np.zeros(len(rows[0]))
    for reach, row, inner in zip(chain.reach, rows, within):
        squared = (row**2).sum(-1)
        variance = variance + (reach * (inner + squared) - (reach * reach) * squared).sum(-1)
        mean.append(reach[:, None] * row)
    return _flattened(mean), variance


def continued(chain: Chain, sizes: Sequence[int]) -> Estimate:
    """Node-wise sampling of JoyAgents-R1 with continuations: groups along one base trajectory.

    The first sample of each group carries the base trajectory on, and its return is the mean of the next group. The
    other samples are played to the end once. Continuations are not trained.
    """
    k = chain.turns
    backed = [np.zeros_like(chain.spread[k])]  # variance of a group's mean return, given its history
    rows: list[Table] = []
    within: list[Table] = []
    for t in reversed(range(k)):
        size, values = sizes[t], chain.after(chain.value, t)
        first = backed[0].reshape(values.shape)
        rows.insert(0, _rows(chain, t, values))
        noise = (size - 1) * chain.after(chain.spread, t) + first
        within.insert(0, group_variance(chain, t, size, values, noise))
        moved = chain.mean(t, values**2) - chain.value[t] ** 2
        backed.insert(0, ((size - 1) * chain.spread[t] + moved + chain.mean(t, first)) / size**2)
    sampled = sum(g + (g - 1) * (k - t - 1) for t, g in enumerate(sizes))
    return Estimate(*_along_a_path(chain, rows, within), sampled, sum(sizes))


def restarted(chain: Chain, sizes: Sequence[int]) -> Estimate:
    """Node-wise sampling with a new start for each turn: own moves up to the turn, then a group that is played on.

    All samples of a group are played to the end once. The moves before a group and the continuations are not trained.
    """
    rows, within = [], []
    for t, size in enumerate(sizes):
        values = chain.after(chain.value, t)
        rows.append(_rows(chain, t, values))
        within.append(group_variance(chain, t, size, values, size * chain.after(chain.spread, t)))
    sampled = sum(t + g * (chain.turns - t) for t, g in enumerate(sizes))
    return Estimate(*_along_a_path(chain, rows, within), sampled, sum(sizes))


def judged(chain: Chain, sizes: Sequence[int], verdicts: Sequence[Table]) -> Estimate:
    """Node-wise sampling with a local verifier: nothing is played on but the base trajectory.

    Args:
        chain: See the module.
        sizes: See the module.
        verdicts: Scores of the histories of every turn, and of the sequences, in the form of ``chain.value``.
    """
    rows, within = [], []
    for t, size in enumerate(sizes):
        values = chain.after(verdicts, t)
        rows.append(_rows(chain, t, values))
        within.append(group_variance(chain, t, size, values, 0.0))
    return Estimate(*_along_a_path(chain, rows, within), sum(sizes), sum(sizes))


def best_payoffs(chain: Chain) -> list[Table]:
    """Verdicts of a verifier that expects perfect play: the largest payoff that a history still allows."""
    found = [chain.value[-1]]
    for pi in reversed(chain.policy):
        found.insert(0, found[0].reshape(len(found[0]), *pi.shape).max(-1))
    return found


def tree(chain: Chain, size: int, weighted: bool) -> Estimate:
    """The full tree: ``size`` samples at every history that is reached, returns backed up as means of children.

    N(s), the number of nodes with history s, is a branching process: N(s a) is binomial with size * N(s) draws. The
    nodes of a history are independent of each other and of their number.

    Args:
        chain: See the module.
        size: Samples of a node, G.
        weighted: Whether every turn weighs the same: nodes of turn t weigh G^-t. Otherwise all nodes weigh the same, as
            in a mean over samples, and turn t counts G^t times.
    """
    k = chain.turns
    backed = [np.zeros_like(chain.spread[k])]
    within: list[Table] = []
    for t in reversed(range(k)):
        values, below = chain.after(chain.value, t), backed[0].reshape(-1, *chain.policy[t].shape)
        within.insert(0, group_variance(chain, t, size, values, size * below))
        moved = chain.mean(t, values**2) - chain.value[t] ** 2
        backed.insert(0, (moved + chain.mean(t, below)) / size)
    mean, variance = [], np.zeros(len(backed[0]))
    number, vary = np.ones(1), np.zeros(1)
    for t in range(k):
        weight = float(size) ** -t if weighted else 1.0
        row = _rows(chain, t, chain.after(chain.value, t))
        squared = (row**2).sum(-1)
        variance = variance + weight**2 * (number * within[t] + vary * squared).sum(-1)
        mean.append(weight * number[:, None] * row)
        pi = chain.policy[t]
        vary = (size * pi * (1 - pi) * number[:, None] + (size * pi) ** 2 * vary[:, None]).ravel()
        number = (size * pi * number[:, None]).ravel()
    tokens = sum(size ** (t + 1) for t in range(k))
    return Estimate(_flattened(mean), variance, tokens, tokens)


class Quality(NamedTuple):
    """Quality of an estimator over tasks that differ, free of its scale.

    across: share of the mean's squared length that is orthogonal to the exact gradient; 0 without bias. noise: variance
    of one task's estimate in units of the mean's squared length, so that a batch of B tasks has noise / B. sampled,
    updated: tokens of a task.
    """

    across: float
    noise: float
    sampled: int
    updated: int

    def aligned(self, tasks: float) -> float:
        """E<estimate, gradient>^2 / (E|estimate|^2 |gradient|^2) of a batch of ``tasks``: a squared cosine."""
        return (1 - self.across) / (1 + self.noise / tasks)

    def needed(self, aligned: float) -> float:
        """Tasks at which `aligned` has the value ``aligned``; infinite where bias keeps it below."""
        room = (1 - self.across) / aligned - 1
        return self.noise / room if room > 0 else float("inf")


def quality(found: Estimate, aim: Table) -> Quality:
    """Quality of a batch whose tasks are drawn with replacement, each with the same probability.

    Args:
        found: Moments of the estimator for each task.
        aim: Exact gradient of each task [B D].
    """
    mean, exact = found.mean.mean(0), aim.mean(0)
    length = mean @ mean
    between = ((found.mean - mean) ** 2).sum(1).mean()
    across = 1 - (mean @ exact) ** 2 / length / (exact @ exact)
    return Quality(max(float(across), 0.0), float((found.variance.mean() + between) / length), *found[2:])


Plan = Callable[[Chain, int], Estimate]

# Plans by name, each with one size for all groups.
PLANS: dict[str, Plan] = {
    "flat": flat,
    "node-wise continued": lambda chain, size: continued(chain, [size] * chain.turns),
    "node-wise restarted": lambda chain, size: restarted(chain, [size] * chain.turns),
    "full tree": lambda chain, size: tree(chain, size, weighted=False),
    "full tree, turns weighted": lambda chain, size: tree(chain, size, weighted=True),
    "node-wise local, true values": lambda chain, size: judged(chain, [size] * chain.turns, chain.value),
    "node-wise local, best payoffs": lambda chain, size: judged(chain, [size] * chain.turns, best_payoffs(chain)),
}
