"""Search-R2: an actor searches and answers, a refiner cuts its trace, and the actor goes on (arXiv 2602.03647).

One model plays both roles. The actor writes searches and an answer. The refiner reads this trace, and accepts it or
cuts it before search k. Then the environment goes back to its state before search k, and the actor goes on from there
(`envs/facts/refine.py`). The tokens of the kept prefix stay the same. With u_i = 1 where search i of the final trace
returns a fact of the gold path, an episode is worth

    R = EM (1 + mean of u_i)                  u 1011: 1.75;  u 0000: 1;  EM = 0: 0

to both roles. ``reward`` weighs the two terms, ``em`` and ``density``. Without ``density`` it is EM alone.

GRPO plays ``group`` episodes of each question. The advantage is (R - mean) / std over these episodes. Each episode
counts once, and all its completions have one advantage, those of the refiner included. Completions that the refiner
cut off are not trained (`final_trace`). PPO's clip.

Kept: the above. Changed: a refiner writes one character. In the paper it accepts where a score reaches a threshold.
Inferred: evidence is a fact of the gold path, and there is no KL.

Claims are stated in `experiments.claims.search_r2`, and what holds of them is in docs/systems.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.credit.advantages import roots
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.envs.contract import Environment, need_roles
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.plans import Plan, flat
from jaxmarl_llm.runs import phases
from jaxmarl_llm.training.algorithm import Algorithm, unequal_groups
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.types import Array, Tree

NEEDED = ("actor", "refiner")
DROPPED = ("dropped_from", "dropped_to")  # components: the turns that the final trace leaves out


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of Search-R2."""

    recipe: str = "search_r2"
    group: int = 8  # episodes of each question
    team: TeamConfig = TeamConfig(parameter_sharing="shared", max_new_tokens=3)
    env: EnvConfig = EnvConfig("facts", {"protocol": "refine"})
    reward: dict[str, float] = field(default_factory=lambda: {"em": 1.0, "density": 1.0})
    credit: Credit = Credit(group="task", stats_over="episodes")
    loss: Loss = Loss(clip_low=0.2, clip_high=0.2)

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (a group compares samples), got {self.group}")
        need_roles(f"{path}.env", self.env.name, self.env.roles(), NEEDED)


def final_trace(key: Array, tree: Tree, trained: Bool[Array, " C"]) -> Bool[Array, " C"]:
    """Leave the completions that were cut off out of the loss. A function for ``select_steps`` of `Algorithm`.

    The refiner's turn pays `DROPPED`: the final trace leaves out the turns from the first to before the second.

    Args:
        key: Not read.
        tree: The rollout, whose episodes are chains.
        trained: Completions that would be trained [C].
    """
    moves, size = tree.transitions, len(trained)
    episode = roots(moves.parent)
    of_episode = lambda paid: jax.ops.segment_max(paid.max(axis=1), episode, len(episode))[episode]
    begin, end = (of_episode(jnp.asarray(moves.rewards[name])) for name in DROPPED)
    dropped = (moves.turn >= begin) & (moves.turn < end)
    seats = jnp.where(moves.steps < 0, size, moves.steps)  # out of range: no seat
    rows = jnp.broadcast_to(dropped[:, None], seats.shape)
    return trained & ~jnp.zeros(size, bool).at[seats].max(rows, mode="drop")


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each question."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Group-relative advantages of ``cfg.credit``, and a loss on the completions of final traces."""
    return Algorithm(standard_rule(cfg.credit), cfg.reward, select=unequal_groups, select_steps=final_trace)


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    recipe = phases.make_recipe(cfg, make_plan(cfg), algorithm(cfg), env=env)
    paid = recipe.env_runner.env.components
    for name in DROPPED:
        if name not in paid:
            raise ConfigError(f"config.env: the environment pays no {name!r}; it pays {', '.join(paid)}")
    return recipe
