"""ReMA: a meta-thinker steers a reasoner over turns, both rewarded by the outcome (arXiv 2503.09501).

The team plays G episodes of a task. Each episode is a conversation. The meta-thinker writes what to do next, and the
reasoner does it, until the meta-thinker calls it final. If the turns are over before that, the reward is 0. The outcome
of the last turn is the return of every turn of both roles. The advantage is (R - mean) / std over the task's episodes,
each counted once. Turn t of a trajectory is one completion, with the turn-level ratio and loss

    rho_t = exp(min(mean over the turn's tokens of log pi - log pi_old, 3))
    L_t = -min(rho_t A, clip(rho_t, 1 - eps, 1 + eps) A), and at most 3 |A| where A < 0 (dual clip)

The loss is the mean of L_t over the turns of a role in a trajectory, then over trajectories. A long turn therefore
counts as much as a short one. These are the settings of the authors' scripts (``clip_mode=turn``,
``agg_mode=trajectory``). `turn_loss` is the loss and `mean_over_turns` the average.

Other averages of the authors' code: ``loss.aggregation="sequence"`` is the mean over all turns (their ``turn``).
``jaxmarl_llm.recipes.rema:mean_over_tokens`` is the mean over all tokens of a trajectory, then over trajectories (their
``trajectory`` with ``clip_mode=token``). It was the default here before. ``loss.ratio_level="token"`` gives each token
its own ratio, capped at exp(3).

A batch has several epochs. Roles learn in turn: the role that learns changes every ``switch`` steps. The other role's
model is not touched, optimizer state included. With ``team.parameter_sharing="shared"`` one model learns from the steps
of one role at a time.

Kept: the above, and single-turn shaping by the environment (`chain`: shaping, rounds 1). Chosen where the paper is
silent: the meta-thinker learns first; the group's std is the sample's; two epochs. Changed: G = 8 instead of 16, and
few, short turns (30 of 512 tokens in the paper). Log-ratios are bounded by -20 from below, the authors' are not. Where
one episode of a group alone is valid, its advantage is 0; the authors keep its return. A trajectory without a trained
token is not counted in the mean; the authors count it as 0. The mean is over the whole batch; the authors' is over one
micro-batch after another.
``switch=0`` lets both roles learn at every step and ``learner`` one role alone, for comparison.

Expected: on `chain`, that an untrained team (after stage 0) is passed on held-out questions; to be measured by
experiments/claims/rema.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.losses import Loss, RowData, loss_properties, policy_loss, ratio_unit
from jaxmarl_llm.types import Array

ROLES = ("meta", "reasoner")
MAX_LOG_RATIO = 3.0  # of a turn, from above (the authors' log_ratio_clip_c)


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of ReMA."""

    recipe: str = "rema"
    group: int = 8  # G episodes of each task
    switch: int = 10  # RL steps until the other role learns; 0: both at every step
    learner: str | None = None  # meta or reasoner: that role alone learns, the other stays frozen
    env: EnvConfig = EnvConfig("chain", {"protocol": "meta"})
    reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0, "shaping": 1.0})
    credit: Credit = Credit(group="task_role", ddof=1, stats_over="episodes")
    loss: Loss = Loss(
        objective="jaxmarl_llm.recipes.rema:turn_loss",
        dual_clip=3.0,
        ratio_level="sequence",
        aggregation="jaxmarl_llm.recipes.rema:mean_over_turns",
        epochs=2,
    )

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (a group compares samples), got {self.group}")
        if self.switch < 0:
            raise ConfigError(f"{path}.switch: expected >= 0, got {self.switch}")
        if self.learner is not None:
            one_of(f"{path}.learner", self.learner, ROLES)


@loss_properties(unit=ratio_unit)
def turn_loss(
    loss: Loss, logprobs: jax.Array, entropy: jax.Array, data: RowData
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the clipped loss with log-ratios of at most 3: a `losses.RowLoss`.

    With ``loss.ratio_level="sequence"`` a ratio is that of a turn, because a turn is one completion.

    Args:
        loss: constants of `losses.policy_loss`.
        logprobs: log-prob of each sampled token under pi [... R]. Carries gradient.
        entropy: entropy in nats of each token's distribution [... R].
        data: the other arrays of the same rows.
    """
    return policy_loss(loss, logprobs, entropy, data, max_log_ratio=MAX_LOG_RATIO)


def mean_over_turns(
    mask: Bool[Array, " C R"], counted: Float[Array, " C"], episode: Int[Array, " C"]
) -> Float[jax.Array, " C R"]:
    """Weigh tokens for the mean over a turn, then over the turns of a trajectory, then over trajectories.

    The weight of a token is 1 / (n m K): n tokens of the turn, m counted turns of the trajectory, K trajectories. A
    `losses.Aggregation`.

    Args:
        mask: True at the tokens that the policy sampled.
        counted: 1 for the turns that are trained, else 0.
        episode: trajectory of each turn, an id in [0, C).
    """
    length = jnp.sum(mask, axis=-1, dtype=jnp.float32)
    return _mean_over_trajectories(mask, counted / jnp.maximum(length, 1.0), episode)


def mean_over_tokens(
    mask: Bool[Array, " C R"], counted: Float[Array, " C"], episode: Int[Array, " C"]
) -> Float[jax.Array, " C R"]:
    """Weigh tokens for the mean over all tokens of a trajectory, then over trajectories.

    A `losses.Aggregation`. Arguments are those of `mean_over_turns`.
    """
    return _mean_over_trajectories(mask, counted, episode)


def _mean_over_trajectories(mask: Array, share: Array, episode: Array) -> jax.Array:
    """Weights of tokens [C R] that add up to 1 / K in each of the K trajectories.

    Args:
        mask: True at the tokens that the policy sampled [C R].
        share: weight of each token of a turn, relative to the others of its trajectory [C].
        episode: trajectory of each turn, an id in [0, C).
    """
    tokens = jnp.where(mask, share[:, None], 0.0)
    mass = jax.ops.segment_sum(jnp.sum(tokens, axis=-1), episode, len(share))
    trajectories = jnp.maximum(jnp.sum(mass > 0), 1)
    return tokens / (jnp.where(mass > 0, mass, 1.0)[episode, None] * trajectories)


def trainable_roles(cfg: Config) -> Callable[[Any], Any]:
    """RL step -> which of ROLES learn at it [2], by ``cfg.learner`` and ``cfg.switch``; the step may be traced."""
    roles = jnp.arange(len(ROLES))
    if cfg.learner is not None:
        return lambda step: roles == ROLES.index(cfg.learner)
    if not cfg.switch:
        return lambda step: roles >= 0
    return lambda step: roles == (step // cfg.switch) % len(ROLES)


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each task."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Group-relative advantages of ``cfg.credit``; roles learn in turn."""
    return Algorithm(standard_rule(cfg.credit), cfg.reward, trainable_roles=trainable_roles(cfg))


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    recipe = phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
    if recipe.env_runner.env.roles != ROLES:
        raise ConfigError(f"config.env: expected an environment with the roles {', '.join(ROLES)}")
    return recipe
