"""Decoder of Qwen2/2.5, Qwen3 (dense) and the Llama family, and its `Policy`.

The families differ by switches: biases on q/k/v (Qwen2), per-head q/k norm (Qwen3), tied head, rope theta and scaling.
Parameters are a plain tree with all layers stacked on a leading axis L and kernels stored [in, out]:

    embed.embedding [V D]   layers.<Hugging Face's module path> [L ...]   norm.scale [D]   lm_head.kernel [D V] (untied)

A group of samples shares its prompt everywhere. `prefill` runs a prompt once, and `extend` appends tokens to a cached
prompt. `decode` appends one token to all samples of a node against that shared prefix. `hidden` (training) sends prompt
and responses through each layer as one sequence. The P prompt tokens of a group of G cost P, not G * P, forward and
backward. `hidden_tree` does so for conversations that branch.

All use one `Block`; they differ in the function that attends. Layers are scanned in prefill and training (the scan is
unrolled for few layers). They are unrolled in the others, so that no stacked weights are sliced inside the token loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmarl_llm.distributed import context, sharding
from jaxmarl_llm.distributed.heads import by_heads
from jaxmarl_llm.generation.decoding import join, split
from jaxmarl_llm.kernels.attention.causal import causal_attention
from jaxmarl_llm.kernels.attention.group import group_attention
from jaxmarl_llm.kernels.attention.group_decode import group_decode_attention, ring_decode_attention
from jaxmarl_llm.kernels.attention.tree import tree_attention
from jaxmarl_llm.kernels.head.head import Head
from jaxmarl_llm.kernels.quantized import Cached, ScaledVectors, attend_to, dequantize, stored
from jaxmarl_llm.models import lora, rope
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.layers import Attend, Block, rms_norm
from jaxmarl_llm.types import Policy, Unembed

QUERIES = 128  # new tokens of a cached prompt that attend at once
Keep = Callable[[jax.Array], Cached]  # new keys or values -> what a cache has of them


def attend_by_heads(attention: Callable[..., jax.Array], *arrays: Any, on_mesh: str = "auto") -> jax.Array:
    """Attend on each device with its own rows and heads: XLA cannot partition the kernels.

    Rows that a mesh cannot cut evenly take the portable form, which XLA partitions.

    Args:
        attention: a function of kernels/attention, which takes ``impl``.
        arrays: its arguments, queries first; caches may be quantized.
        on_mesh: form on each device of a mesh.
    """
    if len(arrays[0]) % sharding.row_parts():
        return attention(*arrays, impl="xla")
    impl = on_mesh if sharding.meshed() else "auto"
    return by_heads(functools.partial(attention, impl=impl), *arrays)


def _on_own_rows(function: Callable[..., Any], *arrays: Any) -> Any:
    """`by_heads` of a function of XLA, which also takes rows that a mesh cannot cut evenly."""
    return function(*arrays) if len(arrays[0]) % sharding.row_parts() else by_heads(function, *arrays)


def causal(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    """Attend causally to a right-padded prompt, and keep its keys and values.

    Prompts are right-padded, so causality alone keeps padding out of every real position.

    Args:
        q: queries [N P Q H].
        k: keys [N P K H].
        v: values [N P K H].
    """
    if context.cuts(q):
        return context.attend_in_parts(tree_attention, q, k, v, jnp.full(q.shape[:2], q.shape[1])), (k, v)
    return attend_by_heads(causal_attention, q, k, v), (k, v)


def causal_kept(keep: Keep, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    """Attend as `causal`, to the keys and values as the cache will have them.

    Args:
        keep: form of the cache.
        q: queries [N P Q H].
        k: keys [N P K H].
        v: values [N P K H].
    """
    kept = keep(k), keep(v)
    read = (dequantize(x, q.dtype) if isinstance(x, ScaledVectors) else x for x in kept)
    return causal(q, *read)[0], kept


def ancestors(q: jax.Array, k: jax.Array, v: jax.Array, end: jax.Array) -> jax.Array:
    """Attend in a forest, see kernels/attention/tree: [N T Q H].

    Args:
        q: queries [N T Q H].
        k: keys [N T K H].
        v: values [N T K H].
        end: index behind the last token of each token's subtree [N T]; 0 is padding.
    """
    if context.cuts(q):
        return context.attend_in_parts(tree_attention, q, k, v, end)
    return attend_by_heads(tree_attention, q, k, v, end)


# ---- parts of every forward pass ------------------------------------------------------------------------------------


def _apply_layer(cfg: Config, layer: Any, x: jax.Array, angles: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
    layer = sharding.gather(layer)
    x = context.cut_tokens(x) if x.ndim == 3 else sharding.cut_rows(x, rest=None)  # a decoded token is no row of them
    return Block(cfg).apply(layer, x, angles, attend)


def _stacked_layers(variables: Any) -> Any:
    """Collect the per-layer variables, with leading axis L: {"params": ..., "lora": ...}."""
    stacked = {"params": variables["params"]["layers"]}
    if "lora" in variables:
        stacked["lora"] = variables["lora"]
    return stacked


def _final_norm(cfg: Config, variables: Any, x: jax.Array) -> jax.Array:
    return rms_norm(sharding.cut_rows(x, rest=None), variables["params"]["norm"]["scale"], cfg.rms_norm_eps)


def _pad_columns(x: jax.Array, count: int) -> jax.Array:
    """Append ``count`` columns of zeros to a table [N T]."""
    return jnp.pad(x, ((0, 0), (0, count))) if count else x


def _at_last_token(x: jax.Array, length: jax.Array) -> jax.Array:
    """Select from x [N T D] the vector [N D] of each row's last token."""
    return jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)[:, 0]


