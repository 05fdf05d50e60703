"""The update: from a tree with advantages to new parameters of the models that own a selected group.

`packing` lays the trained steps out as micro-batches of a few fixed shapes. `Learner` holds the jitted functions that
score, accumulate gradients over micro-batches and apply them. All averaging is in the token weights, computed once over
the whole batch, so that any split into micro-batches adds up to the same gradient. Supervised fine-tuning is the same
update: expert steps with advantage 1 and ratio 1, whose gradient is that of the log-likelihood. A model without a
trained step is not called at all: it stays bit-identical, optimizer state included.

Arguments named ``own`` are the trained parameters of one model. ``shared`` are the params of its frozen backbone, or
None where it has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from flax import struct
from jaxtyping import Float, Int

from jaxmarl_llm.distributed import context, meshes, sharding
from jaxmarl_llm.distributed.vocabulary import by_vocabulary
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.generation.scoring import fused_head, score_hidden
from jaxmarl_llm.kernels.head.head import Head
from jaxmarl_llm.kernels.head.loss import head_loss
from jaxmarl_llm.models.value_head import head_value
from jaxmarl_llm.training.losses import UNIT_AXES, Loss, RowData, aggregation_weights, row_loss, value_loss
from jaxmarl_llm.training.optimizers import Optimizer, make_optimizer, to_memory
from jaxmarl_llm.types import Array, Model, Params, Policy, PyTree


class NodeTargets(struct.PyTreeNode):
    """Regression targets of a value head, one for each of N nodes."""

    target: Float[Array, " N"]
    weight: Float[Array, " N"]  # of the squared error; 0 is not trained
    old: Float[Array, " N"] | None = None  # value before the update


class Forest(struct.PyTreeNode):
    """Sequences with shared prefixes, each token once, depth first: the layout of kernels/attention/tree.

    There are as many forests F as devices that share the rows. Forest f has the completions f N/F to (f + 1) N/F.
    """

    tokens: Int[Array, "F T"]
    position: Int[Array, "F T"]  # of the token in its sequence
    end: Int[Array, "F T"]  # index behind the last token of the token's subtree; 0 is padding
    predictor: Int[Array, "N G R"]  # index in its forest of the token that predicts each completion token of the batch


class Batch(struct.PyTreeNode):
    """One micro-batch: N prompts with G completions each. Weight 0 marks padding and what is not trained."""

    tokens: Int[Array, "N P"]
    length: Int[Array, " N"]
    completions: Int[Array, "N G R"]
    weights: Float[Array, "N G R"]
    advantages: Float[Array, "N G R"]
    sampler_logprobs: Float[Array, "N G R"]  # log-probs that the sampler recorded
    old: Float[Array, "N G R"] | None = None  # log-probs of the policy before the first epoch
    reference: Float[Array, "N G R"] | None = None
    values: NodeTargets | None = None
    forest: Forest | None = None  # in place of tokens and length, which are then empty
    imitation: Float[Array, "N G R"] | None = None  # weights of what experts wrote, see `losses.row_loss`
    rows: Int[Array, "N G"] | None = None  # of the tree's table of steps; read on the host alone, where weights are


def trunk_tokens(batch: Batch) -> int:
    """Count the tokens of a batch that must go through the trunk: neither padding nor a completion's last token.

    Args:
        batch: a micro-batch of `packing.pack`, on the host.
    """
    if batch.forest is not None:
        return int((np.asarray(batch.forest.end) > 0).sum())
    trained = np.asarray(batch.weights) > 0
    if batch.imitation is not None:
        trained = trained | (np.asarray(batch.imitation) > 0)
    last = np.where(trained, np.arange(trained.shape[-1]), 0).max(-1)  # no loss term reads its hidden state
    return int(np.where(trained.any((1, 2)), batch.length, 0).sum() + last.sum())


def pad_rows(batch: Batch, multiple: int) -> Batch:
    """Append rows of weight 0, up to the next multiple of ``multiple`` rows.

    Args:
        batch: a micro-batch on the host.
        multiple: for instance the number of devices that share the rows.
    """
    extra = -len(batch.length) % multiple
    if not extra:
        return batch
    more = jax.tree.map(lambda x: np.pad(x, [(0, extra)] + [(0, 0)] * (x.ndim - 1)), batch)
    return more.replace(length=np.maximum(more.length, 1))


token_weights = jax.jit(aggregation_weights, static_argnames=("kind", "loss_length"))


@jax.jit
def no_gradient(own: Params) -> PyTree:
    """Zeros in float32, to which micro-batches add their gradients: the first one is then no program of its own.

    Args:
        own: trained parameters.
    """
    return sharding.constrain(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), own))


class Scored(NamedTuple):
    """Log-probs of the completions of a micro-batch, as its loss had them.

    Attributes:
        gap: Largest difference to those of the sampler, over the trained tokens.
        logprobs: The log-probs [N G R]; None inside a compiled run, which keeps none.
    """

    gap: Float[jax.Array, ""]
    logprobs: Float[jax.Array, "N G R"] | None


class Learner(NamedTuple):
    """Jitted functions of one architecture.

    init(own) -> optimizer state
    score(own, shared, batch) -> log-probs [N G R]
    value(own, shared, tokens [N P], length [N]) -> values [N] of the head ``own["value"]`` at the last prompt token
    accumulate(own, shared, batch, gradient or None) -> (gradient, metrics, `Scored`): adds the batch's gradient to
        ``gradient``; metrics are sums, to be added over micro-batches
    apply(own, opt_state, gradient, loss) -> (own, opt_state, gradient norm, ok): donates own and opt_state. Both come
        back unchanged unless loss and norm are finite.
    """

    init: Callable[[Params], PyTree]
    score: Callable[..., jax.Array]
    value: Callable[..., jax.Array]
    accumulate: Callable[..., tuple[PyTree, dict[str, jax.Array], Scored]]
    apply: Callable[..., tuple[Params, PyTree, jax.Array, jax.Array]]
    offload: bool = False  # the optimizer state is in host memory between updates


class _Setup(NamedTuple):
    """What the functions of one `Learner` are specialised to."""

    policy: Policy
    loss: Loss
    sampling: Sampling


@functools.cache
def make_learner(policy: Policy, loss: Loss, optimizer: Optimizer, sampling: Sampling) -> Learner:
    """Make the jitted functions of an update. Cached: models of one architecture share their compiled programs.

    Args:
        policy: functions of the architecture.
        loss: what is minimised.
        optimizer: the update rule.
        sampling: the distribution that completions are drawn from; log-probs are those of this distribution.
    """
    setup, tx = _Setup(policy, loss, sampling), make_optimizer(optimizer)
    return Learner(
        init=jax.jit(lambda own: sharding.constrain(tx.init(own))),
        score=jax.jit(functools.partial(score_batch, setup)),
        value=jax.jit(functools.partial(node_values, setup)),
        accumulate=jax.jit(functools.partial(accumulate, setup), donate_argnums=(3,)),
        apply=jax.jit(functools.partial(apply_gradient, tx), donate_argnums=(0, 1)),
        offload=optimizer.offload,
    )


def _variables(own: Params, shared: Params | None) -> Params:
    return own if shared is None else {"params": shared, **own}


def _hidden_states(policy: Policy, variables: Params, batch: Batch) -> Float[jax.Array, "N G R D"]:
    if batch.forest is None:
        return policy.hidden(variables, batch.tokens, batch.length, batch.completions)
    forest = batch.forest
    assert policy.hidden_tree is not None  # `packing` makes forests for such policies alone
    hidden = policy.hidden_tree(variables, forest.tokens, forest.position, forest.end)  # [F T D]
    own = forest.predictor.reshape(len(hidden), -1, *forest.predictor.shape[1:])  # [F N/F G R]
    found = context.take_tokens(hidden, jnp.asarray(own))
    return found.reshape(*forest.predictor.shape, -1)


def _scores(setup: _Setup, variables: Params, batch: Batch, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute log-probs and entropies [N G R] of the completions from their hidden states."""
    return score_hidden(setup.policy, variables, hidden, batch.completions, setup.sampling)


