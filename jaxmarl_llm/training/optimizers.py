"""Optimizers: chains of optax from a configuration; float32 masters of parameters in less; states kept on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import PyTree


@dataclass(frozen=True)
class Optimizer:
    """optax chain: clip the global norm, AdamW (or another of optax by name), a warm-up and decay schedule."""

    name: str = "adamw"  # adamw, adam, sgd, lion, adafactor
    learning_rate: float = 1e-3
    schedule: str = "constant"  # constant, linear or cosine (both to 0 over `steps`)
    warmup: int = 0  # steps of linear warm-up from 0
    steps: int = 0  # length of the schedule in optimizer steps, warm-up included; unused by constant
    weight_decay: float = 0.0  # adamw, lion
    b1: float = 0.9
    b2: float = 0.95
    max_grad_norm: float = 1.0  # 0 does not clip
    masters: bool = True  # of parameters in less than float32 the optimizer keeps float32 copies, and its moments in it
    offload: bool = False  # a model's optimizer state lies in the host's memory but for its own update

    def check(self, path: str) -> None:
        if self.name not in ("adamw", "adam", "sgd", "lion", "adafactor"):
            raise ConfigError(f"{path}.name: expected adamw, adam, sgd, lion or adafactor, got {self.name!r}")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise ConfigError(f"{path}.schedule: expected constant, linear or cosine, got {self.schedule!r}")
        if self.schedule != "constant" and self.steps <= self.warmup:
            raise ConfigError(f"{path}.steps: expected more than warmup={self.warmup}, got {self.steps}")
        if self.learning_rate < 0 or self.max_grad_norm < 0:
            raise ConfigError(f"{path}: learning_rate and max_grad_norm must be >= 0")


def make_optimizer(cfg: Optimizer) -> optax.GradientTransformation:
    rate: Any = cfg.learning_rate
    if cfg.schedule == "linear":
        rate = optax.linear_schedule(cfg.learning_rate, 0.0, cfg.steps - cfg.warmup)
    elif cfg.schedule == "cosine":
        rate = optax.cosine_decay_schedule(cfg.learning_rate, cfg.steps - cfg.warmup)
    if cfg.warmup:
        after = rate if callable(rate) else optax.constant_schedule(rate)
        rate = optax.join_schedules([optax.linear_schedule(0.0, cfg.learning_rate, cfg.warmup), after], [cfg.warmup])
    rule = {
        "adamw": lambda: optax.adamw(rate, cfg.b1, cfg.b2, weight_decay=cfg.weight_decay),
        "adam": lambda: optax.adam(rate, cfg.b1, cfg.b2),
        "sgd": lambda: optax.sgd(rate),
        "lion": lambda: optax.lion(rate, cfg.b1, cfg.b2, weight_decay=cfg.weight_decay),
        "adafactor": lambda: optax.adafactor(rate),
    }[cfg.name]()
    chain = optax.chain(optax.clip_by_global_norm(cfg.max_grad_norm), rule) if cfg.max_grad_norm else rule
    return with_masters(chain) if cfg.masters else chain


class Masters(NamedTuple):
    """``copies``: float32 parameters, `optax.MaskedNode` where the parameter itself is float32."""

    inner: PyTree
    copies: PyTree


def with_masters(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """``tx`` on float32 copies: a step below half a unit in the last place of bfloat16 adds up and is not lost.

    An update is the float32 way from the parameter to its new copy, so that `optax.apply_updates` rounds the copy. With
    parameters that are all float32 it is ``tx``, state included.
    """

    def below(tree: PyTree) -> bool:
        return any(x.dtype != jnp.float32 for x in jax.tree.leaves(tree))

    def init(params: PyTree) -> PyTree:
        if not below(params):
            return tx.init(params)
        copies = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        mine = jax.tree.map(lambda p, c: optax.MaskedNode() if p.dtype == jnp.float32 else c, params, copies)
        return Masters(tx.init(copies), mine)

    def update(gradient: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        if not isinstance(state, Masters):
            return tx.update(gradient, state, params)
        absent = lambda x: isinstance(x, optax.MaskedNode)
        copies = jax.tree.map(lambda c, p: p if absent(c) else c, state.copies, params, is_leaf=absent)
        updates, inner = tx.update(gradient, state.inner, copies)
        copies = jax.tree.map(jnp.add, copies, updates)
        way = jax.tree.map(lambda c, p: c - p.astype(jnp.float32), copies, params)
        mine = jax.tree.map(lambda old, c: old if absent(old) else c, state.copies, copies, is_leaf=absent)
        return way, Masters(inner, mine)

    return optax.GradientTransformation(init, update)


def to_memory(tree: PyTree, kind: str) -> PyTree:
    """Arrays in another memory of where they are: ``pinned_host`` or ``device``."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), tree))
