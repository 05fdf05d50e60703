"""Device meshes of a run: one mesh for all models, or one mesh for each model.

`sharding` says how arrays are split over a mesh.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from absl import logging
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxmarl_llm.config import COUNT_LIMIT, later, one_of
from jaxmarl_llm.distributed.heads import check_heads
from jaxmarl_llm.distributed.sharding import (
    ATTENTION,
    AXES,
    CONTEXT,
    check_divides,
    param_specs,
    place,
    put,
    rollout_specs,
    whole,
)
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import Model, PyTree, TrainState

T = TypeVar("T")


# Settings of generation's own layout -> their values without one, which are the least.
LAYOUT: dict[str, Any] = {"rollout_tensor": 0, "rollout_blocks": 1, "rollout_devices": 0}


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis. At most one axis may be -1, which means the remaining devices.

    data, fsdp, tensor: sizes of the axes of `sharding`. context: devices that cut the tokens of each row of a prefill
    and of an update. It is never -1, and above 1 it goes with no other layout of generation than ``rollout_tensor``.
    models: "all" gives every model all devices, and the models run
    one after another. "split" divides the devices into equal parts, one part a model. Each part has these axes, and the
    models generate and learn at the same time. "split" needs separate models and host environments.

    Generation may have a layout of its own (`rollout_layout`). Then each rollout moves the weights to it.
    rollout_tensor: devices that cut weights while completions are sampled. rollout_blocks: blocks of devices, each of
    which samples for one model at a time, so that as many models sample at once. rollout_devices: devices that sample
    and do not train. With ``staleness`` they sample while the others train.
    """

    data: int = -1  # devices along data: each has its own tasks
    fsdp: int = 1  # devices along fsdp: parameters are cut, and gathered for use
    tensor: int = 1  # devices along tensor: heads and MLP columns are cut
    models: str = "all"  # all: models run one after another on all devices; split: each on its own part
    rollout_tensor: int = 0  # devices that cut weights during generation; 0: as tensor
    rollout_blocks: int = 1  # blocks of devices that generate for different models at once
    rollout_devices: int = later(0)  # devices, the last ones, that sample and do not train; 0: all devices do both
    context: int = later(1)  # devices along context: the tokens of a row are cut

    def check(self, path: str) -> None:
        """Raise ConfigError for impossible sizes. ``path``: name of these settings in the message."""
        sizes = {name: getattr(self, name) for name in AXES}
        for name, size in sizes.items():
            if size != -1 and not 1 <= size <= COUNT_LIMIT:
                raise ConfigError(f"{path}.{name}: expected >= 1, or -1 for the devices that remain, got {size}")
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ConfigError(f"{path}: expected -1 on one axis at most, got it on {' and '.join(free)}")
        if not 1 <= self.context <= COUNT_LIMIT:
            raise ConfigError(f"{path}.context: expected >= 1, got {self.context}")
        one_of(f"{path}.models", self.models, ("all", "split"))
        for name, least in LAYOUT.items():
            if not least <= getattr(self, name) <= COUNT_LIMIT:
                raise ConfigError(f"{path}.{name}: expected >= {least}, got {getattr(self, name)}")
        if self.models == "split":
            self.refuse_layout(path, f"with {path}.models=split")
        if self.context > 1:
            self._check_context(path)

    def _check_context(self, path: str) -> None:
        """Raise ConfigError for settings that no test has together with cut tokens."""
        for name, needed in {"models": "all", "rollout_blocks": 1, "rollout_devices": 0}.items():
            if (value := getattr(self, name)) != needed:
                raise ConfigError(f"{path}.context: expected 1 with {path}.{name}={value}, got {self.context}")

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes of the mesh, in their order."""
        return (*AXES[:2], CONTEXT, AXES[2]) if self.context > 1 else AXES

    def refuse_layout(self, path: str, why: str) -> None:
        """Raise ConfigError where generation has a layout of its own.

        Args:
            path: name of these settings in the message.
            why: the reason, for the message.
        """
        for name, standard in LAYOUT.items():
            if (value := getattr(self, name)) != standard:
                raise ConfigError(f"{path}.{name}: expected {standard} {why}, got {value}")

    @property
    def has_layout(self) -> bool:
        """Whether generation has a layout of its own."""
        return any(getattr(self, name) != standard for name, standard in LAYOUT.items())


def make_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None, path: str = "config.mesh") -> Mesh:
    """Mesh with the axes (data, fsdp, tensor) over all ``devices``; with context above 1, context is before tensor.

    cfg: sizes of the axes. devices: the devices to use; None means ``jax.devices()``. path: name of ``cfg`` in
    messages. Raises ConfigError when the number of devices is not the product of the sizes. Raises ConfigError when the
    data axis does not divide over several TPU slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(cfg, len(devices), path)
    return Mesh(_grid(cfg.axes, sizes, list(devices), path), cfg.axes, axis_types=(AxisType.Auto,) * len(sizes))