def score_batch(setup: _Setup, own: Params, shared: Params | None, batch: Batch) -> Float[Array, "N G R"]:
    """Compute the log-probs of the completions of ``batch``; see `Learner`.

    ``setup``: settings of the learner. ``own``, ``shared``: parameters of the model and of its base.
    """
    variables = _variables(own, shared)
    return _scores(setup, variables, batch, _hidden_states(setup.policy, variables, batch))[0]


def node_values(
    setup: _Setup, own: Params, shared: Params | None, tokens: Int[Array, "N P"], length: Int[Array, " N"]
) -> Float[Array, " N"]:
    """Compute the value [N] of each prompt; see `Learner`.

    ``setup``: settings of the learner. ``own``, ``shared``: parameters of the model and of its base. ``tokens``:
    prompts [N P]. ``length``: tokens of each prompt [N].
    """
    empty = jnp.zeros((tokens.shape[0], 1, 1), jnp.int32)
    hidden = setup.policy.hidden(_variables(own, shared), tokens, length, empty)
    return head_value(own["value"], hidden[:, 0, 0])


def _row_data(batch: Batch) -> RowData:
    return RowData(
        weights=jnp.asarray(batch.weights),
        advantages=jnp.asarray(batch.advantages),
        sampler_logprobs=jnp.asarray(batch.sampler_logprobs),
        old=None if batch.old is None else jnp.asarray(batch.old),
        reference=None if batch.reference is None else jnp.asarray(batch.reference),
        imitation=None if batch.imitation is None else jnp.asarray(batch.imitation),
    )


