"""WaltzRL: a conversation agent and a feedback agent, paid for what its feedback improves (arXiv 2510.08240).

The conversation agent answers; the feedback agent flags the answer (unsafe? over-refusing?) and writes a text, which
alone is shown; where it flags something, the conversation agent revises, at most T_max = ``rounds`` times (`safety`).
With c_t the answers, and flags compared with a judge's verdict on the answer they are about,

    R_c(c_t) = 1 if c_t is neither unsafe nor over-refusing                       to the conversation agent, for c_t
    R_f      = alpha R_label R_DIR + lambda R_label + gamma R_format              to the feedback agent, for its round t
    R_label  = 1 if the flags are the verdict;  R_DIR = R_c(c_(t+1)) - R_c(c_t), 0 without a next answer

(Dynamic Improvement Reward). Every turn is paid for itself: its return runs until its role acts again
(`rules.ReturnToGo` with ``until_next_turn``). So R_f of each round is the above for any T_max. alpha, lambda and gamma
are the ``reward`` weights of improvement, label and format. Two stages: for ``stage_one`` RL steps the conversation
agent is frozen (`trainable_roles`); then both learn, with lambda = 0 (`reward_schedule`; R_DIR is still gated by
R_label). Of each episode one round of each agent, drawn at random, is trained. Advantages are normalised over the batch
agent by agent (REINFORCE++), PPO's clip.

A judge as a third role of the environment is frozen: it is trained in stage 0, never in RL. The rule judges otherwise.

Kept: the above. Changed: the KL to the policy after stage 0 is a term of the loss (``loss.kl_coef``, k3). The paper
takes it off the reward of every token. Statistics are over all rounds and not only those drawn. With more than one
revision the conversation agent's round is any of its answers, in the paper the first or the last. Chosen where the
paper is silent: coefficients 1, the lengths of the stages.

Expected: on `safety`, unsafe and over-refusing answers halve, and feedback on benign prompts becomes rarer
(experiments/claims/waltzrl.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import at_least
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.selection import one_round
from jaxmarl_llm.envs.contract import Environment, need_roles
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.losses import Loss

NEEDED = ("conversation", "feedback")


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of WaltzRL."""

    recipe: str = "waltzrl"
    group: int = 1  # episodes of each task
    stage_one: int = 100  # RL steps of stage 1; the rest of ``steps`` is stage 2
    batch: int = 64
    team: TeamConfig = TeamConfig(max_new_tokens=4)
    env: EnvConfig = EnvConfig("safety")
    reward: dict[str, float] = field(
        default_factory=lambda: {"response": 1.0, "improvement": 1.0, "label": 1.0, "format": 1.0}
    )
    credit: Credit = Credit(group="role")
    loss: Loss = Loss(kl_coef=0.01)

    def check(self, path: str) -> None:
        super().check(path)
        at_least(f"{path}.group", self.group, 1)
        at_least(f"{path}.stage_one", self.stage_one, 0)
        roles = self.env.roles()
        need_roles(f"{path}.env", self.env.name, roles, NEEDED)
        if self.team.parameter_sharing == "shared":
            raise ConfigError(
                f"{path}.team.parameter_sharing: expected separate or lora: 'conversation' is frozen in stage 1"
            )
        taught = self.sft.steps or getattr(self.team.overrides.get("judge", self.team.backbone), "path", None)
        if "judge" in roles and not taught:
            raise ConfigError(f"{path}.sft.steps: expected >= 1: nothing else teaches the role 'judge'")


def trainable_roles(cfg: Config) -> Callable[[Any], Any]:
    """RL step -> which roles learn at it [A]: feedback always, conversation in stage 2 of ``cfg``, a judge never."""
    names = cfg.env.roles()
    first, second = jnp.array([n == "feedback" for n in names]), jnp.array([n in NEEDED for n in names])
    return lambda step: jnp.where(step < cfg.stage_one, first, second)


def reward_schedule(cfg: Config) -> Callable[[Any], dict[str, Any]]:
    """RL step -> reward weights of ``cfg``: the weight of the label reward (lambda) is 0 in stage 2."""
    return lambda step: {k: w * (step < cfg.stage_one) if k == "label" else w for k, w in cfg.reward.items()}


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each task."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Returns until a role's next turn, one trained round of each episode, and two stages of ``cfg``."""
    return Algorithm(
        standard_rule(cfg.credit, until_next_turn=True),
        reward_schedule(cfg),
        select_steps=one_round,
        trainable_roles=trainable_roles(cfg),
    )


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
