"""Chain-of-Agents, AFM: what a team did becomes one sequence that one model learns, and then RL (arXiv 2508.13167).

The source team is a planner, a searcher and an answerer. The agent does all of it alone. Both answer the same questions
with the same searches allowed (`envs/facts/tags.py`). Stage 0 teaches all four roles from imperfect demonstrators
(``sft``). Then

    1. the source team learns by GRPO, for ``source_steps`` RL steps; the agent does not play
    2. the source team plays ``harvested`` training tasks once each. Every right episode is told as one tagged
       sequence, as the agent would have written and read it. The agent imitates these sequences (``imitation``)
    3. the agent learns by GRPO, for ``steps`` RL steps; the team does not play

Only what a role wrote is learned in 2 and 3. Observations are what searches returned, and carry no loss. In 2 a mask
over the sequence says who wrote a token. In 3 the engine samples segments, and observations are parts of prompts.

In 1 and 3 ``group`` episodes of each question are played. R is the answer (``em``). A completion has its episode's
advantage, (R - mean) / std. Groups of equal rewards are left out. PPO's clip.

Two teams take part in one run. Their roles are roles of one environment, which is played in two forms: one for the
source team, one for the agent. So both forms have the same models, and a phase trains the models whose roles act.
Evaluations show the agent's form, and the team's as ``source_...``. A resumed run plays the episodes of 2 again: until
the end of 2 the models of the source team stay as 1 left them.

Kept: one model in place of a team, distilled from the team's right trajectories, and RL on the answer without groups
of equal rewards. Changed: the agent's tags are plan, search and answer. The paper's are more, such as reflection, and
its trajectories are filtered further. Inferred: GRPO as the objective, where the paper has DAPO for some tasks and PPO
for others. Inferred too are the source team's training by RL, and the end of an episode at a segment outside of the
grammar. Not in the paper: the agent's stage 0. It stands for a pretrained model that knows the tags. Its demonstrators
make most mistakes that can be made.

Claims are stated in `experiments.claims.afm`, and what holds of them is in docs/systems.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import at_least
from jaxmarl_llm.credit.assign import Credit, standard_rule
from jaxmarl_llm.distributed.sharding import to_host
from jaxmarl_llm.envs.contract import Environment, need_roles
from jaxmarl_llm.envs.facts.tags import AGENT, MARKS, ROLES
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.env_runner import Demonstrations
from jaxmarl_llm.rollout.keys import TASKS, stream
from jaxmarl_llm.rollout.plans import Plan, flat, single
from jaxmarl_llm.runs import phases
from jaxmarl_llm.runs.ahead import no_programs
from jaxmarl_llm.training.algorithm import Algorithm, Driver, unequal_groups
from jaxmarl_llm.training.config import BaseConfig, Offline
from jaxmarl_llm.training.harvest import as_sequence, harvest
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.training.supervised import make_imitation
from jaxmarl_llm.types import Array, Team, TrainState, Tree

RIGHT = "em"  # component: 1 at the end of a right episode
ON_HOST = "what its source team played becomes sequences on the host"


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of AFM."""

    recipe: str = "afm"
    group: int = 8  # episodes of each question
    source_steps: int = 100  # RL steps of the source team
    harvested: int | None = None  # training tasks that the source team plays for the agent; None: all
    imitation: Offline = Offline(steps=200)
    team: TeamConfig = TeamConfig(max_new_tokens=10)
    env: EnvConfig = EnvConfig("facts", {"protocol": "tags"})
    reward: dict[str, float] = field(default_factory=lambda: {RIGHT: 1.0})
    credit: Credit = Credit(group="task", stats_over="episodes")

    def check(self, path: str) -> None:
        super().check(path)
        at_least(f"{path}.group", self.group, 2)
        at_least(f"{path}.source_steps", self.source_steps, 0)
        if self.harvested is not None:
            at_least(f"{path}.harvested", self.harvested, 1)
        for key, value in {"past.size": self.past.size, "staleness": self.staleness}.items():
            if value:
                raise ConfigError(f"{path}.{key}: expected 0, got {value}: two teams play in phases of their own")
        need_roles(f"{path}.env", self.env.name, self.env.roles(), ROLES)


