"""Supervised steps: the policy update on given completions, for stage 0, imitation and preferences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.rollout.env_runner import Demonstrations
from jaxmarl_llm.rollout.keys import DEMONSTRATIONS, stream
from jaxmarl_llm.training.algorithm import Driver
from jaxmarl_llm.training.config import Offline
from jaxmarl_llm.training.learner import Batch, Learner, token_weights
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.training.packing import as_forest
from jaxmarl_llm.types import Team, TrainState

SFT_LOSS = Loss(clip_low=None)


def supervised_step(
    team: Team,
    learners: Mapping[str, Learner],
    loss: Loss,
    data: Mapping[str, Demonstrations],
    cfg: Offline,
    driver: Driver,
    state: TrainState,
    step: Any,
    *,
    advantages: tuple[float, ...] = (1.0,),
    trees: bool = False,
) -> tuple[TrainState, dict[str, dict[str, Any]]]:
    """Update every model on samples of its roles. All models that learn a role take its samples of the step.

    Completions of a sample share its prompt: one with advantage 1 is maximum likelihood, two with advantages 1 and -1
    are a preference (loss dpo).

    Args:
        team: Roles and models.
        learners: By model.
        loss: Configuration of the loss.
        data: Samples by role; a role without samples is left out.
        cfg: Samples of each role in a step.
        driver: Runs the update.
        state: With the optimizers of ``learners``.
        step: Number of the step on these samples; may be traced.
        advantages: Advantages of the G completions of a sample.
        trees: Whether samples share the beginnings of their prompts, for tables on the host (`packing.as_forest`). On a
            mesh that cuts rows, with several completions, and for a loss of groups they do not.

    Returns:
        The state, and metrics by model.
    """
    batches: dict[str, list[Batch]] = {}
    by_name = {model.name: model for model in team.models}
    trees &= len(advantages) == 1 and loss.unit != "group"
    trees &= sharding.row_parts() == 1 and not meshes.has_split_models()
    for index, role in enumerate(team.roles):
        if role.name not in data or not len(data[role.name].length):
            continue
        d = data[role.name]
        key = jax.random.fold_in(stream(driver.seed, DEMONSTRATIONS), index)
        rows = driver.host(shuffled(key, len(d.length), step * cfg.batch, cfg.batch))
        take = lambda x, rows=rows: (x if isinstance(rows, np.ndarray) else jnp.asarray(x))[rows]
        # One shape a role where its prompts are all short; on the host, buckets of the batch where some are long.
        traced = isinstance(d.length, jax.Array)
        p = d.tokens.shape[1] if traced else min(bucket(int(d.length.max()), 8), d.tokens.shape[1])
        if isinstance(rows, np.ndarray):
            p = min(p, bucket(int(d.length[rows].max()), 64))
        completions = take(d.completions).reshape(cfg.batch, len(advantages), -1)
        size = take(d.completion_length).reshape(cfg.batch, len(advantages), 1)
        mask = np.arange(completions.shape[2]) < size
        if d.loss_mask is not None:
            mask = mask & take(d.loss_mask).reshape(completions.shape)
        weights = driver.host(token_weights(mask, np.ones(mask.shape[:2], np.float32), loss.aggregation))
        gain = np.broadcast_to(np.array(advantages, np.float32)[:, None], mask.shape)
        nothing = np.zeros(mask.shape, np.float32)
        batch = Batch(take(d.tokens)[:, :p], take(d.length), completions, weights, gain, nothing)
        for model in role.players[: role.learning]:
            shares = trees and by_name[model].policy.hidden_tree is not None
            batches.setdefault(model, []).append(as_forest(batch, np.asarray(size).reshape(-1)) if shares else batch)
    return driver.optimize(team.models, learners, loss, state, batches)


def supervised_metrics(name: str, loss: Loss, updated: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of a supervised step: of each model, and their means over models.

    Args:
        name: First part of the names.
        loss: Configuration of the loss.
        updated: Metrics of the update, by model.
    """
    shown = ("nll",) if loss.objective == "policy" else ("loss", "accuracy", "margin")
    out = {f"{name}/{model}/{k}": float(m[k]) for model, m in updated.items() for k in shown}
    if updated:
        out |= {f"{name}/{k}": float(np.mean([m[k] for m in updated.values()])) for k in shown}
    return out | {"bad": float(any(not m["ok"] for m in updated.values()))}
