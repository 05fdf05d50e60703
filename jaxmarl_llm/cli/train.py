"""The update: from a tree with advantages to new parameters of the models that own a selected group.

`packing` lays the trained steps out as micro-batches of a few fixed shapes; `Learner` holds the jitted functions that
score, accumulate gradients over micro-batches and apply them. All averaging is in the token weights, computed once over
the whole batch, so that any split into micro-batches adds up to the same gradient. Supervised fine-tuning is the same
update: expert steps with advantage 1 and ratio 1, whose gradient is that of the log-likelihood. A model without a
trained step is not called at all: it stays bit-identical, optimizer state included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmarl_llm import meshes, sharding
from jaxmarl_llm.kernels.head_loss import head_logprob, head_loss
from jaxmarl_llm.losses import Loss, RowData, aggregation_weights, head_value, row_loss, value_loss
from jaxmarl_llm.optimizers import Optimizer, make_optimizer, to_memory
from jaxmarl_llm.sampling import Sampling, score
from jaxmarl_llm.types import Model, Params, Policy, PyTree, Unembed


class NodeTargets(struct.PyTreeNode):
    """What a value head is trained towards: target, weight (0: none) and value before the update of each node."""

    target: Float[Array, "N"]
    weight: Float[Array, "N"]
    old: Float[Array, "N"] | None = None


class Forest(struct.PyTreeNode):
    """Sequences that begin alike, each token once: depth first, as kernels/tree_attention takes it."""

    tokens: Int[Array, "T"]
    position: Int[Array, "T"]  # in its sequence
    end: Int[Array, "T"]  # index behind the last token of its subtree; 0 is padding
    at: Int[Array, "N G R"]  # the token that predicts each of the batch's completion tokens


class Batch(struct.PyTreeNode):
    """One micro-batch: N prompts with G completions each. Weight 0 marks padding and what is not trained."""

    tokens: Int[Array, "N P"]
    length: Int[Array, "N"]
    completions: Int[Array, "N G R"]
    weights: Float[Array, "N G R"]
    advantages: Float[Array, "N G R"]
    behaviour: Float[Array, "N G R"]  # log-probs recorded by the sampler
    old: Float[Array, "N G R"] | None = None  # log-probs of the policy before the first epoch
    reference: Float[Array, "N G R"] | None = None
    values: NodeTargets | None = None
    forest: Forest | None = None  # in place of tokens and length, which are then empty


def trunk_tokens(batch: Batch) -> int:
    """Tokens that a batch of `packing.pack` has to send through the trunk: not padding, nor a completion's last."""
    if batch.forest is not None:
        return int((np.asarray(batch.forest.end) > 0).sum())
    said = np.asarray(batch.weights) > 0
    last = np.where(said, np.arange(said.shape[-1]), 0).max(-1)  # whose hidden state nothing asks for
    return int(np.where(said.any((1, 2)), batch.length, 0).sum() + last.sum())


def pad_rows(batch: Batch, multiple: int) -> Batch:
    """``batch`` with rows of weight 0 behind it, up to a multiple of rows."""
    extra = -len(batch.length) % multiple
    if not extra:
        return batch
    more = jax.tree.map(lambda x: np.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1)), batch)
    return more.replace(length=np.maximum(more.length, 1))


token_weights = jax.jit(aggregation_weights, static_argnames=("kind", "constant"))


class Learner(NamedTuple):
    """Jitted functions of one architecture. ``own`` is trained; ``shared`` is the frozen backbone's params, or None.

    init(own) -> optimizer state
    score(own, shared, batch) -> log-probs [N G R]
    value(own, shared, tokens [N P], length [N]) -> values [N] of the head ``own["value"]`` at the last prompt token
    accumulate(own, shared, batch, gradient or None) -> (gradient, metrics that add, max |log-prob gap| to the sampler)
    apply(own, opt_state, gradient, loss) -> (own, opt_state, gradient norm, ok): donates own and opt_state;
        unless loss and norm are finite both come back unchanged
    """

    init: Callable[[Params], PyTree]
    score: Callable[..., jax.Array]
    value: Callable[..., jax.Array]
    accumulate: Callable[..., tuple[PyTree, dict[str, jax.Array], jax.Array]]
    apply: Callable[..., tuple[Params, PyTree, jax.Array, jax.Array]]
    offload: bool = False  # between updates the optimizer state lies in the host's memory


