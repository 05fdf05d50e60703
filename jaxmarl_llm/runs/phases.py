"""How a run is composed: phases of steps with optimizers of their own, and the recipe that holds them.

Stage 0 (supervised) is the first phase of every run. `make_recipe` is the common case, rollouts and an `improve`
(`improve_groups`, `improve_critic`); `loop.fit` runs what is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxmarl_llm import memory, meshes, past
from jaxmarl_llm.arena import Arena, Played, make_arena
from jaxmarl_llm.credit import Credited, Weights
from jaxmarl_llm.diagnose import diagnose, episodes_of, evaluate
from jaxmarl_llm.memory import MemoryConfig
from jaxmarl_llm.metrics import Logger
from jaxmarl_llm.optimizers import Optimizer, to_memory
from jaxmarl_llm.plans import Plan
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.stages import PAST, PICK, SFT_LOSS, ActorCritic, BaseConfig, Run, appraise, credit, learn, offline_step
from jaxmarl_llm.team import init_params, make_team, with_past
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.train import Learner, make_learner, task_order
from jaxmarl_llm.types import Params, PyTree, Team, TrainState, Tree


class Improved(NamedTuple):
    """What a recipe made of a rollout."""

    state: TrainState
    credited: Credited
    selected: np.ndarray  # groups [K]
    updated: Mapping[str, Mapping[str, float]]  # model -> metrics of its update; absent: not updated
    metrics: Mapping[str, float]  # anything else, by the naming scheme of metrics.py


Improve = Callable[[Run, TrainState, Played, int, Logger], Improved]


class Recipe(NamedTuple):
    """A recipe ready to run. ``init(step)`` is the state's structure at ``step`` (its values at step 0); ``step`` takes
    the state one step on; ``evaluate`` and ``episodes`` read it.
    """

    team: Team
    arena: Arena
    total_steps: int
    init: Callable[[int], TrainState]
    step: Callable[[TrainState, Logger], tuple[TrainState, dict[str, float]]]
    evaluate: Callable[[TrainState], dict[str, float]]
    episodes: Callable[[], list[list[dict]]]


class Phase(NamedTuple):
    """Consecutive steps of a run, with one optimizer a model that is fresh at the first of them.

    ``step(state, i, logger)`` takes the state one step on, i counted within the phase. ``begin(agents)`` is what the
    parameters hold beside the agents from the phase's first step on.
    """

    steps: int
    learners: Mapping[str, Learner]  # by model
    step: Callable[[TrainState, int, Logger], tuple[TrainState, dict[str, float]]]
    begin: Callable[[Params], Params] = lambda agents: {}


def open_arena(cfg: BaseConfig) -> tuple[Arena, Team]:
    """The environment and team of a configuration; ConfigError for a reward that the environment does not pay."""
    arena = make_arena(cfg.env)
    unknown = sorted(set(cfg.reward) - set(arena.env.components))
    if unknown:
        raise ConfigError(
            f"config.reward: environment {arena.env.name!r} pays no {unknown[0]!r}; it pays "
            f"{', '.join(arena.env.components)}"
        )
    if cfg.team.stacked and not arena.array:
        raise ConfigError(f"config.team.stacked: expected false with the host environment {cfg.env.name!r}")
    return arena, make_team(cfg.team, arena.env.roles)


def make_phases(
    cfg: BaseConfig,
    team: Team,
    arena: Arena,
    phases: Sequence[Phase],
    *,
    context: int = 0,
    stores: Callable[[], PyTree] = dict,
    evaluate: Callable[[TrainState], dict[str, float]],
    episodes: Callable[[], list[list[dict]]] = list,
) -> Recipe:
    """Stage 0 for ``sft.steps``, then ``phases`` one after the other. ``stores()``: empty memories by role.

    ``context``: memory entries in demonstrations. ConfigError when the models do not fit the mesh of the configuration.
    """
    mesh = meshes.open_mesh(cfg.mesh, team.models)
    if isinstance(mesh, meshes.Split):
        beyond = {"env.name": arena.array, "team.critic": bool(team.critics), "past.size": bool(cfg.past.size)}
        for name, asked in beyond.items():
            if asked:
                raise ConfigError(f"config.mesh.models: expected 'all' with config.{name} as it is, got 'split'")
    tutors = {m.name: make_learner(m.policy, SFT_LOSS, cfg.sft.optimizer, Sampling()) for m in team.models}
    data = arena.demonstrations(team, cfg.sft.samples, cfg.seed, context) if cfg.sft.steps else {}

    def teach(state: TrainState, i: int, logger: Logger) -> tuple[TrainState, dict[str, float]]:
        with logger.first("supervised update"), logger.stage("update"):
            return offline_step(team, tutors, SFT_LOSS, data, cfg.sft, cfg.seed, state, i, name="sft")

    phases = [Phase(cfg.sft.steps, tutors, teach), *phases]
    starts = [sum(p.steps for p in phases[:k]) for k in range(len(phases))]

    def phase_of(step: int) -> int:
        """The phase of the step after ``step`` ones; the last phase beyond the end."""
        return next((k for k, p in enumerate(phases) if starts[k] <= step < starts[k] + p.steps), len(phases) - 1)

    def optimizers(phase: Phase, agents: Params) -> PyTree:
        def fresh(name: str) -> PyTree:
            learner = phase.learners[name]
            state = learner.init(agents[name])
            # A model at a time: all of them at once may be more than a device holds.
            return to_memory(state, "pinned_host") if learner.offload else state

        names = [m.name for m in team.models]
        return dict(zip(names, meshes.each(names, fresh), strict=True))

    def init(step: int) -> TrainState:
        params = init_params(cfg.team, team, jax.random.key(cfg.seed))
        for phase in phases:
            params |= phase.begin(params["agents"])
        last = phases[phase_of(max(step - 1, 0))]  # a state is as its last step left it
        state = TrainState(
            step=jnp.int32(0),
            key=jax.random.key(cfg.seed),
            params=params,
            opt_state=optimizers(last, params["agents"]),
            memory=stores(),
            counters={"skipped": jnp.int32(0)},
        )
        return meshes.settled(mesh, state)

    def step(state: TrainState, logger: Logger) -> tuple[TrainState, dict[str, float]]:
        now = int(state.step)
        k = phase_of(now)
        if now and now == starts[k]:
            agents = state.params["agents"]
            params = {**state.params, **phases[k].begin(agents)}
            state = state.replace(params=params, opt_state=optimizers(phases[k], agents))
        state, metrics = phases[k].step(state, now - starts[k], logger)
        return meshes.settled(mesh, state), metrics

    def there(function: Callable) -> Callable:
        """``function`` on the mesh of the run."""

        def call(*args: Any) -> Any:
            with meshes.on(mesh):
                return function(*args)

        return call

    total = sum(p.steps for p in phases)
    return Recipe(team, arena, total, there(init), there(step), there(evaluate), episodes)


def make_recipe(
    cfg: BaseConfig,
    plan: Plan,
    improve: Improve,
    memory_config: MemoryConfig | None = None,
    critic_optimizer: Optimizer | None = None,
) -> Recipe:
    """Stage 0, then for ``cfg.steps``: play a batch of tasks by ``plan``, ``improve`` on it.

    A loss that refers to another policy refers to the one that stage 0 ends with, kept as ``params["reference"]``.
    """
    arena, team = open_arena(cfg)
    if cfg.credit.scale == "std" and cfg.credit.centre != "mean":
        logging.warning(
            "config.credit.centre=%s has no effect with credit.scale=std: standardised advantages have mean 0",
            cfg.credit.centre,
        )
    plan.check(arena.env)
    if cfg.past.size and memory_config is not None:
        raise ConfigError("config.past.size: expected 0 with a memory: past policies have none")
    company = with_past(team) if cfg.past.size else team
    playing = {role.model for role in team.roles}
    chosen = {m.name: cfg.optimizer if m.name in playing else critic_optimizer or cfg.optimizer for m in team.models}
    learners = {m.name: make_learner(m.policy, cfg.loss, chosen[m.name], cfg.sampling) for m in team.models}
    run = Run(team, arena, learners)
    latest: dict[str, Any] = {}

    def stores() -> dict[str, memory.Memory]:
        if memory_config is None:
            return {}
        return {
            role.name: memory.init(
                memory_config,
                dim=team.model_of(i).policy.config.hidden_size,
                max_ids=arena.entry_tokens,
                max_bytes=arena.entry_bytes,
            )
            for i, role in enumerate(team.roles)
        }

    def begin(agents: Params) -> Params:
        """The reference policy, an empty ring of past ones."""
        out: Params = {}
        if cfg.loss.refers:
            out["reference"] = jax.tree.map(jnp.copy, agents)
        if cfg.past.size:
            out["past"] = past.init({role.model: agents[role.model] for role in team.roles}, cfg.past.size)
        return out

    def step(state: TrainState, i: int, logger: Logger) -> tuple[TrainState, dict[str, float]]:
        now, tasks = int(state.step), list(task_order(cfg.seed, arena.size, i * cfg.batch, cfg.batch))
        with logger.first(f"rollout {plan.name}"), logger.stage("rollout"):
            key = jax.random.fold_in(state.key, now)
            params, cast = state.params, None
            if cfg.past.size:
                own, seats = jax.random.split(jax.random.fold_in(key, PAST))
                params = {**params, "agents": past.draw(params["past"], params["agents"], own)}
                cast = past.cast(seats, len(tasks), len(team.roles), cfg.past.share)
            played = arena.play(
                company, params, state.memory, tasks, plan, key, cfg.sampling, memory_config, version=now, cast=cast
            )
        done = improve(run, state, played, len(tasks), logger)
        if cfg.past.size and (i + 1) % cfg.past.every == 0:
            params = done.state.params
            ring = past.push(params["past"], {name: params["agents"][name] for name in params["past"]["ring"]})
            done = done._replace(state=done.state.replace(params={**params, "past": ring}))
        latest.update(played=played, credited=done.credited, selected=done.selected)
        seen = diagnose(cfg, team, arena, played, done.credited, done.selected, done.updated)
        return done.state, {**seen, **done.metrics}

    return make_phases(
        cfg,
        team,
        arena,
        [Phase(cfg.steps, learners, step, begin)],
        context=0 if memory_config is None else memory_config.retrieve,
        stores=stores,
        evaluate=lambda state: evaluate(cfg, team, arena, state, memory_config),
        episodes=lambda: episodes_of(team, **latest, count=cfg.run.episodes) if latest else [],
    )


def improve_groups(
    cfg: BaseConfig,
    *,
    drop_equal: bool = False,
    learns: Callable[[int], Any] | None = None,
    weigh: Callable[[int], Weights] | None = None,
    pick: Callable[[jax.Array, Tree, Any], Any] | None = None,
) -> Improve:
    """Credit every step by ``cfg.credit`` and update every model on all of them.

    ``drop_equal``: groups of equal returns are left out of the loss and of its mean (DAPO's filter); otherwise they
    count as the zeros they are. ``learns``: RL step -> which roles learn [A] (None: all); a model of none of them stays
    as it is, optimizer state included. ``weigh``: RL step -> reward weights (None: ``cfg.reward``, which figures of the
    whole reward use in any case). ``pick``: (key, tree, credited steps [C]) -> those of them that are trained [C]
    (None: all), as `selection.one_round`; the others stay in the statistics of their groups.
    """
    draw = None if pick is None else jax.jit(pick)

    def improve(run: Run, state: TrainState, played: Played, tasks: int, logger: Logger) -> Improved:
        now = int(state.step) - cfg.sft.steps
        with logger.stage("reward"):
            weights = cfg.reward if weigh is None else weigh(now)
            credited = credit(cfg, run.team, run.arena, played, tasks, weights)
            selected = credited.stats.variance > 0 if drop_equal else credited.stats.count > 0
        with logger.first("update"), logger.stage("update"):
            trained = credited.valid & selected[credited.group]
            if draw is not None:
                key = jax.random.fold_in(jax.random.fold_in(state.key, int(state.step)), PICK)
                trained = trained & np.asarray(draw(key, played.tree, trained))
            if learns is not None:
                nodes = played.tree.nodes
                trained = trained & np.asarray(learns(now))[nodes.role[played.tree.steps.node]]
            state, updated = learn(run.team, run.learners, cfg, state, played, credited.advantage, trained)
        return Improved(state, credited, selected, updated, {})

    return improve


def improve_critic(cfg: ActorCritic) -> Improve:
    """Actor-critic: advantages by the team's critics (GAE), every model and critic updated."""

    def improve(run: Run, state: TrainState, played: Played, tasks: int, logger: Logger) -> Improved:
        with logger.first("critic"), logger.stage("reward"):
            credited = credit(cfg, run.team, run.arena, played, tasks, cfg.reward)
            gain, has, appraisals, metrics = appraise(cfg, run, state, played)
            credited = credited.replace(advantage=gain, valid=has)
        with logger.first("update"), logger.stage("update"):
            state, updated = learn(run.team, run.learners, cfg, state, played, gain, has, appraisals)
        metrics |= {f"critic/{n}/loss": m["value_loss"] for n, m in updated.items() if "value_loss" in m}
        return Improved(state, credited, np.ones(len(credited.group_task), bool), updated, metrics)

    return improve
