"""Forms of the operations that have a kernel for GPU: XLA's, Pallas', and cuDNN's. XLA's stands as ours.

Each form is timed with and without its gradient where training uses it. The distance of a form is that of its outputs
from those of the portable form in float32, relative to their norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import Row, Suite, measure
from jaxmarl_llm.kernels.attention.causal import causal_attention
from jaxmarl_llm.kernels.attention.group import group_attention
from jaxmarl_llm.kernels.attention.group_decode import group_decode_attention
from jaxmarl_llm.kernels.attention.tree import tree_attention
from jaxmarl_llm.kernels.head.head import Head
from jaxmarl_llm.kernels.head.sample import head_sample

PALLAS, CUDNN = "Pallas", "cuDNN"
# Nodes, samples, prompt, response, query heads, key heads, head size, hidden size, vocabulary.
CASES = {
    "accelerator": ((1, 16, 512, 256, 14, 2, 64, 896, 151_936), (4, 16, 2048, 512, 16, 2, 128, 2048, 151_936)),
    "tiny_accelerator": ((1, 2, 32, 16, 4, 2, 16, 64, 512),),
}


def run(suite: Suite) -> Iterator[Row]:
    for size in CASES[suite.name]:
        yield from of_size(suite, *size)


def of_size(
    suite: Suite, n: int, g: int, p: int, r: int, heads: int, kv: int, h: int, d: int, vocab: int
) -> Iterator[Row]:
    """Rows of all operations at one size; the arguments are as in `CASES`."""
    on_cpu = jax.default_backend() == "cpu"
    how: Callable[[str], Any] = lambda impl: {"impl": impl, "interpret": on_cpu and impl == "gpu"}
    keys = iter(jax.random.split(jax.random.key(0), 16))
    of = lambda *shape: jax.random.normal(next(keys), shape).astype(suite.dtype)
    size = f"N={n}, G={g}, P={p}, R={r}, Q={heads}, K={kv}, H={h}"
    prefix, own, length = (of(n, p, kv, h), of(n, p, kv, h)), (of(n, g, r, kv, h), of(n, g, r, kv, h)), jnp.full(n, p)

    def both(call: Callable[..., jax.Array]) -> dict[str, Callable[..., jax.Array]]:
        return {"ours": partial(call, "xla"), PALLAS: partial(call, "gpu")}

    def decode(impl: str, q: jax.Array, pk: jax.Array, pv: jax.Array, ok: jax.Array, ov: jax.Array) -> jax.Array:
        return group_decode_attention(q, pk, pv, length, ok, ov, r - 1, **how(impl))

    yield row(suite, f"a token's attention, {size}", both(decode), (of(n, g, 1, heads, h), *prefix, *own))

    def train(impl: str, q: jax.Array, pk: jax.Array, pv: jax.Array, ok: jax.Array, ov: jax.Array) -> jax.Array:
        return group_attention(q, pk, pv, length, ok, ov, **how(impl))

    case = f"responses' attention, {size}"
    yield row(suite, case, both(train), (of(n, g, r, heads, h), *prefix, *own), gradient=True)

    causal = both(lambda impl, q, k, v: causal_attention(q, k, v, **how(impl)))
    if not on_cpu:
        causal[CUDNN] = partial(causal_attention, impl="cudnn")
    yield row(suite, f"a prompt's attention, {size}", causal, (of(n, p, heads, h), *prefix), gradient=True)

    t = p + g * r
    fork = np.concatenate([np.full(p, t), p + r * (1 + np.arange(g)).repeat(r)])
    end = jnp.asarray(np.broadcast_to(fork, (n, t)), jnp.int32)
    tree = both(lambda impl, q, k, v: tree_attention(q, k, v, end, **how(impl)))
    case = f"a tree's attention, {t} tokens, {size}"
    yield row(suite, case, tree, (of(n, t, heads, h), of(n, t, kv, h), of(n, t, kv, h)), gradient=True)

    hidden, weight = of(n, g, d), (of(vocab, d) * d**-0.5).astype(suite.dtype)
    u = jax.random.uniform(next(keys), (n, g))
    draw = both(lambda impl, hidden, weight: head_sample(hidden, Head(weight), u, **how(impl))[1])
    yield row(suite, f"sample from hidden states, {n * g} rows, V={vocab}, D={d}", draw, (hidden, weight))


def row(
    suite: Suite, case: str, forms: dict[str, Callable[..., Any]], args: tuple[jax.Array, ...], gradient: bool = False
) -> Row:
    """Row of an operation, or of the operation and its gradient, with the distance of each form.

    A form that fails is a fact, with the first line of its error.
    """

    def program(form: Callable[..., Any], args: tuple[jax.Array, ...]) -> Any:
        if not gradient:
            return form(*args)
        out, back = jax.vjp(form, *args)
        return out, *back(jnp.ones_like(out))

    exact = [x.astype(jnp.float32) for x in args]
    want = jax.block_until_ready(jax.jit(partial(program, forms["ours"]))(exact))
    calls: dict[str, Callable[[], Any]] = {}
    facts: dict[str, Any] = {}
    for name, form in forms.items():
        jitted = jax.jit(partial(program, form))
        try:
            got = jax.block_until_ready(jitted(args))
        except Exception as error:  # a compiler's errors have no common class, and other forms are still measured
            facts[f"{name} fails"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            continue
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        far = [float(jnp.linalg.norm((a - b).ravel()) / jnp.linalg.norm(b.ravel())) for a, b in pairs]
        facts[f"distance of {name}"] = " ".join(f"{x:.1e}" for x in far)
        calls[name] = partial(_wait, jitted, args)
    return measure("kernels", case + (", with gradient" if gradient else ""), calls, suite.repeats, facts=facts)


def _wait(program: Callable[..., Any], args: tuple[jax.Array, ...]) -> None:
    jax.block_until_ready(program(args))