@functools.cache
def make_learner(policy: Policy, loss: Loss, optimizer: Optimizer, sampling: Sampling) -> Learner:
    """Cached: agents of one architecture and configuration share their compiled programs."""
    tx = make_optimizer(optimizer)

    def variables(own: Params, shared: Params | None) -> Params:
        return own if shared is None else {"params": shared, **own}

    unembed = policy.unembed

    def fused() -> Callable[[Params], Any] | None:
        """The head that the kernels take; None with filters, on a mesh, or where ``unembed`` is a plain function."""
        serves = not sampling.filters and sampling.temperature > 0 and not sharding.meshed()
        return unembed.head if serves and isinstance(unembed, Unembed) else None

    def hidden_states(v: Params, batch: Batch) -> Float[Array, "N G R D"]:
        if batch.forest is None:
            return policy.hidden(v, batch.tokens, batch.length, batch.completions)
        f = batch.forest
        assert policy.hidden_tree is not None  # or nothing would have been packed so
        return policy.hidden_tree(v, f.tokens[None], f.position[None], f.end[None])[0][f.at]

    def scores(v: Params, batch: Batch, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Log-probs and entropies [N G R] under ``v``, from the hidden states."""
        if head := fused():
            return head_logprob(hidden, head(v), batch.completions, temperature=sampling.temperature)
        rows = hidden.reshape(-1, *hidden.shape[2:]), batch.completions.reshape(-1, batch.completions.shape[-1])

        def score_rows(v: Params, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            # Logits of one completion at a time, recomputed in the backward pass: [R V] instead of [N G R V].
            one = jax.checkpoint(lambda row: score(unembed(v, row[0]), row[1], sampling))
            return jax.lax.map(one, rows, batch_size=max(1, CHUNK // (batch.completions.shape[-1])))

        parts = sharding.row_parts()
        if parts == 1 or len(hidden) % parts:
            logprob, entropy = score_rows(v, rows)
        else:
            # Each part goes through its own rows with its own copy of the head, whose gradients are added up once, at
            # the end, and not after every completion.
            own_rows = sharding.cut_rows(jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), rows), rest=None)
            logprob, entropy = jax.vmap(score_rows)(sharding.copies(v), own_rows)
        return logprob.reshape(batch.weights.shape), entropy.reshape(batch.weights.shape)

    def score_batch(own: Params, shared: Params | None, batch: Batch) -> jax.Array:
        v = variables(own, shared)
        return scores(v, batch, hidden_states(v, batch))[0]

    def value(own: Params, shared: Params | None, tokens: jax.Array, length: jax.Array) -> jax.Array:
        empty = jnp.zeros((tokens.shape[0], 1, 1), jnp.int32)
        return head_value(own["value"], policy.hidden(variables(own, shared), tokens, length, empty)[:, 0, 0])

    def objective(own: Params, shared: Params | None, batch: Batch) -> tuple[jax.Array, tuple[dict, jax.Array]]:
        v = variables(own, shared)
        hidden = hidden_states(v, batch)
        data = RowData(batch.weights, batch.advantages, batch.behaviour, batch.old, batch.reference)
        terms = functools.partial(row_loss, loss)
        if head := fused():
            # What adds up: groups, completions or tokens, the leading one, two or three axes of [N G R].
            axes = 1 if loss.objective == "dpo" else 2 if loss.level == "sequence" else 3
            hidden_rows, completions, data_rows = jax.tree.map(
                lambda x: x.reshape(-1, *x.shape[axes:]), (hidden, batch.completions, data)
            )
            value, metrics, logprobs, _ = head_loss(
                hidden_rows,
                head(v),
                completions,
                data_rows,
                terms,
                temperature=sampling.temperature,
            )
            logprobs = logprobs.reshape(batch.weights.shape)
        else:
            logprobs, entropy = scores(v, batch, hidden)
            value, metrics = terms(logprobs, entropy, data)
        gap = jnp.max(jnp.where(batch.weights > 0, jnp.abs(logprobs - batch.behaviour), 0.0))
        if batch.values is not None:
            estimate, to = head_value(own["value"], hidden[:, 0, 0]), batch.values
            metrics["value_loss"] = value_loss(estimate, to.target, to.weight, to.old, loss.value_clip)
            value = value + loss.value_coef * metrics["value_loss"]
        return value, ({**metrics, "loss": value}, gap)

    def accumulate(own: Params, shared: Params | None, batch: Batch, gradient: PyTree | None) -> Any:
        new, (metrics, gap) = jax.grad(objective, has_aux=True)(own, shared, batch)
        new = sharding.settle(jax.tree.map(lambda g: g.astype(jnp.float32), new))
        return new if gradient is None else jax.tree.map(jnp.add, gradient, new), metrics, gap

    def apply(own: Params, opt_state: PyTree, gradient: PyTree, value: jax.Array) -> Any:
        norm = optax.tree.norm(gradient)
        ok = jnp.isfinite(norm) & jnp.isfinite(value)
        updates, after = tx.update(gradient, opt_state, own)
        keep = lambda new, old: jnp.where(ok, new, old)
        return (
            sharding.settle(jax.tree.map(keep, optax.apply_updates(own, updates), own)),
            sharding.settle(jax.tree.map(keep, after, opt_state)),
            norm,
            ok,
        )

    return Learner(
        init=jax.jit(lambda own: sharding.settle(tx.init(own))),
        score=jax.jit(score_batch),
        value=jax.jit(value),
        accumulate=jax.jit(accumulate, donate_argnums=(3,)),
        apply=jax.jit(apply, donate_argnums=(0, 1)),
        offload=optimizer.offload,
    )


CHUNK = 256  # tokens whose logits are alive at once in the update where the head kernels do not serve: with filters


class Updated(NamedTuple):
    own: Params
    opt_state: PyTree
    # Means over the trained tokens (dpo: pairs); grad_norm; logprob_gap; ok 1.0, or 0.0 when skipped; trunk_tokens,
    # how many tokens the trained steps and their prompts are, each counted as often as it is sent. Of the first
    # epoch, but ratio, clip_fraction and approx_kl of the last.
    metrics: dict[str, float]


def update(
    learner: Learner,
    loss: Loss,
    own: Params,
    shared: Params | None,
    opt_state: PyTree,
    batches: list[Batch],
    reference: Params | None = None,
) -> Updated:
    """One or several optimizer steps (``loss.epochs``) of one model on its micro-batches. Donates own and opt_state.

    ``reference`` (a tree like own) is the policy of the KL term, or of dpo. A non-finite loss or gradient skips that
    optimizer step: parameters and optimizer state come back as they were, ``ok`` is 0.
    """
    sent = float(sum(map(trunk_tokens, batches)))  # counted while the batches are on the host
    batches = [sharding.put_rows(pad_rows(b, sharding.row_parts())) for b in batches]
    if loss.refers:
        if reference is None:
            raise ValueError("the loss needs the reference parameters: kl_coef is set, or it is dpo")
        batches = [b.replace(reference=learner.score(reference, shared, b)) for b in batches]
    if loss.epochs > 1:
        batches = [b.replace(old=learner.score(own, shared, b)) for b in batches]
    if learner.offload:
        opt_state = to_memory(opt_state, "device")
    seen: dict[str, float] = {}
    ok = True
    for epoch in range(loss.epochs):
        gradient, totals, gap = None, [], []
        for batch in batches:
            gradient, metrics, g = learner.accumulate(own, shared, batch, gradient)
            totals.append(metrics)
            gap.append(g)
        value = sum(m["loss"] for m in totals)
        own, opt_state, norm, fine = learner.apply(own, opt_state, gradient, value)
        ok &= bool(fine)
        total = {k: float(sum(float(m[k]) for m in totals)) for k in totals[0]}
        weight = total.pop("weight")
        mean = {k: v / weight if weight and k not in ("loss", "value_loss") else v for k, v in total.items()}
        if epoch == 0:
            seen = mean | {"grad_norm": float(norm), "logprob_gap": max(float(g) for g in gap)}
        seen |= {k: mean[k] for k in ("ratio", "clip_fraction", "approx_kl") if k in mean}
    if learner.offload:
        opt_state = to_memory(opt_state, "pinned_host")
    return Updated(own, opt_state, {**seen, "ok": float(ok), "trunk_tokens": sent})


def update_models(
    models: tuple[Model, ...],
    learners: Mapping[str, Learner],
    loss: Loss,
    params: Params,
    opt_state: PyTree,
    batches: Mapping[str, list[Batch]],
    reference: Params | None = None,
) -> tuple[Params, PyTree, dict[str, dict[str, float]]]:
    """Update each model that has batches; the others' parameters and optimizer states are the same arrays as before."""
    agents, states, metrics = dict(params["agents"]), dict(opt_state), {}
    base = {m.name: m.base for m in models}

    def learn(name: str) -> Updated:
        shared = None if base[name] is None else params["shared"][base[name]]
        ref = None if reference is None else reference[name]
        return update(learners[name], loss, agents[name], shared, states[name], batches[name], ref)

    learning = [m.name for m in models if batches.get(m.name)]
    for name, result in zip(learning, meshes.each(learning, learn), strict=True):
        agents[name], states[name], metrics[name] = result
    return {**params, "agents": agents}, states, metrics


def task_order(seed: int, epoch_size: int, start: int, count: int) -> Iterator[int]:
    """Task indices ``start`` to ``start + count - 1`` of an endless stream of shuffled epochs.

    A pure function of (seed, position): resuming needs no state but the position.
    """
    epoch, order = -1, np.arange(0)
    for position in range(start, start + count):
        if position // epoch_size != epoch:
            epoch = position // epoch_size
            order = np.random.default_rng([seed, epoch]).permutation(epoch_size)
        yield int(order[position % epoch_size])
