"""Head kernels and their alternatives: a token loss and its gradient, sampling, the greedy token, and memory. The bytes
are XLA's own count for loss and gradient at 4096 tokens, with one array of dense logits. These programs are compiled
but not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import SHAPES, Row, Suite, measure, temporary
from jaxmarl_llm.generation.sampling import Sampling, score
from jaxmarl_llm.kernels.head.head import Head, logits
from jaxmarl_llm.kernels.head.loss import head_logprob, head_loss
from jaxmarl_llm.kernels.head.sample import argmax, head_sample, sample_logits

# Tokens of a timed loss (16 samples of 64), rows sampled at once, tokens of the loss whose memory is told.
SIZES = {"cpu": (1024, 8, 4096), "accelerator": (1024, 8, 4096), "tiny": (64, 8, 256), "tiny_accelerator": (64, 8, 256)}
DENSE, DRAW = "dense", "jax.random.categorical"


def token_loss(logprob: jax.Array, entropy: jax.Array, data: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped objective of PPO with an entropy bonus, summed over tokens."""
    old, advantage = data
    ratio = jnp.exp(logprob - old)
    objective = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -jnp.sum(objective + 0.01 * entropy), {}


def losses(rows: bool) -> dict[str, Any]:
    """(hidden, weight, targets, data) -> loss and gradient with respect to the first two."""
    value = lambda scored, data: token_loss(scored[0], scored[1], data)[0]
    forms = {
        "ours": lambda h, w, t, data: head_loss(h, Head(w, rows), t, data, token_loss).loss,
        "head_logprob": lambda h, w, t, data: value(head_logprob(h, Head(w, rows), t), data),
        DENSE: lambda h, w, t, data: value(score(logits(h, Head(w, rows)), t, Sampling()), data),
    }
    return {name: jax.jit(jax.value_and_grad(form, (0, 1))) for name, form in forms.items()}


def inputs(tokens: int, vocab: int, dim: int, rows: bool, dtype: str) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    weight = (jax.random.normal(keys[1], (vocab, dim) if rows else (dim, vocab)) * dim**-0.5).astype(dtype)
    data = jnp.full(tokens, -12.0), jax.random.normal(keys[3], (tokens,))
    hidden = jax.random.normal(keys[0], (tokens, dim)).astype(dtype)
    return hidden, weight, jax.random.randint(keys[2], (tokens,), 0, vocab), data


def run(suite: Suite) -> Iterator[Row]:
    cfg = SHAPES["tiny" if suite.tiny else "qwen2_5_0_5b"]
    tokens, rows, many = SIZES[suite.name]
    of = f"V={cfg.vocab_size}, D={cfg.hidden_size}"
    for by_id in (True, False):
        yield from loss(suite, tokens, many, cfg.vocab_size, cfg.hidden_size, by_id)
    hidden, weight, *_ = inputs(rows, cfg.vocab_size, cfg.hidden_size, True, suite.dtype)
    z, u, key = logits(hidden, Head(weight)), jax.random.uniform(jax.random.key(1), (rows,)), jax.random.key(2)
    drawn = {"ours": jax.jit(sample_logits), DRAW: jax.jit(lambda z, u: jax.random.categorical(key, z))}
    through = {
        "ours": jax.jit(lambda h, w, u: head_sample(h, Head(w), u)),
        DRAW: jax.jit(lambda h, w, u: jax.random.categorical(key, logits(h, Head(w)))),
    }
    greedy = {"ours": jax.jit(argmax), "jnp.argmax": jax.jit(lambda z: jnp.argmax(z, -1))}
    cases: tuple[tuple[str, dict[str, Any], tuple, dict[str, float]], ...] = (
        ("sample from logits", drawn, (z, u), {DRAW: 15}),
        ("sample from hidden states", through, (hidden, weight, u), {}),
        ("greedy token from logits", greedy, (z,), {}),
    )
    for case, jitted, args, targets in cases:
        forms = {name: _call(form, *args) for name, form in jitted.items()}
        targets = {} if "machine" in suite.parts else targets
        yield measure("head", f"{case}, {rows} rows, {of}", forms, suite.repeats, targets=targets)


def _call(form: Callable, *args: Any) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(form(*args))


def loss(suite: Suite, tokens: int, many: int, vocab: int, dim: int, by_id: bool) -> Iterator[Row]:
    """Rows of loss and gradient: time, distance of the gradients from dense ones, and bytes."""
    time, share = ({}, {}) if "machine" in suite.parts else ({DENSE: 1.0}, {DENSE: 1 / 0.03})
    given = inputs(tokens, vocab, dim, by_id, suite.dtype)
    forms = losses(by_id)
    (gh, gw), (dh, dw) = (forms[name](*given)[1] for name in ("ours", DENSE))
    apart = lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b)))
    far = max(apart(gh, dh), apart(gw, dw))
    of = f"weight {'[V D]' if by_id else '[D V]'}, V={vocab}, D={dim}"
    facts = {"largest gap of a gradient to the dense one, of its largest entry": f"{far:.1e}"}
    if suite.dtype == "float32":
        facts["that gap, asked for"] = f"at most 1e-5: {'met' if far <= 1e-5 else 'missed'}"
    timed = {name: _call(form, *given) for name, form in forms.items()}
    case = f"loss and gradient, {tokens} tokens, {of}"
    yield measure("head", case, timed, suite.repeats, targets=time, facts=facts)
    shapes = jax.eval_shape(lambda: inputs(many, vocab, dim, by_id, suite.dtype))
    size = {name: [float(temporary(form.lower(*shapes).compile()))] for name, form in forms.items()}
    size["one array of the logits"] = [4.0 * many * vocab]
    case = f"temporaries of loss and gradient, {many} tokens, {of}"
    yield Row("head", case, size, unit="B", targets=share)
