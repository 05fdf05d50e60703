"""HILA: a policy answers itself, has an answer made, or defers to an expert; two loops (arXiv 2603.07972).

Stage 0 imitates random choices (``sft``). Two peers have answered a question. The chooser takes one of their answers,
has a new one created, or defers to an expert. No choice is sampled in training. Every choice of the menu is played, and
the policy scores it.

Inner loop, a policy gradient on the choices:

    R = accuracy - .1 create - .3 defer
    A = R - mean of R over the menu             clip .2, KL .02, entropy .001

Outer loop, in the same update: the policy draws one choice of each menu. Where it is to defer, the role that creates
imitates the expert's answer:

    ``-imitation * mean over tokens of these answers of log pi(token)``

An expert's token has no other gradient: no ratio, no clip, no advantage. An answer that the expert does not give is not
imitated. The choice to defer then has an unknown return, and is left out of its menu.

``imitation=0`` is the inner loop alone. `defer` with ``planted`` has no role that creates, so there is no outer loop
there. With ``menu_weights="by_policy"`` the choices of a menu are weighted by the policy's probabilities, in the mean
and in the loss (`credit.menus`).

Kept: enumerated actions, the mean over them as baseline, the costs, clip, KL and entropy, and an outer loop on the
deferred questions alone. Changed: peers and expert are functions with planted accuracy. Questions are drawn alike from
all types. HILA composes its batches of groups with equal and mixed answers, 1 to 3. The outer loop runs in every step,
on the answers of that step. The expert is planted, or outside: a function or an endpoint (``env.args.asked``).

Measured on `defer` (docs/systems.md): the return of the choices is above that of the best fixed one. After 100 steps
they are not the oracle's on all types in every seed, and after 200 steps with ``by_policy`` they are. With the outer
loop deferral falls in every seed. Whether by as much as was claimed is not decided. `experiments.studies.defer_bounds`
computes the best choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Bool, Float

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import at_least, one_of
from jaxmarl_llm.credit.assign import Credited
from jaxmarl_llm.credit.menus import WEIGHTS, MenuRelative, policy_choices
from jaxmarl_llm.credit.rules import CreditRule, PerCompletion, ReturnToGo, chain
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.rollout.plans import Plan, menu
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.imitation import Imitation
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.types import Array, Tree


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of HILA."""

    recipe: str = "hila"
    menu: tuple[str, ...] = ("1", "2", "c", "d")  # what the role of the first turn may choose
    menu_weights: str = "alike"  # of the choices of a menu: alike or by_policy
    imitation: float = 1.0  # coefficient of the outer loop; 0: without it
    team: TeamConfig = TeamConfig(parameter_sharing="shared", max_new_tokens=1)
    env: EnvConfig = EnvConfig("defer")
    reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0, "create": -0.1, "defer": -0.3})
    loss: Loss = Loss(kl_coef=0.02, entropy_coef=0.001)

    def check(self, path: str) -> None:
        super().check(path)
        one_of(f"{path}.menu_weights", self.menu_weights, WEIGHTS)
        at_least(f"{path}.imitation", self.imitation, 0)


def make_plan(cfg: Config) -> Plan:
    """Plan: every choice of ``cfg.menu`` at the first turn."""
    return menu(cfg.menu)


def rule(cfg: Config) -> CreditRule:
    """The return of each choice, compared within its menu. ``cfg``: its ``menu_weights`` are read."""
    return chain(ReturnToGo(), PerCompletion(), MenuRelative(cfg.menu_weights))


def menus(credited: Credited, num_tasks: int) -> Bool[Array, " K"]:
    """Select the groups that are menus: those of several completions.

    Args:
        credited: Advantages, and statistics of the K groups.
        num_tasks: Not read.
    """
    return credited.stats.count > 1


def deferred(key: Array, tree: Tree) -> Float[Array, " C"]:
    """1 for the completions behind a choice that the policy draws from its menu, else 0.

    Args:
        key: Random key of the draws.
        tree: The rollout.
    """
    chosen, moves = policy_choices(key, tree), tree.transitions
    before = tree.nodes.parent[tree.steps.node]  # the transition that led to the completion's node
    choice = moves.steps[before, 0]
    return 1.0 * ((before >= 0) & (choice >= 0) & chosen[choice])


def algorithm(cfg: Config) -> Algorithm:
    """Both loops: see the top of this file. ``cfg``: the configuration."""
    imitate = Imitation(cfg.imitation, deferred) if cfg.imitation else None
    return Algorithm(rule(cfg), cfg.reward, select=menus, imitate=imitate)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
