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
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.distributed import context, sharding
from jaxmarl_llm.distributed.heads import by_heads, cut_heads, lay_heads
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.decoding import join, split
from jaxmarl_llm.kernels.attention.causal import causal_attention
from jaxmarl_llm.kernels.attention.group import group_attention
from jaxmarl_llm.kernels.attention.group_decode import group_decode_attention, ring_decode_attention
from jaxmarl_llm.kernels.attention.tree import tree_attention
from jaxmarl_llm.kernels.head.head import Head
from jaxmarl_llm.kernels.matmul import matmul
from jaxmarl_llm.kernels.quantized import Cached, ScaledVectors, attend_to, dequantize, stored
from jaxmarl_llm.models import lora
from jaxmarl_llm.types import Policy, Unembed

QUERIES = 128  # new tokens of a cached prompt that attend at once
FAMILIES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class Config:
    """Architecture of one decoder. Field names follow Hugging Face's config.json where they exist there."""

    vocab_size: int
    hidden_size: int  # D
    intermediate_size: int  # F
    num_layers: int  # L
    num_heads: int  # Q
    num_kv_heads: int  # K
    head_dim: int  # H
    rope_theta: float = 10_000.0
    rope_scaling: tuple[tuple[str, Any], ...] | None = None  # sorted items: rope_type linear, llama3, yarn or dynamic
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    attention_bias: bool = True  # on q, k and v (Qwen2)
    qk_norm: bool = False  # per head, before rope (Qwen3)
    max_position: int = 32_768
    family: str = "qwen2"
    dtype: str = "float32"  # of parameters and activations; logits, norms and softmax are float32
    lora_scale: float = 2.0  # alpha / rank of adapters
    used_vocab: int | None = None  # ids at or beyond it are embedding padding: logit -1e30, never sampled

    def to_hf(self) -> dict[str, Any]:
        """Write the contents of a config.json that transformers reads back as the same architecture.

        Transformers 4 reads ``rope_scaling`` and ``rope_theta``, transformers 5 also ``rope_parameters``.
        """
        scaling = dict(self.rope_scaling) if self.rope_scaling else None
        return {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_parameters": {**(scaling or {"rope_type": "default"}), "rope_theta": self.rope_theta},
            "rope_scaling": scaling,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position,
            "hidden_act": "silu",
            "dtype": self.dtype,
        }


def rope_frequencies(cfg: Config) -> np.ndarray:
    """Compute the inverse frequencies [H/2] of rotary embeddings.

    Scaling is none, linear, that of the Llama 3.1 release, which interpolates smoothly between wavelengths, or YaRN.
    Dynamic scaling is none for all positions that `check_positions` permits.

    Args:
        cfg: the architecture.
    """
    freq = cfg.rope_theta ** -(np.arange(0, cfg.head_dim, 2, dtype=np.float64) / cfg.head_dim)
    scaling = dict(cfg.rope_scaling or ())
    if scaling.get("rope_type") == "linear":
        freq = freq / scaling["factor"]
    elif scaling.get("rope_type") == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        freq = (1 - smooth) * freq / scaling["factor"] + smooth * freq
    elif scaling.get("rope_type") == "yarn":
        freq = _yarn_frequencies(freq, scaling, cfg.rope_theta)
    return freq.astype(np.float32)


def _yarn_frequencies(freq: np.ndarray, scaling: Mapping[str, Any], theta: float) -> np.ndarray:
    """Divide slow frequencies by YaRN's factor and keep fast ones (arXiv 2309.00071, section 3.2).

    A frequency is fast if it makes at least ``beta_fast`` turns over the original context, and slow if it makes at most
    ``beta_slow``. Between the two, the result is a linear mixture in the index of the frequency.

    Args:
        freq: frequencies without scaling [H/2].
        scaling: keys of YaRN in ``rope_scaling``.
        theta: base of the frequencies.
    """
    head_dim, turns = 2 * len(freq), (scaling.get("beta_fast", 32.0), scaling.get("beta_slow", 1.0))
    # The index, a real number, at which a frequency makes so many turns.
    context = scaling["original_max_position_embeddings"] / (2 * math.pi)
    low, high = (head_dim * math.log(context / n) / (2 * math.log(theta)) for n in turns)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    slow = np.clip((np.arange(len(freq)) - low) / (high - low or 0.001), 0.0, 1.0)
    return freq * (1 - slow) + freq / scaling["factor"] * slow


