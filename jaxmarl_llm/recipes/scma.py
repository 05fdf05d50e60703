"""SCMA: a segmenter and a scorer weigh the parts of a reasoner's text, and its length penalty (arXiv 2601.21919).

Stage 0 imitates demonstrators that write filler (``sft``). Then GRPO for each role plays ``group`` episodes of each
question. A reasoner writes steps, a segmenter parts the text, and a scorer gives each segment s a weight w of 1 to 5.
The reasoner is paid

    R = accuracy - alpha * sum |s| (1 - w/5) / sum |s|

so that it shortens what the scorer finds unimportant, and keeps its steps. The deployed form is the reasoner alone.

The weights have to mean something. A scorer that is paid R gains most with w = 5 everywhere, and then there is no
penalty. So segmenter and scorer are paid

    1 if the answer still follows without the segments of w <= 2, plus the share of tokens in these segments

``reward`` weighs what all roles are paid, and ``role_reward`` adds what one role is paid besides. Alpha is the weight
of ``penalty`` for the reasoner, with a minus sign. With ``role_reward={}`` all roles share one reward.

Kept: the three roles on one model, the weights 1 to 5, the penalty, GRPO for each role, rewards of the form. Changed:
the environment is `segments`, whose texts are sums. Inferred: the rewards of segmenter and scorer, the limit w <= 2,
alpha, and the penalty of a malformed completion.

Measured by experiments/claims/scma.py, against accuracy alone and against a uniform penalty.
`experiments.studies.segment_bounds` computes which lengths are possible.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax.numpy as jnp
from jaxtyping import Float

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import finite
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.returns import scalarise
from jaxmarl_llm.credit.rules import CreditRule, Signal, chain
from jaxmarl_llm.envs.contract import Environment, need_roles, roles_of
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.types import Array, Tree

Weights = tuple[tuple[str, float], ...]  # of reward components
JUDGED = {"follows": 1.0, "left_out": 1.0}  # what segmenter and scorer are paid


def own_rewards() -> dict[str, dict[str, float]]:
    """Rewards of each role besides ``reward``: role -> component -> weight."""
    reasoner = {"accuracy": 1.0, "penalty": -0.5}
    return {"reasoner": reasoner, "segmenter": dict(JUDGED), "scorer": dict(JUDGED)}


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of SCMA."""

    recipe: str = "scma"
    group: int = 8  # episodes of each question
    team: TeamConfig = TeamConfig(parameter_sharing="shared", max_new_tokens=26)
    env: EnvConfig = EnvConfig("segments")
    reward: dict[str, float] = field(default_factory=lambda: {"malformed": -0.2})
    role_reward: dict[str, dict[str, float]] = field(default_factory=own_rewards)  # role -> component -> weight
    credit: Credit = Credit(group="task_role")

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (a group compares samples), got {self.group}")
        need_roles(f"{path}.role_reward", self.env.name, self.env.roles(), tuple(self.role_reward))
        for role, weights in self.role_reward.items():
            for name, weight in weights.items():
                finite(f"{path}.role_reward.{role}.{name}", weight)


@dataclass(frozen=True)
class PayRoles:
    """Add rewards of single roles to the scalar reward of all. Goes before a return rule.

    Attributes:
        weights: Weights of components, for each role in the order of the environment's roles.
        names: Names of the roles, for error messages.
    """

    weights: tuple[Weights, ...]
    names: tuple[str, ...]

    def __call__(self, tree: Tree, signal: Signal) -> Signal:
        paid = tree.transitions.rewards
        for role, weights in zip(self.names, self.weights, strict=True):
            for name, _ in weights:
                if name not in paid:
                    key = f"config.role_reward.{role}"
                    raise ConfigError(f"{key}: the environment pays no {name!r}; it pays {', '.join(paid)}")
        columns: list[Float[Array, " J"]] = [
            scalarise(paid, dict(weights))[:, k] if weights else jnp.zeros(len(signal.reward))
            for k, weights in enumerate(self.weights)
        ]
        return signal.replace(reward=signal.reward + jnp.stack(columns, axis=1))


def rule(cfg: Config, names: tuple[str, ...]) -> CreditRule:
    """The reward of each role, compared within its group.

    Args:
        cfg: Its ``role_reward`` and its ``credit`` are read.
        names: Roles of the environment.
    """
    weights = tuple(tuple(cfg.role_reward.get(name, {}).items()) for name in names)
    return chain(PayRoles(weights, names), *standard_rule(cfg.credit).rules)


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each question."""
    return flat(cfg.group)


def algorithm(cfg: Config, env: Environment | None = None) -> Algorithm:
    """Advantages of each role's own reward, see `rule`.

    Args:
        cfg: The configuration.
        env: An environment in place of the one that ``cfg`` names.
    """
    return Algorithm(rule(cfg, tuple(cfg.env.roles() if env is None else roles_of(env))), cfg.reward)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg, env), env=env)
