"""ReMA: a meta-thinker steers a reasoner over turns, both rewarded by the outcome (arXiv 2503.09501).

G episodes of a task, each a conversation: the meta-thinker writes what to do next, the reasoner does it, until the
meta-thinker calls it final or the turns are over (then the reward is 0). The outcome of the last turn is the return of
every turn of both roles; advantage (R - mean) / std over the task's episodes, each counted once. Turn t of a trajectory
is one completion, with the turn-level ratio and loss

    rho_t = exp(mean over the turn's tokens of log pi - log pi_old), |log rho_t| <= 3
    L = -min(rho A, clip(rho, 1 - eps, 1 + eps) A), and at most 3 |A| where A < 0 (dual clip)

averaged over the tokens of a role in a trajectory, then over trajectories (``loss.aggregate`` trajectory; ``sequence``
averages over turns instead, ``token`` over all tokens); several epochs on a batch. Roles learn in turn: the one that
learns changes every ``switch`` steps and the other's model is not touched, optimizer state included. With
``team.share="shared"`` one model learns from the steps of one role at a time.

Kept: the above, single-turn shaping by the environment (`chain`: shaping, rounds 1). Chosen where the paper is silent:
the cap holds the mean log-ratio of a turn, not each token's; the meta-thinker learns first; the group's std is the
sample's; two epochs. Changed: G = 8 instead of 16 and few, short turns (30 of 512 tokens in the paper); ``switch=0``
lets both learn at every step and ``learner`` one role alone, for comparison.

Expected: on `chain`, that an untrained team (after stage 0) is passed on held-out questions; to be measured by
experiments/claims/rema.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxmarl_llm import phases
from jaxmarl_llm.arena import EnvConfig
from jaxmarl_llm.config import one_of
from jaxmarl_llm.credit import Credit
from jaxmarl_llm.losses import Loss
from jaxmarl_llm.plans import Plan, flat
from jaxmarl_llm.stages import BaseConfig
from jaxmarl_llm.text import ConfigError

ROLES = ("meta", "reasoner")


@dataclass(frozen=True)
class Config(BaseConfig):
    recipe: str = "rema"
    group: int = 8  # G episodes of each task
    switch: int = 10  # RL steps until the other role learns; 0: both at every step
    learner: str | None = None  # meta or reasoner: that role alone learns, the other stays frozen
    env: EnvConfig = EnvConfig("chain", {"protocol": "meta"})
    reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0, "shaping": 1.0})
    credit: Credit = Credit(group="task_role", ddof=1, over="episodes")
    loss: Loss = Loss(dual_clip=3.0, level="sequence", max_log_ratio=3.0, aggregate="trajectory", epochs=2)

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (a group compares samples), got {self.group}")
        if self.switch < 0:
            raise ConfigError(f"{path}.switch: expected >= 0, got {self.switch}")
        if self.learner is not None:
            one_of(f"{path}.learner", self.learner, ROLES)


def learns(cfg: Config) -> Callable[[Any], Any]:
    """RL step -> which of ROLES learn at it [2]; the step may be traced."""
    roles = jnp.arange(len(ROLES))
    if cfg.learner is not None:
        return lambda step: roles == ROLES.index(cfg.learner)
    if not cfg.switch:
        return lambda step: roles >= 0
    return lambda step: roles == (step // cfg.switch) % len(ROLES)


def make_plan(cfg: Config) -> Plan:
    return flat(cfg.group)


def make(cfg: Config) -> phases.Recipe:
    recipe = phases.make_recipe(cfg, make_plan(cfg), phases.improve_groups(cfg, learns=learns(cfg)))
    if recipe.arena.env.roles != ROLES:
        raise ConfigError(f"config.env: expected an environment with the roles {', '.join(ROLES)}")
    return recipe