def rope_magnitude(cfg: Config) -> float:
    """Compute the factor of rotated queries and keys: YaRN's attention factor, otherwise 1.

    Args:
        cfg: the architecture.
    """
    scaling = dict(cfg.rope_scaling or ())
    if scaling.get("rope_type") != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    grown = lambda scale: 0.1 * scale * math.log(scaling["factor"]) + 1.0
    scale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return grown(scale) / grown(all_dim) if scale and all_dim else grown(1.0)


def check_positions(cfg: Config, count: int) -> None:
    """Raise `ConfigError` if rows of ``count`` tokens may need a frequency of dynamic scaling beyond the first.

    Beyond ``max_position``, transformers computes the frequencies from the longest row of each call. Cached keys keep
    the frequencies of earlier calls. The function then depends on the batch and on the chunks in which a text was sent,
    so training could not repeat what generation computed. Up to ``max_position`` no scaling is applied.

    Args:
        cfg: the architecture.
        count: tokens of a row, with padding.
    """
    if dict(cfg.rope_scaling or ()).get("rope_type") == "dynamic" and count > cfg.max_position:
        raise ConfigError(
            f"rope_scaling dynamic: rows of {count} tokens (with padding), but max_position_embeddings is "
            f"{cfg.max_position}, beyond which the scaling depends on the batch; use shorter rows or yarn"
        )


def rotate(x: jax.Array, angles: jax.Array, magnitude: float = 1.0) -> jax.Array:
    """Apply rotary embeddings in the halves convention.

    Args:
        x: queries or keys [... T heads H].
        angles: rotation angles [... T H/2].
        magnitude: factor of the result, see `rope_magnitude`.
    """
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square over the last axis, in float32, and multiply by ``scale``.

    Args:
        x: activations [... D].
        scale: learned factors [D].
        eps: added to the mean square.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale


class Norm(nn.Module):
    """`rms_norm` with its learned scale."""

    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.cfg.dtype)
        return rms_norm(x, scale, self.cfg.rms_norm_eps)


class Linear(nn.Module):
    """Linear map x W (+ b), plus scale * (x A) B where the ``lora`` collection holds an adapter for this module.

    Of joined adapters (`lora.join_adapters`), ``own`` says which columns of x A each hidden state has.
    """

    cfg: Config
    features: int
    bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        y = matmul(x, self.param("kernel", init, (x.shape[-1], self.features), self.cfg.dtype))
        if self.has_variable("lora", "a"):
            a: jax.Array = self.get_variable("lora", "a")
            b: jax.Array = self.get_variable("lora", "b")
            inner = x @ a.astype(x.dtype)
            if self.has_variable("lora", "own"):
                own: jax.Array = self.get_variable("lora", "own")
                inner = jnp.where(own, inner, 0)
            y = y + (inner @ b.astype(x.dtype)) * self.cfg.lora_scale
        if self.bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,), self.cfg.dtype)
        return y


# (q [... T Q H], k [... T K H], v) -> (attention [... T Q H], the keys and values to keep)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
Keep = Callable[[jax.Array], Cached]  # new keys or values -> what a cache has of them


