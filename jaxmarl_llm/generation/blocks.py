"""Models of one architecture that sample at once in one program, each on a block of devices of its own.

A block is one part of the mesh's data axis. Entry b of every variable [blocks, ...] is on block b, and so is entry b of
every table of rows. The program is that of a single model: `Blocks` maps its functions over blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmarl_llm.distributed.sharding import (
    ATTENTION,
    current,
    is_spec,
    names_of,
    put,
    rollout_specs,
    rows_within_data,
)
from jaxmarl_llm.generation.generate import Rows
from jaxmarl_llm.types import Params, Policy, PyTree

COLLECTIONS = ("params", "lora")


@dataclass(frozen=True)
class Blocks(Rows):
    """Apply functions to each block of rows with its own variables, on a mesh over its data axis.

    Args:
        own: collections of the variables (params, lora) with a leading axis [blocks] in every leaf. The other
            collections are shared.
    """

    own: tuple[str, ...]

    def over(self, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """``function(variables, *trees of rows)``, mapped over blocks. Every array of rows has a leading axis [blocks].

        Its results are those of ``function`` with the variables and rows of one block.
        """

        def call(variables: Params, *rows: PyTree) -> PyTree:
            with rows_within_data():
                in_axes = self._axes(variables), *[0] * len(rows)
                return jax.vmap(function, in_axes=in_axes, spmd_axis_name="data")(variables, *rows)

        return call

    def unstack(self, policy: Policy, variables: Params) -> Params:
        """`Policy.unstack` of the variables of every block."""
        first = jax.tree_util.tree_map_with_path(lambda path, x: x[0] if self._is_own(path) else x, variables)
        after = self._axes(jax.eval_shape(policy.unstack, first))
        return jax.vmap(policy.unstack, in_axes=(self._axes(variables),), out_axes=after)(variables)

    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The mesh axes that split each leading axis of caches: blocks, and rows of a block within attention."""
        return ("data",), ("fsdp", ATTENTION)

    def put(self, tables: PyTree) -> PyTree:
        """Copy of host tables [blocks * N ...] on the devices of their blocks: [blocks N ...]."""
        mesh = current()
        assert mesh is not None  # blocks are parts of a mesh
        by_block = jax.tree.map(lambda x: x.reshape(mesh.shape["data"], -1, *x.shape[1:]), tables)
        return put(by_block, NamedSharding(mesh, PartitionSpec("data", "fsdp")))

    def _is_own(self, path: tuple[Any, ...]) -> bool:
        """Whether blocks own the leaf at ``path`` of variables, also of a result of `Policy.unstack`."""
        names = names_of(path)
        return next((name for name in reversed(names) if name in COLLECTIONS), names[0]) in self.own

    def _axes(self, variables: Params) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, _: 0 if self._is_own(path) else None, variables)


def blocks_of(loads: Sequence[float], blocks: int) -> list[int]:
    """Divide blocks among models: one each, then one by one to the model with the most samples a block.

    Args:
        loads: samples of each model; at most ``blocks`` models.
        blocks: number of blocks.

    Returns:
        Blocks of each model.
    """
    counts = [1] * len(loads)
    for _ in range(blocks - len(loads)):
        counts[max(range(len(loads)), key=lambda m: loads[m] / counts[m])] += 1
    return counts


def stacked(mesh: Mesh, trees: Sequence[PyTree]) -> PyTree:
    """Stack variables of models, entry b on block b, each in the layout of `sharding.to_rollout`.

    Args:
        mesh: its data axis has one part for each block.
        trees: variables of the model of each block. Their devices are those of ``mesh``, in the same order.
    """

    def stack(place: PartitionSpec, *leaves: jax.Array) -> jax.Array:
        return _stack(NamedSharding(mesh, PartitionSpec("data", *place)))(leaves)

    # One leaf after another: a device may not hold all models at once.
    return jax.tree.map(stack, rollout_specs(mesh, trees[0]), *trees, is_leaf=is_spec)


@functools.cache
def _stack(where: NamedSharding) -> Callable[[tuple[jax.Array, ...]], jax.Array]:
    return jax.jit(lambda leaves: jnp.stack(leaves), out_shardings=where)
