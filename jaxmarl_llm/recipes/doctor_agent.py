"""DoctorAgent-RL: a doctor learns to question a frozen patient under a random budget of turns (arXiv 2505.19630).

Stage 0 imitates demonstrated consultations (``sft``). Then GRPO plays n = ``group`` consultations of each patient. A
consultation is worth the sum of its turn rewards and of its diagnosis,

    R = sum of question rewards + outcome         question: 1 valid, -1 unknown, -2 repeated, -2 malformed
    A = (R - mean) / std                          outcome: 0 to 5 for the diagnosis, -5 without one

The mean and the standard deviation are over the n consultations, each counted once. Every turn of a consultation has
the same advantage (`whole_episode`). PPO's clip keeps ratios in [0.8, 1.28]. ``reward`` weighs the components, so that
each can be switched off. What the patient says is a part of prompts, and only completions have a loss. So no gradient
comes from the patient's tokens.

Kept: the above, n = 8, an entropy bonus of 0.001. Changed: the patient is scripted (`consult`), in place of a frozen
language model. The budget is 2 to 6 turns and not 2 to 10. Inferred: the rank that makes a diagnosis worth 0 to 5.
The advice belongs to text: `consult_text` pays 0 or 5 for it, by ``reward["advice"]``. Its patients speak in sentences
from a written table. Dropped: the authors' data, MTMedDialog, which is not available offline.

Expected: on `consult` more right diagnoses than after stage 0. This has not been measured. What the best possible
doctor reaches is in `experiments.studies.consult_bounds`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.credit.advantages import roots
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.rules import CreditRule, Signal, chain
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.types import Tree

TURN_REWARDS = ("valid", "unknown", "repeated", "malformed")  # components of questions
OUTCOMES = ("exhausted", "diagnosis")


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of DoctorAgent-RL."""

    recipe: str = "doctor_agent"
    group: int = 8  # n consultations of each patient
    team: TeamConfig = TeamConfig(max_new_tokens=2)
    env: EnvConfig = EnvConfig("consult")
    reward: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*TURN_REWARDS, *OUTCOMES), 1.0))
    credit: Credit = Credit(group="task_role", stats_over="episodes")
    loss: Loss = Loss(clip_low=0.2, clip_high=0.28, entropy_coef=1e-3)

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (a group compares samples), got {self.group}")


def whole_episode(tree: Tree, signal: Signal) -> Signal:
    """Credit rule: give every transition the return of its episode's first one. It runs after `rules.ReturnToGo`.

    Args:
        tree: The rollout, whose episodes are chains.
        signal: With ``returns`` and ``known``.
    """
    assert signal.returns is not None and signal.known is not None, "whole_episode needs a return rule before it"
    first = roots(tree.transitions.parent)
    return signal.replace(returns=signal.returns[first], known=signal.known & signal.known[first])


def rule(credit: Credit) -> CreditRule:
    """The chain of credit rules: the standard one of ``credit``, with returns of whole episodes."""
    returns, *others = standard_rule(credit).rules
    return chain(returns, whole_episode, *others)


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each task."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Advantages of whole consultations, compared within each patient's group, by ``cfg.credit``."""
    return Algorithm(rule(cfg.credit), cfg.reward)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