class Attention(nn.Module):
    """Attention with projections and rotary embeddings. The ``attend`` argument decides what is attended to."""

    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array, angles: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
        cfg = self.cfg

        def heads(name: str, count: int) -> jax.Array:
            y = Linear(cfg, count * cfg.head_dim, cfg.attention_bias, name=f"{name}_proj")(x)
            y = y.reshape(*x.shape[:-1], count, cfg.head_dim)
            if cfg.qk_norm and name != "v":
                y = Norm(cfg, name=f"{name}_norm")(y)
            return y if name == "v" else rotate(y, angles, rope_magnitude(cfg))

        q = cut_heads(heads("q", cfg.num_heads))
        k, v = (lay_heads(heads(name, cfg.num_kv_heads)) for name in ("k", "v"))
        out, kept = attend(q, k, v)
        out = cut_heads(out).reshape(*x.shape[:-1], cfg.num_heads * cfg.head_dim)
        return Linear(cfg, cfg.hidden_size, name="o_proj")(out), kept


class MLP(nn.Module):
    """Gated feed-forward layer: W_down (silu(x W_gate) * (x W_up))."""

    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        f = self.cfg.intermediate_size
        gate, up = Linear(self.cfg, f, name="gate_proj")(x), Linear(self.cfg, f, name="up_proj")(x)
        # The backward pass keeps gate, up and their product. Without the checkpoint it also keeps what silu computes.
        gated = jax.checkpoint(lambda gate, up: nn.silu(gate) * up, prevent_cse=False)
        return Linear(self.cfg, self.cfg.hidden_size, name="down_proj")(gated(gate, up))


class Block(nn.Module):
    """One layer: attention and feed-forward, each after a norm and added to its input."""

    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array, angles: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
        y = Norm(self.cfg, name="input_layernorm")(x)
        y, kept = Attention(self.cfg, name="self_attn")(y, angles, attend)
        x = x + y
        y = Norm(self.cfg, name="post_attention_layernorm")(x)
        return x + MLP(self.cfg, name="mlp")(y), kept


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


def _angles(cfg: Config, positions: jax.Array) -> jax.Array:
    """Compute rotary angles [... T H/2] of positions [... T]."""
    return positions[..., None].astype(jnp.float32) * rope_frequencies(cfg)


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
    x, angles = jnp.zeros((1, 1, cfg.hidden_size), cfg.dtype), _angles(cfg, jnp.zeros((1, 1), jnp.int32))
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
    check_positions(cfg, tokens.shape[1])
    columns = tokens.shape[1]
    tokens = _pad_columns(tokens, context.missing(columns))
    angles = _angles(cfg, jnp.arange(tokens.shape[1]))[None]
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
    check_positions(cfg, prefix[0][0].shape[1])
    slots = start[:, None] + jnp.arange(tokens.shape[1])  # of the new tokens; they are their positions too
    angles, grown = _angles(cfg, slots), []
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
        check_positions(cfg, of_prompts[0][0].shape[1] + of_samples[0][0].shape[2])
    shapes, attend_part = [x.shape for x in tokens], functools.partial(_attend_samples, t)
    since: Sequence[jax.Array | None] = [None] * len(shapes) if begun is None else begun
    places = (n + t if first is None else n + t - first for n, first in zip(length, since, strict=True))
    positions = [jnp.broadcast_to(n[:, None, None], (*shape, 1)) for n, shape in zip(places, shapes)]
    x, angles = embed(variables, join(tokens))[:, :, None], _angles(cfg, join(positions))
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
    check_positions(cfg, p + r)
    if sharding.context_parts() > 1:
        return _hidden_in_parts(cfg, remat, variables, tokens, length, completions)
    # No state of the last token is needed, but R rows fill tiles of an accelerator, and R - 1 do not.
    s = r if r > 1 else 0
    join = lambda x: x.reshape(n, g * s, *x.shape[3:])
    split = lambda x: x[:, p:].reshape(n, g, s, *x.shape[2:])
    positions = jnp.broadcast_to(length[:, None, None] + jnp.arange(s), (n, g, s))
    angles = _angles(cfg, jnp.concatenate([jnp.broadcast_to(jnp.arange(p), (n, p)), join(positions)], axis=1))

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
    x = _trunk(cfg, remat, variables, tokens, _angles(cfg, position), attend)
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
    check_positions(cfg, tokens.shape[1])
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
