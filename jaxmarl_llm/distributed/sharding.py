"""Where arrays live: a mesh of (data, fsdp, tensor) axes, and rules from a leaf's path to its place on it.

    data    rows of batches and tables; parameters are copies
    fsdp    rows too; parameters and optimizer state are cut along their D axis and gathered where they are used
    tensor  heads, feed-forward units and vocabulary, of parameters and of what is computed from them

A dimension of a leaf has a logical name (``axes_of``), a logical name a mesh axis (``RULES``). The engine is JAX's own:
programs are compiled for the mesh that `meshes.on` sets (GSPMD, Auto axes), and without one they are what they were.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import PyTree

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")

# Logical axis -> mesh axes. What is not named lies whole on every device.
RULES: dict[str, tuple[str, ...]] = {
    "rows": ROWS,
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "rank": (),
}

# Kernels are stored [in, out]. An adapter's A is [in, rank], its B [rank, out], a bias [out].
KERNELS = {
    "q_proj": ("embed", "heads"),
    "k_proj": ("embed", "kv_heads"),
    "v_proj": ("embed", "kv_heads"),
    "o_proj": ("heads", "embed"),
    "gate_proj": ("embed", "mlp"),
    "up_proj": ("embed", "mlp"),
    "down_proj": ("mlp", "embed"),
    "lm_head": ("embed", "vocab"),
}
# Small by nature, whole on every device: norms, value heads, factored second moments (optax.adafactor).
WHOLE = {"scale", "value", "v_row", "v_col"}


def spec(*axes: str | None) -> PartitionSpec:
    """The mesh axes of logical ones, a dimension each. ConfigError when two dimensions would share a mesh axis."""
    taken: dict[str, str] = {}
    for axis in axes:
        for mesh_axis in RULES[axis] if axis is not None else ():
            if mesh_axis in taken:
                raise ConfigError(f"sharding: {taken[mesh_axis]!r} and {axis!r} would both lie on axis {mesh_axis!r}")
            taken[mesh_axis] = str(axis)
    places = (RULES[axis] if axis is not None else () for axis in axes)
    return PartitionSpec(*(p[0] if len(p) == 1 else p or None for p in places))


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys, fields and positions of a path of jax.tree_util."""
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def axes_of(names: Sequence[str], ndim: int) -> tuple[str | None, ...]:
    """Logical axes of a leaf of parameters, adapters, heads, or of an optimizer state that mirrors them.

    Leading axes that the rule does not name (layers, snapshots) are whole. ConfigError for a leaf that no rule knows.
    """
    parent, last = names[-2] if len(names) > 1 else "", names[-1] if names else ""
    axes: tuple[str | None, ...] = ()
    if WHOLE.isdisjoint(names):
        if parent in KERNELS:
            fan_in, fan_out = KERNELS[parent]
            of = {"kernel": (fan_in, fan_out), "bias": (fan_out,), "a": (fan_in, "rank"), "b": ("rank", fan_out)}
            if last not in of:
                raise ConfigError(f"sharding: no rule for parameter {'/'.join(names)}")
            axes = of[last]
        elif (parent, last) == ("embed", "embedding"):
            axes = ("vocab", "embed")
        elif ndim > 1:
            raise ConfigError(f"sharding: no rule for parameter {'/'.join(names)}")
    if ndim < len(axes):
        axes = ()  # the stand-in [1] of a factored optimizer
    return (None,) * (ndim - len(axes)) + axes


def param_specs(tree: PyTree) -> PyTree:
    """PartitionSpec of every leaf (arrays or ShapeDtypeStructs), by its path."""
    return jax.tree_util.tree_map_with_path(lambda path, x: spec(*axes_of(names_of(path), len(x.shape))), tree)


def check_divides(mesh: Mesh, tree: PyTree, specs: PyTree) -> None:
    """ConfigError that names the leaf, its size and the axis where a dimension cannot be cut into equal parts."""
    by_leaf = jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    for (path, leaf), place in zip(jax.tree_util.tree_leaves_with_path(tree), by_leaf, strict=True):
        for dim, entry in zip(leaf.shape, place):
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            parts = math.prod(mesh.shape[a] for a in axes)
            if dim % parts:
                raise ConfigError(
                    f"parameter {'/'.join(names_of(path))} {tuple(leaf.shape)}: {dim} does not divide into the {parts} "
                    f"parts of mesh axis {' x '.join(axes)}"
                )


