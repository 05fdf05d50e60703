"""Log-probs, entropies and losses from hidden states, without [tokens, vocabulary] in memory.

With z = h W / temperature, y the target, s = sum_j exp(z_j) and p_j = exp(z_j) / s:

    logprob = z_y - log s                      d logprob / d z_j = [j = y] - p_j
    entropy = log s - sum_j p_j z_j            d entropy / d z_j = -p_j (log p_j + entropy)

`head_logprob` returns both for each token. Its backward pass gets one cotangent per token and output, and computes the
logits of a chunk of tokens again: four matrix products in all.

`head_loss` is for a loss that is a sum over rows, ``sum_i loss(logprob_i, entropy_i, data_i)``. A row is a token, a
completion or a group. The cotangents of a row are known once its own log-probs are. The gradient is therefore computed
in the forward pass, while the row's logits are in memory: three products. The backward pass only scales it. (Liger's
fused losses do so too, arXiv 2410.10989; Cut Cross-Entropy, arXiv 2411.09009, is the form with four.)

A chunk holds 1/128 of the tokens, at least 128 to 512. All sums are float32, also those of the weight's gradient; its
products take the logits' gradient in the dtype of the hidden states. A weight that is not differentiated (a frozen
backbone under adapters) gets no gradient and costs no product. With ``axis_name`` the weight is one shard of the
vocabulary, inside `jax.shard_map`, and sums over the vocabulary include that axis. Rows may be shards of other axes.
The gradient of the weight is then that of the device's own rows, and the caller sums it (`distributed.vocabulary`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmarl_llm.kernels.head.head import Head, logits

SHARE = 128  # number of chunks, unless they would be smaller than the next numbers
SMALLEST = 1 << 20  # least number of entries of a chunk's logits
FEWEST = 128  # least number of tokens of a chunk: rows of a matrix product, which reads the whole weight
# Tokens of a chunk that keep an accelerator busy. Few tokens are bound by memory: a chunk reads the weight twice, and
# reads and writes its float32 gradient. 128 tokens take 64 FLOPs a byte, 512 take 256, about what a chip computes.
BUSY = 512
LARGEST = 1 << 24  # most entries of the logits of a chunk that has more than `FEWEST` tokens for that
TILE = 8192  # ids in one product of the hidden states' gradient, or as many entries of a product of the weight's

# (logprob [rows of a chunk, ...], entropy, data of those rows) -> (loss, sums to report)
RowLoss = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, dict[str, jax.Array]]]


class HeadLoss(NamedTuple):
    """Result of `head_loss`. Only ``loss`` carries gradient."""

    loss: Float[Array, ""]
    sums: dict[str, Float[Array, ""]]  # sums over all rows
    logprob: Float[Array, "*rows"]
    entropy: Float[Array, "*rows"]


class _Form(NamedTuple):
    """Static arguments."""

    rows: bool
    used: int | None
    temperature: float
    chunk: int  # tokens
    axis_name: str | None

    def head(self, weight: jax.Array) -> Head:
        return Head(weight, self.rows, self.used)


def chunk_tokens(tokens: int, vocab: int) -> int:
    """Choose the tokens of a chunk: 1/128 of all, but at least 128 to 512 and at least 2^20 logits.

    Args:
        tokens: number of tokens.
        vocab: number of ids of the device.
    """
    return max(-(-tokens // SHARE), SMALLEST // vocab, FEWEST, min(BUSY, LARGEST // vocab))


def _form(head: Head, tokens: int, temperature: float, chunk: int | None, axis_name: str | None) -> _Form:
    if not temperature > 0:
        raise ValueError(f"temperature is positive, not {temperature}")
    return _Form(head.rows, head.used, float(temperature), chunk or chunk_tokens(tokens, head.vocab), axis_name)


def _start(form: _Form, vocab: int) -> jax.Array | int:
    """Return the first id of this shard, of ``vocab`` ids."""
    return 0 if form.axis_name is None else jax.lax.axis_index(form.axis_name) * vocab


def _over_shards(form: _Form, x: Any) -> Any:
    return x if form.axis_name is None else jax.lax.psum(x, form.axis_name)


class _ChunkLogits(NamedTuple):
    """Logits of a chunk of C tokens, and statistics [C] of each token."""

    z: jax.Array  # [C V], divided by the temperature
    norm: jax.Array  # log-sum-exp
    logprob: jax.Array
    entropy: jax.Array


def _chunk_logits(form: _Form, hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> _ChunkLogits:
    head = form.head(weight)
    start = _start(form, head.vocab)
    z = logits(hidden, head, start) / form.temperature
    top = z.max(-1)
    if form.axis_name is not None:
        top = jax.lax.pmax(top, form.axis_name)
    shifted = z - top[:, None]
    e = jnp.exp(shifted)
    own = targets - start
    here = (own >= 0) & (own < head.vocab)
    at = jnp.take_along_axis(z, jnp.where(here, own, 0)[:, None], axis=-1)[:, 0]
    total, moment, at = _over_shards(form, (e.sum(-1), (e * shifted).sum(-1), jnp.where(here, at, 0.0)))
    norm = jnp.log(total)
    return _ChunkLogits(z, top + norm, at - top - norm, norm - moment / total)


def _pull(
    form: _Form, seen: _ChunkLogits, targets: jax.Array, to_logprob: jax.Array, to_entropy: jax.Array
) -> jax.Array:
    """Compute the gradient with respect to h W [C V] from cotangents of log-prob and entropy [C]."""
    ids = jnp.arange(seen.z.shape[-1])
    log_p = seen.z - seen.norm[:, None]
    dz = -jnp.exp(log_p) * (to_logprob[:, None] + to_entropy[:, None] * (log_p + seen.entropy[:, None]))
    head_start = _start(form, len(ids))
    dz = jnp.where(ids == (targets - head_start)[:, None], dz + to_logprob[:, None], dz) / form.temperature
    # Nothing flows through the logit of a padding id, not even where it is the target.
    return dz if form.used is None else jnp.where(head_start + ids < form.used, dz, 0.0)


def _in_tiles(add: Callable[[Any, Any, int], Any], total: Any, size: int, tile: int) -> Any:
    """Call ``total = add(total, start, width)`` for each ``tile`` of 0 .. size, and for the remainder."""
    full = size // tile
    if full:
        total = jax.lax.fori_loop(0, full, lambda i, total: add(total, i * tile, tile), total)
    return add(total, full * tile, size % tile) if size % tile else total


def _to_hidden(form: _Form, dz: jax.Array, weight: jax.Array) -> jax.Array:
    """Compute dz W^T, summed over a tile of ids at a time: XLA's CPU product over all ids takes half as long again."""
    ids = 0 if form.rows else 1

    def add(total: jax.Array, start: jax.Array | int, width: int) -> jax.Array:
        cut = lambda x, axis: jax.lax.dynamic_slice_in_dim(x, start, width, axis)
        over = (((1,), (ids,)), ((), ()))
        return total + jax.lax.dot_general(cut(dz, 1), cut(weight, ids), over, preferred_element_type=jnp.float32)

    total = _zeros(form, (len(dz), weight.shape[1 - ids]), dz, weight)
    return _over_shards(form, _in_tiles(add, total, dz.shape[1], TILE))


