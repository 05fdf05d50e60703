"""Low-rank adapters as a tree of their own, one per role over a shared backbone (Hu et al. 2021).

A linear map x W becomes x W + scale (x A) B. The tree mirrors ``params["layers"]`` and holds {"a": [L in r],
"b": [L r out]} at each adapted kernel; it is the ``lora`` collection of `qwen`'s modules. B starts at zero, so a fresh
adapter changes nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import Params

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def init_lora(key: jax.Array, params: Params, rank: int, targets: tuple[str, ...] = TARGETS) -> Params:
    """A fresh adapter for ``params`` (shapes suffice): A normal with variance 1/in, B zero, float32."""
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
    """``params`` with the adapter folded into its kernels: W + scale A B. What an export writes."""
    layers = {k: dict(v) for k, v in params["layers"].items()}
    for block, modules in lora.items():
        for name, ab in modules.items():
            leaf = layers[block][name]
            delta = scale * jnp.einsum("lir,lro->lio", ab["a"], ab["b"])
            layers[block][name] = {**leaf, "kernel": (leaf["kernel"] + delta).astype(leaf["kernel"].dtype)}
    return {**params, "layers": layers}