def check_heads(mesh: Mesh, model: str, heads: int, kv_heads: int) -> None:
    """ConfigError unless every device of the tensor axis holds whole heads."""
    parts = mesh.shape["tensor"]
    for name, count in (("query", heads), ("key/value", kv_heads)):
        if count % parts:
            raise ConfigError(f"config.mesh.tensor: {count} {name} heads of {model} do not divide into {parts} parts")


def shardings(mesh: Mesh, tree: PyTree) -> PyTree:
    """NamedSharding of every leaf, checked."""
    specs = param_specs(tree)
    check_divides(mesh, tree, specs)
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))


def rows(mesh: Mesh) -> NamedSharding:
    """The leading axis of tables and batches, over data and fsdp."""
    return NamedSharding(mesh, spec("rows"))


def whole(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def place(mesh: Mesh, tree: PyTree) -> PyTree:
    """Parameters, adapters, heads or optimizer states on their devices, in the memory that they are in."""
    kind = lambda x: x.sharding.memory_kind if isinstance(x, jax.Array) else None
    return put(tree, jax.tree.map(lambda x, s: s.with_memory_kind(kind(x)), tree, shardings(mesh, tree)))


def put(tree: PyTree, where: Any) -> PyTree:
    """`jax.device_put`, also on devices of other processes, all of which hold the same values: they are not compared.

    ``where``: a sharding, or a tree of them.
    """

    def move(x: Any, where: NamedSharding) -> jax.Array:
        if where.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
            return jax.device_put(x, where)
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(move(jax.random.key_data(x), where), impl=jax.random.key_impl(x))
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    where = jax.tree.map(lambda _: where, tree) if isinstance(where, NamedSharding) else where
    return jax.tree.map(move, tree, where)


def to_host(tree: PyTree) -> PyTree:
    """`jax.device_get`, also of what lies on devices of other processes. All of them have to ask for the same."""
    leaves, treedef = jax.tree.flatten(tree)
    far = [i for i, x in enumerate(leaves) if _far(x)]
    for i, x in zip(far, _everywhere([leaves[i] for i in far]) if far else ()):
        leaves[i] = x
    return jax.device_get(jax.tree.unflatten(treedef, leaves))


def pieces(x: Any, size: int = 1 << 28) -> Iterator[np.ndarray]:
    """The values of an array in order; where parts lie on devices of other processes, some ``size`` bytes at a time."""
    if not _far(x) or x.nbytes <= size or not x.ndim:
        yield np.asarray(to_host(x))
        return
    rows = max(1, size // (x.nbytes // len(x)))
    for start in range(0, len(x), rows):
        yield np.asarray(to_host(jax.lax.slice_in_dim(x, start, min(start + rows, len(x)))))


def _far(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated


def _everywhere(arrays: list[jax.Array]) -> list[jax.Array]:
    mesh = cast(NamedSharding, arrays[0].sharding).mesh  # what is cut over processes lies on a mesh
    return jax.jit(lambda x: x, out_shardings=whole(mesh))(arrays)


def current() -> Mesh | None:
    """The mesh of `meshes.on`, outside of compiled functions; None without one, there and inside."""
    return jax.sharding.get_mesh() if meshed() else None


def meshed() -> bool:
    """Whether XLA partitions what runs here over a mesh: not where all axes are manual, as in `by_device`."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and not mesh.are_all_axes_manual


def row_parts() -> int:
    """Into how many parts rows are cut; 1 without a mesh. Here and below also inside of compiled functions."""
    return _parts(ROWS)


def tensor_parts() -> int:
    """Into how many parts heads, units and vocabulary are cut; 1 without a mesh."""
    return _parts(("tensor",))


def _parts(axes: Sequence[str]) -> int:
    return math.prod(jax.sharding.get_abstract_mesh().shape[a] for a in axes) if meshed() else 1


def put_rows(tree: PyTree) -> PyTree:
    """Host tables onto the mesh, their leading axes cut; without a mesh as they are."""
    mesh = current()
    return tree if mesh is None else put(tree, rows(mesh))


def put_whole(tree: PyTree) -> PyTree:
    """A copy on every device of the mesh; without a mesh as it is."""
    mesh = current()
    return tree if mesh is None else put(tree, whole(mesh))


def cut_rows(tree: PyTree, *, rest: Any = PartitionSpec.UNCONSTRAINED) -> PyTree:
    """Inside a compiled function: leading axes are cut, those that do not divide are left to the compiler.

    ``rest``: the place of the other axes, left to the compiler or None (whole).
    """
    parts = row_parts()
    if parts == 1:
        return tree

    def cut(x: jax.Array) -> jax.Array:
        if not x.ndim or x.shape[0] % parts:
            return x
        return jax.lax.with_sharding_constraint(x, PartitionSpec(ROWS, *[rest] * (x.ndim - 1)))

    return jax.tree.map(cut, tree)


def by_device(function: Callable[..., PyTree], everywhere: PyTree, *tables: PyTree) -> PyTree:
    """Inside a compiled function: ``function(everywhere, *tables)``, each device with its own rows as without a mesh.

    What is ``everywhere`` is whole on every device. Leading axes of ``tables`` and of the result are equal and cut over
    data and fsdp, filled up with the last row where they do not divide; devices along tensor do the same.
    """
    n = len(jax.tree.leaves(tables)[0])
    filled = tables
    if missing := -n % row_parts():
        filled = jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], missing, 0)]), tables)
    cut = PartitionSpec(ROWS)
    each = jax.shard_map(function, in_specs=(PartitionSpec(), *(cut for _ in tables)), out_specs=cut, check_vma=False)
    return jax.tree.map(lambda x: x[:n], each(everywhere, *filled))


def settle(tree: PyTree) -> PyTree:
    """Inside a compiled function: parameters, gradients or optimizer states where the rules say."""
    if not meshed():
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, param_specs(tree))


def without_fsdp(place: PartitionSpec) -> PartitionSpec:
    """The place of a parameter where it is used: whole along fsdp."""
    return PartitionSpec(*(None if axis == "fsdp" else axis for axis in place))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x: jax.Array, place: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, without_fsdp(place))


# The transpose of a constraint is the same constraint, which would have every device hold the whole gradient.
_gather.defvjp(
    lambda x, place: (_gather(x, place), None),
    lambda place, _, g: (jax.lax.with_sharding_constraint(g, place),),
)


def gather(tree: PyTree) -> PyTree:
    """Inside a compiled function: parameters whole along fsdp for use, their gradients cut again."""
    if not meshed() or jax.sharding.get_abstract_mesh().shape["fsdp"] == 1:
        return tree
    return jax.tree.map(_gather, tree, param_specs(tree))


def copies(tree: PyTree) -> PyTree:
    """Inside a compiled function: parameters once for each part of the rows [parts ...], whole along fsdp."""
    parts = row_parts()

    def copy(x: jax.Array, place: PartitionSpec) -> jax.Array:
        wide = jnp.broadcast_to(_gather(x, place), (parts, *x.shape))
        return jax.lax.with_sharding_constraint(wide, PartitionSpec(ROWS, *without_fsdp(place)))

    return jax.tree.map(copy, tree, param_specs(tree))


def to_rollout(mesh: Mesh | None, params: PyTree) -> PyTree:
    """The layout of generation: whole along fsdp, so that no token waits for weights, cut along tensor as before.

    Made where another model begins to speak (`speakers.Playing`), or once for an array rollout, in the process: what is
    cut along fsdp moves, every other leaf is the same array.
    """
    if mesh is None or mesh.shape["fsdp"] == 1:
        return params

    def move(x: jax.Array, place: PartitionSpec) -> jax.Array:
        return x if without_fsdp(place) == place else jax.device_put(x, NamedSharding(mesh, without_fsdp(place)))

    return jax.tree.map(move, params, param_specs(params))
