"""One update on G completions of one prompt: ours (prompt once, no logits kept), naive JAX (prompt repeated, dense
logits), PyTorch. Gradient, clip, AdamW.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import SHAPES, Row, measure, temporary, torch_forms
from jaxmarl_llm.losses import Loss
from jaxmarl_llm.optimizers import Optimizer
from jaxmarl_llm.qwen import make_policy
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.train import Batch, make_learner

CASES = ((16, 512, 64),)  # samples, prompt, response
TINY = ((4, 16, 8),)
OPTIMIZER = Optimizer(learning_rate=1e-6, weight_decay=0.01, b2=0.999)


def run(shape: str, repeats: int) -> list[Row]:
    cfg, rng = SHAPES[shape], np.random.default_rng(0)
    rows = []
    for group, p, r in TINY if shape == "tiny" else CASES:
        tokens = rng.integers(0, cfg.vocab_size, (1, p)).astype(np.int32)
        said = rng.integers(0, cfg.vocab_size, (1, group, r)).astype(np.int32)
        gain = rng.normal(size=(1, group)).astype(np.float32)
        forms, facts = {}, {}
        for name, make in {"ours": ours, "naive JAX": naive}.items():
            forms[name], facts[f"temporary bytes, {name}"] = make(cfg, tokens, said, gain)
        if torch_forms.available():
            forms["PyTorch"] = torch_forms.updater(torch_forms.model(cfg), tokens, said, gain)
        facts |= {"trunk tokens, ours": p + group * r, "trunk tokens, naive JAX": group * (p + r)}
        rows.append(measure("update", f"{shape}, G={group}, P={p}, R={r}", forms, repeats, **facts))
    return rows


def ours(cfg: Any, tokens: np.ndarray, said: np.ndarray, gain: np.ndarray) -> tuple[Any, int]:
    """The learner's own functions, on one micro-batch; and the temporary bytes of its gradient program."""
    policy = make_policy(cfg, remat=False)
    learner = make_learner(policy, Loss(), OPTIMIZER, Sampling())
    own = {"params": jax.jit(policy.init)(jax.random.key(0))}
    weights = np.full(said.shape, 1 / said.size, np.float32)
    length = np.full(len(tokens), tokens.shape[1], np.int32)
    spread = np.broadcast_to(gain[..., None], said.shape).astype(np.float32)
    batch = Batch(tokens, length, said, weights, spread, np.zeros_like(weights))
    held = [(own, learner.init(own))]
    gradient: Any = learner.accumulate  # jitted
    held_bytes = temporary(gradient.lower(own, None, batch, None).compile())

    def step() -> None:
        own, state = held[0]
        slope, seen, _ = learner.accumulate(own, None, batch, None)
        own, state, *_ = learner.apply(own, state, slope, seen["loss"])
        held[0] = jax.block_until_ready((own, state))

    return step, held_bytes


def naive(cfg: Any, tokens: np.ndarray, said: np.ndarray, gain: np.ndarray) -> tuple[Any, int]:
    """As it is usually written in JAX: every prompt repeated, the logits of all tokens in memory."""
    policy = make_policy(cfg, remat=False)
    n, g, r = said.shape
    rows, length = np.repeat(tokens, g, 0), np.full(n * g, tokens.shape[1], np.int32)
    completions, spread = said.reshape(n * g, 1, r), gain.reshape(n * g, 1, 1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.01))

    def loss(own: Any) -> jax.Array:
        logits = policy.unembed(own, policy.hidden(own, rows, length, completions))
        scored = jnp.take_along_axis(jax.nn.log_softmax(logits), completions[..., None], -1)[..., 0]
        ratio = jnp.exp(scored - jax.lax.stop_gradient(scored))
        return -jnp.minimum(ratio * spread, jnp.clip(ratio, 0.8, 1.2) * spread).mean()

    def step(own: Any, state: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(own)
        updates, state = tx.update(gradient, state, own)
        return optax.apply_updates(own, updates), state, value

    own = {"params": jax.jit(policy.init)(jax.random.key(0))}
    held, compiled = [(own, jax.jit(tx.init)(own))], jax.jit(step, donate_argnums=(0, 1))
    held_bytes = temporary(compiled.lower(*held[0]).compile())

    def run() -> None:
        own, state, _ = compiled(*held[0])
        held[0] = jax.block_until_ready((own, state))

    return run, held_bytes