def _unroll(cfg: Config) -> bool:
    """Whether scans over layers are unrolled.

    Tiny models are all overhead: without the loop's stacked residuals an update on CPU takes a fifth less time.
    """
    return cfg.num_layers <= 4


def _trunk(cfg: Config, remat: bool, variables: Any, tokens: jax.Array, angles: jax.Array, attend: Attend) -> jax.Array:
    """Send tokens [N T] through all layers, for training: hidden states [N T D] before the last norm."""

    def layer_step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return _apply_layer(cfg, layer, x, angles, attend)[0], None

    step = jax.checkpoint(layer_step) if remat else layer_step
    x = context.lay_embedded(embed(variables, tokens))
    return jax.lax.scan(step, x, _stacked_layers(variables), unroll=_unroll(cfg))[0]


# ---- the functions of the policy; see `types.Policy` ----------------------------------------------------------------


def init(cfg: Config, key: jax.Array) -> Any:
    """Draw random parameters.

    Args:
        cfg: the architecture.
        key: typed random key.
    """
    k_embed, k_layers, k_head = jax.random.split(key, 3)
    x, angles = jnp.zeros((1, 1, cfg.hidden_size), cfg.dtype), rope.angles(cfg, jnp.zeros((1, 1), jnp.int32))
    shape = (cfg.vocab_size, cfg.hidden_size)
    std = cfg.hidden_size**-0.5
    params = {
        "embed": {"embedding": (jax.random.normal(k_embed, shape) * std).astype(cfg.dtype)},
        "layers": jax.vmap(lambda k: Block(cfg).init(k, x, angles, causal)["params"])(
            jax.random.split(k_layers, cfg.num_layers)
        ),
        "norm": {"scale": jnp.ones((cfg.hidden_size,), cfg.dtype)},
    }
    if not cfg.tie_embeddings:
        params["lm_head"] = {"kernel": (jax.random.normal(k_head, shape[::-1]) * std).astype(cfg.dtype)}
    return params