def _batch_loss(
    setup: _Setup, variables: Params, batch: Batch, hidden: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array], jax.Array]:
    """Compute the loss of the completions, its metrics, and the log-probs [N G R]."""
    data = _row_data(batch)
    terms = functools.partial(row_loss, setup.loss)
    head = fused_head(setup.policy, variables, setup.sampling, len(hidden))
    if head is None:
        logprobs, entropy = _scores(setup, variables, batch, hidden)
        return *terms(logprobs, entropy, data), logprobs
    axes = UNIT_AXES[setup.loss.unit]  # the loss is a sum over groups, completions or tokens
    hidden_rows, completions, data_rows = jax.tree.map(
        lambda x: x.reshape(-1, *x.shape[axes:]), (hidden, batch.completions, data)
    )

    def of_rows(axis: str | None, head: Head, hidden: jax.Array, completions: jax.Array, data: RowData) -> tuple:
        temperature = setup.sampling.temperature
        out = head_loss(hidden, head, completions, data, terms, temperature=temperature, axis_name=axis)
        return (out.loss, out.sums), out.logprob

    (value, metrics), logprobs = by_vocabulary(of_rows, head, hidden_rows, completions, data_rows)
    return value, metrics, logprobs.reshape(batch.weights.shape)


def objective(
    setup: _Setup, own: Params, shared: Params | None, batch: Batch
) -> tuple[jax.Array, tuple[dict[str, jax.Array], Scored]]:
    """Compute the loss of a micro-batch, the value loss included, and its metrics and log-probs.

    Args:
        setup: policy, loss and sampling.
        own: trained parameters; the loss is differentiated by them.
        shared: params of the frozen backbone, or None.
        batch: one micro-batch.
    """
    variables, loss = _variables(own, shared), setup.loss
    hidden = _hidden_states(setup.policy, variables, batch)
    value, metrics, logprobs = _batch_loss(setup, variables, batch, hidden)
    gap = jnp.max(jnp.where(batch.weights > 0, jnp.abs(logprobs - batch.sampler_logprobs), 0.0))
    if batch.values is not None:
        estimate, wanted = head_value(own["value"], hidden[:, 0, 0]), batch.values
        metrics["value_loss"] = value_loss(estimate, wanted.target, wanted.weight, wanted.old, loss.value_clip)
        value = value + loss.value_coef * metrics["value_loss"]
    return value, ({**metrics, "loss": value}, Scored(gap, logprobs))


def accumulate(
    setup: _Setup, own: Params, shared: Params | None, batch: Batch, gradient: PyTree | None
) -> tuple[PyTree, dict[str, jax.Array], Scored]:
    """Add the gradient of a micro-batch to ``gradient``, in float32; see `Learner`.

    ``setup``: settings of the learner. ``own``, ``shared``: parameters of the model and of its base. ``batch``: the
    micro-batch.
    """
    new, (metrics, scored) = jax.grad(functools.partial(objective, setup), has_aux=True)(own, shared, batch)
    new = sharding.constrain(jax.tree.map(lambda g: g.astype(jnp.float32), new))
    return new if gradient is None else jax.tree.map(jnp.add, gradient, new), metrics, scored


