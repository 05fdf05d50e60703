"""An update that looks at what it did: one role learns, and another is paid by the change on held-out tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Float, Int

from jaxmarl_llm.config import at_least
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.array_runner import ArrayEnvRunner
from jaxmarl_llm.training.algorithm import Driver, StepParts, StepResult, Updates
from jaxmarl_llm.training.evaluation import by_task
from jaxmarl_llm.training.learner import Batch, Learner
from jaxmarl_llm.training.optimizers import to_memory
from jaxmarl_llm.types import Array, Params, PyTree, TrainState


class History(struct.PyTreeNode):
    """History of the updates of a run, with the last K = ``patience`` changes."""

    updates: Int[Array, ""]  # of the model that learns; while there is none, scores are not measured
    score: Float[Array, ""]  # of the present parameters
    best_score: Float[Array, ""]
    best: Params  # parameters of the model that learns, at the best score
    changes: Float[Array, " K"]  # the last ones, the newest last; 0 where there is none
    returns: Int[Array, ""]  # times that the best parameters were put back
    idle: Int[Array, ""]  # steps that trained nobody


def scaled(change: float, advantages: Array) -> Array:
    """Multiply advantages by the change.

    Args:
        change: Score after the update minus score before.
        advantages: Of the paid role's completions [N G R].
    """
    return change * advantages


@dataclass(frozen=True)
class PayByChange:
    """Update one role, and pay another by what this changed: a `algorithm.UpdateFunction`, and a `Keeper`.

    The score is the mean of a reward component over the tasks of a held-out part, sampled with the same keys each time.

    1. The model of ``learner`` takes its update. The change is its score afterwards minus its score before.
    2. The model of ``paid`` takes an update with the advantages ``pay(change, advantages)``. Where the change is 0 it
       takes none.
    3. A score above the best one so far makes the learner's parameters the best ones. The score before the first update
       counts too. After ``patience`` changes in a row below 0 the best parameters are put back, with a new optimizer
       state, and the count begins anew. The update of ``paid`` stays.

    A step without a completion of ``learner`` to train on is idle: it trains nobody, and has no change. The loop ends a
    run after ``run.max_bad_steps`` idle steps in a row. The history is in ``state.kept["change"]``.

    Metrics: ``change/score`` after the step, ``change/change``, and the ``change/best`` score so far.
    ``change/returns`` counts how often the best parameters were put back, and ``count/idle`` the idle steps.

    Attributes:
        learner: Role whose model learns first.
        paid: Role that is paid; its model is another one.
        part: Part of the held-out tasks that an array environment names.
        component: Reward component of the score, a mean over roles.
        patience: Changes in a row below 0, at least 1.
        pay: Advantages of the paid role from the change and the credit rule's advantages.
    """

    learner: str
    paid: str
    part: str = "validation"
    component: str = "accuracy"
    patience: int = 15
    pay: Callable[[float, Array], Array] = scaled
    name: ClassVar[str] = "change"
    on_host: ClassVar[str] = "an update that plays held-out tasks before and after is no single program"

    def __post_init__(self) -> None:
        at_least("PayByChange.patience", self.patience, 1)

    def begin(self, step: StepParts, agents: Params) -> History:
        """No step was taken.

        Args:
            step: Parts of the training step.
            agents: Parameters of each model, whose shapes are read.

        Raises:
            ConfigError: One model plays both roles, or the environment has no such part or component.
        """
        learner, paid = (self._model(step, role) for role in (self.learner, self.paid))
        if learner == paid:
            raise ConfigError(
                f"config.team: expected a model of its own for role {self.paid!r}, which is paid for changes of role "
                f"{self.learner!r}; {learner!r} plays both"
            )
        self._tasks(step)
        if self.component not in step.env_runner.env.components:
            raise ConfigError(
                f"config.env.name: environment {step.env_runner.env.name!r} pays no {self.component!r}; it pays "
                f"{', '.join(step.env_runner.env.components)}"
            )
        zero, none = jnp.int32(0), jnp.float32(0)
        empty = jax.tree.map(jnp.zeros_like, agents[learner])
        return History(zero, none, none, empty, jnp.zeros(self.patience), zero, zero)

    def __call__(
        self, step: StepParts, driver: Driver, state: TrainState, batches: Mapping[str, list[Batch]]
    ) -> Updates:
        """Update the learner, measure, then update the role that is paid.

        Args:
            step: Parts of the training step.
            driver: Driver that runs the step.
            state: State before the update.
            batches: Micro-batches by model.
        """
        learner, paid = (self._model(step, role) for role in (self.learner, self.paid))
        history: History = state.kept[self.name]
        if not batches.get(learner):
            return self._with(state, history.replace(idle=history.idle + 1)), {}
        if not history.updates:
            score = self.score(step, state)
            history = history.replace(score=score, best_score=score, best=_copy(state.params["agents"][learner]))
        state, metrics = self._optimize(step, driver, state, learner, batches[learner])
        score = self.score(step, state)
        change = float(score - history.score)
        if change and batches.get(paid):
            own = [b.replace(advantages=self.pay(change, b.advantages)) for b in batches[paid]]
            state, more = self._optimize(step, driver, state, paid, own)
            metrics = {**metrics, **more}
        changes = jnp.append(history.changes[1:], jnp.float32(change))
        history = history.replace(updates=history.updates + 1, score=score, changes=changes)
        if score > history.best_score:
            history = history.replace(best_score=score, best=_copy(state.params["agents"][learner]))
        elif (history.changes < 0).all():
            state, history = self._put_back(state, history, learner, step.learners[learner])
        return self._with(state, history), metrics

    def keep(self, step: StepParts, kept: PyTree, result: StepResult) -> tuple[History, Mapping[str, Any]]:
        """The history as the update left it, and its metrics.

        Args:
            step: Parts of the training step, not used.
            kept: The history after the update.
            result: Result of the step.
        """
        idle = not result.updated
        seen = {"idle": float(idle), "count/idle": kept.idle, "change/returns": kept.returns}
        if kept.updates:
            seen |= {"change/score": kept.score, "change/best": kept.best_score}
        if not idle:
            seen["change/change"] = kept.changes[-1]
        return kept, seen

    def score(self, step: StepParts, state: TrainState) -> jax.Array:
        """The mean of the component over the tasks of the part; unknown rewards are left out.

        Args:
            step: Parts of the training step.
            state: Its parameters play.
        """
        numbers, memory = self._tasks(step), step.algorithm.memory
        rows = by_task(step.cfg, step.team, step.env_runner, state, memory_config=memory, numbers=numbers)
        return jnp.float32(np.nanmean(rows[self.component]))

    def _model(self, step: StepParts, role: str) -> str:
        """Name of the model that plays a role."""
        return next(r.model for r in step.team.roles if r.name == role)

    def _tasks(self, step: StepParts) -> np.ndarray:
        """Numbers of the held-out tasks of the part."""
        runner = step.env_runner
        parts = runner.task.parts if isinstance(runner, ArrayEnvRunner) else {}
        if not np.any(parts.get(self.part, False)):
            raise ConfigError(
                f"config.env.name: environment {runner.env.name!r} has no held-out tasks of part {self.part!r}; its "
                f"parts are {', '.join(parts) or 'none'}"
            )
        return np.flatnonzero(parts[self.part])

    def _with(self, state: TrainState, history: History) -> TrainState:
        return state.with_kept({**state.kept, self.name: history})

    def _optimize(
        self, step: StepParts, driver: Driver, state: TrainState, model: str, batches: list[Batch]
    ) -> Updates:
        return driver.optimize(step.team.models, step.learners, step.cfg.loss, state, {model: batches})

    def _put_back(
        self, state: TrainState, history: History, model: str, learner: Learner
    ) -> tuple[TrainState, History]:
        """The state with the best parameters, and the history from there on."""
        own = _copy(history.best)
        fresh = learner.init(own)
        fresh = to_memory(fresh, "pinned_host") if learner.offload else fresh
        agents, states = {**state.params["agents"], model: own}, {**state.opt_state, model: fresh}
        state = state.replace(params={**state.params, "agents": agents}, opt_state=states)
        changes, returns = jnp.zeros_like(history.changes), history.returns + 1
        return state, history.replace(score=history.best_score, changes=changes, returns=returns)


def _copy(tree: PyTree) -> PyTree:
    """Copies, because the next update reuses the memory of parameters."""
    return jax.tree.map(jnp.copy, tree)