def embed(variables: Any, tokens: jax.Array) -> jax.Array:
    """Look up rows [... D] of the token embedding.

    Args:
        variables: ``{"params": ...}``, as the policy takes them or as `unstack` returns them.
        tokens: ids [...].
    """
    table = sharding.gather({"embed": {"embedding": variables["params"]["embed"]["embedding"]}})
    return jnp.take(table["embed"]["embedding"], tokens, axis=0)


def output_head(cfg: Config, variables: Any) -> Head:
    """Return the linear map from hidden states to logits: ``lm_head``, or the embedding where it is tied.

    Args:
        cfg: the architecture.
        variables: ``{"params": ...}``, as the policy takes them or as `unstack` returns them.
    """
    p = variables["params"]
    if "lm_head" in p:
        return Head(p["lm_head"]["kernel"], rows=False, used=cfg.used_vocab)
    return Head(p["embed"]["embedding"], used=cfg.used_vocab)


def prefill(
    cfg: Config, variables: Any, tokens: jax.Array, length: jax.Array, *, keep: Keep | None = None
) -> tuple[jax.Array, Any]:
    """Run prompts once: hidden state [N D] of the last token, and keys and values (k, v) [N P K H] of each layer.

    Args:
        cfg: the architecture.
        variables: ``{"params": ..., "lora": ...}``; the adapters may be absent.
        tokens: prompts [N P], right-padded.
        length: tokens of each prompt [N], at least 1.
        keep: form of the cache, as `kernels.quantized.quantize_vectors` of a dtype. `extend` and `decode` keep the form
            of the cache that they are given. None: keys and values as they are.
    """
    rope.check_positions(cfg, tokens.shape[1])
    columns = tokens.shape[1]
    tokens = _pad_columns(tokens, context.missing(columns))
    angles = rope.angles(cfg, jnp.arange(tokens.shape[1]))[None]
    attend = causal if keep is None else functools.partial(causal_kept, keep)
    with sharding.many_tokens():
        x, kv = jax.lax.scan(
            lambda x, layer: _apply_layer(cfg, layer, x, angles, attend),
            context.lay_embedded(embed(variables, tokens)),
            _stacked_layers(variables),
            unroll=_unroll(cfg),
        )
    of_layer = lambda x, i: context.whole_tokens(x[i, :, :columns] if columns < x.shape[2] else x[i])
    prefix = tuple(jax.tree.map(lambda x, i=i: of_layer(x, i), kv) for i in range(cfg.num_layers))
    return _final_norm(cfg, variables, _at_last_token(x, length)), prefix


def extend(
    cfg: Config, variables: Any, tokens: jax.Array, count: jax.Array, start: jax.Array, prefix: Any
) -> tuple[jax.Array, Any]:
    """Append new tokens to cached prompts: hidden state [N D] of the last new token, and the new cache.

    Args:
        cfg: the architecture.
        variables: as for `prefill`, or as `unstack` returns them, which compiles faster.
        tokens: new tokens [N E], right-padded.
        count: new tokens of each row [N], at least 1.
        start: filled slots of each row [N].
        prefix: keys and values (k, v) [N P K H] of each layer.
    """
    rope.check_positions(cfg, prefix[0][0].shape[1])
    slots = start[:, None] + jnp.arange(tokens.shape[1])  # of the new tokens; they are their positions too
    angles, grown = rope.angles(cfg, slots), []
    with sharding.many_tokens():
        x = context.lay_embedded(embed(variables, tokens))
        for layer, cached in zip(unstack(cfg, variables)["params"]["layers"], prefix, strict=True):

            def attend(q: Any, k: Any, v: Any, cached: Any = cached) -> Any:
                if context.cuts(q):
                    out, *kept = context.extend_in_parts(_attend_cached, q, k, v, cached[0], cached[1], slots)
                else:
                    out, *kept = _on_own_rows(_attend_cached, q, k, v, *cached, slots)
                return out, tuple(kept)

            x, kept = _apply_layer(cfg, layer, x, angles, attend)
            grown.append(kept)
    return _final_norm(cfg, variables, _at_last_token(x, count)), tuple(grown)


