"""Generation of G samples of one prompt: this project (shared prompt), plain JAX (repeated prompt), transformers, and
the sampler of google-tunix.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import SHAPES, Row, Suite, machine, measure, peers, torch_forms, trunk_ratio
from jaxmarl_llm.generation.generate import generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config

# Shape, samples, prompt, response, others, targets.
Case = tuple[str, int, int, int, tuple[str, ...], dict[str, float]]
JAX, HF, TUNIX = "naive JAX", "transformers", "google-tunix"
HF_SHARED = "transformers, prompt shared"  # as a user writes it who knows that the prompt is shared
CASES: dict[str, tuple[Case, ...]] = {
    "cpu": (
        ("smollm2_135m", 1, 512, 64, (HF,), {HF: 1.2}),
        ("smollm2_135m", 16, 512, 64, (JAX, HF, HF_SHARED, TUNIX), {HF: 3, JAX: 2}),
        ("qwen2_5_0_5b", 1, 512, 64, (HF,), {HF: 1.2}),
        ("qwen2_5_0_5b", 16, 512, 64, (JAX, HF, HF_SHARED), {HF: 3, JAX: 2}),
    ),
    "accelerator": (
        ("qwen2_5_0_5b", 16, 512, 64, (JAX, HF, HF_SHARED), {}),
        ("qwen2_5_3b", 16, 512, 64, (), {}),
        ("qwen2_5_0_5b", 1, 512, 64, (HF,), {}),
        ("qwen2_5_0_5b", 64, 1024, 256, (), {}),
        ("qwen2_5_3b", 64, 1024, 256, (), {}),
    ),
    "tiny": (("tiny", 4, 16, 8, (JAX, HF, HF_SHARED, TUNIX), {JAX: 2}),),
    "tiny_accelerator": (("tiny", 4, 16, 8, (JAX, HF, HF_SHARED), {}),),
}


def run(suite: Suite) -> Iterator[Row]:
    return (case(suite, *given) for given in CASES[suite.name])


def sampler(cfg: Config, tokens: np.ndarray, group: int, response: int, *, repeat: int = 1) -> Any:
    """Function that draws ``group`` samples for each of ``repeat`` copies of the prompt [1 P], and waits for them."""
    policy = make_policy(cfg)
    params = {"params": jax.jit(policy.init)(jax.random.key(0))}
    prompts = jnp.repeat(tokens, repeat, 0)
    keys = jax.random.split(jax.random.key(1), (repeat, group))
    length, active = jnp.full(repeat, tokens.shape[1], jnp.int32), jnp.ones(repeat, bool)
    draw = functools.partial(generate, max_new_tokens=response, stop_ids=(), pad_id=0, sampling=Sampling())
    return lambda: jax.block_until_ready(draw(policy, params, prompts, length, keys, active))


def case(
    suite: Suite,
    shape: str,
    group: int,
    p: int,
    r: int,
    others: tuple[str, ...],
    targets: dict[str, float],
    part: str = "decode",
) -> Row:
    cfg, rng = dataclasses.replace(SHAPES[shape], dtype=suite.dtype), np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab_size, (1, p)).astype(np.int32)
    forms, facts = {"ours": sampler(cfg, tokens, group, r)}, {}
    if JAX in others:
        forms[JAX] = sampler(cfg, tokens, 1, r, repeat=group)
    if {HF, HF_SHARED} & set(others) and torch_forms.available():
        net = torch_forms.model(cfg, suite.device).eval()
        made = {HF: torch_forms.sampler, HF_SHARED: torch_forms.shared_sampler}
        forms |= {name: make(net, tokens, group, r) for name, make in made.items() if name in others}
    with contextlib.ExitStack() as stack:
        if TUNIX in others:
            spec = {"what": "sample", "hf": cfg.to_hf(), "group": group, "prompt": p, "response": r}
            peer = stack.enter_context(peers.start(TUNIX, suite.peers, spec))
            forms[TUNIX] = peer.step
            facts[f"versions of {TUNIX}"] = ", ".join(f"{k} {v}" for k, v in peer.versions.items())
        repeated = [name for name in others if name != HF_SHARED]
        limits = dict.fromkeys(repeated, trunk_ratio(group, p, r)) if group > 1 else {}
        row = measure(part, f"{shape}, G={group}, P={p}, R={r}", forms, suite.repeats, targets=targets)
    if suite.accelerator:
        facts |= machine.roofline(cfg, group, p, r, float(np.median(row.values["ours"])))
    return dataclasses.replace(row, limits=limits, facts={**row.facts, **facts})