def apply_gradient(
    tx: optax.GradientTransformation, own: Params, opt_state: PyTree, gradient: PyTree, value: jax.Array
) -> tuple[Params, PyTree, jax.Array, jax.Array]:
    """Take one optimizer step, or none unless the gradient's norm and ``value`` are finite; see `Learner`.

    ``tx``: the optimizer. ``own``: trained parameters. ``opt_state``: state of the optimizer.
    """
    norm = optax.tree.norm(gradient)
    ok = jnp.isfinite(norm) & jnp.isfinite(value)
    updates, after = tx.update(gradient, opt_state, own)
    select = lambda new, old: jnp.where(ok, new, old)
    return (
        sharding.constrain(jax.tree.map(select, optax.apply_updates(own, updates), own)),
        sharding.constrain(jax.tree.map(select, after, opt_state)),
        norm,
        ok,
    )


def first_not_finite(metrics: list[dict[str, jax.Array]], gaps: list[jax.Array], gradient: PyTree) -> str | None:
    """Name the first quantity of an update that is not finite, in the order in which they are computed, or None.

    Log-probs come first, then the terms of the loss, then the leaves of the summed gradient.

    Args:
        metrics: metrics of each micro-batch, as `Learner.accumulate` returns them.
        gaps: largest difference between log-probs and the sampler's, of each micro-batch.
        gradient: gradient summed over the micro-batches.
    """
    for k, (terms, gap) in enumerate(zip(metrics, gaps, strict=True)):
        if not np.isfinite(float(gap)):
            return f"log-probs of micro-batch {k}"
        for name, term in terms.items():
            if not np.isfinite(float(term)):
                return f"{name} of micro-batch {k}"
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        if not bool(jnp.isfinite(leaf).all()):
            return f"gradient of {jax.tree_util.keystr(path, simple=True, separator='/')}"
    return None


Report = Callable[[jax.Array, list[dict[str, jax.Array]], list[jax.Array], PyTree], None]


class Updated(NamedTuple):
    """Result of one model's optimizer steps on a batch.

    Attributes:
        own: Parameters.
        opt_state: Optimizer state.
        metrics: Means over the trained tokens (dpo: pairs); ``grad_norm``; ``logprob_diff``; ``ok``, 1.0, or 0.0 when
            an optimizer step was skipped. Of the first epoch, but ratio, clip_fraction and approx_kl of the last.
        logprobs: Of the completions of each micro-batch, as the loss of the first epoch had them, see `Scored`.
    """

    own: Params
    opt_state: PyTree
    metrics: dict[str, Any]
    logprobs: Sequence[jax.Array | None]


def optimize(
    learner: Learner,
    loss: Loss,
    own: Params,
    shared: Params | None,
    opt_state: PyTree,
    batches: Sequence[Batch],
    reference: Params | None = None,
    report: Report | None = None,
) -> Updated:
    """One or several optimizer steps (``loss.epochs``) of one model on its micro-batches: pure, metrics are arrays.

    Called from the host each part is a program of its own; inside a compiled program all of them are one.

    Args:
        learner: Functions of the model.
        loss: Configuration of the loss.
        own: Trained parameters; donated when called from the host.
        shared: Parameters of the frozen backbone, or None.
        opt_state: Optimizer state; donated when called from the host.
        batches: Micro-batches; token weights are computed over all of them.
        reference: Parameters of the policy that the KL term, or dpo, refers to.
        report: Called after each optimizer step: (finite, metrics, gaps, gradient), which are traced inside a program.
    """
    if loss.needs_reference:
        if reference is None:
            raise ValueError(f"the loss {loss.objective!r} with kl_coef={loss.kl_coef} needs the reference parameters")
        batches = [b.replace(reference=sharding.settle(learner.score(reference, shared, b))) for b in batches]
    if loss.epochs > 1:
        batches = [b.replace(old=sharding.settle(learner.score(own, shared, b))) for b in batches]
    metrics: dict[str, Any] = {}
    logprobs: list[jax.Array | None] = []
    ok: Any = 1.0
    for epoch in range(loss.epochs):
        gradient, totals, gaps = no_gradient(own), [], []
        for batch in batches:
            gradient, seen, scored = sharding.settle(learner.accumulate(own, shared, batch, gradient))
            totals.append(seen)
            gaps.append(scored.gap)
            if epoch == 0:
                logprobs.append(scored.logprobs)
        total = {k: sum(m[k] for m in totals) for k in totals[0]}
        own, opt_state, norm, fine = sharding.settle(learner.apply(own, opt_state, gradient, total["loss"]))
        ok = ok * fine
        if report is not None:
            report(fine, totals, gaps, gradient)
        weight = total.pop("weight")
        whole = ("loss", "value_loss", "imitation")  # sums; the others are means over what was weighed
        mean = {k: v if k in whole else v / jnp.where(weight > 0, weight, 1.0) for k, v in total.items()}
        if epoch == 0:
            metrics = mean | {"grad_norm": norm, "logprob_diff": functools.reduce(jnp.maximum, gaps)}
        metrics |= {k: mean[k] for k in ("ratio", "clip_fraction", "approx_kl") if k in mean}
    return Updated(own, opt_state, {**metrics, "ok": ok}, logprobs)


