"""Products of few rows with a model's weights in XLA, which take most of the time of a generated token on a CPU. The
weights have the layout of generation, or other layouts. The module also tests whether the bits of a row depend on
the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import SHAPES, Row, Suite, measure
from jaxmarl_llm.models.decoder_config import Config

ROWS = (1, 4, 16)
BITS = (1, 2, 4, 16, 48, 64, 128, 512)
Layer = dict[str, jax.Array]

# Kernels that read the same rows, side by side.
JOINED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


def kernels(cfg: Config) -> list[Layer]:
    """The seven kernels [in, out] of each layer."""
    d, f, q, kv = cfg.hidden_size, cfg.intermediate_size, cfg.num_heads, cfg.num_kv_heads
    shapes = {"q": (d, q * cfg.head_dim), "k": (d, kv * cfg.head_dim), "v": (d, kv * cfg.head_dim)}
    shapes |= {"o": (q * cfg.head_dim, d), "gate": (d, f), "up": (d, f), "down": (f, d)}
    rng = np.random.default_rng(0)
    make = lambda shape: jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, jnp.float32)
    return [{name: make(shape) for name, shape in shapes.items()} for _ in range(cfg.num_layers)]


def through(product: Callable[[jax.Array, jax.Array], jax.Array], joined: bool = False) -> Callable:
    """Function (x [M D], layers) -> [M D] of all products of the layers. The sum of q, k and v replaces attention."""

    def call(x: jax.Array, layers: list[Layer]) -> jax.Array:
        for w in layers:
            take = lambda x, name, w=w: product(x, w[name])
            if joined:
                at = np.cumsum([w["o"].shape[0], (w["qkv"].shape[1] - w["o"].shape[0]) // 2])
                q, k, v = jnp.split(take(x, "qkv"), at, axis=1)
            else:
                q, k, v = (take(x, name) for name in "qkv")
            x = x + take(q.at[:, : k.shape[1]].add(k + v), "o")
            gate, up = jnp.split(take(x, "gate_up"), 2, axis=1) if joined else (take(x, "gate"), take(x, "up"))
            x = x + take(jax.nn.silu(gate) * up, "down")
        return x

    return jax.jit(call)


def ready(function: Callable, *args: Any) -> Callable[[], Any]:
    """Function without arguments that calls ``function(*args)`` and waits for its arrays."""
    return lambda: jax.block_until_ready(function(*args))


def one_by_one(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.concatenate([x[i : i + 1] @ w for i in range(len(x))])


def same_bits(x: jax.Array, w: jax.Array, product: Callable) -> str:
    """Numbers of rows for which the first row of ``x w`` has the same bits as among all rows."""
    form = jax.jit(product)
    of_all = np.asarray(form(x, w))[0]
    said = [m for m in BITS if m <= len(x) and (np.asarray(form(x[:m], w))[0] == of_all).all()]
    return f"{', '.join(map(str, said))} of {', '.join(str(m) for m in BITS if m <= len(x))} rows"


def run(suite: Suite) -> Iterator[Row]:
    for shape in ("tiny",) if suite.tiny else ("7m", "smollm2_135m"):
        cfg = SHAPES[shape]
        layers = kernels(cfg)
        turned = jax.tree.map(lambda w: jnp.asarray(np.asarray(w).T.copy()), layers)
        beside = [{n: jnp.concatenate([w[k] for k in names], 1) for n, names in JOINED.items()} for w in layers]
        size = sum(w.nbytes for w in jax.tree.leaves(layers))
        x = jax.random.normal(jax.random.key(0), (max(BITS), cfg.hidden_size))
        plain, across = (lambda x, w: x @ w), (lambda x, w: x @ w.T)
        forms: dict[str, tuple[Callable, Any]] = {
            "ours": (through(plain), layers),
            "weights [out in]": (through(across), turned),
            "q k v, gate up joined": (through(plain, joined=True), beside),
            "a row at a time": (through(one_by_one), layers),
        }
        for m in ROWS:
            some = {n: f for n, f in forms.items() if 1 < m <= 4 or n != "a row at a time"}
            calls = {n: ready(f, x[:m], w) for n, (f, w) in some.items()}
            row = measure("product", f"{shape}, {m} rows through the weights of its layers", calls, suite.repeats)
            row.facts["GB/s of weights"] = f"{size / np.median(row.values['ours']) / 1e9:.1f}"
            if m == ROWS[-1]:
                wide, tall = layers[0]["gate"], turned[0]["gate"]
                row.facts["a row's bits are those among 512, weights [in out]"] = same_bits(x, wide, plain)
                row.facts["a row's bits are those among 512, weights [out in]"] = same_bits(x, tall, across)
            yield row
        single, both = through(plain), jax.tree.map(lambda w: jnp.stack([w, w]), layers)
        own = [jax.tree.map(lambda w, i=i: w[i], both) for i in range(2)]
        vmapped, few = jax.jit(jax.vmap(single)), jnp.stack([x[:4], x[:4]])
        pair = {
            "ours": ready(lambda single, few, own: [single(few[i], own[i]) for i in range(2)], single, few, own),
            "vmapped": ready(vmapped, few, both),
        }
        yield measure("product", f"{shape}, 4 rows through the weights of each of two models", pair, suite.repeats)
