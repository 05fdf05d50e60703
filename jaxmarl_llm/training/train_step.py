"""One training step: play, assign credit, select, update, remember. Pure, and written once.

Two drivers run it. `runs.phases` calls it from the host, step by step, for `fit`; `runs.compiled` scans it inside one
program. A driver only says how to play a batch, how to lay an update out and how to write memories (`Driver`). The
order of things, the random keys and the rules are those of this file.

What distinguishes one algorithm from another is an `Algorithm`: functions that a recipe hands in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from jaxmarl_llm.agents import snapshots
from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.agents.team import with_past
from jaxmarl_llm.config import load_object
from jaxmarl_llm.credit.assign import Credited, assign
from jaxmarl_llm.credit.rules import CreditRule, RewardWeights, Sizes
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.env_runner import Demonstrations, EnvRunner
from jaxmarl_llm.rollout.keys import IMITATION, OPPONENTS, STEP_SELECTION, TASKS, stream
from jaxmarl_llm.rollout.plans import Plan
from jaxmarl_llm.training import finite, stale
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.imitation import Imitation
from jaxmarl_llm.training.learner import Batch, Learner
from jaxmarl_llm.training.learner_logprobs import LearnerLogprobs
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.types import EXPERT, Array, Model, Params, PyTree, Team, TrainState, Tree

Step = Any  # number of an RL step: an int, or traced


def all_groups(credited: Credited, num_tasks: int) -> Array:
    """Select every group that has a member.

    ``credited``: advantages of the rollout. ``num_tasks``: number of tasks, not used.
    """
    return credited.stats.count > 0


def unequal_groups(credited: Credited, num_tasks: int) -> Array:
    """Select groups whose returns differ (DAPO's filter): the others are left out of the loss and of its mean.

    ``credited``: advantages of the rollout. ``num_tasks``: number of tasks, not used.
    """
    return credited.stats.variance > 0


class CriticAdvantages(Protocol):
    """Advantages from the critics of the team."""

    def __call__(
        self, step: TrainStep, driver: Driver, state: TrainState, tree: Tree
    ) -> tuple[Array, Array, Mapping[str, Any], Mapping[str, Any]]:
        """Compute the advantages of a rollout.

        Args:
            step: Parts of the training step.
            driver: Driver that runs the step.
            state: State before the update.
            tree: The rollout.

        Returns:
            Advantage of each completion [C], whether it has one [C], data that each critic learns from, and metrics.
        """
        ...


class RewardSchedule(Protocol):
    """Weights of reward components that change during a run."""

    def __call__(self, rl_step: Step, /) -> RewardWeights:
        """Weights of one step.

        Args:
            rl_step: Number of the RL step.

        Returns:
            Weight of each component by name: the same names at each step.
        """
        ...


class GroupSelection(Protocol):
    """Which groups are trained."""

    def __call__(self, credited: Credited, num_tasks: int, /) -> Array:
        """Choose groups.

        Args:
            credited: Advantages, and statistics of the K groups.
            num_tasks: Number of tasks of the batch.

        Returns:
            Whether each group is trained [K] bool.
        """
        ...


class StepSelection(Protocol):
    """Which completions are trained."""

    def __call__(self, key: Array, tree: Tree, trained: Array, /) -> Array:
        """Choose completions.

        Args:
            key: Random key of the step.
            tree: The rollout.
            trained: Completions that are valid and of a selected group [C] bool.

        Returns:
            Whether each completion is trained [C] bool. Only completions of ``trained`` count.
        """
        ...


class TrainableRoles(Protocol):
    """Which roles learn."""

    def __call__(self, rl_step: Step, /) -> Array:
        """Choose roles.

        Args:
            rl_step: Number of the RL step.

        Returns:
            Whether each role learns [A] bool.
        """
        ...


class Played(NamedTuple):
    """The rollout that a step trains on."""

    tree: Tree
    played: Any  # `RolloutResult` of a driver on the host; None inside a compiled run
    tasks: Int[Array, " B"]  # numbers of the training tasks in the tree
    metrics: Mapping[str, Any]


class PlayFunction(Protocol):
    """Function that plays the tasks of a step, and may play others in their place.

    An attribute ``on_host`` says in one line why the function runs from the host alone; without it the function is
    traced into compiled runs too.
    """

    def __call__(
        self,
        step: TrainStep,
        once: Callable[[Array, jax.Array], tuple[Tree, Any]],
        tasks: Array,
        key: jax.Array,
        rl_step: Step,
        state: TrainState,
        /,
    ) -> Played:
        """Play.

        Args:
            step: Parts of the training step.
            once: Plays tasks [B] with a key, and returns what `Driver.play` returns.
            tasks: Numbers of the step's training tasks [B].
            key: Random key of the step. ``once(tasks, key)`` is the step's rollout without this function.
            rl_step: Number of the RL step.
            state: State before the step. It is read alone.
        """
        ...


@runtime_checkable
class Keeper(Protocol):
    """A play or an update function that keeps arrays of earlier steps in ``state.kept[name]``.

    The arrays are a part of checkpoints, so a resumed run is equal to the bit. Their shapes stay the same.
    """

    name: ClassVar[str]

    def begin(self, step: TrainStep, agents: Params, /) -> PyTree:
        """The arrays before the first step. Raises a `ConfigError` where the run cannot have them.

        Args:
            step: Parts of the training step.
            agents: Parameters of each model at the begin of the run. They may be traced.
        """
        ...

    def keep(self, step: TrainStep, kept: PyTree, result: StepResult, /) -> tuple[PyTree, Mapping[str, Any]]:
        """The arrays after a step, and metrics.

        Args:
            step: Parts of the training step.
            kept: The arrays before the step.
            result: What the step played and trained. Held-out tasks are never in it.
        """
        ...


Updates = tuple[TrainState, dict[str, dict[str, Any]]]


class UpdateFunction(Protocol):
    """Function that changes parameters and optimizer states in a step.

    ``config.update`` names a function of a user's own: ``"package.module:function"``. On the host,
    ``driver.optimize`` reuses the memory of the state's arrays: copy those that are read afterwards. An attribute
    ``on_host`` is that of a `PlayFunction`. An update that is a `Keeper` may also change its own arrays,
    ``state.kept[name]``.
    """

    def __call__(
        self, step: TrainStep, driver: Driver, state: TrainState, batches: Mapping[str, list[Batch]], /
    ) -> Updates:
        """Update parameters and optimizer states.

        Args:
            step: The training step's parts: configuration, team, learners by model.
            driver: Runs it. ``driver.optimize`` takes optimizer steps on micro-batches.
            state: Before the update.
            batches: Micro-batches of each model that may learn.

        Returns:
            The new state, and metrics of each updated model by name. ``driver.optimize`` returns both.
        """
        ...


@dataclass(frozen=True, eq=False)
class Algorithm:
    """The parts that differ between algorithms. Functions are pure: inside a compiled run they are traced.

    Attributes:
        credit: From rewards to advantages, see credit/rules.py.
        reward: Weights of reward components, or a `RewardSchedule`.
        select: Which groups are trained.
        select_steps: Which completions are trained, among those of selected groups; None: all.
        trainable_roles: Which roles learn; None: all. A model of none of them stays bit-identical.
        critic: Advantages from critics in place of the credit rule's; None: no critics.
        memory: Settings of the adaptive memory; None: no memory.
        memory_reward: Weights of the reward that memories learn from.
        update: How parameters change; None: `policy_update`.
        play: How the tasks of a step are played; None: once.
        imitate: How the roles imitate experts that answer in their place; None: not at all.
    """

    credit: CreditRule
    reward: RewardWeights | RewardSchedule
    select: GroupSelection = all_groups
    select_steps: StepSelection | None = None
    trainable_roles: TrainableRoles | None = None
    critic: CriticAdvantages | None = None
    memory: MemoryConfig | None = None
    memory_reward: RewardWeights = ()
    update: UpdateFunction | None = None
    play: PlayFunction | None = None
    imitate: Imitation | None = None


def find_update(dotted: str, key: str = "config.update") -> UpdateFunction:
    """The update function of a dotted name. Raises a `ConfigError` of one line where there is none.

    Args:
        dotted: ``"package.module:function"``.
        key: dotted name of the config value, for error messages.
    """
    function = load_object(key, dotted)
    try:
        inspect.signature(function).bind(None, None, None, None)
    except (TypeError, ValueError) as error:
        wanted = "expected a function of (step, driver, state, batches)"
        raise ConfigError(f"{key}: {dotted}: {wanted}: {error}") from error
    return function


class StepResult(NamedTuple):
    """Result of a training step, besides the new state."""

    tree: Tree
    played: Any  # `RolloutResult` of a driver on the host; None inside a compiled run
    credited: Credited
    selected: Bool[Array, " K"]  # groups
    updated: Mapping[str, Mapping[str, Any]]  # model -> metrics of its update; absent: not updated
    metrics: Mapping[str, Any]  # of memories and critics
    tasks: Int[Array, " B"]  # that were played: numbers of training tasks
    weights: Mapping[str, Any]  # of reward components, in this step
    trained: Bool[Array, " C"]  # completions in the update
    logprobs: LearnerLogprobs | None = None  # that the update computed; None where no recorder reads them


class Driver(Protocol):
    """Interface that runs the parts of a training step: on the host, or inside a compiled program."""

    @property
    def seed(self) -> jax.Array | int:
        """Of the run; may be traced."""

    @property
    def debug(self) -> bool:
        """Whether values that are not finite end the run (``run.debug``)."""

    def stage(self, name: str, first: str | None = None) -> AbstractContextManager[Any]:
        """Time a part of the step; ``first`` is shown while it compiles."""

    def host(self, x: Any) -> Any:
        """Small integers as the driver wants them: numpy on the host, arrays of JAX when traced."""

    def demonstrations(self, own: Mapping[str, Demonstrations]) -> Mapping[str, Demonstrations]:
        """Samples of stage 0: the recipe's ``own``, or those of this seed."""

    def play(
        self,
        step: TrainStep,
        state: TrainState,
        params: Params,
        tasks: Int[Array, " B"],
        key: jax.Array,
        assignment: Any,
    ) -> tuple[Tree, Any]:
        """Play a batch of training tasks."""

    def take(self, state: TrainState, play: Callable[[], Played]) -> Played:
        """The rollout of a step: what ``play`` returns, or returned when it was begun before this step.

        ``state``: state before the step.
        """

    def begin(self, state: TrainState, play: Callable[[], Played]) -> None:
        """May begin the rollout of the next step, which `take` then returns.

        ``state``: arrays that the rollout reads, and its number. ``play``: plays; it reads no arrays of the update.
        """

    def lay_out(
        self,
        step: TrainStep,
        tree: Tree,
        played: Any,
        advantage: Array,
        trained: Array,
        targets: Mapping[str, Any],
        imitation: Array | None = None,
    ) -> dict[str, list[Batch]]:
        """Micro-batches of each model that may learn, from the tree. ``imitation``: weight of experts' tokens [C R]."""

    def optimize(
        self,
        models: tuple[Model, ...],
        learners: Mapping[str, Learner],
        loss: Loss,
        state: TrainState,
        batches: Mapping[str, list[Batch]],
    ) -> tuple[TrainState, dict[str, dict[str, Any]]]:
        """Optimizer steps of the models that have trained tokens; the others stay bit-identical."""

    def remember(
        self, step: TrainStep, state: TrainState, tree: Tree, played: Any, signal: Array, valid: Array
    ) -> tuple[TrainState, dict[str, Any]]:
        """Each role's memory learns from its own completions and their ``signal`` [C]."""

    def when(self, condition: Any, function: Callable[[Any], Any], operand: Any) -> Any:
        """``function(operand)`` where the condition holds, else ``operand``."""


@dataclass(frozen=True, eq=False)
class TrainStep:
    """The parts of a training step that do not change during a run."""

    cfg: BaseConfig
    team: Team
    env_runner: EnvRunner
    plan: Plan
    learners: Mapping[str, Learner]  # by model
    algorithm: Algorithm

    @property
    def players(self) -> Team:
        """The team with past policies as opponents, where the run has them."""
        return with_past(self.team) if self.cfg.past.size else self.team

    def sizes(self, num_tasks: int) -> Sizes:
        return Sizes(self.env_runner.env.max_turns, num_tasks, len(self.team.roles))

    def assign(self, tree: Tree, weights: RewardWeights) -> Credited:
        """Credit the tree under reward weights."""
        return assign(self.algorithm.credit, tree, weights=weights, sizes=self.sizes(self.cfg.batch))

    def __call__(self, driver: Driver, state: TrainState, rl_step: Step) -> tuple[TrainState, StepResult]:
        """Take the state one step on.

        Args:
            driver: Runs the parts.
            state: ``state.step`` counts all steps of the run.
            rl_step: Counts those of this phase.
        """
        cfg, algorithm = self.cfg, self.algorithm
        with driver.stage("rollout", f"rollout {self.plan.name}"):
            played = driver.take(state, lambda: self.play(driver, state, rl_step))
            tree, metrics = played.tree, dict(played.metrics)
            if driver.debug:
                finite.check_rollout(self.team, tree, finite.number_of(state))
        if cfg.staleness:
            metrics["staleness"] = driver.host(jnp.mean(state.step - tree.steps.version))
            state = stale.push(state, cfg.staleness)
            after = state.replace(step=state.step + 1)
            if algorithm.play is None:  # another one may read what this step leaves
                driver.begin(after, lambda: self.play(driver, after, rl_step + 1))
        key = jax.random.fold_in(state.key, state.step)
        with driver.stage("reward"):
            weights = algorithm.reward(rl_step) if callable(algorithm.reward) else algorithm.reward
            if driver.debug:
                finite.check_rewards(self.team, tree, weights, finite.number_of(state))
            credited = driver.host(self.assign(tree, weights))
            targets: Mapping[str, Any] = {}
            if algorithm.critic is not None:
                advantage, valid, targets, seen = algorithm.critic(self, driver, state, tree)
                credited = credited.replace(advantage=advantage, valid=valid)
                metrics |= seen
            if driver.debug:
                finite.check_advantages(self.team, tree, credited.advantage, credited.valid, finite.number_of(state))
            selected = driver.host(algorithm.select(credited, cfg.batch))
            trained = self.trained(driver, credited, selected, tree, key, rl_step)
        with driver.stage("update", "update"):
            imitation = self.imitation(driver, tree, key, rl_step)
            batches = driver.lay_out(self, tree, played.played, credited.advantage, trained, targets, imitation)
            state, updated = self.updated(driver, state, batches)
        metrics |= {f"critic/{name}/loss": m["value_loss"] for name, m in updated.items() if "value_loss" in m}
        if algorithm.memory is not None:
            with driver.stage("memory", "memory"):
                learnt = driver.host(self.assign(tree, algorithm.memory_reward))
                state, seen = driver.remember(self, state, tree, played.played, learnt.returns, learnt.valid)
                metrics |= seen
        if cfg.past.size:
            state = driver.when((rl_step + 1) % cfg.past.every == 0, _push_snapshot, state)
        result = StepResult(
            tree, played.played, credited, selected, updated, metrics, played.tasks, dict(weights), trained
        )
        return self.kept(driver, state, result)

    def play(self, driver: Driver, state: TrainState, rl_step: Step) -> Played:
        """Play the tasks of a step. The state is only read.

        Args:
            driver: Runs the parts.
            state: State before the step.
            rl_step: Number of the step in its phase.
        """
        cfg = self.cfg
        key = jax.random.fold_in(state.key, state.step)
        numbers = shuffled(stream(driver.seed, TASKS), self.env_runner.size, rl_step * cfg.batch, cfg.batch)
        players = stale.acting(state, cfg.staleness, rl_step) if cfg.staleness else state
        params, assignment = self.opponents(players, key)
        tasks = driver.host(numbers)
        once = lambda tasks, key: driver.play(self, players, params, driver.host(tasks), key, assignment)
        if self.algorithm.play is None:
            return Played(*once(tasks, key), tasks, {})
        tree, played, tasks, seen = self.algorithm.play(self, once, tasks, key, rl_step, state)
        tasks, metrics = driver.host((tasks, dict(seen)))
        return Played(tree, played, tasks, metrics)

    @property
    def on_host(self) -> str | None:
        """Why the step runs from the host alone; None: it also runs inside a compiled program."""
        functions = (self.algorithm.play, self.algorithm.update)
        return next((why for f in functions if (why := getattr(f, "on_host", None))), None)

    @property
    def keepers(self) -> tuple[Keeper, ...]:
        """Functions of the algorithm that keep arrays of earlier steps."""
        functions: tuple[Any, ...] = (self.algorithm.play, self.algorithm.update)
        return tuple(function for function in functions if isinstance(function, Keeper))

    def kept(self, driver: Driver, state: TrainState, result: StepResult) -> tuple[TrainState, StepResult]:
        """State and result after every keeper has seen the step."""
        kept, metrics = dict(state.kept), dict(result.metrics)
        for keeper in self.keepers:
            kept[keeper.name], seen = keeper.keep(self, kept[keeper.name], result)
            metrics |= driver.host(dict(seen))
        return state.with_kept(kept), result._replace(metrics=metrics)

    def updated(self, driver: Driver, state: TrainState, batches: Mapping[str, list[Batch]]) -> Updates:
        """The state and metrics that the algorithm's update makes; ConfigError where they have another type."""
        update = self.algorithm.update or policy_update
        result = update(self, driver, state, batches)
        well = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], TrainState)
        if not well or not isinstance(result[1], Mapping) or not set(result[1]) <= set(self.learners):
            got = type(result).__name__ if not well else f"metrics of {result[1]!r}"
            name = self.cfg.update or update
            raise ConfigError(
                f"config.update: {name}: expected (state, {{model: metrics}}), but it returned {got[:200]}"
            )
        return result

    def opponents(self, state: TrainState, key: jax.Array) -> tuple[Params, Array | None]:
        """Parameters of the rollout, and which player takes which role: past policies among them."""
        past = self.cfg.past
        if not past.size:
            return state.params, self.co_players(key)
        own, seats = jax.random.split(jax.random.fold_in(key, OPPONENTS))
        agents = snapshots.draw(state.params["past"], state.params["agents"], own)
        assignment = snapshots.assignment(seats, self.cfg.batch, len(self.team.roles), past.fraction)
        return {**state.params, "agents": agents}, assignment

    def co_players(self, key: Array) -> Array | None:
        """Which of several models that learn a role plays it, for each task [B A].

        None: each role has one model, or the plan chooses who plays.
        """
        counts = jnp.array([role.learning for role in self.team.roles])
        if self.plan.choose is not None or max(role.learning for role in self.team.roles) == 1:
            return None
        share = jax.random.uniform(jax.random.fold_in(key, OPPONENTS), (self.cfg.batch, len(self.team.roles)))
        return jnp.floor(share * counts).astype(jnp.int32)

    def trained(
        self, driver: Driver, credited: Credited, selected: Array, tree: Tree, key: jax.Array, rl_step: Step
    ) -> Bool[Array, " C"]:
        """The completions to train on."""
        algorithm = self.algorithm
        trained = credited.valid & selected[credited.group] & (tree.steps.source != EXPERT)
        if algorithm.select_steps is not None:
            own = jax.random.fold_in(key, STEP_SELECTION)
            trained = trained & driver.host(algorithm.select_steps(own, tree, trained))
        if algorithm.trainable_roles is not None:
            learns = driver.host(algorithm.trainable_roles(rl_step))
            trained = trained & learns[tree.nodes.role[tree.steps.node]]
        return trained

    def imitation(self, driver: Driver, tree: Tree, key: jax.Array, rl_step: Step) -> Array | None:
        """Weight of each token that an expert wrote [C R]; None where nothing is imitated."""
        algorithm = self.algorithm
        if algorithm.imitate is None:
            return None
        weights = algorithm.imitate(jax.random.fold_in(key, IMITATION), tree, self.cfg.loss)
        if algorithm.trainable_roles is not None:
            learns = jnp.asarray(algorithm.trainable_roles(rl_step))
            weights = jnp.where(learns[tree.nodes.role[tree.steps.node]][:, None], weights, 0.0)
        return driver.host(weights)


def policy_update(step: TrainStep, driver: Driver, state: TrainState, batches: Mapping[str, list[Batch]]) -> Updates:
    """Minimise the configured loss of every model on its micro-batches.

    Args:
        step: Parts of the training step.
        driver: Driver that runs the step.
        state: State before the update.
        batches: Micro-batches by model.
    """
    return driver.optimize(step.team.models, step.learners, step.cfg.loss, state, batches)


def _push_snapshot(state: TrainState) -> TrainState:
    params = state.params
    ring = snapshots.push(params["past"], {name: params["agents"][name] for name in params["past"]["ring"]})
    return state.replace(params={**params, "past": ring})