def update(
    learner: Learner,
    loss: Loss,
    own: Params,
    shared: Params | None,
    opt_state: PyTree,
    batches: list[Batch],
    reference: Params | None = None,
    name: str = "",
    inspect: Report | None = None,
) -> Updated:
    """Take ``loss.epochs`` optimizer steps of one model on its micro-batches. Donates own and opt_state.

    A loss or gradient that is not finite skips that optimizer step. Parameters and optimizer state come back unchanged,
    and ``ok`` is 0. A warning names the model and the first quantity that was not finite.

    Args:
        learner: functions of `make_learner`.
        loss: the configuration that the learner was made with.
        own: trained parameters.
        shared: params of the frozen backbone, or None.
        opt_state: optimizer state of ``own``.
        batches: micro-batches on the host.
        reference: parameters of the reference policy, a tree like ``own``, where `Loss.needs_reference`.
        name: name of the model, for the warning.
        inspect: called after each optimizer step, see ``report`` of `optimize`.
    """
    trunk = float(sum(map(trunk_tokens, batches)))  # counted while the batches are on the host
    batches = [sharding.put_rows(pad_rows(b, sharding.row_parts())) for b in batches]
    if learner.offload:
        opt_state = to_memory(opt_state, "device")

    def report(fine: jax.Array, totals: list, gaps: list, gradient: PyTree) -> None:
        if inspect is not None:
            inspect(fine, totals, gaps, gradient)
        if not fine:
            culprit = first_not_finite(totals, gaps, gradient) or "gradient norm"
            logging.warning("model %s: optimizer step skipped, first not finite: %s", name, culprit)

    done = optimize(learner, loss, own, shared, opt_state, batches, reference, report)
    numbers = {k: float(v) for k, v in jax.device_get(done.metrics).items()}
    opt_state = to_memory(done.opt_state, "pinned_host") if learner.offload else done.opt_state
    return done._replace(opt_state=opt_state, metrics={**numbers, "trunk_tokens": trunk})


def update_models(
    models: tuple[Model, ...],
    learners: Mapping[str, Learner],
    loss: Loss,
    params: Params,
    opt_state: PyTree,
    batches: Mapping[str, list[Batch]],
    reference: Params | None = None,
    inspect: Callable[[str], Report] | None = None,
    keep: Callable[[str, Sequence[Batch], Sequence[Any]], None] | None = None,
) -> tuple[Params, PyTree, dict[str, dict[str, float]]]:
    """Update each model that has batches. Parameters and optimizer states of the others stay the same arrays.

    Args:
        models: models of the team.
        learners: functions of `make_learner`, by model.
        loss: the configuration that the learners were made with.
        params: parameters of the run, ``{"shared": ..., "agents": {model: ...}}``.
        opt_state: optimizer state of each model.
        batches: micro-batches of each model that has any.
        reference: parameters of each model's reference policy, where `Loss.needs_reference`.
        inspect: model -> what is called after each of its optimizer steps, see ``report`` of `optimize`.
        keep: called with each updated model, its micro-batches and `Updated.logprobs`, in the order of ``models``. On a
            mesh log-probs are on its devices, and may have more rows than their batch.

    Returns:
        Parameters, optimizer states, and the metrics of each updated model.
    """
    agents, states, metrics = dict(params["agents"]), dict(opt_state), {}
    base = {m.name: m.base for m in models}

    def learn(name: str) -> Updated:
        shared = None if base[name] is None else params["shared"][base[name]]
        ref = None if reference is None else reference[name]
        check = None if inspect is None else inspect(name)
        return update(learners[name], loss, agents[name], shared, states[name], batches[name], ref, name, check)

    learning = [m.name for m in models if batches.get(m.name)]
    for name, result in zip(learning, meshes.map_models(learning, learn), strict=True):
        agents[name], states[name], metrics[name], logprobs = result
        if keep is not None:
            keep(name, batches[name], logprobs)
    return {**params, "agents": agents}, states, metrics
