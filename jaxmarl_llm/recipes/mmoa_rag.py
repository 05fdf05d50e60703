"""MMOA-RAG: a query rewriter, a document selector and an answer generator trained by MAPPO (arXiv 2501.15228).

Retrieval-augmented generation is a team of three roles that act one after the other, once each. One model plays all
roles, and a value head on its last prompt token is the critic of every role. All roles share the F1 of the answer.
Each role also has a penalty of its own for a completion out of form:

    R_i = F1 + penalty_i;  rewriter -.5 (too many queries, or too long), selector -1 (malformed, repeated or unknown
                           ids), generator -1 (too long)

The environment pays both (`envs/facts/pipeline.py`). Advantages are GAE on each role's own rewards. A role's value is
bootstrapped from its own rows, and turns of other roles cost no lambda (`credit.returns.generalised_advantage`). With
one action a role and discount 1, the advantage of role i is R_i - V_i for every lambda. The update is PPO's clip, with
the squared error of the value head.

Kept: the above, with one shared model and a KL to the policy after stage 0. Changed: the KL is a term of the loss
(``loss.kl_coef``, k3) with the fixed coefficient .05. The paper takes it off the rewards, with an adaptive coefficient
that is at least .05. Advantages are whitened by role over the batch. Inferred: a malformed query is out of form too.

``trained_roles`` names the roles that learn. A model of none of them stays as after stage 0. So the generator alone
learns where it has a model of its own.

Claims are stated in `experiments.claims.mmoa_rag`, and what holds of them is in docs/systems.md. With half of the
supervised steps of ``mmoa_rag:tiny`` held-out F1 after stage 0 was .096 .361 .335 on seeds 100 to 102. Joint training
led to .151 .881 .741, and training of the generator alone to .139 .574 .525.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.envs.contract import Environment, need_roles, roles_of
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.actor_critic import CriticAdvantage
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import ActorCritic
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.trained_roles import check_trained_roles, only

NEEDED = ("rewriter", "selector", "generator")


@dataclass(frozen=True)
class Config(ActorCritic):
    """Configuration of MMOA-RAG."""

    recipe: str = "mmoa_rag"
    trained_roles: tuple[str, ...] = NEEDED  # roles that learn; the models of the others stay as after stage 0
    gae_lambda: float = 0.95
    team: TeamConfig = TeamConfig(parameter_sharing="shared", critic="head", max_new_tokens=12)
    env: EnvConfig = EnvConfig("facts")
    reward: dict[str, float] = field(default_factory=lambda: {"f1": 1.0, "penalty": 1.0})
    credit: Credit = Credit(discount=1.0, group="task_role_turn", normalise="none")
    loss: Loss = Loss(clip_low=0.2, clip_high=0.2, kl_coef=0.05, value_coef=0.5)

    def check(self, path: str) -> None:
        super().check(path)
        self.check_critic(path, ("head", "separate"))
        need_roles(f"{path}.env", self.env.name, self.env.roles(), NEEDED)
        check_trained_roles(path, self.trained_roles, NEEDED, self.team.parameter_sharing)


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each task."""
    return flat(cfg.group)


def algorithm(cfg: Config, env: Environment | None = None) -> Algorithm:
    """Advantages from the critics of ``cfg.team``. ``env``: an environment in place of the one that ``cfg`` names."""
    names = cfg.env.roles() if env is None else roles_of(env)
    return Algorithm(
        standard_rule(cfg.credit),
        cfg.reward,
        critic=CriticAdvantage(cfg),
        trainable_roles=only(cfg.trained_roles, names),
    )


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    made = algorithm(cfg, env)
    return phases.make_recipe(cfg, make_plan(cfg), made, env=env, critic_optimizer=cfg.critic_optimizer)
