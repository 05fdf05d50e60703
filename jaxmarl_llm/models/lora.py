"""Low-rank adapters in a tree of their own, one per role over a shared backbone (Hu et al. 2021).

A linear map x W becomes x W + scale (x A) B. The tree mirrors ``params["layers"]`` and holds {"a": [L in r],
"b": [L r out]} at each adapted kernel. It is the ``lora`` collection of the modules in `decoder`. B is 0 at first, so a
new adapter changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

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


@jax.jit
def join_adapters(adapters: Sequence[Params]) -> Params:
    """Lay adapters of one backbone side by side along their ranks: one adapter of all ranks.

    A third leaf of each module, "of" [L sum of ranks], is the index of the adapter that each column belongs to.

    Args:
        adapters: adapters with the same modules.
    """

    def join(*modules: Params) -> Params:
        if "a" not in modules[0]:
            return {name: join(*(module[name] for module in modules)) for name in modules[0]}
        ranks = [module["a"].shape[-1] for module in modules]
        of = jnp.repeat(jnp.arange(len(ranks)), jnp.array(ranks), total_repeat_length=sum(ranks))
        layers = len(modules[0]["a"])
        return {
            "a": jnp.concatenate([module["a"] for module in modules], axis=-1),
            "b": jnp.concatenate([module["b"] for module in modules], axis=-2),
            "of": jnp.broadcast_to(of, (layers, len(of))),
        }

    return join(*adapters)


def choose_adapters(variables: Params, index: jax.Array) -> Params:
    """Give each hidden state one of joined adapters. It fulfils `Policy.choose_adapters`.

    Args:
        variables: with the result of `join_adapters` as ``lora``; stacked, or as `Policy.unstack` returns them.
        index: adapter of each hidden state [...], of as many axes as they have, or 1 where all of an axis agree.
    """

    def choose(module: Params) -> Params:
        if "of" not in module:
            return {name: choose(inner) for name, inner in module.items()}
        of: jax.Array = module["of"]
        of = of.reshape(*of.shape[:-1], *[1] * index.ndim, of.shape[-1])
        return {"a": module["a"], "b": module["b"], "own": of == index[..., None]}

    if "lora" in variables:
        return {**variables, "lora": choose(variables["lora"])}
    layers = tuple({**layer, "lora": choose(layer["lora"])} for layer in variables["params"]["layers"])
    return {**variables, "params": {**variables["params"], "layers": layers}}
