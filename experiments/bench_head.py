"""The head kernels against what they replace, as ratios in one process: time (median, lowest and highest) and memory.

    python -m experiments.bench_head [--vocab=151936] [--dim=64] [--tokens=512] [--batch=8] [--repeats=5]

Forms take turns, so that a busy machine slows all of them. Without `--memory_only` the dense loss is also run: it needs
four times tokens * vocab floats. Memory is XLA's own count of temporaries, at 4096 tokens whatever `--tokens`.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jaxmarl_llm.kernels.head import Head, logits
from jaxmarl_llm.kernels.head_loss import head_logprob, head_loss
from jaxmarl_llm.kernels.head_sample import argmax, head_sample, sample_logits

from jaxmarl_llm.sampling import Sampling, score

_VOCAB = flags.DEFINE_integer("vocab", 151_936, "ids")
_DIM = flags.DEFINE_integer("dim", 64, "size of a hidden state")
_TOKENS = flags.DEFINE_integer("tokens", 512, "tokens of the timed losses")
_BATCH = flags.DEFINE_integer("batch", 8, "rows that are sampled")
_REPEATS = flags.DEFINE_integer("repeats", 5, "timed runs of each form")
_MEMORY_ONLY = flags.DEFINE_boolean("memory_only", False, "no loss is run, only compiled")

MEMORY_TOKENS = 4096


def side_by_side(forms: dict[str, Callable], *args: Any, repeats: int, inner: int = 1) -> dict[str, dict[str, float]]:
    """Seconds of each form, taking turns. Ratios are the first form's over this one's: of the median times, and of the
    lowest processor times, which a busy machine moves less.
    """
    run = {name: jax.jit(form) for name, form in forms.items()}
    for form in run.values():
        jax.block_until_ready(form(*args))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
    for _ in range(repeats):
        for name, form in run.items():
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(inner):
                jax.block_until_ready(form(*args))
            times[name].append(((time.perf_counter() - wall) / inner, (time.process_time() - cpu) / inner))
    out = {}
    for name, pairs in times.items():
        walls, cpus = zip(*pairs)
        out[name] = {"median_s": statistics.median(walls), "min_s": min(walls), "max_s": max(walls), "cpu_s": min(cpus)}
    first = out[next(iter(forms))]
    for figures in out.values():
        figures |= {k: first[x] / figures[x] for k, x in (("ratio", "median_s"), ("cpu_ratio", "cpu_s"))}
    return out


def token_loss(logprob: jax.Array, entropy: jax.Array, data: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """PPO's clipped objective with an entropy bonus, summed over tokens."""
    old, advantage = data
    ratio = jnp.exp(logprob - old)
    objective = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    return -jnp.sum(objective + 0.01 * entropy), {"ratio": jax.lax.stop_gradient(ratio.sum())}


def loss_forms(targets: jax.Array, data: Any) -> dict[str, Callable]:
    """value_and_grad with respect to (hidden, weight [V D])."""

    def dense(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        return token_loss(*score(logits(hidden, Head(weight)), targets, Sampling()), data)[0]

    def two(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        return token_loss(*head_logprob(hidden, Head(weight), targets), data)[0]

    def one(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        return head_loss(hidden, Head(weight), targets, data, token_loss).loss

    forms = {"dense": dense, "head_logprob": two, "head_loss": one}
    return {name: jax.value_and_grad(form, (0, 1)) for name, form in forms.items()}


def inputs(tokens: int, vocab: int, dim: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (tokens, dim))
    weight = jax.random.normal(keys[1], (vocab, dim)) * dim**-0.5
    advantage = jax.random.normal(keys[3], (tokens,))
    return hidden, weight, jax.random.randint(keys[2], (tokens,), 0, vocab), advantage


def loss_memory(vocab: int, dim: int) -> dict[str, float]:
    """Temporaries of loss and gradient, as a share of float32 logits [tokens vocab]."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    targets = jnp.zeros(MEMORY_TOKENS, jnp.int32)
    data = jnp.zeros(MEMORY_TOKENS), jnp.zeros(MEMORY_TOKENS)
    out = {}
    for name, form in loss_forms(targets, data).items():
        compiled = jax.jit(form).lower(shape(MEMORY_TOKENS, dim), shape(vocab, dim)).compile()
        analysis: Any = compiled.memory_analysis()
        out[name] = analysis.temp_size_in_bytes / (4 * MEMORY_TOKENS * vocab)
    return out


def sample_times(vocab: int, dim: int, batch: int, repeats: int) -> dict[str, Any]:
    hidden, weight, _, _ = inputs(batch, vocab, dim)
    z, u = logits(hidden, Head(weight)), jax.random.uniform(jax.random.key(1), (batch,))
    key = jax.random.key(2)
    from_logits = {
        "categorical": lambda z, u: jax.random.categorical(key, z),
        "sample_logits": lambda z, u: sample_logits(z, u),
    }
    from_hidden = {
        "categorical": lambda h, w, u: jax.random.categorical(key, logits(h, Head(w))),
        "head_sample": lambda h, w, u: head_sample(h, Head(w), u),
    }
    greedy = {"jnp.argmax": lambda z: jnp.argmax(z, -1), "argmax": argmax}
    return {
        "from logits": side_by_side(from_logits, z, u, repeats=repeats, inner=10),
        "from hidden states": side_by_side(from_hidden, hidden, weight, u, repeats=repeats, inner=5),
        "greedy": side_by_side(greedy, z, repeats=repeats, inner=10),
    }


def main(argv: list[str]) -> None:
    del argv
    vocab, dim, repeats = _VOCAB.value, _DIM.value, _REPEATS.value
    report: dict[str, Any] = {"backend": jax.default_backend(), "vocab": vocab, "dim": dim, "tokens": _TOKENS.value}
    report["sampling"] = sample_times(vocab, dim, _BATCH.value, repeats)
    report["temporaries, share of dense logits"] = loss_memory(vocab, dim)
    if not _MEMORY_ONLY.value:
        hidden, weight, targets, advantage = inputs(_TOKENS.value, vocab, dim)
        forms = loss_forms(targets, (jnp.full(len(targets), -12.0), advantage))
        report["loss and gradient"] = side_by_side(forms, hidden, weight, repeats=repeats)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    app.run(main)
