"""Sharding rules: how each array is split over a mesh with the axes (data, fsdp, tensor).

    data    splits rows of batches and tables; parameters are replicated
    fsdp    splits rows too; splits parameters and optimizer states along their D axis, gathered for use
    tensor  splits heads, feed-forward units and vocabulary, of parameters and of arrays computed from them

With ``config.mesh.context`` above 1 a mesh has a fourth axis between fsdp and tensor:

    context splits the tokens of a row (`distributed.context`); cuts parameters and optimizer states together with fsdp

A mesh of generation (`meshes.Layout`) has another fourth axis in that place:

    attn_dp splits parameters as tensor does, but rows and not heads within attention, so no key/value head is copied

Each dimension of a leaf has a logical axis name (`axes_of`). ``RULES`` maps each logical axis to mesh axes. JAX
partitions the programs (GSPMD, Auto axes) for the mesh that `meshes.use_mesh` sets. Without a mesh, programs do not
change.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import PyTree

T = TypeVar("T")

UNCONSTRAINED = PartitionSpec.UNCONSTRAINED

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")
ATTENTION = "attn_dp"
CONTEXT = "context"

_row_axes: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("row_axes", default=ROWS)

# Logical axis -> mesh axes. A dimension without a logical axis is not split.
RULES: dict[str, tuple[str, ...]] = {
    "rows": ROWS,
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "rank": (),
}

# Logical axes (in, out) of each kernel [in, out]. An adapter has A [in, rank] and B [rank, out]. A bias is [out]. A
# quantized kernel (`kernels.quantized`) has values [in, out] and scales [out].
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
# Small leaves, replicated on every device: norms, value heads, factored second moments (optax.adafactor).
WHOLE = {"scale", "value", "v_row", "v_col"}


def spec(*axes: str | None) -> PartitionSpec:
    """PartitionSpec of an array with these logical axes.

    axes: one logical axis for each dimension; None for a dimension that is not split. Raises ConfigError when two
    dimensions would use the same mesh axis.
    """
    taken: dict[str, str] = {}
    for axis in axes:
        for mesh_axis in RULES[axis] if axis is not None else ():
            if mesh_axis in taken:
                raise ConfigError(f"sharding: {taken[mesh_axis]!r} and {axis!r} would both lie on axis {mesh_axis!r}")
            taken[mesh_axis] = str(axis)
    places = (RULES[axis] if axis is not None else () for axis in axes)
    return PartitionSpec(*(p[0] if len(p) == 1 else p or None for p in places))


def names_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """Keys, field names and indices of a ``path`` of ``jax.tree_util``, as strings."""
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def axes_of(names: Sequence[str], ndim: int) -> tuple[str | None, ...]:
    """Logical axes of a leaf of parameters, adapters or value heads, or of an optimizer state of the same structure.

    names: path of the leaf (`names_of`). ndim: its number of dimensions. Leading dimensions beyond the rule, such as
    layers or snapshots, are not split. Raises ConfigError for a leaf without a rule.
    """
    parent, last = names[-2] if len(names) > 1 else "", names[-1] if names else ""
    if parent == "kernel":
        parent = names[-3]
    axes: tuple[str | None, ...] = ()
    if WHOLE.isdisjoint(names):
        if parent in KERNELS:
            fan_in, fan_out = KERNELS[parent]
            of = {"kernel": (fan_in, fan_out), "bias": (fan_out,), "a": (fan_in, "rank"), "b": ("rank", fan_out)}
            of |= {"values": (fan_in, fan_out), "scales": (fan_out,)}
            of |= {"of": ("rank",), "own": ("rank",)}  # of joined adapters
            if last not in of:
                raise ConfigError(f"sharding: no rule for parameter {'/'.join(names)}")
            axes = of[last]
        elif (parent, last) == ("embed", "embedding"):
            axes = ("vocab", "embed")
        elif ndim > 1:
            raise ConfigError(f"sharding: no rule for parameter {'/'.join(names)}")
    if ndim < len(axes):
        axes = ()  # the placeholder [1] of a factored optimizer
    return (None,) * (ndim - len(axes)) + axes


def param_specs(tree: PyTree, mesh: Mesh | AbstractMesh | None = None) -> PyTree:
    """PartitionSpec of every leaf of ``tree`` (arrays or ShapeDtypeStructs), from its path.

    mesh: the mesh that the leaves are cut over; None is the mesh of the current code. With an axis context, what fsdp
    cuts is cut over both.
    """
    cut = CONTEXT in (jax.sharding.get_abstract_mesh() if mesh is None else mesh).axis_names

    def place(path: Any, x: Any) -> PartitionSpec:
        own = spec(*axes_of(names_of(path), len(x.shape)))
        return PartitionSpec(*(("fsdp", CONTEXT) if axis == "fsdp" else axis for axis in own)) if cut else own

    return jax.tree_util.tree_map_with_path(place, tree)


def is_spec(x: Any) -> bool:
    """Whether ``x`` is a PartitionSpec: a leaf of a tree of them."""
    return isinstance(x, PartitionSpec)


def check_divides(mesh: Mesh, tree: PyTree, specs: PyTree) -> None:
    """Raise ConfigError when an axis of ``mesh`` does not divide a dimension that it splits.

    tree: arrays or ShapeDtypeStructs. specs: their PartitionSpecs. The message names the leaf, its shape and the axis.
    """
    by_leaf = jax.tree.leaves(specs, is_leaf=is_spec)
    for (path, leaf), place in zip(jax.tree_util.tree_leaves_with_path(tree), by_leaf, strict=True):
        for dim, entry in zip(leaf.shape, place):
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            parts = math.prod(mesh.shape[a] for a in axes)
            if dim % parts:
                raise ConfigError(
                    f"parameter {'/'.join(names_of(path))} {tuple(leaf.shape)}: {dim} does not divide into the {parts} "
                    f"parts of mesh axis {' x '.join(axes)}"
                )


def shardings(mesh: Mesh, tree: PyTree) -> PyTree:
    """NamedSharding on ``mesh`` of every leaf of ``tree``. Raises ConfigError as `check_divides` does."""
    specs = param_specs(tree, mesh)
    check_divides(mesh, tree, specs)
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=is_spec)


def rows(mesh: Mesh) -> NamedSharding:
    """Sharding that splits axis 0 over the data and fsdp axes of ``mesh``."""
    return NamedSharding(mesh, spec("rows"))


def whole(mesh: Mesh) -> NamedSharding:
    """Sharding that replicates an array on every device of ``mesh``."""
    return NamedSharding(mesh, PartitionSpec())


def place(mesh: Mesh, tree: PyTree) -> PyTree:
    """Copy of ``tree``, split over ``mesh`` by the rules. Each leaf keeps its memory kind (device or host memory).

    tree: parameters, adapters, value heads or optimizer states.
    """
    kind = lambda x: x.sharding.memory_kind if isinstance(x, jax.Array) else None
    return put(tree, jax.tree.map(lambda x, s: s.with_memory_kind(kind(x)), tree, shardings(mesh, tree)))


def put(tree: PyTree, where: Any) -> PyTree:
    """Place arrays like ``jax.device_put``, also on devices of other processes.

    tree: arrays; every process must hold the same values, which is not checked. where: one sharding for all leaves, or
    a tree of shardings.
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
    """Fetch the arrays of ``tree`` like ``jax.device_get``, also from devices of other processes.

    A collective: every process must call it with the same tree.
    """
    leaves, treedef = jax.tree.flatten(tree)
    far = [i for i, x in enumerate(leaves) if _far(x)]
    for i, x in zip(far, _everywhere([leaves[i] for i in far]) if far else ()):
        leaves[i] = x
    return jax.device_get(jax.tree.unflatten(treedef, leaves))