def _attend_cached(
    q: Any, k: Any, v: Any, pk: Any, pv: Any, slots: jax.Array, asking: jax.Array | None = None
) -> tuple[jax.Array, ...]:
    """Write keys and values [N E K H] to ``slots`` [N E] of a cache, and attend to what stands before: out, the cache.

    Padding behind a row may be beyond the cache: dropped, where a slice would be moved. The scores of `QUERIES` tokens
    of each row are in memory. ``asking``: slots of the queries [N E'], where these are a part of the new tokens.
    """
    row = jnp.arange(len(slots))[:, None]
    write = lambda x, new: x.at[row, slots].set(new, mode="drop")
    pk, pv = (jax.tree.map(write, x, stored(new, x)) for x, new in ((pk, k), (pv, v)))
    slots = slots if asking is None else asking
    n, e = slots.shape

    def attend(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        visible = jnp.arange(pk.shape[1]) <= part[1][..., None]
        if isinstance(pk, ScaledVectors):
            return attend_to(part[0], pk, pv, visible)
        return jax.nn.dot_product_attention(part[0], pk, pv, mask=visible[:, None])

    if e <= QUERIES:
        return attend((q, slots)), pk, pv
    fill = lambda x: jnp.pad(x, [(0, 0), (0, -e % QUERIES), *[(0, 0)] * (x.ndim - 2)])
    chunks = (jnp.moveaxis(fill(x).reshape(n, -1, QUERIES, *x.shape[2:]), 1, 0) for x in (q, slots))
    out = jax.lax.map(attend, tuple(chunks))
    return jnp.moveaxis(out, 0, 1).reshape(n, -1, *q.shape[2:])[:, :e], pk, pv


def unstack(cfg: Config, variables: Any) -> Any:
    """Split the stacked layers into one tree per layer, the form that `decode` takes. Split ones stay as they are.

    Args:
        cfg: the architecture.
        variables: as for `prefill`.
    """
    if isinstance(variables["params"]["layers"], tuple):
        return variables
    stacked = _stacked_layers(variables)
    layers = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(cfg.num_layers))
    return {"params": {**variables["params"], "layers": layers}}


def init_suffix(prefix: Any, group: int, response: int) -> Any:
    """Make an empty cache for samples: (k, v) [N G R K H] of each layer.

    Args:
        prefix: cache of the prompts, which gives N, K, H and the form.
        group: samples of each prompt, G.
        response: slots of each sample, R.
    """
    zeros = jax.tree.map(lambda x: jnp.zeros((len(x), group, response, *x.shape[2:]), x.dtype), prefix[0][0])
    return tuple((zeros, zeros) for _ in prefix)


def _attend_samples(
    t: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    prefix: Any,
    length: jax.Array,
    suffix: Any,
    begun: jax.Array | None,
) -> tuple[jax.Array, Any]:
    """Attend from one token of every sample of a part in one layer: [N G 1 Q H], and (k, v) with the token's."""
    slot = t if begun is None else t % suffix[0].shape[2]
    write = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, slot, axis=2)
    written = (jax.tree.map(write, x, stored(new, x)) for x, new in zip(suffix, (k, v), strict=True))
    (own_k, own_v), (prefix_k, prefix_v) = written, prefix
    if begun is None:
        # Pallas forms copy the own slots out of the loop's state on a mesh: 1.8 times the traffic (docs/log.md).
        out = attend_by_heads(group_decode_attention, q, prefix_k, prefix_v, length, own_k, own_v, t, on_mesh="xla")
    else:
        out = _on_own_rows(ring_decode_attention, q, prefix_k, prefix_v, length, own_k, own_v, t, begun)
    return out, (own_k, own_v)


