"""How a run is composed: phases of steps with optimizers of their own, and the recipe that holds them.

Stage 0 (supervised) is the first phase of every run. `make_recipe` is the common case: stage 0, then training steps of
one `Algorithm`. `loop.fit` runs a recipe step by step; `compiled.make_program` runs it as one program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from absl import logging

from jaxmarl_llm.agents import memory, snapshots
from jaxmarl_llm.agents.team import init_params, make_team
from jaxmarl_llm.credit.assign import Credit, find_rule, standard_rule, try_rule
from jaxmarl_llm.credit.rules import CreditRule, RewardWeights, Sizes
from jaxmarl_llm.distributed import meshes
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.envs.contract import Environment, check_step
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models import rollout_cache, rollout_weights
from jaxmarl_llm.models.rollout_weights import SAME
from jaxmarl_llm.rollout.array import table_rows
from jaxmarl_llm.rollout.array_runner import ArrayEnvRunner
from jaxmarl_llm.rollout.env_runner import Demonstrations, EnvRunner
from jaxmarl_llm.rollout.external import Engines
from jaxmarl_llm.rollout.growth import try_choice
from jaxmarl_llm.rollout.host_runner import HostEnvRunner
from jaxmarl_llm.rollout.keys import INIT, STEPS, stream
from jaxmarl_llm.rollout.make_runner import make_env_runner
from jaxmarl_llm.rollout.menus import check_menus
from jaxmarl_llm.rollout.plans import ROOT, Plan
from jaxmarl_llm.runs.ahead import Programs, no_programs, programs_of
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training import stale
from jaxmarl_llm.training.algorithm import Algorithm, Driver, RewardSchedule, StepParts, StepResult, find_update
from jaxmarl_llm.training.config import OTHERS, BaseConfig, weights_of
from jaxmarl_llm.training.drivers import HostDriver
from jaxmarl_llm.training.evaluation import episodes_of, evaluate
from jaxmarl_llm.training.finite import check_parameters
from jaxmarl_llm.training.learner import Learner, make_learner
from jaxmarl_llm.training.learner_logprobs import LearnerLogprobs
from jaxmarl_llm.training.optimizers import Optimizer, to_memory
from jaxmarl_llm.training.overlap import NextRollout
from jaxmarl_llm.training.step_metrics import diagnose
from jaxmarl_llm.training.supervised import make_imitation
from jaxmarl_llm.training.train_step import TrainStep
from jaxmarl_llm.types import Params, PyTree, Team, TrainState

ConfigT = TypeVar("ConfigT", bound=BaseConfig)

# (parts of the training step, number of the step, number in its phase from 0, memories before and after, result)
Recorder = Callable[[StepParts, int, int, PyTree, PyTree, StepResult], None]


class Phase(NamedTuple):
    """A run of training steps. Each model's optimizer is re-initialised when the phase begins.

    Attributes:
        steps: Number of steps.
        learners: By model.
        step: (driver, state, i) -> (state, result), where i counts steps of the phase. Pure, unless ``on_host``.
        metrics: Result of a step -> metrics for the log; runs on the host.
        begin: Agents' parameters -> what the parameters hold beside the agents from the phase's first step on.
        on_host: Why the phase runs from the host alone; None: it also runs inside a compiled program.
        name: For people.
    """

    steps: int
    learners: Mapping[str, Learner]
    step: Callable[[Driver, TrainState, Any], tuple[TrainState, Any]]
    metrics: Callable[[Any], dict[str, float]]
    begin: Callable[[Params], Params] = lambda agents: {}
    on_host: str | None = None
    name: str = "training"


@dataclass(eq=False)
class Recipe:
    """A recipe ready to run: the phases, and what they work with.

    Attributes:
        cfg: The configuration.
        team: Roles and models.
        env_runner: Runner of the environment.
        phases: One after the other; stage 0 is the first.
        mesh: Devices, or None.
        stores: Empty memories by role.
        evaluator: State -> metrics on held-out tasks.
        episodes: The last step's first episodes, for people.
        context: Memory entries in demonstrations, at most.
        recorder: Sees every training step from the host, and what `HostDriver.record` takes; None: nobody does.
        ahead: Function from a state to compilers of programs that RL needs.
        rollouts: Plays the rollout of the next step while a step updates; None: each step plays its own.
    """

    cfg: BaseConfig
    team: Team
    env_runner: EnvRunner
    phases: tuple[Phase, ...]
    mesh: Any
    stores: Callable[[], PyTree]
    evaluator: Callable[[TrainState], dict[str, float]]
    episodes: Callable[[], list[list[dict]]]
    context: int = 0
    recorder: Recorder | None = None
    ahead: Programs = no_programs
    rollouts: NextRollout | None = None

    @functools.cached_property
    def total_steps(self) -> int:
        return sum(p.steps for p in self.phases)

    @functools.cached_property
    def starts(self) -> list[int]:
        """First step of each phase."""
        return [sum(p.steps for p in self.phases[:k]) for k in range(len(self.phases))]

    def phase_of(self, step: int) -> int:
        """The phase of the step after ``step`` ones; the last phase beyond the end."""
        ends = [start + p.steps for start, p in zip(self.starts, self.phases, strict=True)]
        return next((k for k, end in enumerate(ends) if self.starts[k] <= step < end), len(ends) - 1)

    def init(self, step: int) -> TrainState:
        """The state's structure at ``step``, with its values at step 0."""
        with meshes.use_mesh(self.mesh):
            return meshes.place_state(self.mesh, self.initial(self.cfg.seed, step))

    def initial(self, seed: int | jax.Array, step: int) -> TrainState:
        """As `init`, for any seed; pure. ``seed`` may be traced."""
        params = init_params(self.cfg.team, self.team, stream(seed, INIT))
        for phase in self.phases:
            params |= phase.begin(params["agents"])
        trained = [phase.step for phase in self.phases if isinstance(phase.step, TrainStep)]
        last = self.phases[self.phase_of(max(step - 1, 0))]  # a state is as its last step left it
        state = TrainState(
            step=jnp.int32(0),
            key=stream(seed, STEPS),
            params=params,
            opt_state=self.optimizers(last, params["agents"]),
            memory=self.stores(),
            counters={"skipped": jnp.int32(0)},
        ).with_kept({keeper.name: keeper.begin(own, params["agents"]) for own in trained for keeper in own.keepers})
        return stale.begin(state, self.cfg.staleness) if self.cfg.staleness else state

    def optimizers(self, phase: Phase, agents: Params) -> PyTree:
        """Fresh optimizer states of a phase."""

        def fresh(name: str) -> PyTree:
            learner = phase.learners[name]
            state = learner.init(agents[name])
            # A model at a time: all of them at once may be more than a device holds.
            return to_memory(state, "pinned_host") if learner.offload else state

        names = [m.name for m in self.team.models]
        return dict(zip(names, meshes.map_models(names, fresh), strict=True))

    def begin(self, phase: Phase, state: TrainState) -> TrainState:
        """The state at the first step of a phase."""
        agents = state.params["agents"]
        params = {**state.params, **phase.begin(agents)}
        state = state.replace(params=params, opt_state=self.optimizers(phase, agents))
        return stale.begin(state, self.cfg.staleness) if self.cfg.staleness else state

    def step(self, state: TrainState, logger: Logger) -> tuple[TrainState, dict[str, float]]:
        """Take the state one step on, from the host: ``state.step`` counts it.

        Args:
            state: State before the step. Arrays that the step updates are donated: copy what is read afterwards.
            logger: Times the stages.

        Returns:
            The state after the step, and the metrics of the step.
        """
        now = int(state.step)
        k = self.phase_of(now)
        with meshes.use_mesh(self.mesh):
            if now and now == self.starts[k]:
                state = self.begin(self.phases[k], state)
            logprobs = None if self.recorder is None else LearnerLogprobs()
            before, step = state.memory, self.phases[k].step
            record = None
            if (recorder := self.recorder) is not None:
                record = lambda own, result: recorder(own, now + 1, now - self.starts[k], before, before, result)
            more = now + 1 - self.starts[k] < self.phases[k].steps
            driver = HostDriver(self.cfg.seed, logger, self.cfg.run.debug, logprobs, record, self.rollouts, more)
            state, result = step(driver, state, now - self.starts[k])
            if driver.debug:
                check_parameters(state.params["agents"], now + 1)
            if self.recorder is not None and isinstance(step, TrainStep):
                seen = result._replace(logprobs=logprobs)
                self.recorder(step, now + 1, now - self.starts[k], before, state.memory, seen)
            state = meshes.place_state(self.mesh, state)
            return state.replace(step=state.step + 1), self.phases[k].metrics(result)

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Metrics on the held-out tasks. A rollout that is played ahead ends before."""
        if self.rollouts is not None:
            self.rollouts.wait()
        with meshes.use_mesh(self.mesh):
            return self.evaluator(state)


def with_algorithm(recipe: Recipe, algorithm: Algorithm) -> Recipe:
    """Return a recipe with another algorithm in its training steps, for instance one with traced reward weights.

    Args:
        recipe: The recipe, which stays as it is.
        algorithm: Takes the place of the algorithm of every training step. A credit rule that the configuration names
            goes before the algorithm's own.
    """
    phases = []
    for phase in recipe.phases:
        step = phase.step
        if isinstance(step, TrainStep):
            rule = credit_rule(step.cfg.credit, algorithm.credit)
            step = replace(step, algorithm=replace(algorithm, credit=rule))
        phases.append(phase._replace(step=step))
    return replace(recipe, phases=tuple(phases))


def open_env_runner(cfg: BaseConfig, env: Environment | None = None) -> tuple[EnvRunner, Team]:
    """Make the environment runner and the team of a configuration.

    Args:
        cfg: The configuration.
        env: The environment; None: the one that ``cfg.env`` names.

    Raises:
        ConfigError: The environment does not pay a reward of ``cfg.reward``, or has a fault, or does not go with
            ``cfg.team``.
    """
    env_runner = make_env_runner(cfg.env, env, seed=cfg.seed)
    hint = f"""; --config.reward="{{'{OTHERS}': 1.0}}" pays each of them"""
    _check_paid("config.reward", {*cfg.reward} - {OTHERS}, env_runner, hint)
    if cfg.team.batch_models and not env_runner.array:
        raise ConfigError(f"config.team.batch_models: expected false with the host environment {cfg.env.name!r}")
    team = make_team(cfg.team, env_runner.env.roles)
    env_runner.form = rollout_weights.FORMS[cfg.rollout_weights]
    env_runner.cache_form = rollout_cache.FORMS[cfg.rollout_cache]
    env_runner.playing(team, held_out=False)  # raises ConfigError for a model whose cache has no form
    if cfg.engine.urls:
        if not isinstance(env_runner, HostEnvRunner):
            raise ConfigError(f"config.engine.urls: expected none with the array environment {cfg.env.name!r}")
        if cfg.mesh.models == "split":
            raise ConfigError("config.mesh.models: expected 'all' with config.engine.urls, got 'split'")
        cfg.mesh.refuse_layout("config.mesh", "with config.engine.urls")
        if cfg.mesh.context > 1:
            raise ConfigError(f"config.mesh.context: expected 1 with config.engine.urls, got {cfg.mesh.context}")
        env_runner.engines = Engines(cfg.engine, team, cfg.env.max_prompt)
    return env_runner, team


def _check_paid(path: str, weights: Iterable[str], env_runner: EnvRunner, hint: str = "") -> None:
    """Raise ConfigError for a weight of a component that the environment does not pay. ``hint``: end of the message."""
    env = env_runner.env
    if unknown := sorted(set(weights) - set(env.components)):
        raise ConfigError(
            f"{path}: environment {env.name!r} pays no {unknown[0]!r}; it pays {', '.join(env.components)}{hint}"
        )


def with_weights(cfg: ConfigT, env_runner: EnvRunner) -> ConfigT:
    """Return a configuration whose weights name every component, in place of the entry ``others``.

    Args:
        cfg: The configuration; it is returned as it is without such an entry.
        env_runner: Runner of the environment, whose components are read.
    """
    if OTHERS not in cfg.reward:
        return cfg
    return replace(cfg, reward=weights_of(cfg.reward, env_runner.env.components))


def _weighted(
    cfg: BaseConfig, plan: Plan, algorithm: Algorithm, env_runner: EnvRunner
) -> tuple[BaseConfig, Plan, Algorithm]:
    """The same three with weights of all components in place of the entry ``others``."""
    if OTHERS not in cfg.reward:
        return cfg, plan, algorithm
    given, components = algorithm.reward, env_runner.env.components
    if callable(given):
        paid: RewardWeights | RewardSchedule = lambda step: weights_of(dict(given(step)), components)
    else:
        paid = weights_of(dict(given), components)
    weights = tuple(sorted(weights_of(dict(plan.reward), components).items()))
    return with_weights(cfg, env_runner), plan._replace(reward=weights), replace(algorithm, reward=paid)


def make_phases(
    cfg: BaseConfig,
    team: Team,
    env_runner: EnvRunner,
    phases: Sequence[Phase],
    *,
    context: int = 0,
    stores: Callable[[], PyTree] = dict,
    evaluate: Callable[[TrainState], dict[str, float]],
    episodes: Callable[[], list[list[dict]]] = list,
) -> Recipe:
    """Stage 0 for ``sft.steps``, then phases one after the other.

    Args:
        cfg: The configuration.
        team: Roles and models.
        env_runner: Runner of the environment.
        phases: After stage 0.
        context: Memory entries in demonstrations.
        stores: Empty memories by role.
        evaluate: State -> metrics on held-out tasks.
        episodes: The last step's first episodes, for people.

    Raises:
        ConfigError: The models do not fit the mesh of the configuration, or ``cfg.update`` has no step to be used in.
    """
    if cfg.update is not None and not any(isinstance(phase.step, TrainStep) for phase in phases):
        raise ConfigError(f"config.update: expected None: recipe {cfg.recipe} updates by phases of its own")
    if cfg.staleness and not all(isinstance(phase.step, TrainStep) for phase in phases):
        raise ConfigError(f"config.staleness: expected 0: recipe {cfg.recipe} samples in phases of its own")
    for name in ("rollout_weights", "rollout_cache"):
        if getattr(cfg, name) != SAME and not all(isinstance(phase.step, TrainStep) for phase in phases):
            raise ConfigError(f"config.{name}: expected {SAME!r}: recipe {cfg.recipe} samples in phases of its own")
    if isinstance(env_runner, ArrayEnvRunner):
        check_step(env_runner.task, cfg.env.name, max(role.max_new_tokens for role in team.roles))
    mesh = meshes.open_mesh(cfg.mesh, team.models)
    env_runner.layout = meshes.rollout_layout(cfg.mesh, mesh, team.models)
    if env_runner.array and cfg.mesh.rollout_blocks > 1:
        raise ConfigError(f"config.mesh.rollout_blocks: expected 1 with the array environment {cfg.env.name!r}")
    if isinstance(mesh, meshes.Split):
        beyond = {"env.name": env_runner.array, "team.critic": bool(team.critics), "past.size": bool(cfg.past.size)}
        beyond["staleness"] = bool(cfg.staleness)
        for name, asked in beyond.items():
            if asked:
                raise ConfigError(f"config.mesh.models: expected 'all' with config.{name} as it is, got 'split'")
    imitation = make_imitation(team, cfg.sft, trees=not env_runner.array)
    taught: Mapping[str, Demonstrations] = {}
    if cfg.sft.steps:
        least = cfg.sft.min_fitting
        taught = env_runner.demonstrations(team, cfg.sft.samples, cfg.seed, context, min_fitting=least)

    def teach(driver: Driver, state: TrainState, i: Any) -> tuple[TrainState, Any]:
        with driver.stage("update", "supervised update"):
            return imitation.step(driver, state, i, driver.demonstrations(taught))

    def seen(result: Any) -> dict[str, float]:
        dropped = {"sft/dropped": env_runner.dropped} if env_runner.dropped else {}
        return imitation.metrics("sft", result) | dropped

    stage_0 = Phase(cfg.sft.steps, imitation.learners, teach, seen, name="stage 0")
    return Recipe(cfg, team, env_runner, (stage_0, *phases), mesh, stores, evaluate, episodes, context)


def credit_rule(cfg: Credit, standard: CreditRule | None = None) -> CreditRule:
    """The credit rule of a configuration: a user's own where ``cfg.rule`` names one, else ``standard``.

    Args:
        cfg: Settings.
        standard: The recipe's rule; None: `standard_rule`.
    """
    return (standard or standard_rule(cfg)) if cfg.rule is None else find_rule(cfg.rule)


def tried_rule(cfg: BaseConfig, env_runner: EnvRunner, plan: Plan, standard: CreditRule | None = None) -> CreditRule:
    """The credit rule of a configuration, tried on the shapes of its rollout.

    Args:
        cfg: The configuration.
        env_runner: Runner of the environment, whose reward components and sizes are read.
        plan: How tasks are played.
        standard: The recipe's rule, as in `credit_rule`.

    Raises:
        ConfigError: The rule raises, or returns something else than one advantage a completion.
    """
    rule, env = credit_rule(cfg.credit, standard), env_runner.env
    if isinstance(env, ArrayEnv):
        rows, seats = tuple(map(int, table_rows(plan, env, cfg.batch))), env.seats
    else:
        rows, seats = (cfg.batch, *[cfg.batch * plan.width(ROOT)] * 2), len(env.roles)
    sizes = Sizes(env.max_turns, cfg.batch, len(env.roles))
    try_rule(rule, env.components, sizes, rows, seats=seats, name=cfg.credit.rule)
    return rule


def _empty_memories(remembers: memory.MemoryConfig | None, team: Team, env_runner: EnvRunner) -> PyTree:
    """An empty memory of each role; nothing without settings of a memory."""
    if remembers is None:
        return {}
    return {
        role.name: memory.init(
            remembers,
            dim=team.model_of(i).policy.config.hidden_size,
            max_ids=env_runner.entry_tokens,
            max_bytes=env_runner.entry_bytes,
        )
        for i, role in enumerate(team.roles)
    }


def make_recipe(
    cfg: BaseConfig,
    plan: Plan,
    algorithm: Algorithm,
    *,
    env: Environment | None = None,
    critic_optimizer: Optimizer | None = None,
) -> Recipe:
    """Stage 0, then ``cfg.steps`` training steps of an algorithm.

    A loss that refers to another policy refers to the one that stage 0 ends with, kept as ``params["reference"]``.

    Args:
        cfg: The configuration.
        plan: How tasks are played.
        algorithm: What a step does with a rollout.
        env: The environment; None: the one that ``cfg.env`` names.
        critic_optimizer: Of critics that play no role; None: ``cfg.optimizer``.
    """
    env_runner, team = open_env_runner(cfg, env)
    cfg, plan, algorithm = _weighted(cfg, plan, algorithm, env_runner)
    if cfg.credit.normalise == "std" and cfg.credit.baseline != "mean":
        logging.warning(
            "config.credit.baseline=%s has no effect with credit.normalise=std: standardised advantages have mean 0",
            cfg.credit.baseline,
        )
    if cfg.staleness and cfg.loss.tis_clip is None:
        logging.warning("config.loss.tis_clip=None with config.staleness: no weight corrects for the older policy")
    plan.check(env_runner.env)
    try_choice(plan, team)
    if isinstance(env_runner.env, ArrayEnv):
        check_menus(plan, team, env_runner.env)
    if cfg.past.size and plan.choose is not None:
        raise ConfigError(f"config.past.size: expected 0 with plan {plan.name}, which chooses who plays")
    remembers = algorithm.memory
    if cfg.past.size and remembers is not None:
        raise ConfigError("config.past.size: expected 0 with a memory: past policies have none")
    if cfg.past.size and any(role.co_players for role in team.roles):
        raise ConfigError("config.past.size: expected 0 with several models of a role in config.team.models")
    if remembers is not None:
        _check_paid("config.memory_reward", dict(algorithm.memory_reward), env_runner)
    algorithm = replace(algorithm, credit=tried_rule(cfg, env_runner, plan, algorithm.credit))
    if cfg.update is not None:
        algorithm = replace(algorithm, update=find_update(cfg.update))
    playing = {name for role in team.roles for name in role.players}
    chosen = {m.name: cfg.optimizer if m.name in playing else critic_optimizer or cfg.optimizer for m in team.models}
    learners = {m.name: make_learner(m.policy, cfg.loss, chosen[m.name], cfg.sampling) for m in team.models}
    step = TrainStep(cfg, team, env_runner, plan, learners, algorithm)
    latest: list[StepResult] = []

    def begin(agents: Params) -> Params:
        """The reference policy, an empty ring of past ones."""
        out: Params = {}
        if cfg.loss.needs_reference:
            out["reference"] = jax.tree.map(jnp.copy, agents)
        if cfg.past.size:
            out["past"] = snapshots.init({role.model: agents[role.model] for role in team.roles}, cfg.past.size)
        return out

    def metrics(result: StepResult) -> dict[str, float]:
        latest[:] = [result]
        seen = diagnose(cfg, team, env_runner, result.played, result.credited, result.selected, result.updated)
        return {**seen, **result.metrics}

    def episodes() -> list[list[dict]]:
        shown = latest[-1:]
        return [e for r in shown for e in episodes_of(team, r.played, range(cfg.run.episodes), r.credited, r.selected)]

    made = make_phases(
        cfg,
        team,
        env_runner,
        [Phase(cfg.steps, learners, step, metrics, begin, step.on_host)],
        context=0 if remembers is None else remembers.retrieve,
        stores=functools.partial(_empty_memories, remembers, team, env_runner),
        evaluate=lambda state: evaluate(cfg, team, env_runner, state, remembers),
        episodes=episodes,
    )
    if made.mesh is None and not cfg.mesh.rollout_devices:
        made.ahead = programs_of(step)
    if cfg.staleness and (made.mesh is None or cfg.mesh.rollout_devices):
        made.rollouts = NextRollout(env_runner)
    return made
