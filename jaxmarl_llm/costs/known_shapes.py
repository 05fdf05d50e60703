"""Shapes of public models, for planning without their weights: the fields of their config.json on the Hugging Face hub.

`shape_only` turns a training configuration that names one of them into the same one without files: a random backbone
of the same shape. What a program costs depends on nothing else.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxmarl_llm import qwen
from jaxmarl_llm.stages import BaseConfig
from jaxmarl_llm.team import Backbone, shape_of
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.tokenizer import ByteTokenizer

FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
# name: the FIELDS, whether embeddings are tied, family. (Qwen2.5-Coder has the shapes of Qwen2.5.)
SHAPES: dict[str, tuple[tuple[int, ...], bool, str]] = {
    "Qwen2.5-0.5B": ((151936, 896, 4864, 24, 14, 2, 64), True, "qwen2"),
    "Qwen2.5-1.5B": ((151936, 1536, 8960, 28, 12, 2, 128), True, "qwen2"),
    "Qwen2.5-3B": ((151936, 2048, 11008, 36, 16, 2, 128), True, "qwen2"),
    "Qwen2.5-7B": ((152064, 3584, 18944, 28, 28, 4, 128), False, "qwen2"),
    "Qwen2.5-14B": ((152064, 5120, 13824, 48, 40, 8, 128), False, "qwen2"),
    "Qwen2.5-32B": ((152064, 5120, 27648, 64, 40, 8, 128), False, "qwen2"),
    "Qwen3-1.7B": ((151936, 2048, 6144, 28, 16, 8, 128), True, "qwen3"),
}


def architecture(backbone: Backbone) -> qwen.Config:
    """Of a folder, of a name in SHAPES (``Qwen/Qwen2.5-3B-Instruct``), or of the shape the backbone itself gives.

    A vocabulary that the backbone leaves to its tokenizer is that of bytes.
    """
    if backbone.path is not None and not Path(backbone.path).exists():
        name = Path(backbone.path).name.replace("-Coder", "").removesuffix("-Instruct")
        if name not in SHAPES:
            raise ConfigError(
                f"config.team.backbone.path: {backbone.path!r} is no folder, and no shape is known by that name; "
                f"known: {', '.join(SHAPES)}"
            )
        numbers, tied, family = SHAPES[name]
        return qwen.Config(
            **dict(zip(FIELDS, numbers)),
            rope_theta=1e6,
            tie_embeddings=tied,
            attention_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            family=family,
            dtype=backbone.dtype,
        )
    return shape_of(backbone, ByteTokenizer().vocab_size)


def shape_only(cfg: BaseConfig) -> BaseConfig:
    """``cfg`` with backbones of the same shapes that need no file, and the data that its environment brings along."""

    def bare(backbone: Backbone) -> Backbone:
        arch = architecture(backbone)
        fields = {name: getattr(arch, name) for name in (*FIELDS, "rope_theta", "tie_embeddings", "family", "dtype")}
        return Backbone(**fields)

    team = dataclasses.replace(
        cfg.team,
        backbone=bare(cfg.team.backbone),
        overrides={role: bare(b) for role, b in cfg.team.overrides.items()},
    )
    args = {k: v for k, v in cfg.env.args.items() if k != "data"}
    return dataclasses.replace(cfg, team=team, env=dataclasses.replace(cfg.env, args=args))
