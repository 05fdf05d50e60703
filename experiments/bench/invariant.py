"""Cost of batch-invariant generation (`models.batch_invariant`), and differences in a sample's log-probabilities when
it is generated alone or among others, with and without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import SHAPES, Row, Suite, measure
from jaxmarl_llm.generation.generate import generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.batch_invariant import invariant
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.types import Params, Policy

# Shape, samples, prompt, response.
CASES = {
    "cpu": (("7m", 4, 115, 64), ("smollm2_135m", 1, 512, 64), ("smollm2_135m", 16, 512, 64)),
    "tiny": (("tiny", 4, 16, 8),),
}


def run(suite: Suite) -> Iterator[Row]:
    return (case(suite, *given) for given in CASES[suite.name])


def said(
    policy: Policy, params: Params, cfg: Config, group: int, p: int, r: int, nodes: slice, samples: slice
) -> Params:
    """Completions of a slice of samples, for a slice of four prompts."""
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (4, p)).astype(np.int32)[nodes]
    keys = jax.random.split(jax.random.key(1), (4, group))[nodes, samples]
    length, active = jnp.full(len(tokens), p, jnp.int32), jnp.ones(len(tokens), bool)
    out = generate(
        policy,
        params,
        jnp.asarray(tokens),
        length,
        keys,
        active,
        max_new_tokens=r,
        stop_ids=(),
        pad_id=0,
        sampling=Sampling(),
    )
    return jax.block_until_ready(out)


def case(suite: Suite, shape: str, group: int, p: int, r: int) -> Row:
    cfg = dataclasses.replace(SHAPES[shape], dtype=suite.dtype)
    default = make_policy(cfg)
    params = {"params": jax.jit(default.init)(jax.random.key(0))}
    first, given = slice(0, 1), (params, cfg, group, p, r)
    policies = {"ours": default, "invariant": invariant(default)}
    forms = {n: lambda policy=policy: said(policy, *given, first, slice(None)) for n, policy in policies.items()}
    row = measure("invariant", f"{shape}, G={group}, P={p}, R={r}", forms, suite.repeats)
    if shape in ("7m", "tiny"):
        for name, policy in policies.items():
            of_all = np.asarray(said(policy, *given, slice(None), slice(None)).logprobs[0, 0])
            alone = np.asarray(said(policy, *given, first, slice(0, 1)).logprobs[0, 0])
            gap = f"{(alone != of_all).sum()} of {r}, by {np.abs(alone - of_all).max():.1e} at most"
            row.facts[f"log-probs of a sample alone unlike those among {4 * group}, {name}"] = gap
    return row
