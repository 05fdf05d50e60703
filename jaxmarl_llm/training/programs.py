"""What compiles the programs of a training step on an array environment, before the step needs them.

An update has a program for each size of its micro-batches, and a memory has one for each number of rows. A rare size
comes up after dozens of steps. The shapes follow from the rollout's, so all programs can be compiled before.

A compiler is a function without arguments. The step then finds its program in the caches of JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxmarl_llm.agents import memory
from jaxmarl_llm.generation.buckets import bucket, coarse_sizes
from jaxmarl_llm.rollout.array_runner import lesson_program
from jaxmarl_llm.training.algorithm import StepParts
from jaxmarl_llm.training.drivers import blocks_of, update_memory
from jaxmarl_llm.training.learner import Batch, no_gradient
from jaxmarl_llm.training.packing import micro_sizes
from jaxmarl_llm.types import TrainState, Tree

Compiler = Callable[[], object]
Shape: Any = jax.ShapeDtypeStruct  # stands for an array


def step_programs(step: StepParts, state: TrainState, tree: Tree) -> list[Compiler]:
    """Compilers of the programs that follow a rollout from the host: the update's, then the memories'.

    Args:
        step: Training step on an array environment.
        state: State of the RL phase: shapes are read, and arrays do as well.
        tree: Shapes of the tree of the step's rollout.
    """
    calls = {}  # models and roles of the same shapes share a program
    for function, *args in (*_update_calls(step, state, tree), *_memory_calls(step, state, tree)):
        leaves, structure = jax.tree.flatten(args)
        calls[function, structure, tuple(leaves)] = lambda f=function, a=args: f.lower(*a).compile()
    return list(calls.values())


def _update_calls(step: StepParts, state: TrainState, tree: Tree) -> Iterator[tuple]:
    """Functions of `learner.optimize` and shapes of their arguments.

    There are none where the update is not one pass over the completions alone.
    """
    cfg, algorithm = step.cfg, step.algorithm
    other = (algorithm.update, algorithm.critic, algorithm.imitate, step.plan.choose)
    if any(function is not None for function in other) or cfg.loss.needs_reference or cfg.loss.epochs > 1:
        return
    for model in step.team.models:
        learner, own = step.learners[model.name], _shapes(state.params["agents"][model.name])
        shared = _shapes(state.params["shared"].get(model.base))
        gradient = jax.eval_shape(no_gradient, own)
        roles = {r for r, role in enumerate(step.team.roles) if model.name in role.players}
        batches = list(_batches(step, tree, roles))
        for batch in batches:
            yield learner.accumulate, own, shared, batch, gradient
        if batches:
            yield learner.apply, own, jax.eval_shape(learner.init, own), gradient, Shape((), jnp.float32)


def _batches(step: StepParts, tree: Tree, roles: set[int]) -> Iterator[Batch]:
    """Shapes of the micro-batches that `packing.pack` makes of the completions of ``roles``, the largest first.

    Nodes of one completion are left out where others have several: most credit rules compare siblings.
    """
    nodes: dict[int, int] = {}
    for block, seats in blocks_of(step, roles):
        group = bucket(block.group)
        nodes[group] = nodes.get(group, 0) + len(block.rows(seats)[0])
    if len(nodes) > 1:
        nodes.pop(1, None)
    prompt, response = tree.nodes.tokens.shape[1], tree.steps.tokens.shape[1]
    for group, count in nodes.items():
        for size in micro_sizes(step.cfg.micro_tokens // (prompt + group * response), count):
            grid = Shape((size, group, response), jnp.float32)
            yield Batch(
                tokens=Shape((size, prompt), jnp.int32),
                length=Shape((size,), jnp.int32),
                completions=Shape(grid.shape, jnp.int32),
                weights=grid,
                advantages=grid,
                sampler_logprobs=grid,
                rows=Shape((size, group), jnp.int32),
            )


def _memory_calls(step: StepParts, state: TrainState, tree: Tree) -> Iterator[tuple]:
    """Functions of `HostDriver.remember`, and their arguments or the shapes of these."""
    config, read = step.algorithm.memory, tree.nodes.retrieved
    if config is None:
        return
    for index, role in enumerate(step.team.roles):
        store = _shapes(state.memory[role.name])
        most = sum(block.rows(seats)[1].size for block, seats in blocks_of(step, {index}))
        for size in coarse_sizes(most, 32):
            table = lambda x, width, size=size: Shape((size, width), x.dtype)
            samples = memory.Samples(
                keys=table(read.query, store.key.shape[1]),
                ids=Shape((size, step.env_runner.entry_tokens), jnp.int32),
                length=Shape((size,), jnp.int32),
                text=table(store.text, store.text.shape[1]),
                reward=Shape((size,), jnp.float32),
                retrieved=table(read.slots, read.slots.shape[1]),
                similarity=table(read.similarity, read.similarity.shape[1]),
                valid=Shape((size,), jnp.bool_),
            )
            yield lesson_program, step.env_runner, step.team, tree, Shape((size,), jnp.int32)
            yield update_memory, config, store, samples, _shapes(state.step)


def _shapes(tree: Any) -> Any:
    return jax.eval_shape(lambda x: x, tree)