def axis_sizes(cfg: MeshConfig, count: int, path: str = "config.mesh") -> list[int]:
    """Sizes of the axes (`MeshConfig.axes`) over ``count`` devices. cfg, path: as for `make_mesh`.

    Raises ConfigError when the number of devices is not the product of the sizes.
    """
    cfg.check(path)
    sizes = [getattr(cfg, name) for name in cfg.axes]
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes and count % known == 0:
        sizes[sizes.index(-1)] = count // known
    if math.prod(sizes) != count:
        asked = " x ".join(f"{name}={getattr(cfg, name)}" for name in cfg.axes)
        raise ConfigError(f"{path}: {count} devices cannot be {asked}; expected a product of {count}")
    return sizes


def _grid(names: Sequence[str], sizes: Sequence[int], devices: list[Any], path: str) -> np.ndarray:
    """``devices`` as an array of shape ``sizes``, the sizes of the axes ``names``.

    Neighbours along all axes but data are in one TPU slice.

    Slices are connected by the network of the hosts, which is slower than the links of a slice. So the slices divide
    the data axis: only sums of gradients and tables of rows pass between them.
    """
    tpu = devices[0].platform == "tpu"
    # A device that programs are compiled for ahead of time may lack the attribute.
    slices = Counter(getattr(device, "slice_index", 0) for device in devices) if tpu else Counter()
    # A mesh axis may be a part of one axis of a TPU torus, such as tensor=2 on 8x8x8.
    if len(slices) < 2:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    if len(set(slices.values())) > 1:
        raise ConfigError(f"{path}: expected slices of one size, found slices of {sorted(slices.values())} devices")
    count, (data, *inside) = len(slices), sizes
    if data % count:
        within = " and ".join(f"{name}={size}" for name, size in zip(names[1:], inside, strict=True))
        raise ConfigError(
            f"{path}.data: expected a multiple of {count}, the number of slices, got {data}: {within} stay within a "
            f"slice of {len(devices) // count} devices"
        )
    inner, outer = (data // count, *inside), (count, *[1] * len(inside))
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)


class Split(NamedTuple):
    """One mesh for each model. No two meshes share a device.

    meshes: model name -> mesh.
    """

    meshes: Mapping[str, Mesh]


_split: contextvars.ContextVar[Split | None] = contextvars.ContextVar("split", default=None)


@contextlib.contextmanager
def use_mesh(mesh: Mesh | Split | None) -> Iterator[None]:
    """Context manager: compile the programs of its body for a mesh.

    mesh: with a `Mesh`, the functions of `sharding` apply to it. With a `Split`, `model_mesh` and `map_models` select
    the mesh of each model. None changes nothing.
    """
    if isinstance(mesh, Split):
        token = _split.set(mesh)
        try:
            yield
        finally:
            _split.reset(token)
    else:
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            yield


def model_mesh(model: str) -> contextlib.AbstractContextManager[Any]:
    """Context manager: use this model's mesh, if models have separate devices. ``model``: the name of the model."""
    split = _split.get()
    return contextlib.nullcontext() if split is None else use_mesh(split.meshes[model])


def has_split_models() -> bool:
    """Whether each model has separate devices (``MeshConfig.models == "split"``)."""
    return _split.get() is not None


def map_models(models: Sequence[str], function: Callable[[str], T]) -> list[T]:
    """Call ``function`` once for each model, inside `model_mesh`, and return the results in the order of ``models``.

    models: names of models. function: takes the name of one model. The calls run in parallel threads if models have
    separate devices, otherwise one after another.
    """

    def run(model: str) -> T:
        with model_mesh(model):
            return function(model)

    if not has_split_models() or len(models) < 2:
        return [run(model) for model in models]
    with ThreadPoolExecutor(len(models)) as pool:
        started = [pool.submit(contextvars.copy_context().run, run, model) for model in models]
        return [future.result() for future in started]


