"""Architecture of a decoder: its sizes, and the switches by which the families differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
