"""Optimised programs for TPUs as libtpu writes them, for tests/costs/test_hlo.py:

    python -m tests.costs.dumps.make [NAME ...]

Compiles each of PROGRAMS ahead of time (extra ``aot``, no accelerator) and writes NAME.hlo.gz beside this file. Folders
of this machine and the bodies of Pallas kernels, which hold such folders, are cut.
"""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.tpu import compile_ahead

FOLDER = Path(__file__).parent
BF16 = jnp.bfloat16
Lowered = Any


def mesh_of(topology: str, *shape: int) -> Mesh:
    found = compile_ahead.devices(topology)[: int(np.prod(shape))]
    return Mesh(np.array(found).reshape(shape), ("data", "tensor")[: len(shape)])


def lower(mesh: Mesh, function: Callable[..., Any], *arrays: Any, **options: Any) -> Lowered:
    """The program of ``function`` for arrays (shape, dtype, axes of the mesh ...), or tuples of them."""

    def place(array: Any) -> Any:
        if isinstance(array[0][0], tuple):
            return tuple(map(place, array))
        shape, dtype, *axes = array
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))

    return jax.jit(function, **options).lower(*map(place, arrays))


def product() -> Lowered:
    return lower(mesh_of("v5e:2x2", 1), jnp.matmul, ((256, 512), BF16), ((512, 384), BF16))


def batched() -> Lowered:
    """Scores of attention: the batch dimension becomes a spatial dimension of a convolution."""
    scores = partial(jnp.einsum, "bqd,bkd->bqk", preferred_element_type=jnp.float32)
    return lower(mesh_of("v5e:2x2", 1), scores, ((8, 256, 128), BF16), ((8, 512, 128), BF16))


def scan() -> Lowered:
    def run(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    return lower(mesh_of("v5e:2x2", 1), run, ((256, 512), BF16), ((7, 512, 512), BF16))


def early() -> Lowered:
    """A loop from 2 by 3 to 20 that may end before, with a branch; before it one product that always runs."""

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            i, x = state
            return i + 3, jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w), lambda x: x, x)

        going = lambda state: (state[0] < 20) & (state[1].max() < 9)
        return jax.lax.while_loop(going, body, (jnp.int32(2), x @ w))[1]

    return lower(mesh_of("v5e:2x2", 1), run, ((256, 512), BF16), ((512, 512), BF16))


def collectives() -> Lowered:
    """Every kind once, over the four chips of an axis of eight. All have one channel_id."""
    mesh, axis = mesh_of("v5e:2x4", 2, 4), "tensor"

    def run(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array, e: jax.Array) -> tuple[jax.Array, ...]:
        moved = jax.lax.ppermute(e, axis, [(i, (i + 1) % 4) for i in range(4)])
        scattered = jax.lax.psum_scatter(c, axis, tiled=True)
        exchanged = jax.lax.all_to_all(d, axis, 0, 0, tiled=True)
        return jax.lax.psum(a, axis), jax.lax.all_gather(b, axis, tiled=True), scattered, exchanged, moved

    cut = P(axis)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(cut,) * 5, out_specs=(P(), P(), cut, cut, cut), check_vma=False)
    return lower(mesh, mapped, *(((4 * rows, 256), jnp.float32, axis) for rows in (128, 256, 512, 1024, 2048)))


def gathered(topology: str) -> Lowered:
    """Gradient through four layers whose weights are cut over four chips: gathered twice, reduced and scattered."""
    mesh, (layers, d, f) = mesh_of(topology, 4), (4, 1024, 2048)
    cut = None, "data", None

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        layer = lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None)
        return (jax.lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).mean()

    gradient = lambda up, down, x: jax.grad(loss)((up, down), x)
    shapes = ((layers, d, f), BF16, *cut), ((layers, f, d), BF16, *cut), ((4096, d), BF16, "data", None)
    return lower(mesh, gradient, *shapes, out_shardings=(NamedSharding(mesh, P(*cut)),) * 2)