def parted(cfg: MeshConfig, path: str = "config.mesh") -> tuple[list[Any], list[Any]]:
    """Devices that train, and those that sample alone: the last ``rollout_devices``.

    Args:
        cfg: the configured sizes.
        path: name of ``cfg`` in messages.

    Raises:
        ConfigError: no device is left to train, or there are several processes.
    """
    devices, count = list(jax.devices()), cfg.rollout_devices
    if count and jax.process_count() > 1:
        raise ConfigError(f"{path}.rollout_devices: expected 0 with several processes, got {count}")
    if count >= len(devices):
        raise ConfigError(
            f"{path}.rollout_devices: expected <= {len(devices) - 1}, because one of {len(devices)} devices trains at "
            f"least, got {count}"
        )
    return devices[: len(devices) - count], devices[len(devices) - count :]


def open_mesh(cfg: MeshConfig, models: Sequence[Model], path: str = "config.mesh") -> Mesh | Split | None:
    """Mesh or meshes of a run; None for one device.

    cfg: the configured sizes. models: the models of the team. path: name of ``cfg`` in messages. Raises ConfigError
    when the devices or the shape of a model do not allow this mesh.
    """
    cfg.check(path)
    if cfg.models == "split":
        return _open_split(cfg, models, path)
    devices, _ = parted(cfg, path)
    if replace(cfg, **LAYOUT) == MeshConfig(data=1):
        if jax.process_count() > 1:
            raise ConfigError(
                f"config.mesh: 1 device for {jax.process_count()} processes, which have {jax.device_count()}; "
                "data=-1 takes all"
            )
        if len(devices) > 1:
            logging.info("config.mesh: 1 of %d devices is used; data=-1 takes all", len(devices))
        return None
    mesh = make_mesh(cfg, devices)
    if mesh.size == 1:
        return None
    for model in models:
        _check_model(mesh, model)
        if cfg.context > 1 and model.policy.draw is not None:
            raise ConfigError(f"{path}.context: expected 1 with config.team.batch_invariant, got {cfg.context}")
    return mesh


def _open_split(cfg: MeshConfig, models: Sequence[Model], path: str) -> Split:
    """Meshes of equal size, one for each model. Raises ConfigError when the devices cannot be divided like that."""
    devices = jax.devices()
    if jax.process_count() > 1:
        raise ConfigError(f"{path}.models: expected 'all' with several processes, got 'split'")
    if any(model.base is not None for model in models):
        raise ConfigError(f"{path}.models: expected 'all' where models share a backbone, got 'split'")
    if len(devices) % len(models):
        raise ConfigError(f"{path}.models: {len(devices)} devices are no {len(models)} equal parts, one for each model")
    size = len(devices) // len(models)
    meshes = {m.name: make_mesh(cfg, devices[i * size : (i + 1) * size], path) for i, m in enumerate(models)}
    for model in models:
        _check_model(meshes[model.name], model)
    return Split(meshes)


def _check_model(mesh: Mesh, model: Model) -> None:
    """Raise ConfigError unless the mesh axes divide the heads and the parameters of ``model``."""
    arch = model.policy.config
    check_heads(mesh.shape["tensor"], model.name, arch.num_heads, arch.num_kv_heads)
    tree = {model.name: jax.eval_shape(model.policy.init, jax.random.key(0))}
    check_divides(mesh, tree, param_specs(tree, mesh))


class Layout(NamedTuple):
    """Arrangement of the devices while completions are sampled.

    mesh: has the axes of `sharding`, with attn_dp; fsdp cuts rows alone. blocks: models that sample at once, each on
    one part of the data axis; 1: one after another, on all devices. apart: none of the devices trains.
    """

    mesh: Mesh
    blocks: int
    apart: bool = False

    @property
    def tensor(self) -> int:
        """Number of devices that a model's weights are cut over."""
        return self.mesh.shape[ATTENTION] * self.mesh.shape["tensor"]


