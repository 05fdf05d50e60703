"""CoMAM: an extractor, a profiler and a retriever share a memory and the reward of the answer (arXiv 2603.12631).

The extractor reads a stream and keeps statements. The profiler makes a profile of what was kept. The retriever quotes
the entries that a question needs, and the answer is read off (`envs/facts/remember.py`). A team plays ``group``
episodes of each task. Agent n is paid

    r = r_n + w_n r_ans       r_ans = 1 for a right answer
                              r_extractor = .8 recall + .2 overlap of what is kept
                              r_profiler  = 1 for a right profile
                              r_retriever = .2 recall + .8 overlap of what is quoted

    w = softmax(v)            v_n = NDCG of the task's episodes, ordered by r_n, with ranks by r_ans as relevance

``reward`` weighs the components of r_ans, and ``local_reward`` those of r_n. Overlap is the intersection over the
union. Each agent has a GRPO of its own, with PPO's clip. Its advantages are (r - mean) / std over the episodes of a
task, at one turn of one role. Weights have no gradient.

All turns of the extractor have the return of its episode, and read the same statements in all episodes of a task. The
profiler and the retriever read what was written in their own episode. So an agent may earn more because of the one
before it: a short store has an easy profile.

Kept: the above, with G = 8. Inferred: ranks ascend from 0, so that the reverse of four episodes has v = .6138. With
ranks from 1 it would be .7489. Chosen: equal rewards of answers have the mean of their ranks. With an argsort, v of
binary answers depends on the order of rows: .943 and .989 were seen for one group. Equal local rewards have the mean of
their discounts. Changed: a rule judges profiles, in place of a language model, and a rule reads the answer off.

Little is to be expected of the weights. Over random orders of eight different rewards, v is .80 +- .09, and v is never
below .607. So no weight is more than 1.5 times another.

``weights="uniform"`` takes 1/3 for each agent, and ``weights="none"`` local rewards alone. These are the controls.
Claims are stated in `experiments.claims.comam`, and what holds of them is in docs/systems.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import at_least, finite, one_of
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.ranks import WEIGHTS, WeighByRanks
from jaxmarl_llm.credit.rules import CreditRule, chain
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm, unequal_groups
from jaxmarl_llm.training.config import BaseConfig

LOCAL = {
    "kept_recall": 0.8,
    "kept_overlap": 0.2,
    "profile": 1.0,
    "found_recall": 0.2,
    "found_overlap": 0.8,
}


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of CoMAM."""

    recipe: str = "comam"
    group: int = 8  # G episodes of each task
    team: TeamConfig = TeamConfig(max_new_tokens=13)
    env: EnvConfig = EnvConfig("facts", {"protocol": "remember"})
    reward: dict[str, float] = field(default_factory=lambda: {"answer": 1.0})  # weights of the components of r_ans
    local_reward: dict[str, float] = field(default_factory=lambda: dict(LOCAL))  # weights of the components of r_n
    weights: str = "ranks"  # w: ranks, uniform (1 / number of roles), or none (0)
    credit: Credit = Credit(group="task_role_turn")

    def check(self, path: str) -> None:
        super().check(path)
        at_least(f"{path}.group", self.group, 2)
        one_of(f"{path}.weights", self.weights, WEIGHTS)
        if not self.local_reward:
            raise ConfigError(f"{path}.local_reward: expected weights of reward components, got none")
        for name, weight in self.local_reward.items():
            finite(f"{path}.local_reward.{name}", weight)


def rule(cfg: Config) -> CreditRule:
    """Local rewards plus the weighted reward of the answer, compared as ``cfg.credit`` says. ``cfg``: settings."""
    paid = WeighByRanks(tuple(cfg.local_reward.items()), cfg.weights, "config.local_reward")
    return chain(paid, *standard_rule(cfg.credit).rules)


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each task."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Advantages of `rule`; groups of equal returns are left out. ``cfg``: the configuration."""
    return Algorithm(rule(cfg), cfg.reward, select=unequal_groups)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
