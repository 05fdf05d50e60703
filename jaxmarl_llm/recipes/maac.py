"""MAAC: decentralised actors with one centralised critic (CoLLM-CC of arXiv 2601.21972; CoMLRL's MAAC trainer).

As IAC, but one critic V(h_1, ..., h_n) reads the prompts of all agents at a state, each behind the name of its role.
Its TD error is every agent's advantage (CTDE: the critic is used in training alone). It is a copy of the backbone with
a value head on its last token, with an optimizer of its own. All agents must share one tokenizer.

Kept: TD(0) target for actor and critic, advantages whitened by role and turn over the batch, gradients clipped at 0.5.
Changed: GAE with ``gae_lambda`` above 0 is offered; many tasks in a batch; one update for the samples of all turns. Not
here: the library's Q-critic.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.credit.assign import standard_rule
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.actor_critic import CriticAdvantage
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import ActorCritic


@dataclass(frozen=True)
class Config(ActorCritic):
    """Configuration of MAAC."""

    recipe: str = "maac"
    team: TeamConfig = TeamConfig(critic="joint")

    def check(self, path: str) -> None:
        super().check(path)
        self.check_critic(path, ("joint",))


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each task."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Advantages from the joint critic of ``cfg.team``."""
    return Algorithm(standard_rule(cfg.credit), cfg.reward, critic=CriticAdvantage(cfg))


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env, critic_optimizer=cfg.critic_optimizer)
