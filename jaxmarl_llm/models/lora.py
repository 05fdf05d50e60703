"""Low-rank adapters in a tree of their own, one per role over a shared backbone (Hu et al. 2021).

A linear map x W becomes x W + scale (x A) B. The tree mirrors ``params["layers"]`` and holds {"a": [L in r],
"b": [L r out]} at each adapted kernel. It is the ``lora`` collection of the modules in `decoder`. B is 0 at first, so a
new adapter changes nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import Params

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def init_lora(key: jax.Array, params: Params, rank: int, targets: tuple[str, ...] = TARGETS) -> Params:
    """Draw a new adapter in float32: A normal with variance 1/in, B zero.

    Args:
        key: typed random key.
        params: parameters of the backbone, or their shapes.
        rank: inner dimension r, at least 1.
        targets: names of the adapted kernels, from `TARGETS`.
    """
    if rank < 1:
        raise ConfigError(f"lora rank: expected >= 1, got {rank}")
    unknown = sorted(set(targets) - set(TARGETS))
    if unknown:
        raise ConfigError(f"lora targets: unknown {', '.join(unknown)}; known: {', '.join(TARGETS)}")
    tree: Params = {}
    for block, modules in sorted(params["layers"].items()):
        for name, leaf in sorted(modules.items()):
            if name in targets:
                key, now = jax.random.split(key)
                layers, fan_in, fan_out = leaf["kernel"].shape
                a = jax.random.normal(now, (layers, fan_in, rank)) * fan_in**-0.5
                tree.setdefault(block, {})[name] = {"a": a, "b": jnp.zeros((layers, rank, fan_out))}
    return tree


def merge_lora(params: Params, lora: Params, scale: float) -> Params:
    """Add an adapter to the kernels, W + scale A B, as an export does.

    Args:
        params: parameters of the backbone.
        lora: the adapter.
        scale: factor of A B, alpha / rank.
    """
    layers = {k: dict(v) for k, v in params["layers"].items()}
    for block, modules in lora.items():
        for name, ab in modules.items():
            leaf = layers[block][name]
            delta = scale * jnp.einsum("lir,lro->lio", ab["a"], ab["b"])
            layers[block][name] = {**leaf, "kernel": (leaf["kernel"] + delta).astype(leaf["kernel"].dtype)}
    return {**params, "layers": layers}
