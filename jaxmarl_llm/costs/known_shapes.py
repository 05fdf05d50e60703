"""Shapes of public models, for planning without weights. Source: config.json of each model on the Hugging Face hub.

`shape_only` replaces the backbone of a training configuration by a random one of the same shape, which needs no files.
The cost of a program depends only on the shape. A folder needs its config.json and nothing else.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxmarl_llm.agents.team import Backbone, shape_of
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models import decoder_config
from jaxmarl_llm.models.hf_weights import read_config
from jaxmarl_llm.models.tokenizer import ByteTokenizer, HFTokenizer
from jaxmarl_llm.training.config import BaseConfig

FIELDS = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
# name -> (values of FIELDS, whether embeddings are tied, family). Qwen2.5-Coder has the shapes of Qwen2.5.
SHAPES: dict[str, tuple[tuple[int, ...], bool, str]] = {
    "Qwen2.5-0.5B": ((151936, 896, 4864, 24, 14, 2, 64), True, "qwen2"),
    "Qwen2.5-1.5B": ((151936, 1536, 8960, 28, 12, 2, 128), True, "qwen2"),
    "Qwen2.5-3B": ((151936, 2048, 11008, 36, 16, 2, 128), True, "qwen2"),
    "Qwen2.5-7B": ((152064, 3584, 18944, 28, 28, 4, 128), False, "qwen2"),
    "Qwen2.5-14B": ((152064, 5120, 13824, 48, 40, 8, 128), False, "qwen2"),
    "Qwen2.5-32B": ((152064, 5120, 27648, 64, 40, 8, 128), False, "qwen2"),
    "Qwen3-1.7B": ((151936, 2048, 6144, 28, 16, 8, 128), True, "qwen3"),
    "SmolLM2-135M": ((49152, 576, 1536, 30, 9, 3, 64), True, "llama"),
}
FOLDERS = {"smollm2": "SmolLM2-135M"}  # `jaxmarl-llm fetch_weights` writes weights/smollm2


def architecture(backbone: Backbone, key: str = "config.team.backbone") -> decoder_config.Config:
    """Architecture of a backbone, from what is there without its weights.

    backbone: has a path to a folder with config.json, or a path that names a model in SHAPES
    (``Qwen/Qwen2.5-3B-Instruct``), or its own sizes. Sizes without a vocabulary size take that of the tokenizer. key:
    name of the backbone in error messages. Raises ConfigError for an unknown name and for a folder that cannot be read.
    """
    if backbone.path is None:
        return shape_of(backbone, backbone.vocab_size or _vocabulary(backbone.tokenizer, f"{key}.tokenizer"))
    if not Path(backbone.path).exists():
        return dataclasses.replace(_known(backbone.path, f"{key}.path"), dtype=backbone.dtype)
    try:
        return shape_of(backbone, ByteTokenizer().vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{key}.path: {error}") from None


def _known(path: str, key: str) -> decoder_config.Config:
    """The shape in SHAPES that ``path`` names. key: name of the path in an error message."""
    name = Path(path).name.replace("-Coder", "").removesuffix("-Instruct")
    name = FOLDERS.get(name, name)
    if name not in SHAPES:
        raise ConfigError(
            f"{key}: {path!r} is no folder, and no shape is known by that name; known: {', '.join(SHAPES)}"
        )
    numbers, tied, family = SHAPES[name]
    vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim = numbers
    return decoder_config.Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=1e5 if family == "llama" else 1e6,
        tie_embeddings=tied,
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        family=family,
    )


def _vocabulary(tokenizer: str | None, key: str) -> int:
    """Number of ids of a tokenizer: of bytes, of a folder with tokenizer.json or config.json, or of a known model."""
    if tokenizer is None or tokenizer == ByteTokenizer.name:
        return ByteTokenizer().vocab_size
    path = Path(tokenizer)
    if not path.exists():
        return _known(tokenizer, key).vocab_size
    try:
        if path.is_file() or (path / "tokenizer.json").is_file():
            return HFTokenizer(path).vocab_size
        return read_config(path).vocab_size
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


def shape_only(cfg: BaseConfig) -> BaseConfig:
    """Copy of ``cfg`` that needs no weights: random backbones of the same shapes.

    Data that is not on this machine is replaced by the packaged data of the environment.
    """

    def bare(backbone: Backbone, key: str) -> Backbone:
        """Random backbone with the shape of ``backbone``."""
        arch = architecture(backbone, key)
        fields = {name: getattr(arch, name) for name in (*FIELDS, "rope_theta", "tie_embeddings", "family", "dtype")}
        return Backbone(**fields)

    team, args = cfg.team, dict(cfg.env.args)
    overrides = {role: bare(b, f"config.team.overrides.{role}") for role, b in team.overrides.items()}
    team = dataclasses.replace(team, backbone=bare(team.backbone, "config.team.backbone"), overrides=overrides)
    if not Path(str(args.get("data", "."))).exists():
        del args["data"]
    stand_in = getattr(cfg.env.module, "stand_in", None)
    args = args if stand_in is None else stand_in(args)
    return dataclasses.replace(cfg, team=team, env=dataclasses.replace(cfg.env, args=args))