def form(cfg: Config, players: str) -> EnvConfig:
    """The environment of ``cfg`` as ``players`` play it, "team" or "agent"."""
    args = cfg.env.args
    return replace(cfg.env, args={**args, "tags": {**args.get("tags", {}), "players": players}})


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` episodes of each question."""
    return flat(cfg.group)


def algorithm(cfg: Config) -> Algorithm:
    """Group-relative advantages of ``cfg.credit``; groups of equal returns are left out."""
    return Algorithm(standard_rule(cfg.credit), cfg.reward, select=unequal_groups)


def right(tree: Tree) -> Array:
    """The transitions [J] bool that end a right episode of ``tree``, a rollout on the host."""
    moves = tree.transitions
    return np.asarray(moves.valid & (moves.rewards[RIGHT].max(axis=1) > 0))


def sequences(tree: Tree) -> Demonstrations:
    """The right episodes of the source team, as the agent would have written them.

    Args:
        tree: A rollout of the source team, on the host.

    Raises:
        ConfigError: No episode is right.
    """
    return harvest(tree, right(tree), lambda path: as_sequence(path, [ord(MARKS[AGENT])]))


def play_source(cfg: Config, source: phases.Recipe, state: TrainState) -> Demonstrations:
    """`sequences` of ``cfg.harvested`` training tasks, which the source team plays once each.

    Args:
        cfg: The configuration.
        source: The recipe whose environment is the source team's.
        state: State with the source team's parameters as RL left them.

    Raises:
        ConfigError: No episode is right.
    """
    runner, version = source.env_runner, cfg.sft.steps + cfg.source_steps
    count = min(cfg.harvested or runner.size, runner.size)
    tasks = np.asarray(shuffled(stream(cfg.seed, TASKS), runner.size, 0, count)).tolist()
    key = jax.random.fold_in(state.key, version)
    played = runner.play(
        source.team, state.params, state.memory, tasks, single(), key, cfg.sampling, None, version=version
    )
    tree = to_host(played.tree)
    if not right(tree).any():
        why = f"none of the {count} episodes that the source team played is right, so no episode is kept for imitation"
        raise ConfigError(f"config.source_steps: {why}; expected more steps of it, or of sft")
    return sequences(tree)


def imitation(cfg: Config, source: phases.Recipe, team: Team) -> phases.Phase:
    """The phase in which the agent imitates what the source team played.

    Args:
        cfg: The configuration.
        source: The recipe whose environment is the source team's.
        team: Roles and models of both.
    """
    imitation = make_imitation(team, cfg.imitation)
    held: dict[str, Demonstrations] = {}

    def step(driver: Driver, state: TrainState, i: int) -> tuple[TrainState, Any]:
        if not held or i == 0:
            with driver.stage("rollout"):
                held[ROLES[AGENT]] = play_source(cfg, source, state)
        with driver.stage("update", "imitation"):
            return imitation.step(driver, state, i, held)

    def metrics(result: Mapping[str, Any]) -> dict[str, float]:
        kept = held[ROLES[AGENT]]
        assert kept.loss_mask is not None
        figures = {"episodes": len(kept.length), "learned_tokens": kept.loss_mask.sum()}
        named = {f"data/{ROLES[AGENT]}/{name}": float(value) for name, value in figures.items()}
        return imitation.metrics("imitation", result) | named

    return phases.Phase(cfg.imitation.steps, imitation.learners, step, metrics, on_host=ON_HOST, name="imitation")


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the agent's form of the one that ``cfg.env`` names."""
    plan, rule = make_plan(cfg), algorithm(cfg)
    agent = phases.make_recipe(replace(cfg, env=form(cfg, "agent")), plan, rule, env=env)
    untaught = replace(cfg.sft, steps=0)
    source = phases.make_recipe(replace(cfg, env=form(cfg, "team"), steps=cfg.source_steps, sft=untaught), plan, rule)
    team = agent.team
    if agent.env_runner.env.roles != ROLES:
        raise ConfigError(f"config.env: expected an environment with the roles {', '.join(ROLES)}")
    for role in team.roles[:AGENT]:
        if set(role.players) & set(team.roles[AGENT].players):
            raise ConfigError(f"config.team: expected a model of its own for {ROLES[AGENT]}, which {role.name} shares")
    stage_0, rl = agent.phases
    of_source = source.phases[-1]._replace(name="source team")

    def evaluate(state: TrainState) -> dict[str, float]:
        of_team = source.evaluator(state).items()
        return agent.evaluator(state) | {f"eval/source_{name.removeprefix('eval/')}": x for name, x in of_team}

    steps = (stage_0, of_source, imitation(cfg, source, team), rl)
    return replace(agent, phases=steps, evaluator=evaluate, ahead=no_programs)
