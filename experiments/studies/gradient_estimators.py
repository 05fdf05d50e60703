"""Gradient estimates of the project's own rollout, credit, selection and loss on enumerable games. Many batches run in
one program; the results are bias, noise and cosine relative to the exact gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from experiments.studies.enumerable_games import Exact, Game, chicken, exact, line, params
from jaxmarl_llm.credit.assign import Credit, assign
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.credit.selection import top_k_variance
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout import plans
from jaxmarl_llm.rollout.array import layout, make_rollout
from jaxmarl_llm.training.learner import Batch, make_learner
from jaxmarl_llm.training.losses import Loss, aggregation_weights
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.types import Array, PyTree

TOKENS = 256  # sampled tokens of a batch; as many tasks as come nearest
CHUNK = 64  # batches played at once
LOSS = Loss(clip_low=None, aggregation="sum")  # with one token a completion every kind of average is this one


class Arm(NamedTuple):
    """A rule that computes a gradient from a rollout tree."""

    name: str
    credit: Credit
    top_k: int | None = None  # groups of each task; None: every step is trained


class Cell(NamedTuple):
    """One game under one plan. A batch has ``batch`` tasks and ``tokens`` sampled tokens."""

    name: str
    game: Game
    plan: plans.Plan
    group: int
    arms: tuple[Arm, ...]
    batch: int
    tokens: int

    def own(self, logits: np.ndarray, task: PyTree) -> Exact | None:
        """What the arm ``mean`` estimates by derivation: None where what goes on is chosen by reward (in ``line`` only
        the last move is paid: all are equal before, and a hand-off of the best is one of the first).

        Samples of a group are independent given its state, so a baseline that includes a sample itself takes
        1/G of the gradient away: a group gives (G - 1) times what its state contributes. All is divided by the number
        of trained steps. A plan with n_t branching states of a task at turn t weighs turn t n_t times.
        """
        local = self.game.judge if self.plan.local else self.game.pay if self.plan.name.startswith("handoff") else None
        if self.plan.rank and self.game.name == "matrix":
            return None
        blocks = layout(self.plan, self.game.env, 1)
        seats = self.game.env.seats
        flat = self.plan.name.startswith("flat")
        states = [
            sum(b.nodes // len(b.turns) // seats for b in blocks if t in b.turns and b.group > 1)
            for t in range(self.game.turns)
        ]
        found = exact(self.game, logits, task, local)
        weight = np.array([1 if flat else n for n in states]) * (self.group - 1) / (self.tokens / self.batch)
        return found._replace(gradient=found.gradient * weight[found.turn][:, None])


def cell(name: str, game: Game, plan: plans.Plan, group: int, more: tuple[Arm, ...] = ()) -> Cell:
    """Advantages less the group's mean (``mean``) and standardised (``std``), and ``more``."""
    immediate = plan.local or plan.name.startswith("handoff")
    base = Credit(
        discount=0.0 if immediate else 1.0,
        group="task_role_turn" if plan.name.startswith("flat") else "node",
        normalise="none",
    )
    of = lambda **changes: dataclasses.replace(base, **changes)
    arms = [Arm("mean", base), Arm("std", of(normalise="std"))]
    if plan.name.startswith("flat"):
        arms.append(Arm("none", of(baseline="none")))
    for arm in more:
        arms.append(arm._replace(credit=of(normalise=arm.credit.normalise)))
    each = sum(b.nodes * b.group for b in layout(plan, game.env, 1))
    batch = max(1, round(TOKENS / each))
    return Cell(f"{game.name}/{name}/{group}", game, plan, group, tuple(arms), batch, batch * each)


@functools.cache
def cells() -> tuple[Cell, ...]:
    one, two = line(), chicken()
    top = tuple(
        Arm(f"{scale} top {k}", Credit(normalise=scale if scale == "std" else "none"), k)
        for scale in ("mean", "std")
        for k in range(1, one.turns + 1)
    )
    out = []
    for g in (2, 4, 8):
        chosen = top if g == 4 else ()
        out += [cell("flat", one, plans.flat(g), g)]
        out += [cell("node-wise local", one, plans.node_wise(g, "local"), g, chosen)]
        out += [cell("node-wise continued", one, plans.node_wise(g), g, chosen)]
        if g < 8:
            out += [cell("product", one, plans.product(g), g)]
    ranked = lambda game: plans.handoff(4)._replace(reward=((game.component, 1.0),))
    out += [cell("hand-off best", one, ranked(one), 4)]
    out += [
        cell("flat", two, plans.flat(4), 4),
        cell("product", two, plans.product(4), 4),
        cell("product crossed", two, plans.product(4, "cross"), 4),
        cell("hand-off best", two, ranked(two), 4),
        cell("hand-off first", two, plans.handoff(4, best=False), 4),
        cell("node-wise continued", two, plans.node_wise(4), 4),
    ]
    return tuple(out)


