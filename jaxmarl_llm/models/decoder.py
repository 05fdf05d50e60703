"""Qwen2/2.5, Qwen3 (dense) and the Llama family as one decoder, and its `Policy`.

The families differ by switches: biases on q/k/v (Qwen2), per-head q/k norm (Qwen3), tied head, rope theta and scaling.
Parameters are a plain tree with all layers stacked on a leading axis L and kernels stored [in, out]:

    embed.embedding [V D]   layers.<Hugging Face's module path> [L ...]   norm.scale [D]   lm_head.kernel [D V] (untied)

A group of samples shares its prompt everywhere: `prefill` runs a prompt once, `extend` goes on behind what is cached
of it, `decode` extends all of a node's samples by one token against that shared prefix, and `hidden` (training) sends
prompt and responses through each layer as one sequence, so that the P prompt tokens of a group of G cost P, not G * P,
forward and backward; `hidden_tree` does so for conversations that branch. All use one `Block`; they differ in the
function it calls to attend. Layers are scanned for prefill and training (unrolled where there are but a few), and
unrolled for the others (per-layer caches: no slicing of stacked weights inside the token loop).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm import sharding
from jaxmarl_llm.kernels.causal_attention import causal_attention
from jaxmarl_llm.kernels.group_attention import group_attention
from jaxmarl_llm.kernels.group_decode import group_decode_attention
from jaxmarl_llm.kernels.head import Head
from jaxmarl_llm.kernels.matmul import matmul
from jaxmarl_llm.kernels.tree_attention import tree_attention
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import Policy, Unembed

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
    rope_scaling: tuple[tuple[str, Any], ...] | None = None  # sorted items: rope_type linear or llama3
    rms_norm_eps: float = 1e-6
    tie_embeddings: bool = True
    attention_bias: bool = True  # on q, k and v (Qwen2)
    qk_norm: bool = False  # per head, before rope (Qwen3)
    max_position: int = 32_768
    family: str = "qwen2"
    dtype: str = "float32"  # of parameters and activations; logits, norms and softmax are float32
    lora_scale: float = 2.0  # alpha / rank of adapters
    used_vocab: int | None = None  # ids at or beyond it are embedding padding: logit -1e30, never sampled

    @staticmethod
    def from_hf(hf: Mapping[str, Any], dtype: str = "float32") -> Config:
        """From the contents of a config.json, of transformers 4 (rope_theta) or 5 (rope_parameters)."""
        family = hf.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(f"config.json: model_type {family!r} is not supported; known: {', '.join(FAMILIES)}")
        rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", hf.get("rope_theta", 10_000.0))
        kind = rope.get("rope_type", rope.pop("type", "default"))
        if kind not in ("default", "linear", "llama3"):
            raise ConfigError(f"config.json: rope scaling {kind!r} is not supported; known: default, linear, llama3")
        if hf.get("use_sliding_window"):
            raise ConfigError("config.json: use_sliding_window is not supported; full attention only")
        if family == "llama" and (hf.get("attention_bias") or hf.get("mlp_bias")):
            raise ConfigError("config.json: attention_bias and mlp_bias of Llama are not supported")
        if hf.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"config.json: hidden_act {hf['hidden_act']!r} is not supported; expected silu")
        heads = hf["num_attention_heads"]
        return Config(
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            rope_theta=float(theta),
            rope_scaling=None if kind == "default" else tuple(sorted({**rope, "rope_type": kind}.items())),
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            attention_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            max_position=hf.get("max_position_embeddings", 32_768),
            family=family,
            dtype=dtype,
        )

    def to_hf(self) -> dict[str, Any]:
        """A config.json that transformers reads back as the same architecture."""
        rope = dict(self.rope_scaling or (("rope_type", "default"),))
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
            "rope_parameters": {**rope, "rope_theta": self.rope_theta},
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_position,
            "hidden_act": "silu",
            "dtype": self.dtype,
        }


def rope_frequencies(cfg: Config) -> np.ndarray:
    """Inverse frequencies [H/2], with linear or Llama-3 scaling (Llama 3.1 release: smooth between wavelengths)."""
    freq = cfg.rope_theta ** -(np.arange(0, cfg.head_dim, 2, dtype=np.float64) / cfg.head_dim)
    scaling = dict(cfg.rope_scaling or ())
    if scaling.get("rope_type") == "linear":
        freq = freq / scaling["factor"]
    elif scaling.get("rope_type") == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * freq / (2 * math.pi)
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        freq = (1 - smooth) * freq / scaling["factor"] + smooth * freq
    return freq.astype(np.float32)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary embedding of x [... T heads H] by angles [... T H/2] (halves convention)."""
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale


