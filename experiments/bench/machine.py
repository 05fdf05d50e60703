"""Measured limits of the device: bytes copied per second, and FLOPs of a bfloat16 matrix product. Also the distance of
decoding from the bytes that it must read.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import Row, Suite
from jaxmarl_llm.models.decoder_config import Config


def best(form: Callable[[], Any], repeats: int) -> float:
    """Shortest of ``repeats`` times, after a first call."""
    jax.block_until_ready(form())
    times = []
    for _ in range(repeats):
        clock = time.perf_counter()
        jax.block_until_ready(form())
        times.append(time.perf_counter() - clock)
    return min(times)


@functools.cache
def bandwidth(size: int) -> float:
    """Bytes per second, read and written, of a copy of ``size`` bytes."""
    x = jnp.zeros(size // 4, jnp.float32)
    twice = jax.jit(lambda x: x * 2)
    return 2 * size / best(lambda: twice(x), 20)


@functools.cache
def matmul_peak(n: int) -> float:
    """FLOPs per second of an [n n] matrix product in bfloat16."""
    x = jnp.ones((n, n), jnp.bfloat16)
    product = jax.jit(lambda x: x @ x)
    return 2 * n**3 / best(lambda: product(x), 20)


def sizes() -> tuple[int, int]:
    """Sizes of the copy and the matrix product: large on an accelerator, small in tests."""
    return (64 << 20, 256) if jax.default_backend() == "cpu" else (4 << 30, 8192)


def run(suite: Suite) -> list[Row]:
    copied, n = sizes()
    facts = {
        "device": jax.devices()[0].device_kind,
        f"copy of {copied >> 20} MiB": f"{bandwidth(copied) / 1e9:.4g} GB/s read and written",
        f"bfloat16 product of {n}": f"{matmul_peak(n) / 1e12:.4g} TFLOP/s",
    }
    return [Row("machine", "peaks", {"ours": []}, facts=facts)]


def roofline(cfg: Config, group: int, prompt: int, response: int, seconds: float) -> dict[str, str]:
    """Facts about a generation of ``seconds``: the bytes that every token must read, relative to the measured
    bandwidth. These are the weights, the keys and values of the prompt, and those of each sample's own tokens. The
    pass over the prompt counts as one token.
    """
    item = jnp.dtype(cfg.dtype).itemsize
    d, f, h = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    layer = d * h * (2 * cfg.num_heads + 2 * cfg.num_kv_heads) + 3 * d * f
    weights = item * (cfg.num_layers * layer + cfg.vocab_size * d)
    cached = item * 2 * cfg.num_layers * cfg.num_kv_heads * h * (prompt + group * response / 2)
    least = response * (weights + cached) / bandwidth(sizes()[0])
    return {"share of the bandwidth that reading weights and caches takes": f"{least / seconds:.2f} ({least:.3g} s)"}