class Seen(NamedTuple):
    """Of n batches: the ascent direction of each arm; of each group its variance, size, turn and what a step on it
    alone is worth (`experiments.studies.gradient_quality`), for arms mean and std.
    """

    gradient: Float[Array, "n E K D"]
    variance: Float[Array, "n Z"]
    size: Float[Array, "n Z"]
    turn: Float[Array, "n Z"]
    benefit: Float[Array, "n 2 Z"]


@functools.cache
def sampler(c: Cell, count: int) -> Callable[..., Seen]:
    """(logits, task, towards [K D], key) -> Seen of ``count`` batches; compiled once for all seeds.

    The gradient is the learner's own, of every step as a row of its own. A group's worth is the derivative of its mean
    advantage-weighted log-prob in the direction ``towards``.
    """
    game, model = c.game, c.game.team.models[0]
    rollout = make_rollout(game.team, game.env, c.plan, Sampling())
    learner = make_learner(model.policy, LOSS, Optimizer(), Sampling())

    def one(logits: jax.Array, task: PyTree, towards: jax.Array, key: jax.Array) -> Seen:
        tasks = jax.tree.map(lambda x: jnp.broadcast_to(x, (c.batch, *jnp.shape(x))), task)
        tree = rollout(params(logits), {}, tasks, key, 0)
        steps, known = tree.steps, {}
        for arm in c.arms:
            if arm.credit not in known:
                known[arm.credit] = assign(
                    arm.credit,
                    tree,
                    weights={game.component: 1.0},
                    sizes=Sizes(game.turns, c.batch, len(game.env.roles)),
                )
        advantages, weights = [], []
        for arm in c.arms:
            got = known[arm.credit]
            trained = got.valid
            if arm.top_k is not None:
                chosen = top_k_variance(
                    got.stats.variance, got.stats.count >= 2, arm.top_k, scope=got.group_task, num_scopes=c.batch
                )
                trained &= chosen[got.group]
            weights.append(aggregation_weights(steps.loss_mask, trained.astype(jnp.float32), LOSS.aggregation))
            advantages.append(got.advantage)
        own = {"params": {"logits": logits}}
        row = lambda x: x[:, None]
        whole = Batch(
            tree.nodes.tokens[steps.node],
            tree.nodes.length[steps.node],
            row(steps.tokens),
            row(weights[0]),
            row(row(advantages[0])),
            row(steps.logprobs),
        )

        def ascent(weight: jax.Array, advantage: jax.Array) -> jax.Array:
            batch = whole.replace(weights=row(weight), advantages=row(row(advantage)))
            return -learner.accumulate(own, None, batch, None)[0]["params"]["logits"]

        gradient = jax.vmap(ascent)(jnp.stack(weights), jnp.stack(advantages))
        scores = lambda x: learner.score({"params": {"logits": x}}, None, whole)[:, 0, 0]
        _, slope = jax.jvp(scores, (logits,), (towards,))
        got, other = (known[arm.credit] for arm in c.arms[:2])
        size = got.stats.count.shape[0]
        mean = lambda x: jax.ops.segment_sum(x * slope, got.group, size) / jnp.maximum(got.stats.count, 1)
        worth = jnp.stack([mean(got.advantage), mean(other.advantage)])
        return Seen(gradient, got.stats.variance, got.stats.count, got.group_turn, worth)

    def many(logits: jax.Array, task: PyTree, towards: jax.Array, key: jax.Array) -> Seen:
        keys = jax.random.split(key, count)
        return jax.lax.map(lambda k: one(logits, task, towards, k), keys, batch_size=min(CHUNK, count))

    return jax.jit(many)


def direction(g: Float[np.ndarray, "n D"], aim: Float[np.ndarray, " D"]) -> dict[str, float]:
    """Direction of the mean of ``g`` relative to ``aim``, with standard errors.

    scale is ``<E g, aim> / |aim|^2``. The squared bias is that of the orthogonal part relative to the parallel part,
    ``|E g_across|^2 / (E g_along)^2``, a squared tangent.

    Products of different batches estimate the squared norm of a mean, without the noise of the mean. So without bias,
    the estimate is negative as often as positive.
    """
    n, norm = len(g), np.linalg.norm(aim)
    along = g @ (aim / norm)
    across = g - np.outer(along, aim / norm)
    total, mean = across.sum(0), across.mean(0)
    squared = (total @ total - (across**2).sum()) / (n * (n - 1))
    spread = np.atleast_2d(np.cov(across, rowvar=False))
    pure = (spread**2).sum() / n  # what the noise of the mean adds to mean' spread mean
    error = np.sqrt((2 * pure + 4 * max(mean @ spread @ mean - pure, 0)) / n)
    unit = along.mean() ** 2
    return {
        "scale": along.mean() / norm,
        "scale_error": along.std(ddof=1) / n**0.5 / norm,
        "bias": squared / unit,
        "bias_error": error / unit,
    }


