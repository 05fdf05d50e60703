"""Optimizers: optax chains from a configuration.

They keep float32 master copies of lower-precision parameters. Optimizer state can be offloaded to host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmarl_llm.config import at_least, in_range, one_of
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import PyTree


@dataclass(frozen=True)
class Optimizer:
    """Configuration of an optax chain: global norm clipping, an update rule, and a warm-up and decay schedule."""

    name: str = "adamw"  # adamw, adam, sgd, lion, adafactor
    learning_rate: float = 1e-3  # largest one, after the warm-up
    schedule: str = "constant"  # constant, linear or cosine (both to 0 over `total_steps`)
    warmup_steps: int = 0  # steps of linear warm-up from 0
    total_steps: int = 0  # length of the schedule in optimizer steps, warm-up included; unused by constant
    weight_decay: float = 0.0  # adamw, lion
    b1: float = 0.9  # decay of the first moment
    b2: float = 0.95  # decay of the second moment
    max_grad_norm: float = 1.0  # 0 does not clip
    float32_master_weights: bool = True  # keep float32 copies, and float32 moments, of lower-precision parameters
    offload: bool = False  # a model's optimizer state is in host memory except during its own update

    ALIASES: ClassVar[dict[str, str]] = {
        "warmup": "warmup_steps",
        "steps": "total_steps",
        "masters": "float32_master_weights",
    }

    def check(self, path: str) -> None:
        one_of(f"{path}.name", self.name, ("adamw", "adam", "sgd", "lion", "adafactor"))
        one_of(f"{path}.schedule", self.schedule, ("constant", "linear", "cosine"))
        for name in ("learning_rate", "warmup_steps", "total_steps", "weight_decay", "max_grad_norm"):
            at_least(f"{path}.{name}", getattr(self, name), 0)
        for name in ("b1", "b2"):
            in_range(f"{path}.{name}", getattr(self, name), 0, 1, "[)")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"{path}.total_steps: expected more than {path}.warmup_steps={self.warmup_steps} with "
                f"{path}.schedule={self.schedule!r}, got {self.total_steps}"
            )


def make_optimizer(cfg: Optimizer) -> optax.GradientTransformation:
    """Build the optax chain of a configuration.

    Args:
        cfg: the configuration.
    """
    rate: Any = cfg.learning_rate
    if cfg.schedule == "linear":
        rate = optax.linear_schedule(cfg.learning_rate, 0.0, cfg.total_steps - cfg.warmup_steps)
    elif cfg.schedule == "cosine":
        rate = optax.cosine_decay_schedule(cfg.learning_rate, cfg.total_steps - cfg.warmup_steps)
    if cfg.warmup_steps:
        after = rate if callable(rate) else optax.constant_schedule(rate)
        rate = optax.join_schedules(
            [optax.linear_schedule(0.0, cfg.learning_rate, cfg.warmup_steps), after], [cfg.warmup_steps]
        )
    rule = {
        "adamw": lambda: optax.adamw(rate, cfg.b1, cfg.b2, weight_decay=cfg.weight_decay),
        "adam": lambda: optax.adam(rate, cfg.b1, cfg.b2),
        "sgd": lambda: optax.sgd(rate),
        "lion": lambda: optax.lion(rate, cfg.b1, cfg.b2, weight_decay=cfg.weight_decay),
        "adafactor": lambda: optax.adafactor(rate),
    }[cfg.name]()
    chain = optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), rule) if cfg.max_grad_norm else rule
    return with_masters(chain) if cfg.float32_master_weights else chain


class Masters(NamedTuple):
    """State of `with_masters`."""

    inner: PyTree  # state of the wrapped optimizer
    copies: PyTree  # float32 copies of parameters; `optax.MaskedNode` where the parameter itself is float32


def with_masters(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run an optimizer on float32 master copies of lower-precision parameters.

    A step below half a unit in the last place of bfloat16 is then added to the copy and not lost. The update is the
    float32 difference between new copy and parameter, so that `optax.apply_updates` rounds the copy. If all parameters
    are float32 the result is ``tx``, state included.

    Args:
        tx: the optimizer to wrap.
    """

    def has_lower_precision(tree: PyTree) -> bool:
        return any(x.dtype != jnp.float32 for x in jax.tree.leaves(tree))

    def init(params: PyTree) -> PyTree:
        if not has_lower_precision(params):
            return tx.init(params)
        copies = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        masters = jax.tree.map(lambda p, c: optax.MaskedNode() if p.dtype == jnp.float32 else c, params, copies)
        return Masters(tx.init(copies), masters)

    def update(gradient: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        if not isinstance(state, Masters):
            return tx.update(gradient, state, params)
        absent = lambda x: isinstance(x, optax.MaskedNode)
        copies = jax.tree.map(lambda c, p: p if absent(c) else c, state.copies, params, is_leaf=absent)
        updates, inner = tx.update(gradient, state.inner, copies)
        copies = jax.tree.map(jnp.add, copies, updates)
        difference = jax.tree.map(lambda c, p: c - p.astype(jnp.float32), copies, params)
        masters = jax.tree.map(lambda old, c: old if absent(old) else c, state.copies, copies, is_leaf=absent)
        return difference, Masters(inner, masters)

    return optax.GradientTransformation(init, update)


def to_memory(tree: PyTree, kind: str) -> PyTree:
    """Move arrays to another memory of the devices that hold them.

    Args:
        tree: the arrays.
        kind: ``pinned_host`` or ``device``.
    """
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), tree))
