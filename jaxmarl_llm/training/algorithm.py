"""What a recipe hands to a training step, what a step returns, and what runs its parts.

What distinguishes one algorithm from another is an `Algorithm`: pure functions, each with a documented type here.
`train_step.TrainStep` calls them, in the order that is written there. A `Driver` says how the parts of a step are run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Bool, Int

from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.agents.team import with_past
from jaxmarl_llm.config import load_object
from jaxmarl_llm.credit.assign import Credited, assign
from jaxmarl_llm.credit.rules import CreditRule, RewardWeights, Sizes
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.env_runner import Demonstrations, EnvRunner
from jaxmarl_llm.rollout.plans import Plan
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.imitation import Imitation
from jaxmarl_llm.training.learner import Batch, Learner
from jaxmarl_llm.training.learner_logprobs import LearnerLogprobs
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.types import Array, Model, Params, PyTree, Team, TrainState, Tree

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
        self, step: StepParts, driver: Driver, state: TrainState, tree: Tree
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
        step: StepParts,
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

    def begin(self, step: StepParts, agents: Params, /) -> PyTree:
        """The arrays before the first step. Raises a `ConfigError` where the run cannot have them.

        Args:
            step: Parts of the training step.
            agents: Parameters of each model at the begin of the run. They may be traced.
        """
        ...

    def keep(self, step: StepParts, kept: PyTree, result: StepResult, /) -> tuple[PyTree, Mapping[str, Any]]:
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
        self, step: StepParts, driver: Driver, state: TrainState, batches: Mapping[str, list[Batch]], /
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


@dataclass(frozen=True, eq=False)
class StepParts:
    """The parts of a training step that do not change during a run.

    Attributes:
        cfg: Configuration of the run.
        team: Roles and models.
        env_runner: Plays the environment.
        plan: How a rollout branches.
        learners: Learner of each model that may learn, by name.
        algorithm: What the recipe hands in.
    """

    cfg: BaseConfig
    team: Team
    env_runner: EnvRunner
    plan: Plan
    learners: Mapping[str, Learner]
    algorithm: Algorithm

    @property
    def players(self) -> Team:
        """The team with past policies as opponents, where the run has them."""
        return with_past(self.team) if self.cfg.past.size else self.team

    def sizes(self, num_tasks: int) -> Sizes:
        """Sizes that credit needs. ``num_tasks``: number of tasks in the tree."""
        return Sizes(self.env_runner.env.max_turns, num_tasks, len(self.team.roles))

    def assign(self, tree: Tree, weights: RewardWeights) -> Credited:
        """Credit the tree under reward weights."""
        return assign(self.algorithm.credit, tree, weights=weights, sizes=self.sizes(self.cfg.batch))


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
        step: StepParts,
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
        step: StepParts,
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
        self, step: StepParts, state: TrainState, tree: Tree, played: Any, signal: Array, valid: Array
    ) -> tuple[TrainState, dict[str, Any]]:
        """Each role's memory learns from its own completions and their ``signal`` [C]."""

    def when(self, condition: Any, function: Callable[[Any], Any], operand: Any) -> Any:
        """``function(operand)`` where the condition holds, else ``operand``."""
