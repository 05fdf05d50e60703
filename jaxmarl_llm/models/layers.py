"""Modules of a decoder: norm, linear map with its adapter, attention, feed-forward layer and block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxmarl_llm.distributed.heads import cut_heads, lay_heads
from jaxmarl_llm.kernels.matmul import matmul
from jaxmarl_llm.models import rope
from jaxmarl_llm.models.decoder_config import Config

# (q [... T Q H], k [... T K H], v) -> (attention [... T Q H], the keys and values to keep)
Attend = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


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
            return y if name == "v" else rope.rotate(y, angles, rope.magnitude(cfg))

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
