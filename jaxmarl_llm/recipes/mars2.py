"""MARS^2: two models grow one tree of programs for each task, and both learn (arXiv 2604.14564).

`rollout.plans.grow` makes ``expansions`` attempts a task with protocol `refine` of `programs`. A choice by Thompson
sampling names the attempt to go on from, and the model that writes the next one (`rollout.choices`). Rewards r are the
share of hidden tests passed. They are shaped within the tree (`advantages.sibling_shaping`):

    b = (1 - lambda) r_parent + lambda mean of the siblings,    R = r + gamma (r - b),    gamma = lambda = 0.5
    A = (R - mean) / (std + 1e-9) over all attempts of the tree

The loss has the ratio of whole sequences (GSPO), importance weights truncated at 2, and the KL estimator k3 with weight
1e-3. A model learns from its own attempts alone. A tree of equal rewards trains nobody.

Kept: the above, with the constants of the authors' scripts. Chosen: the population's standard deviation, rewards before
shaping in b, and the clip of the ratio at 0.2. ``shaped_parents`` shapes from the root down, as the authors' code does.
Inferred: what a draw of the choice counts, see `choices.thompson`. Controls: ``strength=0``, and ``choose`` as uniform,
as last (a chain of refinements) or as root (independent attempts). Claims are stated in `experiments.claims.mars2`, and
what holds of them is in docs/systems.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import at_least, in_range, one_of
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.credit.rules import Chain, ShapeBySiblings, chain
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout import choices
from jaxmarl_llm.rollout.plans import Plan, grow
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm, unequal_groups
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.losses import Loss

CHOICES = {c.__name__: c for c in (choices.thompson, choices.uniform, choices.best, choices.last, choices.root)}
PARTNER = "partner"  # the second model of the role


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of MARS^2."""

    recipe: str = "mars2"
    expansions: int = 8  # attempts of a task, as many as turns of the environment
    choose: str = "thompson"  # how the next attempt is chosen: thompson, uniform, best, last or root
    strength: float = 0.5  # gamma: factor of the difference to parent and siblings
    mix: float = 0.5  # lambda: share of the siblings in what a reward is compared with
    shaped_parents: bool = False  # compare with the parent's shaped reward, as the authors' code does
    team: TeamConfig = TeamConfig(
        models={"coder": ("coder", PARTNER)}, overrides={PARTNER: Backbone()}, max_new_tokens=5
    )
    env: EnvConfig = EnvConfig("programs", {"protocol": "refine"})
    reward: dict[str, float] = field(default_factory=lambda: {"tests": 1.0})
    credit: Credit = Credit(group="task")
    loss: Loss = Loss(ratio_level="sequence", tis_clip=2.0, kl_coef=1e-3, kl_kind="k3")

    def check(self, path: str) -> None:
        super().check(path)
        one_of(f"{path}.choose", self.choose, tuple(CHOICES))
        at_least(f"{path}.expansions", self.expansions, 2)
        in_range(f"{path}.strength", self.strength, 0, 1)
        in_range(f"{path}.mix", self.mix, 0, 1)
        if self.credit.group != "task":
            raise ConfigError(f"{path}.credit.group: expected 'task', a tree, got {self.credit.group!r}")
        if self.credit.discount != 1:
            raise ConfigError(f"{path}.credit.discount: expected 1: an attempt has its own reward and no return-to-go")


def players(cfg: Config) -> int:
    """The number of models that play the role: 1 without an entry in ``cfg.team.models``."""
    own = next(iter(cfg.team.models.values()), "")
    return 1 if isinstance(own, str) else len(own)


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.expansions`` attempts of each task, which ``cfg.choose`` places."""
    return grow(cfg.expansions, CHOICES[cfg.choose](players(cfg)), tuple(cfg.reward.items()))


def rule(cfg: Config) -> Chain:
    """The chain of credit rules of ``cfg``: shaped rewards, compared within the tree."""
    _, *others = standard_rule(cfg.credit, eps=1e-9).rules  # in place of the return-to-go
    return chain(ShapeBySiblings(cfg.strength, cfg.mix, cfg.shaped_parents), *others)


def algorithm(cfg: Config) -> Algorithm:
    """Advantages of ``cfg`` within each tree; trees of equal shaped rewards are left out."""
    return Algorithm(rule(cfg), cfg.reward, select=unequal_groups)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