def decode(
    cfg: Config,
    variables: Any,
    tokens: Sequence[jax.Array],
    prefix: Sequence[Any],
    length: Sequence[jax.Array],
    suffix: Sequence[Any],
    t: jax.Array,
    begun: Sequence[jax.Array] | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[Any, ...]]:
    """Append one token to every sample: hidden states [N G D], and the new suffix cache, of each part of a launch.

    Samples of all parts are rows of the same matrix products. A part attends by itself. With ``begun`` the suffix is a
    ring: the token of time t is in slot t mod R. It is the (t - begun)-th token behind the prompt.

    Args:
        cfg: the architecture.
        variables: result of `unstack`.
        tokens: for each part, the token of each sample [N G].
        prefix: for each part, the cache of the prompts, (k, v) [N P K H] of each layer.
        length: for each part, tokens of each prompt [N].
        suffix: for each part, the cache of the samples, (k, v) [N G R K H] of each layer.
        t: slot of the token in the suffix, or its time with ``begun``; one scalar for all samples.
        begun: for each part, the time of the first token of each node [N]; None: the parts have begun together.
    """
    for of_prompts, of_samples in zip(prefix, suffix, strict=True):
        rope.check_positions(cfg, of_prompts[0][0].shape[1] + of_samples[0][0].shape[2])
    shapes, attend_part = [x.shape for x in tokens], functools.partial(_attend_samples, t)
    since: Sequence[jax.Array | None] = [None] * len(shapes) if begun is None else begun
    places = (n + t if first is None else n + t - first for n, first in zip(length, since, strict=True))
    positions = [jnp.broadcast_to(n[:, None, None], (*shape, 1)) for n, shape in zip(places, shapes)]
    x, angles = embed(variables, join(tokens))[:, :, None], rope.angles(cfg, join(positions))
    grown = []
    for layer, prompts, samples in zip(variables["params"]["layers"], zip(*prefix), zip(*suffix), strict=True):

        def attend(q: Any, k: Any, v: Any, prompts: Any = prompts, samples: Any = samples) -> Any:
            of_parts = zip(*(split(y, shapes) for y in (q, k, v)), prompts, length, samples, since, strict=True)
            outs, kept = zip(*(attend_part(*part) for part in of_parts), strict=True)
            return join(outs), kept

        x, kept = _apply_layer(cfg, layer, x, angles, attend)
        grown.append(kept)
    return split(_final_norm(cfg, variables, x[:, :, 0]), shapes), tuple(zip(*grown, strict=True))


def hidden(
    cfg: Config, remat: bool, variables: Any, tokens: jax.Array, length: jax.Array, completions: jax.Array
) -> jax.Array:
    """Compute the hidden states [N G R D] that predict each completion token, for training.

    The prompt and the G completions of a node go through each layer as one sequence.

    Args:
        cfg: the architecture.
        remat: whether layers are computed again in the backward pass.
        variables: as for `prefill`.
        tokens: prompts [N P], right-padded.
        length: tokens of each prompt [N].
        completions: sampled tokens [N G R].
    """
    (n, p), (_, g, r) = tokens.shape, completions.shape
    rope.check_positions(cfg, p + r)
    if sharding.context_parts() > 1:
        return _hidden_in_parts(cfg, remat, variables, tokens, length, completions)
    # No state of the last token is needed, but R rows fill tiles of an accelerator, and R - 1 do not.
    s = r if r > 1 else 0
    join = lambda x: x.reshape(n, g * s, *x.shape[3:])
    split = lambda x: x[:, p:].reshape(n, g, s, *x.shape[2:])
    positions = jnp.broadcast_to(length[:, None, None] + jnp.arange(s), (n, g, s))
    angles = rope.angles(cfg, jnp.concatenate([jnp.broadcast_to(jnp.arange(p), (n, p)), join(positions)], axis=1))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
        out, (pk, pv) = causal(q[:, :p], k[:, :p], v[:, :p])
        if s:
            sampled = attend_by_heads(group_attention, split(q), pk, pv, length, split(k), split(v))
            out = jnp.concatenate([out, join(sampled)], axis=1)
        return out, None

    x = _trunk(cfg, remat, variables, jnp.concatenate([tokens, join(completions[:, :, :s])], axis=1), angles, attend)
    first = jnp.broadcast_to(_at_last_token(x[:, :p], length)[:, None, None], (n, g, 1, cfg.hidden_size))
    return _final_norm(cfg, variables, jnp.concatenate([first, split(x)[:, :, :-1]], axis=2))