def _add_to_weight(form: _Form, total: jax.Array, dz: jax.Array, hidden: jax.Array) -> jax.Array:
    """Compute total + dz^T h, a tile of rows at a time: one product would be a second array as large as the weight.

    Rows are ids [V D] or hidden units [D V]. They are contiguous; a tile of columns takes twice the time.
    """
    left, right = (dz, hidden) if form.rows else (hidden, dz)
    size = total.shape[0]
    tile = TILE if form.rows else max(1, TILE * size // total.shape[1])

    def add(total: jax.Array, start: jax.Array | int, width: int) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(left, start, width, axis=1)
        new = jax.lax.dot_general(part, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        new += jax.lax.dynamic_slice_in_dim(total, start, width, axis=0)
        return jax.lax.dynamic_update_slice_in_dim(total, new, start, axis=0)

    return _in_tiles(add, total, size, tile)


def _gradients(
    form: _Form,
    seen: _ChunkLogits,
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    cotangents: Any,
    total: Any,
) -> tuple[jax.Array, Any]:
    """Compute the gradient of the chunk's hidden states, and add the weight's to ``total`` (None stays None)."""
    dz = _pull(form, seen, targets, *cotangents).astype(hidden.dtype)
    dh = _to_hidden(form, dz, weight).astype(hidden.dtype)
    return dh, None if total is None else _add_to_weight(form, total, dz, hidden)


def _scan(function: Callable, carry: Any, rows: Any, size: int) -> tuple[Any, Any, Any]:
    """Scan a function over chunks of ``size`` rows and the remainder.

    ``function(carry, rows of a chunk)`` returns (carry, outputs of those rows, sums). Outputs are concatenated and sums
    added.
    """
    n = jax.tree.leaves(rows)[0].shape[0]
    full = n // size if n > size else 0
    outputs, sums = [], []
    if full:
        cut = lambda x: x[: full * size].reshape(full, size, *x.shape[1:])

        def step(carry: Any, rows: Any) -> tuple[Any, Any]:
            carry, out, sums = function(carry, rows)
            return carry, (out, sums)

        carry, (out, added) = jax.lax.scan(step, carry, jax.tree.map(cut, rows))
        outputs.append(jax.tree.map(lambda x: x.reshape(full * size, *x.shape[2:]), out))
        sums.append(jax.tree.map(lambda x: x.sum(0), added))
    if full * size < n:
        carry, out, added = function(carry, jax.tree.map(lambda x: x[full * size :], rows))
        outputs.append(out)
        sums.append(added)
    if len(outputs) == 1:
        return carry, outputs[0], sums[0]
    return carry, jax.tree.map(lambda *x: jnp.concatenate(x), *outputs), jax.tree.map(jnp.add, *sums)


def _varying(form: _Form, x: jax.Array, *like: jax.Array) -> jax.Array:
    """``x``, which inside `jax.shard_map` then has the type of a value that differs where any of ``like`` does."""
    if form.axis_name is None:
        return x
    return x + sum(jnp.where(False, array[(0,) * array.ndim], 0).astype(x.dtype) for array in like)


def _zeros(form: _Form, shape: tuple[int, ...], *like: jax.Array) -> jax.Array:
    return _varying(form, jnp.zeros(shape, jnp.float32), *like)


# ------------------------------------------------------------------------------------------------ one value a token


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprob(form: _Form, hidden: jax.Array, weight: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    def step(carry: None, rows: Any) -> tuple[None, Any, None]:
        seen = _chunk_logits(form, rows[0], weight, rows[1])
        return None, (seen.logprob, seen.entropy), None

    return _scan(step, None, (hidden, targets), form.chunk)[1]


def _logprob_forward(form: _Form, hidden: Any, weight: Any, targets: Any) -> tuple[Any, Any]:
    hidden, targets, trained = hidden.value, targets.value, weight.perturbed
    # Whether the weight is differentiated is static, so it travels in the structure of the residuals.
    return _logprob(form, hidden, weight.value, targets), (hidden, weight.value, targets, () if trained else None)


def _logprob_backward(form: _Form, saved: Any, cotangents: Any) -> tuple[Any, Any, None]:
    hidden, weight, targets, trained = saved
    a, b = (_varying(form, jnp.zeros(x.shape, x.dtype), hidden) if _is_zero(x) else x for x in cotangents)

    def step(total: Any, rows: Any) -> tuple[Any, jax.Array, None]:
        hidden, targets, *cotangents = rows
        seen = _chunk_logits(form, hidden, weight, targets)
        dh, total = _gradients(form, seen, hidden, weight, targets, cotangents, total)
        return total, dh, None

    total = None if trained is None else _zeros(form, weight.shape, hidden, weight)
    total, dh, _ = _scan(step, total, (hidden, targets, a, b), form.chunk)
    return dh, None if total is None else total.astype(weight.dtype), None


def _is_zero(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.SymbolicZero)


_logprob.defvjp(_logprob_forward, _logprob_backward, symbolic_zeros=True)


def head_logprob(
    hidden: Float[Array, "*T D"],
    head: Head,
    targets: Int[Array, "*T"],
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    axis_name: str | None = None,
) -> tuple[Float[Array, "*T"], Float[Array, "*T"]]:
    """Compute float32 log-probs of targets, and entropies (nats) of their distributions.

    Raises ValueError for a temperature that is not positive.

    Args:
        hidden: hidden states.
        head: the linear map to logits.
        targets: ids to score, of the whole vocabulary.
        temperature: divisor of the logits.
        chunk: tokens whose logits are in memory at once; None is `chunk_tokens`.
        axis_name: mesh axis that the vocabulary is sharded over, or None. Hidden states and targets are the same on all
            its devices.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    form = _form(head, len(flat), temperature, chunk, axis_name)
    out = _logprob(form, flat, head.weight, targets.reshape(-1))
    logprob, entropy = (x.reshape(targets.shape) for x in out)
    return logprob, entropy


# --------------------------------------------------------------------------------------------------- a loss of rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loss(form: _Form, row_loss: RowLoss, hidden: jax.Array, weight: jax.Array, targets: jax.Array, data: Any) -> Any:
    return _over_rows(form, row_loss, hidden, weight, targets, data)[0]


def _over_rows(
    form: _Form,
    row_loss: RowLoss,
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    data: Any,
    trained: bool | None = None,
) -> tuple[HeadLoss, jax.Array | None, jax.Array | None]:
    """Compute the loss, and the gradients of hidden states and weight.

    ``trained`` says whether the weight has a gradient. None computes the loss alone.
    """

    def step(total: Any, rows: Any) -> tuple[Any, Any, Any]:
        hidden, targets, data = rows
        flat, ids = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        seen = _chunk_logits(form, flat, weight, ids)
        as_rows = lambda x: x.reshape(targets.shape)
        of_rows = lambda logprob, entropy: row_loss(as_rows(logprob), as_rows(entropy), data)
        if trained is None:
            dh, (value, sums) = None, of_rows(seen.logprob, seen.entropy)
        else:
            value, pull, sums = jax.vjp(of_rows, seen.logprob, seen.entropy, has_aux=True)
            one = _varying(form, jnp.ones_like(value), value)
            dh, total = _gradients(form, seen, flat, weight, ids, pull(one), total)
            dh = dh.reshape(hidden.shape)
        return total, (as_rows(seen.logprob), as_rows(seen.entropy), dh), (value, sums)

    total = _zeros(form, weight.shape, hidden, weight) if trained else None
    size = max(1, form.chunk // max(1, targets[0].size))
    total, (logprob, entropy, dh), (value, sums) = _scan(step, total, (hidden, targets, data), size)
    return HeadLoss(value, sums, logprob, entropy), dh, total


def _loss_forward(form: _Form, row_loss: RowLoss, hidden: Any, weight: Any, targets: Any, data: Any) -> Any:
    value = lambda x: jax.tree.map(lambda leaf: leaf.value, x)
    arrays = hidden.value, weight.value, targets.value, value(data)
    out, dh, total = _over_rows(form, row_loss, *arrays, trained=weight.perturbed)
    return out, (dh, None if total is None else total.astype(weight.value.dtype))


def _loss_backward(form: _Form, row_loss: RowLoss, saved: Any, cotangent: Any) -> tuple[Any, Any, None, None]:
    dh, total = saved
    to_loss = cotangent.loss
    if _is_zero(to_loss):
        return jnp.zeros_like(dh), None if total is None else jnp.zeros_like(total), None, None
    scale = lambda x: None if x is None else (x.astype(jnp.float32) * to_loss).astype(x.dtype)
    return scale(dh), scale(total), None, None


_loss.defvjp(_loss_forward, _loss_backward, symbolic_zeros=True)


def head_loss(
    hidden: Float[Array, "N *T D"],
    head: Head,
    targets: Int[Array, " N *T"],
    data: Any,
    row_loss: RowLoss,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    axis_name: str | None = None,
) -> HeadLoss:
    """Compute a loss that is a sum over rows, with the gradient of hidden states and weight.

    Args:
        hidden: hidden states of N rows.
        head: the linear map to logits.
        targets: ids to score.
        data: arrays with leading axis N, without gradient.
        row_loss: function of (logprob, entropy, data) of some rows that returns (scalar, {name: scalar}). Both must add
            over rows. It must be a function of its arguments alone: arrays go into ``data``.
        temperature: divisor of the logits.
        chunk: tokens whose logits are in memory at once, rounded to whole rows; None is `chunk_tokens`. Where a single
            row is larger, `head_logprob` scores it in pieces and its logits are computed twice.
        axis_name: mesh axis that the vocabulary is sharded over, or None.
    """
    form = _form(head, targets.size, temperature, chunk, axis_name)
    if targets[0].size > form.chunk:
        logprob, entropy = head_logprob(
            hidden, head, targets, temperature=temperature, chunk=form.chunk, axis_name=axis_name
        )
        loss, sums = row_loss(logprob, entropy, jax.lax.stop_gradient(data))
        out = HeadLoss(loss, sums, logprob, entropy)
    else:
        out = _loss(form, row_loss, hidden, head.weight, targets, data)
    sums, logprob, entropy = jax.lax.stop_gradient((out.sums, out.logprob, out.entropy))
    return HeadLoss(out.loss, sums, logprob, entropy)
