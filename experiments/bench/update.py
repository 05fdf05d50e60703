"""One update on G completions of one prompt: ours (prompt once, no logits kept), naive JAX (prompt repeated, dense
logits), PyTorch. Gradient, clip, AdamW; no layer is recomputed in the backward pass.

The others add their gradient up over micro-batches of rows: without them naive JAX needs more memory than a machine of
24 GB has. On a CPU each form has a process of its own. Both forms of a comparison have the same settings: with PyTorch,
freed memory is kept; with naive JAX it is not, because its process would grow to 17 GB. The rows of bytes are of the
gradient program on all rows at once, with and without recomputing; compiled, not run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.bench import SHAPES, Row, Suite, held, machine, measure, torch_forms, trunk_ratio
from experiments.bench.apart import apart
from jaxmarl_llm.costs import model
from jaxmarl_llm.costs.counts import ModelSize
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.training.learner import Batch, make_learner
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.types import Policy

# Shape, samples, prompt, response, micro-batches of the others, targets.
JAX, TORCH = "naive JAX", "PyTorch"
CASES = {
    "cpu": ("smollm2_135m", 16, 512, 64, 4, {JAX: 4.0, TORCH: 2.0}),
    "accelerator": ("qwen2_5_0_5b", 16, 512, 64, 1, {}),
    "tiny": ("tiny", 4, 16, 8, 2, {JAX: 4.0}),
    "tiny_accelerator": ("tiny", 4, 16, 8, 1, {}),
}
# Shape, samples, prompt, response; ours alone, with its share of the device's peak.
LARGE = {
    "accelerator": (("qwen2_5_0_5b", 16, 1024, 512), ("qwen2_5_3b", 8, 1024, 512)),
    "tiny_accelerator": (("tiny", 8, 16, 8),),
}
# Without float32 masters, which the others do not keep either.
OPTIMIZER = Optimizer(learning_rate=1e-6, weight_decay=0.01, b2=0.999, float32_master_weights=False)


def run(suite: Suite) -> Iterator[Row]:
    shape, group, p, r, micro, targets = CASES[suite.name]
    given, case = inputs(suite, shape, group, p, r), f"{shape}, G={group}, P={p}, R={r}"
    cfg, *rows = given
    # Whether both forms of a comparison keep freed memory: naive JAX would grow to 17 GB.
    others: dict[str, tuple[Callable[..., Callable[[], None]], bool]] = {JAX: (naive, False)}
    if torch_forms.available():
        others[TORCH] = functools.partial(pytorch, device=suite.device), True
    sent = f"ours {p + group * r}, the others {group * (p + r)}"
    facts = {"tokens through the trunk": f"{sent}; ours in one micro-batch, theirs in {micro}"}
    for other, (make, keep) in others.items():  # one at a time: a process may hold a third of a machine of 24 GB
        with apart(suite, ours, *given, keep=keep) as mine, apart(suite, make, *given, micro, keep=keep) as its:
            forms, limits = {"ours": mine, other: its}, {other: trunk_ratio(group, p, r)}
            asked = {k: v for k, v in targets.items() if k == other}
            row = measure("update", case, forms, suite.repeats, targets=asked, limits=limits, facts=facts)
            yield dataclasses.replace(row, facts={**row.facts, **share_of_peak(suite, row, cfg, group, p, r)})
    for remat in (False, True):
        policy = make_policy(cfg, remat=remat)
        own = {"params": jax.eval_shape(policy.init, jax.random.key(0))}
        learner, batch = _learner(policy), _batch(*rows)
        gradient: Any = learner.accumulate  # jitted
        size = {"ours": held(gradient.lower(own, None, batch, None).compile())}
        form = jax.jit(lambda own, *rows, policy=policy: jax.value_and_grad(_naive_loss(policy))(own, *rows))
        size[JAX] = held(form.lower(own, *_repeated(*rows)).compile())
        yield Row(
            "update",
            f"peak bytes of the gradient{', layers recomputed' if remat else ''}, {case}",
            {name: [float(x)] for name, x in size.items()},
            unit="B",
            targets={} if remat or not targets else {JAX: 1 / 0.3},
        )
    for sizes in LARGE.get(suite.name, ()):
        yield large(suite, *sizes)


def inputs(
    suite: Suite, shape: str, group: int, prompt: int, response: int
) -> tuple[Config, np.ndarray, np.ndarray, np.ndarray]:
    """Architecture, one prompt [1 P], its completions [1 G R] and their advantages [1 G], all random.

    Args:
        suite: gives the dtype.
        shape: a key of `SHAPES`.
        group: samples of the prompt, G.
        prompt: tokens, P.
        response: tokens of each sample, R.
    """
    cfg, rng = dataclasses.replace(SHAPES[shape], dtype=suite.dtype), np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab_size, (1, prompt)).astype(np.int32)
    said = rng.integers(0, cfg.vocab_size, (1, group, response)).astype(np.int32)
    return cfg, tokens, said, rng.normal(size=(1, group)).astype(np.float32)


def flops(cfg: Config, group: int, prompt: int, response: int) -> float:
    """FLOPs of an update that sends each token once, forward and backward, nothing computed again.

    Args:
        cfg: the architecture.
        group: samples of the prompt.
        prompt: tokens.
        response: tokens of each sample.
    """
    pairs = prompt**2 / 2 + group * response * (prompt + response / 2)
    trunk = model.token_flops(ModelSize(cfg)) * (prompt + group * response) + model.attention_flops(cfg) * pairs
    return 3 * (trunk + 2 * cfg.vocab_size * cfg.hidden_size * group * response)


def large(suite: Suite, shape: str, group: int, p: int, r: int) -> Row:
    """Row of ours alone."""
    given = inputs(suite, shape, group, p, r)
    row = measure("update", f"{shape}, G={group}, P={p}, R={r}", {"ours": ours(*given)}, suite.repeats)
    return dataclasses.replace(row, facts={**row.facts, **share_of_peak(suite, row, given[0], group, p, r)})


def share_of_peak(suite: Suite, row: Row, cfg: Config, group: int, p: int, r: int) -> dict[str, str]:
    """Fact about ours on an accelerator: `flops` over the seconds, relative to the measured matmul peak."""
    if not suite.accelerator:
        return {}
    done, seconds = flops(cfg, group, p, r), float(np.median(row.values["ours"]))
    share = done / seconds / machine.matmul_peak(machine.sizes()[1])
    return {"share of the matmul peak": f"{share:.2f} ({done:.3g} FLOP, {seconds:.3g} s)"}


def _learner(policy: Policy) -> Any:
    return make_learner(policy, Loss(), OPTIMIZER, Sampling())


def _batch(tokens: np.ndarray, said: np.ndarray, gain: np.ndarray) -> Batch:
    weights = jnp.full(said.shape, 1 / said.size, jnp.float32)
    length = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    spread = jnp.broadcast_to(gain[..., None], said.shape).astype(jnp.float32)
    return Batch(jnp.asarray(tokens), length, jnp.asarray(said), weights, spread, jnp.zeros_like(weights))


def ours(cfg: Config, tokens: np.ndarray, said: np.ndarray, gain: np.ndarray) -> Callable[[], None]:
    """Function of one update by the learner's own functions, on one micro-batch."""
    policy = make_policy(cfg, remat=False)
    learner, batch = _learner(policy), _batch(tokens, said, gain)
    own = {"params": jax.jit(policy.init)(jax.random.key(0))}
    state = [(own, learner.init(own))]

    def step() -> None:
        own, optimizer = state[0]
        slope, seen, _ = learner.accumulate(own, None, batch, None)
        own, optimizer, *_ = learner.apply(own, optimizer, slope, seen["loss"])
        state[0] = jax.block_until_ready((own, optimizer))

    return step


