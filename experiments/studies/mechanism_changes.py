"""Changes that arms of the mechanisms study make in a training step: selection, groups, memory, and the driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxmarl_llm.agents.memory import Memory
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.credit.selection import top_k_variance
from jaxmarl_llm.training.algorithm import StepParts
from jaxmarl_llm.training.drivers import TracedDriver, blocks_of
from jaxmarl_llm.training.learner import Batch, Learner
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.types import Array, Model, Params, TrainState, Tree


def random_groups(k: int, num_tasks: int) -> Callable[[Array, Tree, Array], Array]:
    """`Algorithm.select_steps` that keeps the steps of k random nodes of each task, of those with a trained step."""

    def select(key: Array, tree: Tree, trained: Array) -> Array:
        nodes = tree.nodes.task.shape[0]
        able = jax.ops.segment_max(jnp.asarray(trained).astype(jnp.int32), tree.steps.node, nodes) > 0
        score = jax.random.uniform(key, (nodes,), minval=0.1, maxval=1.0)
        chosen = top_k_variance(score, able, k, scope=tree.nodes.task, num_scopes=num_tasks)
        return trained & chosen[tree.steps.node]

    return select


def by_task_and_turn(tree: Tree, sizes: Sizes) -> tuple[Array, int]:
    """Groups of a flat plan: the completions of one turn of a task, whichever role made them."""
    node = tree.steps.node
    ids = tree.nodes.task[node] * sizes.max_turns + tree.nodes.turn[node]
    return ids, sizes.num_tasks * sizes.max_turns


def permuted(store: Memory, key: jax.Array) -> Memory:
    """A memory in which the keys of the used entries are exchanged at random: they say nothing of the entries."""
    draws = jax.random.uniform(key, store.used.shape)
    order = jnp.argsort(jnp.where(store.used, draws, jnp.inf))
    place = jnp.argsort(~store.used, stable=True)  # used slots first, as in ``order``
    return replace(store, key=store.key.at[place].set(store.key[order]))


def permuted_stores(stores: Mapping[str, Memory], key: jax.Array) -> dict[str, Memory]:
    """`permuted` for each role's memory."""
    return {name: permuted(store, jax.random.fold_in(key, i)) for i, (name, store) in enumerate(stores.items())}


@dataclass(frozen=True)
class Driver(TracedDriver):
    """A `TracedDriver` of a step whose rollout is there already.

    Its updates leave out nodes behind alternatives, which are never trained on.

    Attributes:
        tree: The rollout; None: it is played.
    """

    tree: Tree | None = None

    def play(
        self, step: StepParts, state: TrainState, params: Params, tasks: Array, key: jax.Array, assignment: Any
    ) -> tuple[Tree, None]:
        if self.tree is not None:
            return self.tree, None
        return super().play(step, state, params, tasks, key, assignment)

    def lay_out(
        self,
        step: StepParts,
        tree: Tree,
        played: None,
        advantage: Array,
        trained: Array,
        targets: Mapping[str, Any],
        imitation: Array | None = None,
    ) -> dict[str, list[Batch]]:
        """Micro-batches of base trajectories alone."""
        whole = super().lay_out(step, tree, played, advantage, trained, targets, imitation)
        out: dict[str, list[Batch]] = {}
        for name, batches in whole.items():
            roles = {r for r, role in enumerate(step.team.roles) if name in role.players}
            blocks = [block for block, _ in blocks_of(step, roles)]
            out[name] = [batch for block, batch in zip(blocks, batches, strict=True) if block.branch.trunk]
        return out

    def optimize(
        self,
        models: tuple[Model, ...],
        learners: Mapping[str, Learner],
        loss: Loss,
        state: TrainState,
        batches: Mapping[str, list[Batch]],
    ) -> tuple[TrainState, dict[str, dict[str, Any]]]:
        """As `TracedDriver.optimize`. Micro-batches of one shape are joined, so that few are compiled."""
        joined: dict[str, list[Batch]] = {}
        for name, some in batches.items():
            alike: dict[tuple[int, ...], list[Batch]] = {}
            for batch in some:
                if jnp.ndim(batch.length) == 1:  # no stack
                    batch = jax.tree.map(lambda x: x[None], batch)
                alike.setdefault((batch.tokens.shape[2], *batch.completions.shape[2:]), []).append(batch)
            joined[name] = [jax.tree.map(lambda *rows: jnp.concatenate(rows, 1), *some) for some in alike.values()]
        return super().optimize(models, learners, loss, state, joined)
