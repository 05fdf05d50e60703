"""UnityMAS-O: PPO over any workflow of a team, where each record has a reward of its own (arXiv 2605.26646).

A record is one completion of a role at one turn. Three tables of the configuration say who is who:

    team.models   which model plays a role; a model learns from the records of all its roles, and from no others
    scored        roles whose completions have a score R, which the environment pays as ``score``
    absolute      roles that are paid their own score

All other records are paid the change that they lead to: the next score minus the last one before it. Where no score
follows they are paid 0 (`credit.differences`). ``reward`` adds what a record is paid at its own turn, such as
``invalid``. So

    code    planner, coder_i        R_i - R_(i-1), with R_(-1) = 0
            reflection_i            R_(i+1) - R_i
    M-ASK   plan, answer_i          F1 of the own answer
            search_i, summary_i, update_i    F1_i - F1_(i-1); 0 for a search that ends

Each record is an episode of one completion. With discount 0 its advantage is r - V for every lambda of GAE, where V is
the value head's estimate of the prompt. The update is PPO's clip at .2, with the squared error of the value head.
``pay="team"`` pays every record the team's reward of the whole episode, ``team_reward``. It is the control, and the
form for workflows that have a final reward alone.

Kept: the above, from the authors' code of M-ASK, with the weight 1 of a malformed record. Its map of roles to models is
`configs.unitymas_o.split`. Inferred: the code workflow's rules for trees, where a change is a mean over what follows.
Changed: a value is an estimate of a prompt, where the authors' critics estimate each token. Advantages are whitened by
role and turn. The M-ASK of `facts` has one round of at most seven turns (`envs/facts/mask.py`), an update that may
replace several steps, and no extra final answer. A reflection is a change of the program in two or three signs
(`envs/programs/reflect.py`). Dropped: engines of their own for each model.

Claims are stated in `experiments.claims.unitymas_o`, and what holds of them is in docs/systems.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import one_of
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.differences import PayRecords, PayTeam
from jaxmarl_llm.credit.rules import CreditRule, chain
from jaxmarl_llm.envs.contract import Environment, need_roles, roles_of
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.actor_critic import CriticAdvantage
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import ActorCritic
from jaxmarl_llm.training.losses import Loss

PAYS = ("records", "team")


@dataclass(frozen=True)
class Config(ActorCritic):
    """Configuration of UnityMAS-O."""

    recipe: str = "unitymas_o"
    pay: str = "records"  # each record its own reward (records), or the team's reward (team)
    score: str = "score"  # reward component that has the scores
    scored: tuple[str, ...] = ("answerer",)  # roles whose scores are compared
    absolute: tuple[str, ...] = ("planner", "answerer")  # roles that are paid their own score
    team_reward: str = "f1"  # reward component that every record is paid with pay="team"
    gae_lambda: float = 0.95
    team: TeamConfig = TeamConfig(critic="head", max_new_tokens=12)
    env: EnvConfig = EnvConfig("facts", {"protocol": "mask"})
    reward: dict[str, float] = field(default_factory=lambda: {"invalid": 1.0})  # of a record, beside score or change
    credit: Credit = Credit(discount=0.0, group="task_role_turn", normalise="none")
    loss: Loss = Loss(clip_low=0.2, clip_high=0.2, value_coef=0.5)

    def check(self, path: str) -> None:
        super().check(path)
        self.check_critic(path, ("head", "separate"))
        one_of(f"{path}.pay", self.pay, PAYS)
        if self.pay == "records":
            if not self.scored:
                raise ConfigError(f"{path}.scored: expected one or several roles, got none")
            for name in ("scored", "absolute"):
                need_roles(f"{path}.{name}", self.env.name, self.env.roles(), getattr(self, name))


def paid(cfg: Config, roles: tuple[str, ...]) -> CreditRule:
    """The return rule that pays the records.

    Args:
        cfg: Who is paid what.
        roles: Names of the environment's roles.
    """
    if cfg.pay == "team":
        return PayTeam(cfg.team_reward, "config.team_reward")
    places = lambda names: tuple(map(roles.index, names))
    return PayRecords(cfg.score, places(cfg.scored), places(cfg.absolute), "config.score")


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each task."""
    return flat(cfg.group)


def algorithm(cfg: Config, env: Environment | None = None) -> Algorithm:
    """Rewards of records, and advantages from the critics of ``cfg.team``.

    Args:
        cfg: The configuration.
        env: An environment in place of the one that ``cfg.env`` names.
    """
    names = cfg.env.roles() if env is None else roles_of(env)
    rewards = paid(cfg, tuple(names))
    _, *compare = standard_rule(cfg.credit).rules  # the rule on rewards takes the place of the return
    return Algorithm(chain(rewards, *compare), cfg.reward, critic=CriticAdvantage(cfg, rewards))


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    made = algorithm(cfg, env)
    return phases.make_recipe(cfg, make_plan(cfg), made, env=env, critic_optimizer=cfg.critic_optimizer)