def _repeated(tokens: np.ndarray, said: np.ndarray, gain: np.ndarray) -> tuple[np.ndarray, ...]:
    """Prompts [N P] and completions [N G R] as N G prompts with one completion each."""
    n, g, r = said.shape
    rows, length = np.repeat(tokens, g, 0), np.full(n * g, tokens.shape[1], np.int32)
    return rows, length, said.reshape(n * g, 1, r), gain.reshape(n * g, 1, 1)


def _naive_loss(policy: Policy) -> Callable[..., jax.Array]:
    def loss(own: Any, rows: Any, length: Any, completions: Any, gain: Any) -> jax.Array:
        logits = policy.unembed(own, policy.hidden(own, rows, length, completions))
        scored = jnp.take_along_axis(jax.nn.log_softmax(logits), completions[..., None], -1)[..., 0]
        ratio = jnp.exp(scored - jax.lax.stop_gradient(scored))
        return -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain).mean()

    return loss


def naive(
    cfg: Config, tokens: np.ndarray, said: np.ndarray, gain: np.ndarray, micro_batches: int
) -> Callable[[], None]:
    """Function of one update in plain JAX: every prompt repeated, logits of all tokens of a micro-batch in memory."""
    policy = make_policy(cfg, remat=False)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-6, weight_decay=0.01))
    parts = list(zip(*(np.split(x, micro_batches) for x in _repeated(tokens, said, gain))))

    def gradient(own: Any, total: Any, *rows: Any) -> Any:
        new = jax.grad(_naive_loss(policy))(own, *rows)
        return new if total is None else jax.tree.map(jnp.add, total, new)

    def apply(own: Any, state: Any, total: Any) -> Any:
        updates, state = tx.update(jax.tree.map(lambda x: x / micro_batches, total), state, own)
        return optax.apply_updates(own, updates), state

    own = {"params": jax.jit(policy.init)(jax.random.key(0))}
    held = [(own, jax.jit(tx.init)(own))]
    add, take = jax.jit(gradient, donate_argnums=1), jax.jit(apply, donate_argnums=(0, 1))

    def run() -> None:
        total = None
        for rows in parts:
            total = add(held[0][0], total, *rows)
        held[0] = jax.block_until_ready(take(*held[0], total))

    return run


def pytorch(
    cfg: Config, tokens: np.ndarray, said: np.ndarray, gain: np.ndarray, micro_batches: int, device: str
) -> Callable[[], None]:
    return torch_forms.updater(torch_forms.model(cfg, device), tokens, said, gain, micro_batches)
