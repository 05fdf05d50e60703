"""IAC: independent actor-critics of a language-model team (CoLLM-DC of arXiv 2601.21972; CoMLRL's IAC trainer).

Each agent plays as in MAGRPO, at once with the others and on its own history, for one joint reward. Its own critic
values its own prompts, V_i(h_i), read from the last prompt token. The critic is a head on the policy's backbone
(``team.critic="head"``) or on an own copy (``"separate"``). Advantage and value target by TD(0), r + discount V' - V,
or GAE with ``gae_lambda`` above 0. At the last turn the target is the reward. Policy loss: minus the advantage
times the summed token log-probs; value loss: ``loss.value_coef`` times the squared error.

Kept: the above, advantages whitened by role and turn over the batch, gradients clipped at 0.5. Changed:
``loss.value_clip`` is off unless set (the library clips at 0.2 for a shared backbone), and many tasks are in a batch.
One update takes the samples of all turns (the library updates once for each turn). Its loss is a mean over all
completions of a model. The library is that of commit 1c94100. Its earlier version 20b05ad regressed the critic to the
return.
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
    """Configuration of IAC."""

    recipe: str = "iac"
    team: TeamConfig = TeamConfig(critic="head")

    def check(self, path: str) -> None:
        super().check(path)
        self.check_critic(path, ("head", "separate"))


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each task."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Advantages from the critics of ``cfg.team``, one for each agent."""
    return Algorithm(standard_rule(cfg.credit), cfg.reward, critic=CriticAdvantage(cfg))


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env, critic_optimizer=cfg.critic_optimizer)
