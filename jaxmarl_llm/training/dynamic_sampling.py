"""Dynamic sampling: more tasks are played until the batch is full of groups that differ (DAPO, arXiv 2503.14476)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from jaxmarl_llm.config import at_least
from jaxmarl_llm.rollout.keys import EXTRA_PLAYS
from jaxmarl_llm.rollout.merge import merge_tasks
from jaxmarl_llm.training.algorithm import Played, Step, StepParts
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.types import Array, TrainState


@dataclass(frozen=True)
class DynamicSampling:
    """Replace tasks without a selected group by others: a `algorithm.PlayFunction`.

    A task is kept if `Algorithm.select` takes one of its groups. With `algorithm.unequal_groups` a kept task has a
    group whose returns differ. While fewer than B tasks are kept, B other tasks are played, at most ``extra_plays``
    times. The batch is the first B kept tasks in the order of play. If there are fewer, tasks that are not kept fill
    the batch, and the selection leaves them out of the update.

    Groups have to be within a task: ``credit.group`` is ``node``, ``task``, ``task_role`` or ``task_role_turn``. The
    tasks and keys of extra plays come from the step's key. So a resumed run plays the same tasks, and a step without an
    extra play is equal to one without dynamic sampling. Changed: DAPO goes on in the order of its data. Here extra
    tasks are drawn for each step, without regard to the epoch. An extra task may be one of the batch.

    Metrics: ``sampling/plays``, ``sampling/played`` and ``sampling/kept`` tasks.

    Attributes:
        extra_plays: Plays of B tasks after the first one, at most.
    """

    extra_plays: int = 4
    on_host: ClassVar[str] = "dynamic sampling plays a number of tasks that depends on the samples"

    def __post_init__(self) -> None:
        at_least("DynamicSampling.extra_plays", self.extra_plays, 0)

    def __call__(
        self,
        step: StepParts,
        once: Callable[[Array, jax.Array], tuple[Any, Any]],
        tasks: Array,
        key: jax.Array,
        rl_step: Step,
        state: TrainState,
    ) -> Played:
        """Play until enough tasks are kept.

        Args:
            step: parts of the training step.
            once: plays tasks [B] with a key.
            tasks: numbers of the step's tasks [B].
            key: random key of the step.
            rl_step: number of the RL step.
            state: not used.
        """
        batch = len(tasks)
        own = jax.random.fold_in(key, EXTRA_PLAYS)
        plays, numbers, kept, rest = [], [], [], []
        for play in range(1 + self.extra_plays):
            if play:
                start = (play - 1) * batch
                tasks = np.asarray(shuffled(own, step.env_runner.size, start, batch))
                key = jax.random.fold_in(own, play)
            tree, played = once(tasks, key)
            plays.append(played)
            numbers.append(np.asarray(tasks))
            good = self._kept(step, tree, rl_step)
            kept += [(play, int(task)) for task in np.flatnonzero(good)]
            rest += [(play, int(task)) for task in np.flatnonzero(~good)]
            if len(kept) >= batch:
                break
        seen = {"sampling/plays": len(plays), "sampling/played": len(plays) * batch, "sampling/kept": len(kept)}
        metrics = {name: float(value) for name, value in seen.items()}
        if len(plays) == 1:
            return Played(tree, played, numbers[0], metrics)
        chosen = sorted((kept + rest)[:batch])
        merged = merge_tasks(plays, chosen)
        return Played(merged.tree, merged, np.array([numbers[p][t] for p, t in chosen], np.int32), metrics)

    def _kept(self, step: StepParts, tree: Any, rl_step: Step) -> np.ndarray:
        """Whether the selection takes a group of each task [B]."""
        reward = step.algorithm.reward
        credited = step.assign(tree, reward(rl_step) if callable(reward) else reward)
        selected = np.asarray(step.algorithm.select(credited, step.cfg.batch))
        good = np.zeros(step.cfg.batch, bool)
        good[np.asarray(credited.group_task)[selected]] = True
        return good