def quality(g: Float[np.ndarray, "n D"], aim: Float[np.ndarray, " D"], tokens: int) -> dict[str, float]:
    """`direction`, and ``noise``: sampled tokens at which the standard deviation of the gradient is as long as its
    component along ``aim`` (variance times tokens, in units of the gradient); ``cosine`` of one batch to ``aim``,
    0 for a batch without a gradient, of which there is a share ``empty``.
    """
    found = direction(g, aim)
    length = np.linalg.norm(g, axis=1)
    cosine = np.where(length > 0, g @ aim / np.maximum(length, 1e-30) / np.linalg.norm(aim), 0.0)
    along = found["scale"] * np.linalg.norm(aim)
    return {
        **found,
        "noise": tokens * g.var(axis=0, ddof=1).sum() / along**2,
        "cosine": cosine.mean(),
        "empty": float((length == 0).mean()),
    }


def measured(c: Cell, logits: np.ndarray, task: PyTree, key: Any, count: int) -> dict[str, dict[str, float]]:
    """`quality` of each arm relative to the exact gradient of the return; for ``mean`` also ``own_*`` relative to
    `Cell.own`.
    """
    aim = exact(c.game, logits, task).gradient
    seen = jax.device_get(sampler(c, count)(jnp.float32(logits), task, jnp.float32(aim), key))
    out = {}
    for i, arm in enumerate(c.arms):
        g = seen.gradient[:, i].reshape(count, -1).astype(np.float64)
        out[arm.name] = quality(g, aim.ravel(), c.tokens)
        if arm.name == "mean" and (own := c.own(logits, task)) is not None:
            out[arm.name] |= {f"own_{k}": v for k, v in direction(g, own.gradient.ravel()).items()}
        if arm.top_k is not None:  # at most: fewer where fewer have a variance
            out[arm.name] |= {"updated": arm.top_k * c.group * c.batch, "tokens": c.tokens}
    return jax.tree.map(float, out)


def shown(found: dict[str, float]) -> str:
    return (
        f"bias^2 {found['bias']:.4f} +- {found['bias_error']:.4f}, noise {found['noise']:.0f} tokens, "
        f"cosine {found['cosine']:.3f}"
    )


def ranking(c: Cell, logits: np.ndarray, task: PyTree, key: Any, count: int) -> dict[str, dict[str, float]]:
    """How selection by variance over a whole batch finds the groups that are worth most, for ``mean`` and ``std``.

    A third of the branching groups are taken. ``spearman``: rank correlation of variance and worth. ``precision``:
    share of the third worth most among those taken (1/3 by chance). ``captured``: worth of what is taken, 0 what random
    groups bring and 1 what the oracle brings. ``turn t``: share of groups of turn t among those taken.
    """
    from scipy.stats import spearmanr

    aim = exact(c.game, logits, task).gradient
    seen = jax.device_get(sampler(c, count)(jnp.float32(logits), task, jnp.float32(aim), key))
    out: dict[str, dict[str, float]] = {}
    for i, name in enumerate(("mean", "std")):
        rows = []
        for variance, size, turn, worth in zip(seen.variance, seen.size, seen.turn, seen.benefit[:, i]):
            there = np.flatnonzero(size >= 2)
            variance, turn, worth = variance[there], turn[there], worth[there]
            k = len(there) // 3
            taken, best = np.argsort(-variance, kind="stable")[:k], np.argsort(-worth, kind="stable")[:k]
            random, oracle = k * worth.mean(), worth[best].sum()
            row = {
                "spearman": spearmanr(variance, worth).statistic,
                "precision": len(np.intersect1d(taken, best)) / k,
                "captured": (worth[taken].sum() - random) / (oracle - random),
            }
            rows.append(row | {f"turn {t}": (turn[taken] == t).mean() for t in range(c.game.turns)})
        out[name] = {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}
    return out


def equal_groups(game: Game, group: int, p: float, key: Any, tasks: int) -> float:
    """Share of groups without a variance when a move succeeds with probability ``p``, by rollout and credit."""
    task = {"payoff": np.array([1, 0], np.float32), "noise": np.zeros(1, np.float32)}
    logits = np.array([[np.log(p / (1 - p)), 0.0]])
    seen = _groups(game, group, tasks)(jnp.float32(logits), task, jnp.zeros((1, 2)), key)
    return float((np.asarray(seen.variance)[np.asarray(seen.size) == group] == 0).mean())


@functools.cache
def _groups(game: Game, group: int, tasks: int) -> Callable[..., Seen]:
    return sampler(cell("flat", game, plans.flat(group), group)._replace(batch=tasks), 1)