def prefetch() -> Lowered:
    """Weights of 32 MB, which libtpu prefetches to VMEM in slices, used five times."""

    def run(x: jax.Array, *weights: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for w in weights:
                x = jnp.tanh(x @ w)
            return x, None

        return jax.lax.scan(step, x, None, length=5)[0]

    up, down = ((2048, 8192), BF16), ((8192, 2048), BF16)
    return lower(mesh_of("v6e:2x2", 1), run, ((16, 2048), BF16), up, down, up, down)


def splash() -> Lowered:
    """Gradient through causal attention in a scan of three: 1024 tokens, 2 rows, 4 heads of 128."""
    from jaxmarl_llm.kernels.attention.causal import causal_attention

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        layer = lambda x, _: (causal_attention(x, k, v, impl="tpu"), None)
        return jax.lax.scan(layer, q, None, length=3)[0].astype(jnp.float32).sum()

    return lower(mesh_of("v5e:2x2", 1), jax.grad(loss, argnums=(0, 1, 2)), *(((2, 1024, 4, 128), BF16),) * 3)


def estimated() -> Lowered:
    """A Pallas kernel whose author estimated its FLOPs."""

    def double(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = 2 * x_ref[...]

    def run(x: jax.Array) -> jax.Array:
        cost = pl.CostEstimate(flops=12345, transcendentals=0, bytes_accessed=2 * x.size * 4)
        return pl.pallas_call(double, out_shape=x, cost_estimate=cost, name="double")(x)

    return lower(mesh_of("v5e:2x2", 1), run, ((512, 512), jnp.float32))


def kernels() -> Lowered:
    """This project's other kernels: a tree with its gradient, a step of decoding, and a draw from a head."""
    from jaxmarl_llm.kernels.attention.group_decode import group_decode_attention
    from jaxmarl_llm.kernels.attention.tree import tree_attention
    from jaxmarl_llm.kernels.head.head import Head
    from jaxmarl_llm.kernels.head.sample import head_sample

    def run(tree: tuple[Any, ...], decode: tuple[Any, ...], hidden: Any, weight: Any, u: Any) -> tuple[Any, ...]:
        attended = lambda q, k, v: tree_attention(q, k, v, tree[3], impl="tpu").astype(jnp.float32).sum()
        gradient = jax.grad(attended, argnums=(0, 1, 2))(*tree[:3])
        drawn = head_sample(hidden, Head(weight, True), u, impl="tpu")
        return gradient, group_decode_attention(*decode, 5, impl="tpu"), drawn

    array = lambda dtype, *shape: (shape, dtype)
    tree = array(BF16, 2, 1024, 4, 128), *[array(BF16, 2, 1024, 2, 128)] * 2, array(jnp.int32, 2, 1024)
    prefix, own = array(BF16, 3, 512, 2, 128), array(BF16, 3, 8, 16, 2, 128)
    decode = array(BF16, 3, 8, 1, 4, 128), prefix, prefix, array(jnp.int32, 3), own, own
    given = tree, decode, array(BF16, 32, 256), array(BF16, 16384, 256), array(jnp.float32, 32)
    return lower(mesh_of("v5e:2x2", 1), run, *given)


def rows() -> Lowered:
    """128 rows of a table of 64 MB are read, then added to; six columns of a cache of 256 MB are set."""

    def run(table: jax.Array, cache: jax.Array, ids: jax.Array, new: jax.Array) -> tuple[jax.Array, ...]:
        taken = table[ids]
        put = lambda i, cache: jax.lax.dynamic_update_slice_in_dim(cache, new[i][:, None], 3 * i, 1)
        return taken, table.at[ids].add(taken), jax.lax.fori_loop(0, 6, put, cache)

    shapes = ((65536, 512), BF16), ((64, 1024, 2048), BF16), ((128,), jnp.int32), ((6, 64, 2048), BF16)
    return lower(mesh_of("v5e:2x2", 1), run, *shapes, donate_argnums=(0, 1))


PROGRAMS: dict[str, Callable[[], Lowered]] = {
    "product": product,
    "batched": batched,
    "scan": scan,
    "early": early,
    "collectives": collectives,
    "gathered_v5e": partial(gathered, "v5e:2x2"),
    "gathered_v6e": partial(gathered, "v6e:2x2"),
    "prefetch": prefetch,
    "splash": splash,
    "estimated": estimated,
    "kernels": kernels,
    "rows": rows,
}


def cut_folders(text: str) -> str:
    """Text of a program without folders of this machine."""
    text = re.sub(r'"body":"[^"]*"', '"body":""', text)
    return re.sub(r'"/[^"]*?/(?=(?:site-packages|tests|jaxmarl_llm|kernels|experiments)/)', '"', text)


def main(names: list[str]) -> None:
    for name in names or PROGRAMS:
        _, text = compile_ahead.compile_text(PROGRAMS[name]())
        (FOLDER / f"{name}.hlo.gz").write_bytes(gzip.compress(cut_folders(text).encode(), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1:])
