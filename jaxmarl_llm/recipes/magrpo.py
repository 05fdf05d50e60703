"""MAGRPO: collaboration as a Dec-POMDP with a joint return and group-relative advantages (arXiv 2508.04652, AAAI-26).

Agents act at once, each on its own history; one joint reward. Return of a joint action (eq. 1)

    flat   R_t = sum over tau >= t of r_tau                    G episodes from each task's first state (the paper)
    tree   R_j = r_j + discount * mean over children of R      G samples an agent at every state (the later library)
    best   R_j = r_j, the best joint action is played on       (the first version); ``first`` plays on a random one

advantage (eq. 2) A = R - mean of the group, shared by all agents, no std; objective (eq. 3): mean of A times the summed
token log-probs; no clip, no KL, no length normalisation. Groups: one agent's samples at one state, and in ``flat``
one agent's at one turn of one task. ``joint="cross"`` forms every combination of the agents' samples; a completion is
credited with the mean of its joint actions (``credit.joint_action_reduce="sum"`` as the library does).
``credit.baseline`` none, loo and max are MAREINFORCE, MARLOO and MAREMAX; ``credit.normalise="std"`` makes all four one
algorithm.

No factor discount^t. The gradient of the discounted return J = E[sum over t of discount^t r_t] weighs the term of turn
t by discount^t:

    exact   sum over t of discount^t A_t grad log pi(a_t | h_t)
    here    sum over t of            A_t grad log pi(a_t | h_t)

Without the factor, turn t of a tree counts 1 / discount^t as much as in the exact gradient. The authors' library has no
factor either. The paper's formula of the return has no discount, and ``credit.discount`` is 1 by default, where both
agree. The library's default is 0.9.

Kept: the above. Changed, each by intent: the stop token is trained and padding is not. Log-probs are those of the
distribution sampled from. A batch has many tasks, with one update on all of them (the library trains task by task,
partly off policy). Gradients are clipped only if ``optimizer.max_grad_norm`` says so. Early termination is off unless
``stop_above`` is set. With one agent and normalise std this is GRPO without a clip (tests/recipes/test_magrpo.py).
All roles learn. ``trained_roles`` is for comparisons: RL then trains some roles, beside frozen partners.

Expected: `experiments/configs/magrpo.py:tiny` passes the untrained team and one agent alone at equal sampled tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxmarl_llm.config import later
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.envs.contract import Environment, roles_of
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import JOINT, Plan, flat, handoff, product
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.training.trained_roles import check_trained_roles, only

MODES = ("flat", "tree", "best", "first")


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of MAGRPO."""

    recipe: str = "magrpo"
    group: int = 4  # G samples of each agent
    tree_mode: str = "flat"  # flat, tree, best or first
    joint: str = "aligned"  # how the agents' samples are combined: aligned or cross
    stop_above: float | None = None  # a state whose joint actions' mean reward is above it is not played on
    # roles that learn in RL, None: all; others stay as after stage 0
    trained_roles: tuple[str, ...] | None = later(None)
    credit: Credit = Credit(group="task_role_turn", normalise="none")
    loss: Loss = Loss(clip_low=None, aggregation="sum")
    optimizer: Optimizer = Optimizer(learning_rate=1e-4, max_grad_norm=0.0)

    ALIASES: ClassVar[dict[str, str]] = {"mode": "tree_mode"}

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (a group compares samples), got {self.group}")
        if self.tree_mode not in MODES:
            raise ConfigError(f"{path}.tree_mode: expected one of {', '.join(MODES)}, got {self.tree_mode!r}")
        if self.joint not in JOINT:
            raise ConfigError(f"{path}.joint: expected one of {', '.join(JOINT)}, got {self.joint!r}")
        if self.tree_mode == "flat" and self.joint == "cross":
            raise ConfigError(f"{path}.joint: expected aligned with tree_mode=flat; trees and hand-offs can be crossed")
        group = "task_role_turn" if self.tree_mode == "flat" else "node"
        if self.credit.group != group:
            raise ConfigError(
                f"{path}.credit.group: expected {group!r} with tree_mode={self.tree_mode}, got {self.credit.group!r}"
            )
        if self.tree_mode in ("best", "first") and self.credit.discount:
            raise ConfigError(
                f"{path}.credit.discount: expected 0 with tree_mode={self.tree_mode}: what goes on is chosen"
            )
        if self.trained_roles is not None:
            check_trained_roles(path, self.trained_roles, self.env.roles(), self.team.parameter_sharing)


def make_plan(cfg: Config) -> Plan:
    """Plan that ``cfg.tree_mode`` and ``cfg.joint`` name."""
    if cfg.tree_mode == "flat":
        plan = flat(cfg.group)
    elif cfg.tree_mode == "tree":
        plan = product(cfg.group, cfg.joint)
    else:
        plan = handoff(cfg.group, cfg.joint, best=cfg.tree_mode == "best")
    return plan._replace(stop_above=cfg.stop_above, reward=tuple(sorted(cfg.reward.items())))


def algorithm(cfg: Config, env: Environment | None = None) -> Algorithm:
    """Group-relative advantages of ``cfg.credit``; joint actions share a reward.

    Args:
        cfg: The configuration.
        env: An environment in place of the one that ``cfg`` names.
    """
    if cfg.trained_roles is None:
        return Algorithm(standard_rule(cfg.credit), cfg.reward)
    learns = only(cfg.trained_roles, cfg.env.roles() if env is None else roles_of(env))
    return Algorithm(standard_rule(cfg.credit), cfg.reward, trainable_roles=learns)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg, env), env=env)
