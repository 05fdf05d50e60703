"""Advantages from a team's critics: generalised advantage estimation on a forest, and what the critics learn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.credit.returns import generalised_advantage, scalarise, step_returns
from jaxmarl_llm.credit.rules import CreditRule, Signal, Sizes, roles_that_act
from jaxmarl_llm.training.algorithm import Driver, StepParts
from jaxmarl_llm.training.config import ActorCritic
from jaxmarl_llm.training.critic import CriticInputs, critic_batches, critic_inputs, estimate, stacks_of_rows
from jaxmarl_llm.training.learner import Batch, NodeTargets
from jaxmarl_llm.types import Array, Team, TrainState, Tree


class CriticTargets(NamedTuple):
    """Prompts that one critic read, its estimates, and its targets.

    Attributes:
        read: Prompts [M], and the prompt of each node.
        value: Estimate of each prompt before the update [M].
        target: Target of each prompt [M].
        weight: 1 / number of targets [M]; 0 where a prompt has none.
    """

    read: CriticInputs
    value: Float[Array, " M"]
    target: Float[Array, " M"]
    weight: Float[Array, " M"]

    def of_prompts(self) -> NodeTargets:
        """Targets by prompt."""
        return NodeTargets(self.target, self.weight, self.value)

    def of_nodes(self) -> NodeTargets:
        """Targets by node of the tree."""
        xp = np if isinstance(self.value, np.ndarray) else jnp
        row, none = xp.maximum(self.read.of_node, 0), self.read.of_node < 0
        weight = xp.where(none, 0.0, self.weight[row]).astype(np.float32)
        return NodeTargets(self.target[row], weight, self.value[row])

    def batches(self, micro_tokens: int) -> list[Batch]:
        """Batches without completions, for a critic that plays no role; in a compiled run stacks of them, [K ...].

        ``micro_tokens``: prompt tokens of one micro-batch, at most where possible.
        """
        if isinstance(self.value, np.ndarray):
            return critic_batches(self.read, self.of_prompts(), micro_tokens=micro_tokens)
        out, read, targets = [], self.read, self.of_prompts()
        for rows in stacks_of_rows(len(self.value), micro_tokens // read.tokens.shape[1]):
            none = jnp.zeros((*rows.shape, 1, 1))
            values = jax.tree.map(lambda x, rows=rows: x[rows], targets)
            empty = none.astype(jnp.int32)
            out.append(Batch(read.tokens[rows], read.length[rows], empty, none, none, none, values=values))
        return out


@dataclass(frozen=True)
class CriticAdvantage:
    """Advantages by the team's critics, see `algorithm.CriticAdvantages`.

    Attributes:
        cfg: Discount, lambda, and whether advantages are whitened.
        paid: A return rule whose returns are the rewards that critics learn from, for example `PayRecords`; None: the
            weighted rewards of ``cfg.reward``.
    """

    cfg: ActorCritic
    paid: CreditRule | None = None

    def __call__(
        self, step: StepParts, driver: Driver, state: TrainState, tree: Tree
    ) -> tuple[Array, Array, dict[str, CriticTargets], dict[str, Any]]:
        team, cfg = step.team, self.cfg
        estimates: dict[str, tuple[CriticInputs, Any]] = {}
        value = jnp.zeros(len(tree.nodes.role))
        for i, model in enumerate(team.models):
            if model.name in team.critics:
                read, said = _estimate(step, state, tree, i)
                estimates[model.name] = read, said
                padded = jnp.concatenate([jnp.asarray(said), jnp.zeros(1)])  # -1, no prompt, reads the zero
                value = jnp.where(read.of_node >= 0, padded[read.of_node], value)
        out = _advantages(
            tree,
            value,
            dict(step.cfg.reward),
            roles=len(team.roles),
            max_turns=step.env_runner.env.max_turns,
            discount=cfg.credit.discount,
            gae_lambda=cfg.gae_lambda,
            whiten=cfg.whiten,
            paid=self.paid,
            num_tasks=cfg.batch,
        )
        gain, has, aim, known = driver.host(out)
        targets: dict[str, CriticTargets] = {}
        metrics: dict[str, Any] = {}
        for name, (read, said) in estimates.items():
            goal, count = driver.host(_of_prompts(aim, known, read.of_node, jnp.asarray(said)))
            xp = np if isinstance(goal, np.ndarray) else jnp
            there = count > 0
            weight = (there / xp.maximum(there.sum(), 1)).astype(np.float32)
            targets[name] = CriticTargets(read, said, goal, weight)
            metrics |= {f"critic/{name}/{k}": v for k, v in _fit_of(xp, said, goal, there).items()}
        return gain, has, targets, metrics


def _fit_of(xp: Any, value: Any, target: Any, there: Any) -> dict[str, Any]:
    """Mean estimate, and the share of the targets' variance that estimates explain.

    Equal targets have no variance, so the share is undefined. NumPy's metrics leave it out, traced ones have NaN.
    """
    n = xp.maximum(there.sum(), 1)
    mean = lambda x: xp.where(there, x, 0.0).sum() / n
    variance = lambda x: mean((x - mean(x)) ** 2)
    spread, left = variance(target), variance(target - value)
    if xp is np and not spread > 0:
        return {"value": mean(value)}
    explained = xp.where(spread > 0, 1.0 - left / xp.where(spread > 0, spread, 1.0), xp.nan)
    return {"value": mean(value), "explained_variance": explained}


def _estimate(step: StepParts, state: TrainState, tree: Tree, critic: int) -> tuple[CriticInputs, Any]:
    """What the model ``critic`` reads, and its estimates."""
    model, learner = step.team.models[critic], step.learners[step.team.models[critic].name]
    if isinstance(tree.nodes.role, np.ndarray):
        read = critic_inputs(step.team, tree, critic)
        return read, estimate(learner, model, state.params, read, micro_tokens=step.cfg.micro_tokens)
    read = traced_inputs(step.team, tree, critic, tree.transitions.steps.shape[1])
    shared = None if model.base is None else state.params["shared"][model.base]
    return read, learner.value(state.params["agents"][model.name], shared, read.tokens, read.length)


def traced_inputs(team: Team, tree: Tree, critic: int, seats: int) -> CriticInputs:
    """Inputs of a critic in a compiled program, as `critic.critic_inputs`: a row for each node, or each state if joint.

    Args:
        team: Roles, models and critics.
        tree: An array rollout: the ``seats`` nodes of a state follow each other.
        critic: Index of the critic's model.
        seats: Number of seats, W.
    """
    nodes = tree.nodes
    own = jnp.array([c == team.models[critic].name for c in team.critics])
    mine, n = nodes.valid & own[nodes.role], len(nodes.role)
    if not team.joint_critic:
        return CriticInputs(nodes.tokens, jnp.maximum(nodes.length, 1), jnp.where(mine, jnp.arange(n), -1))
    encode = team.models[critic].tokenizer.encode
    marks = [encode(f"[{role.name}]") for role in team.roles]
    width = max(map(len, marks))
    mark = jnp.array([m + [0] * (width - len(m)) for m in marks], jnp.int32)[nodes.role]
    size = jnp.array([len(m) for m in marks], jnp.int32)[nodes.role]
    tokens = jnp.concatenate([mark, nodes.tokens], axis=1)
    used = jnp.concatenate(
        [jnp.arange(width) < size[:, None], jnp.arange(nodes.tokens.shape[1]) < nodes.length[:, None]], axis=1
    )
    used &= mine[:, None]
    # The prompts of a state one behind the other, in the order of the roles, without gaps.
    order = jnp.argsort(jnp.where(mine, nodes.role, len(team.roles)).reshape(-1, seats), axis=1, stable=True)
    row = lambda x: jnp.take_along_axis(x.reshape(-1, seats, x.shape[1]), order[..., None], 1).reshape(n // seats, -1)
    tokens, used = row(tokens), row(used)
    front = jnp.argsort(~used, axis=1, stable=True)
    tokens = jnp.where(jnp.take_along_axis(used, front, 1), jnp.take_along_axis(tokens, front, 1), 0)
    of_node = jnp.where(mine, jnp.arange(n) // seats, -1)
    return CriticInputs(tokens, jnp.maximum(used.sum(1), 1).astype(jnp.int32), of_node)


@jax.jit
def _of_prompts(
    target: Float[Array, " N"], known: Bool[Array, " N"], of_node: Int[Array, " N"], value: Float[Array, " M"]
) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
    """Mean target of the nodes of each prompt, and how many nodes have one."""
    mine = known & (of_node >= 0)
    ids = jnp.where(mine, of_node, len(value))  # out of range: dropped
    total = jax.ops.segment_sum(jnp.where(mine, target, 0.0), ids, len(value))
    count = jax.ops.segment_sum(mine.astype(jnp.float32), ids, len(value))
    return total / jnp.maximum(count, 1.0), count


def advantages_of(
    tree: Tree,
    value: Float[Array, " N"],
    reward: Mapping[str, Any],
    *,
    roles: int,
    max_turns: int,
    discount: float,
    gae_lambda: float,
    whiten: bool,
    paid: CreditRule | None = None,
    num_tasks: int = 1,
) -> tuple[Array, Array, Array, Array]:
    """Advantages and value targets of a rollout whose prompts have estimates.

    Args:
        tree: The rollout.
        value: Estimate of each node.
        reward: Component -> weight.
        roles: Number of roles.
        max_turns: Of an episode.
        discount: Of the next state's estimate.
        gae_lambda: Lambda of GAE.
        whiten: Advantages of one role and turn get mean 0 and the population's standard deviation 1. An advantage that
            is alone stays.
        paid: See `CriticAdvantage`.
        num_tasks: Of the batch; only ``paid`` reads it.

    Returns:
        Advantage of each completion and whether it has one [C]; target of each node and whether it has one [N].
    """
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    seats = moves.steps
    node = steps.node[jnp.maximum(seats, 0)]
    taker = jnp.where(seats >= 0, nodes.role[node], roles)  # out of range: dropped
    at = jnp.arange(seats.shape[0])[:, None]
    values = jnp.zeros((seats.shape[0], roles)).at[at, taker].set(value[node], mode="drop")
    earned, rewarded = scalarise(moves.rewards, reward), moves.valid
    if paid is not None:
        signal = paid(tree, Signal(earned, sizes=Sizes(max_turns, num_tasks, roles)))
        assert signal.returns is not None and signal.known is not None, "paid is no return rule"
        earned, rewarded = signal.returns, signal.known
    advantage, target = generalised_advantage(
        earned,
        values,
        roles_that_act(tree, roles),
        moves.parent,
        moves.turn,
        moves.played,
        rewarded,
        max_turns=max_turns,
        discount=discount,
        gae_lambda=gae_lambda,
    )
    role, c, n = nodes.role[steps.node], len(steps.node), len(nodes.role)
    gain, has = step_returns(seats, role, advantage, rewarded, num_steps=c)
    aim, known = step_returns(seats, role, target, rewarded, num_steps=c)
    ids = jnp.where(known, steps.node, n)
    total = jax.ops.segment_sum(jnp.where(known, aim, 0.0), ids, n)
    count = jax.ops.segment_sum(known.astype(jnp.float32), ids, n)
    has &= steps.valid
    if whiten:
        groups = roles * max_turns
        ids = jnp.where(has, role * max_turns + nodes.turn[steps.node], groups)
        within = lambda x: jax.ops.segment_sum(jnp.where(has, x, 0.0), ids, groups)
        mine, count_of = jnp.minimum(ids, groups - 1), within(jnp.ones(c))
        size = jnp.maximum(count_of, 1.0)
        centred = gain - (within(gain) / size)[mine]
        spread = jnp.sqrt(within(centred**2) / size)
        gain = jnp.where(has & (count_of[mine] > 1), centred / jnp.maximum(spread, 1e-6)[mine], gain)
    return gain, has, total / jnp.maximum(count, 1.0), (count > 0) & nodes.valid


_STATIC = ("roles", "max_turns", "discount", "gae_lambda", "whiten", "paid", "num_tasks")
_advantages = jax.jit(advantages_of, static_argnames=_STATIC)
