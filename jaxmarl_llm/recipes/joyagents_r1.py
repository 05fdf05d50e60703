"""JoyAgents-R1: joint evolution of a master and specialists (arXiv 2506.19846; v2: HiMA-R1, with VR-GRPO).

Stage 0 fine-tunes every agent on its own samples, memory-bearing ones included. Then each step

    1. plays node-wise: one base trajectory a task, G samples at each of its nodes (G_1 + ... + G_k, section 3.2)
    2. credits each node's samples against their siblings, R = R_A + R_F - R_E
    3. selects the K groups of largest reward variance of each task: where an update has the most marginal benefit
    4. updates the models that own a selected group, on those groups alone; the others stay bit-identical
    5. evolves every agent's memory by R_A + R_F of the same rollout

The authors have published no code. Section 3 of the paper, which defines the method, could not be read: the sources are
its abstracts and its reviews. "Kept" therefore means kept from those.

Kept: the above, K = 5, thresholds at 2.5 and 97.5 % of a normal of the rewards, and alpha = beta = 1. Also kept: one
additive reward R_A + R_F - R_E for the policy and R_A + R_F for the memory (`dispatch`). On `assistant` form and
efficiency are paid in proportion to accuracy, and memory learns from R_A alone; ``env.args.reward="sum"`` is the
paper's sum there.

Chosen, because no source states it:

- node: the base trajectory's action is one of its node's G samples. G is a number for each turn and does not adapt to
  the node.
- return: alternatives are played to the end by the current policies (``continuation="local"``: scored by the
  environment's verifier instead). Their single continuation steps are not trained on. A sample's return is the mean
  over its node's children, so what lies behind a base action is an average of G.
- loss: advantages (R - mean) / (std + eps) per node, population std; PPO clip 0.2. There is no KL, although the
  abstract calls the method a variant of GRPO, whose original form has one.
- selection: K counts nodes of one task (``selection_scope="batch"``: of the batch), not agents. A group has two
  samples at least and a variance above 0. With at most K nodes a task, as in the tiny variant (3 nodes, K = 5), it
  selects every group that has a variance.
- sizes: group size, learning rate, memory size, and the number and form of retrieved entries.
- memory: every rule of agents/memory.py beyond those named above. The normal is fitted to the whole history of an
  agent's rewards, and thresholds are clipped to the least and largest reward. For rewards of 0 and 1 the upper
  threshold is therefore the best reward seen whenever the success rate is above 1 / (1 + 1.96^2) = 0.21. The lower one
  is the worst whenever it is below 0.79.

Dropped: nothing that those sources name. What section 3 says beyond them is unknown here, so more may be missing. On
`dispatch`, the demo, no agent has tools; `assistant` has the master and four specialists with tools and ReAct turns.
The scales of the rewards are the environments'. The paper's models and data were not at hand.

Expected: on `dispatch`, from a success of at most 0.60 after stage 0 to at least 0.90 (`make demo`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import jax
from jaxtyping import Array

from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.config import one_of
from jaxmarl_llm.credit.assign import Credited, standard_rule
from jaxmarl_llm.credit.selection import top_k_variance
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat, node_wise, product
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm
from jaxmarl_llm.training.config import BaseConfig

PLANS = ("node_wise", "flat", "product")


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of JoyAgents-R1."""

    recipe: str = "joyagents_r1"
    plan: str = "node_wise"  # or flat, product: for comparison
    group: int | tuple[int, ...] = 4  # G of a node; a tuple gives one a turn
    continuation: str = "continue"  # of a node's alternatives: continue, or local
    selected_groups: int | None = 5  # K; None: all with a variance
    selection_scope: str = "task"  # selected_groups of each task, or of the whole batch
    use_memory: bool = True  # put entries of an adaptive memory into prompts, and evolve it
    memory: MemoryConfig = MemoryConfig()
    # component -> weight of the reward that memory learns from
    memory_reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0, "format": 1.0})

    ALIASES: ClassVar[dict[str, str]] = {"scope": "selection_scope", "top_k": "selected_groups"}

    def check(self, path: str) -> None:
        super().check(path)
        sizes = self.group if isinstance(self.group, tuple) else (self.group,)
        if not sizes or min(sizes) < 1 or max(sizes) < 2:
            raise ConfigError(f"{path}.group: expected sizes >= 2 (a group compares samples), got {self.group}")
        if self.selected_groups is not None and self.selected_groups < 1:
            raise ConfigError(f"{path}.selected_groups: expected >= 1 or None for all, got {self.selected_groups}")
        one_of(f"{path}.selection_scope", self.selection_scope, ("task", "batch"))
        one_of(f"{path}.plan", self.plan, PLANS)
        one_of(f"{path}.continuation", self.continuation, ("continue", "local"))
        if self.plan != "node_wise" and len(sizes) > 1:
            raise ConfigError(f"{path}.group: expected one size for plan {self.plan!r}, got {self.group}")
        if self.continuation == "local" and self.plan == "node_wise" and self.credit.discount:
            raise ConfigError(f"{path}.credit.discount: expected 0 with continuation=local: verdicts do not add up")
        make_plan(self)


def make_plan(cfg: Config) -> Plan:
    """Plan that ``cfg.plan`` names."""
    if cfg.plan == "node_wise":
        return node_wise(cfg.group, cfg.continuation)
    size = cfg.group[0] if isinstance(cfg.group, tuple) else cfg.group
    return flat(size) if cfg.plan == "flat" else product(size)


def select(cfg: Config) -> Callable[[Credited, int], Array]:
    """Selection of the groups of marginal benefit: largest variance, at least two members, variance above 0.

    ``cfg``: its ``selected_groups`` and ``selection_scope`` say how many groups.
    """

    def top_groups(credited: Credited, num_tasks: int) -> Array:
        scope, scopes = (credited.group_task, num_tasks) if cfg.selection_scope == "task" else (None, 1)
        eligible = credited.stats.count >= 2
        return _top_k(credited.stats.variance, eligible, cfg.selected_groups, scope=scope, num_scopes=scopes)

    return top_groups


_top_k = jax.jit(top_k_variance, static_argnames=("k", "num_scopes"))


def algorithm(cfg: Config) -> Algorithm:
    """Group-relative advantages of ``cfg.credit``, selection of groups, and the adaptive memory."""
    return Algorithm(
        standard_rule(cfg.credit),
        cfg.reward,
        select=select(cfg),
        memory=cfg.memory if cfg.use_memory else None,
        memory_reward=cfg.memory_reward,
    )


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    return phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
