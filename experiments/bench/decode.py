"""Generation of G samples of one prompt: ours (prompt once, shared), naive JAX (prompt repeated), transformers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from experiments.bench import SHAPES, Row, measure, torch_forms
from jaxmarl_llm.generate import generate
from jaxmarl_llm.qwen import make_policy
from jaxmarl_llm.sampling import Sampling

CASES = ((1, 512, 64), (16, 512, 64))  # samples, prompt, response
TINY = ((1, 16, 8), (4, 16, 8))


def run(shape: str, repeats: int) -> list[Row]:
    cfg = SHAPES[shape]
    policy, rng = make_policy(cfg), np.random.default_rng(0)
    params = {"params": jax.jit(policy.init)(jax.random.key(0))}
    net = torch_forms.model(cfg).eval() if torch_forms.available() else None
    rows = []
    for group, p, r in TINY if shape == "tiny" else CASES:
        tokens = rng.integers(0, cfg.vocab_size, (1, p)).astype(np.int32)

        def sampled(repeat: int, group: int, tokens: np.ndarray = tokens, r: int = r) -> Any:
            prompts = np.repeat(tokens, repeat, 0)
            keys = jax.random.split(jax.random.key(1), (repeat, group))
            length, active = np.full(repeat, tokens.shape[1], np.int32), np.ones(repeat, bool)
            fixed = {"max_new": r, "stop_ids": (), "pad_id": 0, "sampling": Sampling()}
            return lambda: jax.block_until_ready(generate(policy, params, prompts, length, keys, active, **fixed))

        forms = {"ours": sampled(1, group), "naive JAX": sampled(group, 1)}
        if group == 1:
            del forms["naive JAX"]  # the same program
        if net is not None:
            forms["transformers"] = torch_forms.sampler(net, tokens, group, r)
        rows.append(measure("decode", f"{shape}, G={group}, P={p}, R={r}", forms, repeats))
    return rows
