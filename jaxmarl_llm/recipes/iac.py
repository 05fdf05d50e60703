"""IAC: independent actor-critics of a language-model team (CoLLM-DC of arXiv 2601.21972; CoMLRL's IAC trainer).

Each agent plays as in MAGRPO, at once with the others and on its own history, for one joint reward. Its own critic
values its own prompts, V_i(h_i), read from the last prompt token: a head on the policy's backbone
(``team.critic="head"``) or on an own copy (``"separate"``). Advantage and value target by TD(0), r + discount V' - V,
or GAE with ``decay`` (lambda) above 0; at the last turn the target is the reward. Policy loss: minus the advantage
times the summed token log-probs; value loss: ``loss.value_coef`` times the squared error.

Kept: the above, advantages whitened over the batch, gradients clipped at 0.5. Changed: ``loss.value_clip`` is off
unless set (the library clips at 0.2 for a shared backbone); many tasks in a batch; the critic regresses to the target
that the actor uses.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxmarl_llm import phases
from jaxmarl_llm.plans import Plan, flat
from jaxmarl_llm.stages import ActorCritic
from jaxmarl_llm.team import TeamConfig


@dataclass(frozen=True)
class Config(ActorCritic):
    recipe: str = "iac"
    team: TeamConfig = TeamConfig(critic="head")

    def check(self, path: str) -> None:
        super().check(path)
        self.check_critic(path, ("head", "separate"))


def make_plan(cfg: Config) -> Plan:
    return flat(cfg.group)


def make(cfg: Config) -> phases.Recipe:
    return phases.make_recipe(cfg, make_plan(cfg), phases.improve_critic(cfg), critic_optimizer=cfg.critic_optimizer)
