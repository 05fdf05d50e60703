"""Rotary position embeddings, with the scalings of the Llama family and YaRN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.decoder_config import Config


def frequencies(cfg: Config) -> np.ndarray:
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
        freq = _yarn(freq, scaling, cfg.rope_theta)
    return freq.astype(np.float32)


def _yarn(freq: np.ndarray, scaling: Mapping[str, Any], theta: float) -> np.ndarray:
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


def magnitude(cfg: Config) -> float:
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


def angles(cfg: Config, positions: jax.Array) -> jax.Array:
    """Compute rotary angles [... T H/2].

    Args:
        cfg: the architecture.
        positions: of tokens, from 0 [... T].
    """
    return positions[..., None].astype(jnp.float32) * frequencies(cfg)


def rotate(x: jax.Array, angles: jax.Array, factor: float = 1.0) -> jax.Array:
    """Apply rotary embeddings in the halves convention.

    Args:
        x: queries or keys [... T heads H].
        angles: rotation angles [... T H/2].
        factor: of the result, see `magnitude`.
    """
    cos, sin = jnp.cos(angles)[..., None, :], jnp.sin(angles)[..., None, :]
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
