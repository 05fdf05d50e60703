"""MAAC: decentralised actors with one centralised critic (CoLLM-CC of arXiv 2601.21972; CoMLRL's MAAC trainer).

As IAC, but one critic V(h_1, ..., h_n) reads the prompts of all agents at a state, each behind the name of its role,
and its TD error is every agent's advantage (CTDE: the critic is used in training alone). It is a copy of the backbone
with a value head on its last token, with an optimizer of its own. All agents must share one tokenizer.

Kept: TD(0) target for actor and critic, advantages whitened over the batch, gradients clipped at 0.5. Changed: GAE with
``decay`` above 0 is offered; many tasks in a batch. Not here: the library's Q-critic.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxmarl_llm import phases
from jaxmarl_llm.plans import Plan, flat
from jaxmarl_llm.stages import ActorCritic
from jaxmarl_llm.team import TeamConfig


@dataclass(frozen=True)
class Config(ActorCritic):
    recipe: str = "maac"
    team: TeamConfig = TeamConfig(critic="joint")

    def check(self, path: str) -> None:
        super().check(path)
        self.check_critic(path, ("joint",))


def make_plan(cfg: Config) -> Plan:
    return flat(cfg.group)


def make(cfg: Config) -> phases.Recipe:
    return phases.make_recipe(cfg, make_plan(cfg), phases.improve_critic(cfg), critic_optimizer=cfg.critic_optimizer)
