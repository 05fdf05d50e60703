"""A curriculum by success rate: tasks that sometimes succeed are drawn more often (sampling for learnability)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.config import finite, in_range, positive
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.keys import EXTRA_PLAYS
from jaxmarl_llm.training.algorithm import Played, Step, StepParts, StepResult
from jaxmarl_llm.types import POLICY, Array, Params, PyTree, TrainState


class Rates(struct.PyTreeNode):
    """Counts of completions and successes of T training tasks so far."""

    tried: Float[Array, " T"]  # completions
    solved: Float[Array, " T"]  # of which successes


@dataclass(frozen=True)
class Curriculum:
    """Draw a part of each step's tasks by the variance of their success so far: a `algorithm.PlayFunction`.

    Task i has the estimate ``p_i = (a + solved_i) / (a + b + tried_i)``, the mean of a Beta(a, b) prior after the
    completions so far. Its chance is in proportion to the learnability ``p_i (1 - p_i)`` of SFL (Rutherford et al.,
    arXiv 2408.15099). LILO (Foster et al., arXiv 2502.12272) uses it for language models.

    ``round(share B)`` of the B tasks are drawn, without one being drawn twice. The others stay the first ones of the
    step's order, as SFL mixes chosen and random levels. A drawn task is none of the others.

    Changed: SFL and LILO play extra rollouts to estimate p, and SFL keeps the tasks of highest ``p (1 - p)``. Here p
    comes from training alone, and a task of low learnability keeps a chance.

    Counted are the completions of the policy at the first decision of an episode. One is a success if its return, as
    the credit rule gives it, is above ``bound``. Held-out tasks are never counted. The counts are in
    ``state.kept["curriculum"]``. Draws depend on the counts and the step's key alone.

    Metrics, of the state before the step: ``curriculum/learnability`` is the mean of ``p (1 - p)`` over the step's
    tasks. ``curriculum/tried`` is the share of all training tasks that were tried.

    Attributes:
        share: Share of the tasks that is drawn, in [0, 1]. 0 is the step without a curriculum, to the bit.
        bound: Return above which a completion is a success.
        prior: Numbers a and b of the prior, above 0. With (1, 1) a task that was never tried has the highest chance.
        decay: Factor of a task's counts before a step that tries it is added, in [0, 1]. Below 1 old rates fade.
    """

    share: float = 0.5
    bound: float = 0.5
    prior: tuple[float, float] = (1.0, 1.0)
    decay: float = 1.0
    name: ClassVar[str] = "curriculum"

    def __post_init__(self) -> None:
        in_range("Curriculum.share", self.share, 0, 1)
        finite("Curriculum.bound", self.bound)
        in_range("Curriculum.decay", self.decay, 0, 1)
        if len(self.prior) != 2:
            raise ConfigError(f"Curriculum.prior: expected two numbers above 0, got {self.prior}")
        for value in self.prior:
            positive("Curriculum.prior", value)

    def begin(self, step: StepParts, agents: Params) -> Rates:
        """No task was tried.

        Args:
            step: parts of the training step.
            agents: not used.

        Raises:
            ConfigError: A batch has more tasks than there are.
        """
        size, batch = step.env_runner.size, step.cfg.batch
        if batch > size:
            raise ConfigError(f"config.batch: expected <= {size} with a curriculum, the number of tasks; got {batch}")
        return Rates(jnp.zeros(size), jnp.zeros(size))

    def __call__(
        self,
        step: StepParts,
        once: Callable[[Array, jax.Array], tuple[Any, Any]],
        tasks: Array,
        key: jax.Array,
        rl_step: Step,
        state: TrainState,
    ) -> Played:
        """Draw tasks and play.

        Args:
            step: parts of the training step.
            once: plays tasks [B] with a key.
            tasks: numbers of the step's tasks [B].
            key: random key of the step.
            rl_step: number of the RL step, not used.
            state: state before the step.
        """
        rates, drawn = state.kept[self.name], round(self.share * len(tasks))
        worth = learnability(rates, self.prior)
        if drawn:
            tasks = mixed(jax.random.fold_in(key, EXTRA_PLAYS), worth, tasks, drawn)
        tree, played = once(tasks, key)
        metrics = {"curriculum/learnability": worth[tasks].mean(), "curriculum/tried": (rates.tried > 0).mean()}
        return Played(tree, played, tasks, metrics)

    def keep(self, step: StepParts, kept: PyTree, result: StepResult) -> tuple[Rates, Mapping[str, Any]]:
        """Count the completions of a step.

        Args:
            step: parts of the training step, not used.
            kept: rates before the step.
            result: result of the step.
        """
        nodes, steps, credited = result.tree.nodes, result.tree.steps, result.credited
        first = nodes.parent[steps.node] < 0
        counted = credited.valid & steps.valid & (steps.source == POLICY) & first
        task = nodes.task[steps.node]
        return counts_of(kept, result.tasks, task, counted, credited.returns, self.bound, self.decay), {}


@functools.partial(jax.jit, static_argnames=("prior",))
def learnability(rates: Rates, prior: tuple[float, float]) -> Float[Array, " T"]:
    """Compute ``p (1 - p)`` of each task, with ``p = (a + solved) / (a + b + tried)`` (arXiv 2408.15099).

    Args:
        rates: counts so far.
        prior: a and b.
    """
    a, b = prior
    p = (a + rates.solved) / (a + b + rates.tried)
    return p * (1 - p)


@functools.partial(jax.jit, static_argnames=("drawn",))
def mixed(key: jax.Array, worth: Float[Array, " T"], tasks: Int[Array, " B"], drawn: int) -> Int[Array, " B"]:
    """Replace the last tasks of a batch by drawn ones, each with a chance in proportion to its worth.

    The draw is without replacement: the tasks of highest ``log worth + Gumbel noise``.

    Args:
        key: random key.
        worth: weight of each task, above 0.
        tasks: tasks of the batch, at most T. The first B - ``drawn`` stay, and none of them is drawn.
        drawn: number of tasks to draw.
    """
    stay = tasks[: len(tasks) - drawn]
    order = jnp.log(worth) + jax.random.gumbel(key, worth.shape)
    chosen = jax.lax.top_k(order.at[stay].set(-jnp.inf), drawn)[1]
    return jnp.concatenate([stay, chosen.astype(tasks.dtype)])


@jax.jit
def counts_of(
    rates: Rates,
    tasks: Int[Array, " B"],
    task: Int[Array, " C"],
    counted: Bool[Array, " C"],
    returns: Float[Array, " C"],
    bound: float,
    decay: float,
) -> Rates:
    """Add the completions of a step to the counts.

    Args:
        rates: counts before the step.
        tasks: numbers of the tasks of the batch.
        task: task of each completion, as an index into ``tasks``.
        counted: completions that count.
        returns: return of each completion.
        bound: return above which a completion is a success.
        decay: factor of the old counts of tasks that are tried.
    """
    of_task = lambda which: jnp.zeros_like(rates.tried).at[tasks[task]].add(which.astype(jnp.float32))
    tried, solved = of_task(counted), of_task(counted & (returns > bound))
    old = jnp.where(tried > 0, decay, 1.0)
    return Rates(old * rates.tried + tried, old * rates.solved + solved)
