"""The head kernels against what they replace: a token loss and its gradient, sampling, the greedy token; and memory.

Temporary bytes are XLA's own count for loss and gradient at 4096 tokens, of which the dense logits are one array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from experiments.bench import SHAPES, Row, measure, temporary
from jaxmarl_llm.kernels.head import Head, logits
from jaxmarl_llm.kernels.head_loss import head_logprob, head_loss
from jaxmarl_llm.kernels.head_sample import argmax, head_sample, sample_logits
from jaxmarl_llm.sampling import Sampling, score

TOKENS, ROWS, MANY = 128, 8, 4096  # of a timed loss; sampled at once; of the loss whose memory is told


def token_loss(logprob: jax.Array, entropy: jax.Array, data: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """PPO's clipped objective with an entropy bonus, summed over tokens."""
    old, advantage = data
    ratio = jnp.exp(logprob - old)
    objective = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -jnp.sum(objective + 0.01 * entropy), {}


def losses(rows: bool) -> dict[str, Callable]:
    """(hidden, weight, targets, data) -> loss and gradient with respect to the first two."""
    value = lambda scored, data: token_loss(scored[0], scored[1], data)[0]
    forms = {
        "ours": lambda h, w, t, data: head_loss(h, Head(w, rows), t, data, token_loss).loss,
        "head_logprob": lambda h, w, t, data: value(head_logprob(h, Head(w, rows), t), data),
        "dense": lambda h, w, t, data: value(score(logits(h, Head(w, rows)), t, Sampling()), data),
    }
    return {name: jax.jit(jax.value_and_grad(form, (0, 1))) for name, form in forms.items()}


def inputs(tokens: int, vocab: int, dim: int, rows: bool) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    weight = jax.random.normal(keys[1], (vocab, dim) if rows else (dim, vocab)) * dim**-0.5
    data = jnp.full(tokens, -12.0), jax.random.normal(keys[3], (tokens,))
    return jax.random.normal(keys[0], (tokens, dim)), weight, jax.random.randint(keys[2], (tokens,), 0, vocab), data


def run(shape: str, repeats: int) -> list[Row]:
    vocab, dim = SHAPES[shape].vocab_size, SHAPES[shape].hidden_size
    call = lambda form, *args: lambda: jax.block_until_ready(form(*args))
    rows = []
    for by_id in (True, False):
        given = inputs(TOKENS, vocab, dim, by_id)
        forms = {name: call(form, *given) for name, form in losses(by_id).items()}
        many = jax.eval_shape(lambda by_id=by_id: inputs(MANY, vocab, dim, by_id))
        share = lambda form, many=many: temporary(form.lower(*many).compile()) / (4 * MANY * vocab)
        facts = {f"temporaries ÷ logits, {name}": round(share(form), 4) for name, form in losses(by_id).items()}
        case = f"loss and gradient, {TOKENS} tokens, weight {'[V D]' if by_id else '[D V]'}, V={vocab}, D={dim}"
        rows.append(measure("head", case, forms, repeats, **facts))
    hidden, weight, *_ = inputs(ROWS, vocab, dim, True)
    z, u, key = logits(hidden, Head(weight)), jax.random.uniform(jax.random.key(1), (ROWS,)), jax.random.key(2)
    drawn = {
        "ours": jax.jit(sample_logits),
        "jax.random.categorical": jax.jit(lambda z, u: jax.random.categorical(key, z)),
    }
    through = {
        "ours": jax.jit(lambda h, w, u: head_sample(h, Head(w), u)),
        "jax.random.categorical": jax.jit(lambda h, w, u: jax.random.categorical(key, logits(h, Head(w)))),
    }
    greedy = {"ours": jax.jit(argmax), "jnp.argmax": jax.jit(lambda z: jnp.argmax(z, -1))}
    cases: tuple[tuple[str, dict[str, Any], tuple], ...] = (
        ("sample from logits", drawn, (z, u)),
        ("sample from hidden states", through, (hidden, weight, u)),
        ("greedy token from logits", greedy, (z,)),
    )
    for case, jitted, args in cases:
        each = {name: call(form, *args) for name, form in jitted.items()}
        rows.append(measure("head", f"{case}, {ROWS} rows, V={vocab}", each, repeats))
    return rows
