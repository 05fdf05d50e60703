"""JoyAgents-R1: joint evolution of a master and specialists (arXiv 2506.19846; v2: HiMA-R1, with VR-GRPO).

Stage 0 fine-tunes every agent on its own samples, memory-bearing ones included. Then each step

    1. plays node-wise: one base trajectory a task, G samples at each of its nodes (G_1 + ... + G_k, section 3.2)
    2. credits each node's samples against their siblings, R = R_A + R_F - R_E
    3. selects the K groups of largest reward variance of each task: where an update has the most marginal benefit
    4. updates the models that own a selected group, on those groups alone; the others stay bit-identical
    5. evolves every agent's memory by R_A + R_F of the same rollout

Kept from the paper: the above, K = 5, thresholds at 2.5 and 97.5 % of a running normal, alpha = beta = 1.
Chosen where the paper is silent: the base trajectory's action is one of its node's G samples; alternatives are played
to the end by the current policies (``continuation="local"``: scored by the environment's verifier instead), and their
single continuation steps are not trained on; a sample's return is the mean over its node's children, so what lies
behind a base action is an average of G; advantages (R - mean) / (std + eps) per node; PPO clip 0.2, no KL; memory
rules of memory.py. Dropped: nothing we know of.

Expected: on `dispatch`, from a success of at most 0.60 after stage 0 to at least 0.90 (`make demo`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from jaxmarl_llm import phases
from jaxmarl_llm.arena import Played
from jaxmarl_llm.credit import Credited
from jaxmarl_llm.memory import MemoryConfig
from jaxmarl_llm.metrics import Logger
from jaxmarl_llm.plans import Plan, flat, node_wise, product
from jaxmarl_llm.selection import top_k_variance
from jaxmarl_llm.stages import BaseConfig, Run, credit, learn, remember
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import TrainState

PLANS = ("node_wise", "flat", "product")


@dataclass(frozen=True)
class Config(BaseConfig):
    recipe: str = "joyagents_r1"
    plan: str = "node_wise"  # or flat, product: for comparison
    group: int | tuple[int, ...] = 4  # G of a node; a tuple gives one a turn
    continuation: str = "continue"  # of a node's alternatives: continue, or local
    top_k: int | None = 5  # groups selected; None: all with a variance
    scope: str = "task"  # top_k groups of each task, or of the whole batch
    use_memory: bool = True
    memory: MemoryConfig = MemoryConfig()
    memory_reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0, "format": 1.0})

    def check(self, path: str) -> None:
        super().check(path)
        sizes = self.group if isinstance(self.group, tuple) else (self.group,)
        if not sizes or min(sizes) < 1 or max(sizes) < 2:
            raise ConfigError(f"{path}.group: expected sizes >= 2 (a group compares samples), got {self.group}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"{path}.top_k: expected >= 1 or None for all, got {self.top_k}")
        if self.scope not in ("task", "batch"):
            raise ConfigError(f"{path}.scope: expected task or batch, got {self.scope!r}")
        if self.plan not in PLANS:
            raise ConfigError(f"{path}.plan: expected one of {', '.join(PLANS)}, got {self.plan!r}")
        if self.plan != "node_wise" and len(sizes) > 1:
            raise ConfigError(f"{path}.group: expected one size for plan {self.plan!r}, got {self.group}")
        if self.continuation == "local" and self.plan == "node_wise" and self.credit.discount:
            raise ConfigError(f"{path}.credit.discount: expected 0 with continuation=local: verdicts do not add up")
        make_plan(self)


def make_plan(cfg: Config) -> Plan:
    if cfg.plan == "node_wise":
        return node_wise(cfg.group, cfg.continuation)
    size = cfg.group[0] if isinstance(cfg.group, tuple) else cfg.group
    return flat(size) if cfg.plan == "flat" else product(size)


def select(cfg: Config, credited: Credited, tasks: int) -> np.ndarray:
    """The marginal-benefit groups [K]: largest variance, two members at least, variance above 0."""
    scope, scopes = (credited.group_task, tasks) if cfg.scope == "task" else (None, 1)
    eligible = credited.stats.count >= 2
    return np.asarray(_top_k(credited.stats.variance, eligible, cfg.top_k, scope=scope, num_scopes=scopes))


_top_k = jax.jit(top_k_variance, static_argnames=("k", "num_scopes"))


def make(cfg: Config) -> phases.Recipe:
    remembers = cfg.memory if cfg.use_memory else None

    def improve(run: Run, state: TrainState, played: Played, tasks: int, logger: Logger) -> phases.Improved:
        team, arena = run.team, run.arena
        with logger.stage("reward"):
            credited = credit(cfg, team, arena, played, tasks, cfg.reward)
            selected = select(cfg, credited, tasks)
        with logger.first("update"), logger.stage("update"):
            trained = credited.valid & selected[credited.group]
            state, updated = learn(team, run.learners, cfg, state, played, credited.advantage, trained)
        metrics: dict[str, float] = {}
        if remembers is not None:
            with logger.first("memory"), logger.stage("memory"):
                kept = credit(cfg, team, arena, played, tasks, cfg.memory_reward)
                state, metrics = remember(team, arena, remembers, state, played, kept.returns, kept.valid)
        return phases.Improved(state, credited, selected, updated, metrics)

    return phases.make_recipe(cfg, make_plan(cfg), improve, remembers)
