"""Which devices a run has, and which of its models has which: a mesh for all of them, or one for each.

Where arrays lie on a mesh is `sharding`.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
from absl import logging
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxmarl_llm.config import one_of
from jaxmarl_llm.sharding import AXES, check_divides, check_heads, param_specs, place, put, whole
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import Model, TrainState

T = TypeVar("T")


@dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 on one of them: the devices that remain.

    ``models``: ``all``, every model on all devices, one after the other; ``split``, as many equal parts of the devices
    as there are models, each of these axes, which generate and learn at once (separate models, host environments).
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    models: str = "all"

    def check(self, path: str) -> None:
        sizes = {name: getattr(self, name) for name in AXES}
        for name, size in sizes.items():
            if size != -1 and size < 1:
                raise ConfigError(f"{path}.{name}: expected >= 1, or -1 for the devices that remain, got {size}")
        free = [name for name, size in sizes.items() if size == -1]
        if len(free) > 1:
            raise ConfigError(f"{path}: expected -1 on one axis at most, got it on {' and '.join(free)}")
        one_of(f"{path}.models", self.models, ("all", "split"))


def make_mesh(cfg: MeshConfig, devices: Sequence[Any] | None = None, path: str = "config.mesh") -> Mesh:
    """The mesh over all of ``devices`` (None: those of JAX). ConfigError when they cannot be laid out like that."""
    cfg.check(path)
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(cfg, name) for name in AXES]
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        asked = " x ".join(f"{name}={getattr(cfg, name)}" for name in AXES)
        raise ConfigError(f"{path}: {len(devices)} devices cannot be {asked}; expected a product of {len(devices)}")
    # An axis may be a part of one of a TPU torus' own, as tensor=2 on 8x8x8.
    grid = mesh_utils.create_device_mesh(sizes, list(devices), allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


class Split(NamedTuple):
    """A mesh for each model, of devices that no other has."""

    meshes: Mapping[str, Mesh]


_split: contextvars.ContextVar[Split | None] = contextvars.ContextVar("split", default=None)


@contextlib.contextmanager
def on(place: Mesh | Split | None) -> Iterator[None]:
    """What runs inside is compiled for a mesh (the functions of `sharding` do their work there), or what `each` and
    `home` run of each model for its own; None: as without.
    """
    if isinstance(place, Split):
        token = _split.set(place)
        try:
            yield
        finally:
            _split.reset(token)
    else:
        with contextlib.nullcontext() if place is None else jax.set_mesh(place):
            yield


def home(model: str) -> contextlib.AbstractContextManager[Any]:
    """What runs inside is the model's: on its own devices where it has some."""
    split = _split.get()
    return contextlib.nullcontext() if split is None else on(split.meshes[model])


def apart() -> bool:
    """Whether every model has devices of its own."""
    return _split.get() is not None


def each(models: Sequence[str], function: Callable[[str], T]) -> list[T]:
    """``function`` of each model, at `home`: at once where all have their own devices, else one after the other."""

    def run(model: str) -> T:
        with home(model):
            return function(model)

    if not apart() or len(models) < 2:
        return [run(model) for model in models]
    with ThreadPoolExecutor(len(models)) as pool:
        started = [pool.submit(contextvars.copy_context().run, run, model) for model in models]
        return [future.result() for future in started]


def open_mesh(cfg: MeshConfig, models: Sequence[Model], path: str = "config.mesh") -> Mesh | Split | None:
    """The mesh of a run, None for one device; ConfigError when a model does not fit it."""
    cfg.check(path)
    if cfg.models == "split":
        return _open_split(cfg, models, path)
    if cfg == MeshConfig(data=1):
        if jax.process_count() > 1:
            raise ConfigError(
                f"config.mesh: 1 device for {jax.process_count()} processes, which have {jax.device_count()}; "
                "data=-1 takes all"
            )
        if jax.device_count() > 1:
            logging.info("config.mesh: 1 of %d devices is used; data=-1 takes all", jax.device_count())
        return None
    mesh = make_mesh(cfg)
    if mesh.size == 1:
        return None
    for model in models:
        _check_model(mesh, model)
    return mesh


def _open_split(cfg: MeshConfig, models: Sequence[Model], path: str) -> Split:
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
    arch = model.policy.config
    check_heads(mesh, model.name, arch.num_heads, arch.num_kv_heads)
    tree = {model.name: jax.eval_shape(model.policy.init, jax.random.key(0))}
    check_divides(mesh, tree, param_specs(tree))


def settled(mesh: Mesh | Split | None, state: TrainState) -> TrainState:
    """``state`` where it lives: parameters and optimizer states by the rules, all else on every device.

    Of a `Split` no device is everybody's: all else stays where it is.
    """
    if mesh is None:
        return state
    if isinstance(mesh, Split):
        at = lambda trees: {name: place(mesh.meshes[name], tree) for name, tree in trees.items()}
        return state.replace(params={k: at(v) for k, v in state.params.items()}, opt_state=at(state.opt_state))
    everywhere = {k: put(getattr(state, k), whole(mesh)) for k in ("step", "key", "memory", "counters")}
    placed = {k: place(mesh, getattr(state, k)) for k in ("params", "opt_state")}
    return state.replace(**everywhere, **placed)