def pieces(x: Any, size: int = 1 << 28) -> Iterator[np.ndarray]:
    """Values of an array as consecutive NumPy arrays along axis 0.

    x: any array. size: bytes of one piece. An array is cut only if it is larger and lies partly on devices of other
    processes. Then this is a collective.
    """
    if not _far(x) or x.nbytes <= size or not x.ndim:
        yield np.asarray(to_host(x))
        return
    rows = max(1, size // (x.nbytes // len(x)))
    for start in range(0, len(x), rows):
        yield np.asarray(to_host(jax.lax.slice_in_dim(x, start, min(start + rows, len(x)))))


def _far(x: Any) -> bool:
    """Whether parts of ``x`` lie only on devices of other processes."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable and not x.is_fully_replicated


def _everywhere(arrays: list[jax.Array]) -> list[jax.Array]:
    """Copies of ``arrays``, replicated on every device of their mesh."""
    mesh = cast(Mesh, cast(NamedSharding, arrays[0].sharding).mesh)  # arrays split over processes have a concrete mesh
    return jax.jit(lambda x: x, out_shardings=whole(mesh))(arrays)


def current() -> Mesh | None:
    """Mesh that `meshes.use_mesh` set, for code outside compiled functions; None without a mesh."""
    return jax.sharding.get_mesh() if meshed() else None


def meshed() -> bool:
    """Whether XLA partitions the current code over a mesh. False where all axes are manual, as in `by_device`."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and not mesh.are_all_axes_manual


def settle(tree: T) -> T:
    """Wait for the arrays of ``tree`` on a mesh of simulated CPU devices; elsewhere return at once.

    XLA launches at most 32 programs ahead on a CPU device. A launch beyond that holds one of the few threads on which
    the devices run. A program with collectives may then wait for ever for a device that has no thread.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree)):
        return tree
    mesh = current()
    if mesh is not None and mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.block_until_ready(tree)
    return tree


def row_parts() -> int:
    """Number of parts into which rows are split; 1 without a mesh. Also valid inside compiled functions."""
    return parts_along(attention_rows()) if meshed() else 1


def context_parts() -> int:
    """Number of parts into which the tokens of a row are cut; 1 without such a mesh. Also valid when compiled."""
    return parts_along((CONTEXT,))


def tensor_parts() -> int:
    """Number of parts into which heads, units and vocabulary are split; 1 without a mesh. Also valid when compiled."""
    return parts_along((ATTENTION, "tensor"))


def parts_along(axes: Sequence[str]) -> int:
    """Number of devices along ``axes`` of the mesh; 1 for an axis that the mesh lacks. Also valid when compiled."""
    return math.prod(jax.sharding.get_abstract_mesh().shape.get(a, 1) for a in axes) if meshed() else 1


def row_axes() -> tuple[str, ...]:
    """The mesh axes that split rows outside of attention, inside a compiled function."""
    return _row_axes.get()


def attention_rows() -> tuple[str, ...]:
    """The mesh axes that split rows within attention, inside a compiled function."""
    own, there = _row_axes.get(), jax.sharding.get_abstract_mesh().axis_names
    return (*own, ATTENTION) if ATTENTION in there and ATTENTION not in own else own


@contextlib.contextmanager
def many_tokens() -> Iterator[None]:
    """Context manager: on a mesh with attn_dp, that axis splits rows everywhere, and parameters are gathered along it.

    For prompts. Their activations are larger than the parameters, and a decoded token's are smaller.
    """
    with _rows_along(attention_rows() if meshed() else row_axes()):
        yield


@contextlib.contextmanager
def rows_within_data() -> Iterator[None]:
    """Context manager: rows are those of one part of the data axis, and are split over fsdp alone.

    For functions that `jax.vmap` maps over the data axis (`generation.blocks`).
    """
    with _rows_along(("fsdp",)):
        yield


@contextlib.contextmanager
def _rows_along(axes: tuple[str, ...]) -> Iterator[None]:
    """Context manager: rows are split over ``axes`` outside of attention."""
    token = _row_axes.set(axes)
    try:
        yield
    finally:
        _row_axes.reset(token)


def put_rows(tree: PyTree) -> PyTree:
    """Copy of host tables on the mesh, split along axis 0; without a mesh, ``tree`` itself."""
    mesh = current()
    return tree if mesh is None else put(tree, rows(mesh))


def put_whole(tree: PyTree) -> PyTree:
    """Copy of ``tree``, replicated on every device of the mesh; without a mesh, ``tree`` itself."""
    mesh = current()
    return tree if mesh is None else put(tree, whole(mesh))


def cut_rows(tree: PyTree, *, rest: Any = UNCONSTRAINED) -> PyTree:
    """Constrain axis 0 of every leaf to be split over rows, inside a compiled function.

    tree: arrays; the compiler decides for an axis 0 that does not divide. rest: placement of the other axes. By default
    the compiler decides; None means not split.
    """
    parts = row_parts()
    if parts == 1:
        return tree

    def cut(x: jax.Array) -> jax.Array:
        if not x.ndim or x.shape[0] % parts:
            return x
        return jax.lax.with_sharding_constraint(x, PartitionSpec(_row_axes.get(), *[rest] * (x.ndim - 1)))

    return jax.tree.map(cut, tree)


def by_device(function: Callable[..., PyTree], everywhere: PyTree, *tables: PyTree) -> PyTree:
    """Run ``function(everywhere, *tables)`` on each device with its own rows, inside a compiled function.

    everywhere: arrays replicated on every device. tables: arrays of equal length, split along axis 0 over data and
    fsdp; the last row is repeated where the length does not divide. function: returns arrays of the same length. Its
    code sees no mesh. Devices along the tensor axis compute the same values.
    """
    n = len(jax.tree.leaves(tables)[0])
    filled = tables
    if missing := -n % row_parts():
        filled = jax.tree.map(lambda x: jnp.concatenate([x, jnp.repeat(x[-1:], missing, 0)]), tables)
    cut = PartitionSpec(ROWS)
    each = jax.shard_map(function, in_specs=(PartitionSpec(), *(cut for _ in tables)), out_specs=cut, check_vma=False)
    return jax.tree.map(lambda x: x[:n], each(everywhere, *filled))


def constrain(tree: PyTree) -> PyTree:
    """Constrain parameters, gradients or optimizer states to the sharding rules, inside a compiled function.

    ``tree``: the parameters, gradients or states.
    """
    if not meshed():
        return tree
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, param_specs(tree))


def is_rollout() -> bool:
    """Whether the mesh is one of generation, where parameters are gathered along fsdp already."""
    return ATTENTION in jax.sharding.get_abstract_mesh().axis_names


def without_fsdp(place: PartitionSpec) -> PartitionSpec:
    """PartitionSpec of a parameter in use: as ``place``, but not split along fsdp, nor along context with it."""
    return PartitionSpec(*(None if axis in ("fsdp", ("fsdp", CONTEXT)) else axis for axis in place))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(x: jax.Array, place: PartitionSpec) -> jax.Array:
    """Gather ``x`` along fsdp. ``place``: PartitionSpec of the parameter, which its gradient gets again."""
    return jax.lax.with_sharding_constraint(x, without_fsdp(place))


# The default gradient repeats the constraint, so that every device would hold the whole gradient. This one splits it.
_gather.defvjp(
    lambda x, place: (_gather(x, place), None),
    lambda place, _, g: (jax.lax.with_sharding_constraint(g, place),),
)


def gather(tree: PyTree) -> PyTree:
    """Gather the parameters ``tree`` for use, inside a compiled function. Gradients are split again.

    They are gathered along fsdp; in generation along attn_dp, within `many_tokens` alone.
    """
    if not meshed():
        return tree
    if is_rollout():
        if ATTENTION not in _row_axes.get():
            return tree
        # Without the first constraint XLA gathers the layers of all steps of a scan at each of them.
        kept = rollout_specs(jax.sharding.get_abstract_mesh(), tree)
        tree = jax.tree.map(jax.lax.with_sharding_constraint, tree, kept)
        return jax.tree.map(_gather, tree, param_specs(tree))
    if parts_along(("fsdp", CONTEXT)) == 1:
        return tree
    return jax.tree.map(_gather, tree, param_specs(tree))


def copies(tree: PyTree) -> PyTree:
    """Replicate a ``tree`` of parameters once for each part of rows and tokens, inside a compiled function.

    Each leaf [...] becomes [parts, ...], split along axis 0 and gathered along fsdp. There are `row_parts` parts, times
    `context_parts`.
    """
    parts, own = row_parts() * context_parts(), (*ROWS, CONTEXT) if context_parts() > 1 else ROWS

    def copy(x: jax.Array, place: PartitionSpec) -> jax.Array:
        wide = jnp.broadcast_to(_gather(x, place), (parts, *x.shape))
        return jax.lax.with_sharding_constraint(wide, PartitionSpec(own, *without_fsdp(place)))

    return jax.tree.map(copy, tree, param_specs(tree))


def to_rollout(mesh: Mesh | None, params: PyTree) -> PyTree:
    """Parameters in the layout of generation (`rollout_specs`), so that no decoding step waits for weights.

    A host rollout calls it when another model starts to generate (`rollout.launches`); an array rollout calls it once.
    mesh: None returns ``params``. It has the devices of the parameters' mesh, in the same order. params: parameters in
    the layout of training. Only leaves that lie otherwise are copied.
    """
    if mesh is None:
        return params

    def move(x: jax.Array, place: PartitionSpec) -> jax.Array:
        where = NamedSharding(mesh, place)
        return x if x.sharding.is_equivalent_to(where, x.ndim) else jax.device_put(x, where)

    return jax.tree.map(move, params, rollout_specs(mesh, params))


def rollout_specs(mesh: Mesh | AbstractMesh, tree: PyTree) -> PyTree:
    """PartitionSpec of every parameter in the layout of generation: not split along fsdp, and split along tensor.

    Where ``mesh`` has attn_dp, what tensor splits is split along both, except for the projections to keys and values.

    mesh: the mesh of generation. tree: arrays or ShapeDtypeStructs.
    """

    def place(path: Any, x: Any) -> PartitionSpec:
        names = names_of(path)
        whole = without_fsdp(spec(*axes_of(names, len(x.shape))))
        if ATTENTION not in mesh.shape or not {"k_proj", "v_proj"}.isdisjoint(names):
            return whole
        return PartitionSpec(*((ATTENTION, "tensor") if axis == "tensor" else axis for axis in whole))

    return jax.tree_util.tree_map_with_path(place, tree)