def rollout_layout(
    cfg: MeshConfig, mesh: Mesh | Split | None, models: Sequence[Model], path: str = "config.mesh"
) -> Layout | None:
    """Layout of generation; None: that of training.

    Args:
        cfg: the configured sizes.
        mesh: result of `open_mesh`. The layout has its devices in the same order, or the devices that sample alone.
        models: the models of the team.
        path: name of ``cfg`` in messages.

    Raises:
        ConfigError: there is one device, or the devices do not divide, or models that sample at once are not alike.
    """
    if not cfg.has_layout:
        return None
    if cfg.rollout_devices:
        own = np.array(parted(cfg, path)[1]).reshape(-1, 1, 1)
        mesh = Mesh(own, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    if not isinstance(mesh, Mesh):
        cfg.refuse_layout(path, "on one device")
    assert isinstance(mesh, Mesh)
    layout = layout_of(cfg, mesh, [model.policy.config.num_kv_heads for model in models], path)
    layout = layout._replace(apart=bool(cfg.rollout_devices))
    for model in models:
        heads, parts = model.policy.config.num_heads, layout.tensor
        check_heads(parts, model.name, heads, heads, f"{path}.rollout_tensor")
        tree = {model.name: jax.eval_shape(model.policy.init, jax.random.key(0))}
        check_divides(layout.mesh, tree, rollout_specs(layout.mesh, tree))
    if layout.blocks > 1:
        check_alike(models, f"{path}.rollout_blocks")
    return layout


def layout_of(cfg: MeshConfig, mesh: Mesh, kv_heads: Sequence[int], path: str = "config.mesh") -> Layout:
    """Layout of generation over the devices of ``mesh``.

    Without blocks, all devices that do not cut weights are along data. With blocks, data has one part for each block,
    and the devices of a block that do not cut weights are along fsdp. Of those that cut weights, as many are along
    tensor as divide the key/value heads. The others are along attn_dp.

    Args:
        cfg: the configured sizes.
        mesh: mesh of training.
        kv_heads: number of key/value heads of each model.
        path: name of ``cfg`` in messages.

    Raises:
        ConfigError: the devices do not divide.
    """
    blocks, tensor = cfg.rollout_blocks, cfg.rollout_tensor or mesh.shape["tensor"]
    rest, over = divmod(mesh.size, blocks * tensor)
    if over:
        raise ConfigError(
            f"{path}: {mesh.size} devices are no {blocks} blocks (rollout_blocks) of parts of {tensor} devices "
            "(rollout_tensor)"
        )
    whole = math.gcd(tensor, *kv_heads)
    sizes = ((rest, 1) if blocks == 1 else (blocks, rest)) + (tensor // whole, whole)
    axes = (*AXES[:2], ATTENTION, AXES[2])
    return Layout(Mesh(mesh.devices.reshape(sizes), axes, axis_types=(AxisType.Auto,) * len(axes)), blocks)


@contextlib.contextmanager
def sampling_on(layout: Layout | None) -> Iterator[Callable[[PyTree], PyTree]]:
    """Context manager: programs of its body run on the devices of a layout that are apart from training.

    Args:
        layout: arrangement of the devices; without one, or where its devices also train, nothing changes.

    Yields:
        Function from a tree of arrays to copies on each of these devices. It returns the tree where nothing changes.
    """
    if layout is None or not layout.apart:
        yield lambda tree: tree
        return
    with use_mesh(layout.mesh):
        yield lambda tree: put(tree, whole(layout.mesh))


def check_alike(models: Sequence[Model], key: str) -> None:
    """Raise ConfigError unless the models can sample in one program.

    Args:
        models: the models of the team.
        key: name of the setting in the message.
    """
    first, *others = models
    for other in others:
        if other.kind != first.kind:
            raise ConfigError(
                f"{key}: expected 1 unless models have one architecture, base, stop ids and padding; {other.name!r} "
                f"is not as {first.name!r}"
            )
    if first.policy.draw is not None:
        raise ConfigError(f"{key}: expected 1 with config.team.batch_invariant: models in one launch are a batch")


def place_state(mesh: Mesh | Split | None, state: TrainState) -> TrainState:
    """Copy of ``state`` on the devices of ``mesh``; ``state`` itself when ``mesh`` is None.

    Parameters and optimizer states are split by the rules of `sharding`. With a `Mesh`, every other field is replicated
    on all devices. With a `Split`, no device belongs to all models, so every other field stays where it is.
    """
    if mesh is None:
        return state
    if isinstance(mesh, Split):
        at = lambda trees: {name: place(mesh.meshes[name], tree) for name, tree in trees.items()}
        return state.replace(params={k: at(v) for k, v in state.params.items()}, opt_state=at(state.opt_state))
    everywhere = {k: put(getattr(state, k), whole(mesh)) for k in ("step", "key", "memory", "counters")}
    placed = {k: place(mesh, getattr(state, k)) for k in ("params", "opt_state")}
    return state.replace(**everywhere, **placed)