def _hidden_in_parts(
    cfg: Config, remat: bool, variables: Any, tokens: jax.Array, length: jax.Array, completions: jax.Array
) -> jax.Array:
    """Compute `hidden` with tokens cut over context: [prompt | G responses] of a node as a tree with one fork."""
    (n, p), (_, g, r) = tokens.shape, completions.shape
    s = r - 1  # no loss reads the state of the last token
    t = p + g * s
    table = lambda of_prompt, of_samples: jnp.concatenate(
        [jnp.broadcast_to(of_prompt, (n, p)), jnp.broadcast_to(of_samples, (n, g, s)).reshape(n, g * s)], axis=1
    )
    begins = p + s * jnp.arange(g)[:, None]
    position = table(jnp.arange(p), length[:, None, None] + jnp.arange(s))
    end = table(jnp.where(jnp.arange(p) < length[:, None], t, 0), begins + s)
    x = _forest(cfg, remat, variables, table(tokens, completions[:, :, :s]), position, end)
    last = jnp.broadcast_to((length - 1)[:, None, None], (n, g, 1))
    own = jnp.broadcast_to(begins + jnp.arange(s), (n, g, s))
    return context.take_tokens(x, jnp.concatenate([last, own], axis=2))


def _forest(cfg: Config, remat: bool, variables: Any, tokens: jax.Array, position: jax.Array, end: jax.Array) -> Any:
    """Compute the hidden state of each token of a forest, see `hidden_tree`, and of padding that context needs."""
    more = context.missing(tokens.shape[1])
    tokens, position, end = (_pad_columns(x, more) for x in (tokens, position, end))
    attend: Attend = lambda q, k, v: (ancestors(q, k, v, end), None)
    x = _trunk(cfg, remat, variables, tokens, rope.angles(cfg, position), attend)
    return _final_norm(cfg, variables, x)


def hidden_tree(
    cfg: Config, remat: bool, variables: Any, tokens: jax.Array, position: jax.Array, end: jax.Array
) -> jax.Array:
    """Compute the hidden state [B T D] of each token of sequences that share prefixes, for training.

    On a mesh with context, T is that of ``tokens`` up to the next multiple of its parts.

    Args:
        cfg: the architecture.
        remat: whether layers are computed again in the backward pass.
        variables: as for `prefill`.
        tokens: tokens [B T] of a forest, depth first; see kernels/attention/tree.
        position: position of each token in its sequence [B T].
        end: index behind the last token of each token's subtree [B T]; 0 is padding.
    """
    rope.check_positions(cfg, tokens.shape[1])
    return _forest(cfg, remat, variables, tokens, position, end)


@functools.cache
def make_policy(cfg: Config, *, remat: bool = True) -> Policy:
    """Make the `Policy` of an architecture.

    Cached: equal arguments give the same object with the same functions, so that models share compiled programs.

    Args:
        cfg: the architecture.
        remat: whether `hidden` and `hidden_tree` compute each layer again in the backward pass. Residuals of one layer
            instead of L are then in memory, for one more forward pass.
    """
    bind = functools.partial
    return Policy(
        config=cfg,
        init=bind(init, cfg),
        prefill=bind(prefill, cfg),
        decode=bind(decode, cfg),
        init_suffix=init_suffix,
        hidden=bind(hidden, cfg, remat),
        unembed=Unembed(bind(output_head, cfg)),
        embed=embed,
        unstack=bind(unstack, cfg),
        extend=bind(extend, cfg),
        hidden_tree=bind(hidden_tree, cfg, remat),
        decode_slots=bind(decode, cfg),
        choose_adapters=lora.choose_adapters,
    )