class Norm(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.cfg.dtype)
        return rms_norm(x, scale, self.cfg.rms_norm_eps)


class Linear(nn.Module):
    """x W (+ b), plus scale * (x A) B when the ``lora`` collection holds an adapter for this module."""

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
            y = y + ((x @ a.astype(x.dtype)) @ b.astype(x.dtype)) * self.cfg.lora_scale
        if self.bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,), self.cfg.dtype)
        return y


# (q [... T Q H], k [... T K H], v) -> (attention [... T Q H], the keys and values to keep)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


class Attention(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array, angles: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
        cfg = self.cfg

        def heads(name: str, count: int) -> jax.Array:
            y = Linear(cfg, count * cfg.head_dim, cfg.attention_bias, name=f"{name}_proj")(x)
            y = y.reshape(*x.shape[:-1], count, cfg.head_dim)
            if cfg.qk_norm and name != "v":
                y = Norm(cfg, name=f"{name}_norm")(y)
            return y if name == "v" else rotate(y, angles)

        out, kept = attend(heads("q", cfg.num_heads), heads("k", cfg.num_kv_heads), heads("v", cfg.num_kv_heads))
        out = out.reshape(*x.shape[:-1], cfg.num_heads * cfg.head_dim)
        return Linear(cfg, cfg.hidden_size, name="o_proj")(out), kept


class MLP(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        f = self.cfg.intermediate_size
        gate, up = Linear(self.cfg, f, name="gate_proj")(x), Linear(self.cfg, f, name="up_proj")(x)
        # The backward pass keeps gate, up and their product; without the checkpoint also what silu has in between.
        gated = jax.checkpoint(lambda gate, up: nn.silu(gate) * up, prevent_cse=False)
        return Linear(self.cfg, self.cfg.hidden_size, name="down_proj")(gated(gate, up))


class Block(nn.Module):
    cfg: Config

    @nn.compact
    def __call__(self, x: jax.Array, angles: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
        y = Norm(self.cfg, name="input_layernorm")(x)
        y, kept = Attention(self.cfg, name="self_attn")(y, angles, attend)
        x = x + y
        y = Norm(self.cfg, name="post_attention_layernorm")(x)
        return x + MLP(self.cfg, name="mlp")(y), kept


def attention_impl() -> str:
    """For a mesh XLA partitions the portable forms, and cannot the others."""
    return "xla" if sharding.meshed() else "auto"


def _causal(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    # Prompts are right-padded, so causality alone keeps padding out of every real position.
    return causal_attention(q, k, v, impl=attention_impl()), (k, v)


@functools.cache
def make_policy(cfg: Config, *, remat: bool = True) -> Policy:
    """The `Policy` of an architecture. Equal configs give the same object, hence share compiled programs.

    ``remat`` recomputes each layer in the backward pass: memory of one layer instead of L, for one more forward pass.
    """
    block = Block(cfg)
    # Tiny models are all overhead: without the loop's stacked residuals an update on CPU takes a fifth less time.
    unroll = cfg.num_layers <= 4
    freq = rope_frequencies(cfg)

    def angles(positions: jax.Array) -> jax.Array:
        return positions[..., None].astype(jnp.float32) * freq

    def apply(layer: Any, x: jax.Array, a: jax.Array, attend: Attend) -> tuple[jax.Array, Any]:
        return block.apply(sharding.gather(layer), sharding.cut_rows(x, rest=None), a, attend)

    def layers(variables: Any) -> Any:
        """Per-layer variables with the leading axis L: {"params": ..., "lora": ...}."""
        stacked = {"params": variables["params"]["layers"]}
        if "lora" in variables:
            stacked["lora"] = variables["lora"]
        return stacked

    def embed(variables: Any, tokens: jax.Array) -> jax.Array:
        table = sharding.gather({"embed": {"embedding": variables["params"]["embed"]["embedding"]}})
        return jnp.take(table["embed"]["embedding"], tokens, axis=0)

    def final(variables: Any, x: jax.Array) -> jax.Array:
        return rms_norm(sharding.cut_rows(x, rest=None), variables["params"]["norm"]["scale"], cfg.rms_norm_eps)

    def head(variables: Any) -> Head:
        p = variables["params"]
        if "lm_head" in p:
            return Head(p["lm_head"]["kernel"], rows=False, used=cfg.used_vocab)
        return Head(p["embed"]["embedding"], used=cfg.used_vocab)

    def init(key: jax.Array) -> Any:
        k_embed, k_layers, k_head = jax.random.split(key, 3)
        x, a = jnp.zeros((1, 1, cfg.hidden_size), cfg.dtype), angles(jnp.zeros((1, 1), jnp.int32))
        shape = (cfg.vocab_size, cfg.hidden_size)
        std = cfg.hidden_size**-0.5
        params = {
            "embed": {"embedding": (jax.random.normal(k_embed, shape) * std).astype(cfg.dtype)},
            "layers": jax.vmap(lambda k: block.init(k, x, a, _causal)["params"])(
                jax.random.split(k_layers, cfg.num_layers)
            ),
            "norm": {"scale": jnp.ones((cfg.hidden_size,), cfg.dtype)},
        }
        if not cfg.tie_embeddings:
            params["lm_head"] = {"kernel": (jax.random.normal(k_head, shape[::-1]) * std).astype(cfg.dtype)}
        return params

    def last(x: jax.Array, length: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, (length - 1)[:, None, None], axis=1)[:, 0]

    def prefill(variables: Any, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, Any]:
        a = angles(jnp.arange(tokens.shape[1]))[None]
        x, kv = jax.lax.scan(
            lambda x, layer: apply(layer, x, a, _causal), embed(variables, tokens), layers(variables), unroll=unroll
        )
        prefix = tuple((kv[0][i], kv[1][i]) for i in range(cfg.num_layers))
        return final(variables, last(x, length)), prefix

    def extend(
        variables: Any, tokens: jax.Array, count: jax.Array, start: jax.Array, prefix: Any
    ) -> tuple[jax.Array, Any]:
        at = start[:, None] + jnp.arange(tokens.shape[1])  # slots of the new tokens, which are their positions
        row, a = jnp.arange(len(start))[:, None], angles(at)
        see = (jnp.arange(prefix[0][0].shape[1]) <= at[..., None])[:, None]
        x, grown = embed(variables, tokens), []
        for layer, (pk, pv) in zip(unstack(variables)["params"]["layers"], prefix):

            def attend(q: Any, k: Any, v: Any, pk: Any = pk, pv: Any = pv) -> Any:
                # Padding behind `count` may lie beyond the cache: dropped, where a slice would be moved.
                pk, pv = pk.at[row, at].set(k, mode="drop"), pv.at[row, at].set(v, mode="drop")
                return jax.nn.dot_product_attention(q, pk, pv, mask=see), (pk, pv)

            x, kept = apply(layer, x, a, attend)
            grown.append(kept)
        return final(variables, last(x, count)), tuple(grown)

    def unstack(variables: Any) -> Any:
        """What `decode` takes: one tree per layer, cut once per launch, not once per token."""
        stacked = layers(variables)
        of_layers = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(cfg.num_layers))
        return {"params": {**variables["params"], "layers": of_layers}}

    def init_suffix(prefix: Any, group: int, response: int) -> Any:
        n, _, k, h = prefix[0][0].shape
        zeros = jnp.zeros((n, group, response, k, h), prefix[0][0].dtype)
        return tuple((zeros, zeros) for _ in prefix)

    def decode(
        variables: Any, tokens: jax.Array, prefix: Any, length: jax.Array, suffix: Any, t: jax.Array
    ) -> tuple[jax.Array, Any]:
        a = angles((length + t)[:, None, None])
        x, grown, impl = embed(variables, tokens)[:, :, None], [], attention_impl()
        for layer, (pk, pv), (sk, sv) in zip(variables["params"]["layers"], prefix, suffix):

            def attend(q: Any, k: Any, v: Any, pk: Any = pk, pv: Any = pv, sk: Any = sk, sv: Any = sv) -> Any:
                sk = jax.lax.dynamic_update_slice_in_dim(sk, k, t, axis=2)
                sv = jax.lax.dynamic_update_slice_in_dim(sv, v, t, axis=2)
                return group_decode_attention(q, pk, pv, length, sk, sv, t, impl=impl), (sk, sv)

            x, kept = apply(layer, x, a, attend)
            grown.append(kept)
        return final(variables, x[:, :, 0]), tuple(grown)

    def trunk(variables: Any, tokens: jax.Array, a: jax.Array, attend: Attend) -> jax.Array:
        def layer_step(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
            return apply(layer, x, a, attend)[0], None

        step = jax.checkpoint(layer_step) if remat else layer_step
        return jax.lax.scan(step, embed(variables, tokens), layers(variables), unroll=unroll)[0]

    def hidden(variables: Any, tokens: jax.Array, length: jax.Array, completions: jax.Array) -> jax.Array:
        (n, p), (_, g, r), impl = tokens.shape, completions.shape, attention_impl()
        # Nothing asks for the state of the last token, but R rows fill tiles of an accelerator, and R - 1 do not.
        s = r if r > 1 else 0
        rows = lambda x: x.reshape(n, g * s, *x.shape[3:])
        of_groups = lambda x: x[:, p:].reshape(n, g, s, *x.shape[2:])
        own = jnp.broadcast_to(length[:, None, None] + jnp.arange(s), (n, g, s))
        a = angles(jnp.concatenate([jnp.broadcast_to(jnp.arange(p), (n, p)), rows(own)], axis=1))

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, None]:
            out, (pk, pv) = _causal(q[:, :p], k[:, :p], v[:, :p])
            if s:
                of_own = group_attention(of_groups(q), pk, pv, length, of_groups(k), of_groups(v), impl=impl)
                out = jnp.concatenate([out, rows(of_own)], axis=1)
            return out, None

        x = trunk(variables, jnp.concatenate([tokens, rows(completions[:, :, :s])], axis=1), a, attend)
        first = jnp.broadcast_to(last(x[:, :p], length)[:, None, None], (n, g, 1, cfg.hidden_size))
        return final(variables, jnp.concatenate([first, of_groups(x)[:, :, :-1]], axis=2))

    def hidden_tree(variables: Any, tokens: jax.Array, position: jax.Array, end: jax.Array) -> jax.Array:
        impl = attention_impl()
        attend: Attend = lambda q, k, v: (tree_attention(q, k, v, end, impl=impl), None)
        return final(variables, trunk(variables, tokens, angles(position), attend))

    return Policy(cfg, init, prefill, decode, init_suffix, hidden, Unembed(head), embed, unstack, extend, hidden_tree)
