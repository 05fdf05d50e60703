"""Supervised steps: the policy update on given completions, for stage 0, imitation and preferences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.env_runner import Demonstrations
from jaxmarl_llm.rollout.keys import DEMONSTRATIONS, stream
from jaxmarl_llm.training.algorithm import Driver
from jaxmarl_llm.training.config import Offline
from jaxmarl_llm.training.learner import Batch, Learner, make_learner, token_weights
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.training.packing import as_forest
from jaxmarl_llm.types import Array, Team, TrainState

SFT_LOSS = Loss(clip_low=None)


@dataclass(frozen=True)
class Supervised:
    """Updates of every model on given samples of its roles.

    Completions of a sample share its prompt: one with advantage 1 is maximum likelihood, two with advantages 1 and -1
    are a preference (loss dpo). All models that learn a role take its samples of a step.

    Attributes:
        team: Roles and models.
        learners: By model.
        batch: Samples of each role in a step.
        loss: Configuration of the loss.
        advantages: Advantages of the G completions of a sample.
        trees: Whether samples share the beginnings of their prompts, for tables on the host (`packing.as_forest`). On a
            mesh that cuts rows, with several completions, and for a loss of groups they do not.
    """

    team: Team
    learners: Mapping[str, Learner]
    batch: int
    loss: Loss = SFT_LOSS
    advantages: tuple[float, ...] = (1.0,)
    trees: bool = False

    def step(
        self, driver: Driver, state: TrainState, i: Any, data: Mapping[str, Demonstrations]
    ) -> tuple[TrainState, dict[str, dict[str, Any]]]:
        """Update every model on its samples of one step.

        Args:
            driver: Runs the update.
            state: With the optimizers of ``learners``.
            i: Number of the step on these samples; may be traced.
            data: Samples by role; a role without samples is left out.

        Returns:
            The state, and metrics by model.
        """
        batches: dict[str, list[Batch]] = {}
        by_name = {model.name: model for model in self.team.models}
        trees = self.trees and len(self.advantages) == 1 and self.loss.unit != "group"
        trees &= sharding.row_parts() == 1 and not meshes.has_split_models()
        for index, role in enumerate(self.team.roles):
            if role.name not in data or not len(data[role.name].length):
                continue
            batch, sizes = self._batch(driver, i, index, data[role.name])
            for model in role.players[: role.learning]:
                shares = trees and by_name[model].policy.hidden_tree is not None
                batches.setdefault(model, []).append(as_forest(batch, np.asarray(sizes)) if shares else batch)
        return driver.optimize(self.team.models, self.learners, self.loss, state, batches)

    def _batch(self, driver: Driver, i: Any, index: int, d: Demonstrations) -> tuple[Batch, Array]:
        """The samples ``d`` that role number ``index`` has in step ``i``, and tokens of their completions [B * G]."""
        key = jax.random.fold_in(stream(driver.seed, DEMONSTRATIONS), index)
        rows = driver.host(shuffled(key, len(d.length), i * self.batch, self.batch))
        take = lambda x: (x if isinstance(rows, np.ndarray) else jnp.asarray(x))[rows]
        # One shape a role where its prompts are all short; on the host, buckets of the batch where some are long.
        traced = isinstance(d.length, jax.Array)
        p = d.tokens.shape[1] if traced else min(bucket(int(d.length.max()), 8), d.tokens.shape[1])
        if isinstance(rows, np.ndarray):
            p = min(p, bucket(int(d.length[rows].max()), 64))
        completions = take(d.completions).reshape(self.batch, len(self.advantages), -1)
        sizes = take(d.completion_length)
        mask = np.arange(completions.shape[2]) < sizes.reshape(self.batch, len(self.advantages), 1)
        if d.loss_mask is not None:
            mask = mask & take(d.loss_mask).reshape(completions.shape)
        weights = driver.host(token_weights(mask, np.ones(mask.shape[:2], np.float32), self.loss.aggregation))
        gain = np.broadcast_to(np.array(self.advantages, np.float32)[:, None], mask.shape)
        nothing = np.zeros(mask.shape, np.float32)
        return Batch(take(d.tokens)[:, :p], take(d.length), completions, weights, gain, nothing), sizes.reshape(-1)

    def metrics(self, name: str, updated: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of a step: of each model, and their means over models.

        Args:
            name: First part of the names.
            updated: Metrics of the update, by model.
        """
        shown = ("nll",) if self.loss.objective == "policy" else ("loss", "accuracy", "margin")
        out = {f"{name}/{model}/{k}": float(m[k]) for model, m in updated.items() for k in shown}
        if updated:
            out |= {f"{name}/{k}": float(np.mean([m[k] for m in updated.values()])) for k in shown}
        return out | {"bad": float(any(not m["ok"] for m in updated.values()))}


def make_imitation(team: Team, size: Offline, *, trees: bool = False) -> Supervised:
    """Maximum likelihood of given completions, for every model of a team.

    Args:
        team: Roles and models.
        size: Samples of a step, and the optimizer.
        trees: As in `Supervised`.
    """
    learners = {m.name: make_learner(m.policy, SFT_LOSS, size.optimizer, Sampling()) for m in team.models}
    return Supervised(team, learners, size.batch, trees=trees)
