"""Adapters as folders of PEFT: adapter_config.json and adapter_model.safetensors, which `peft` and vLLM load."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.types import Params


def save(path: str | Path, lora: Params, config: Config, base: str) -> None:
    """Write an adapter.

    PEFT adds ``lora_alpha / r`` times B A x. Its A is [r, in] and its B is [out, r], the transposes of ours.

    Args:
        path: Folder to write; must not exist.
        lora: Adapter, as `lora.init_lora` makes it.
        config: Architecture of the backbone; its ``lora_scale`` is written.
        base: Name of the backbone on a hub, or its path from inside ``path``, such as ``../base``. Loaders that read it
            take a path as one from the current folder, so they run in ``path``.

    Raises:
        ConfigError: The folder exists.
    """
    path = Path(path)
    if path.exists():
        raise ConfigError(f"export {path}: it exists; name a new folder")
    tensors: dict[str, np.ndarray] = {}
    rank = 0
    for block, modules in lora.items():
        for name, ab in modules.items():
            a, b = np.asarray(ab["a"], np.float32), np.asarray(ab["b"], np.float32)
            rank = a.shape[-1]
            for layer in range(len(a)):
                where = f"base_model.model.model.layers.{layer}.{block}.{name}"
                tensors[f"{where}.lora_A.weight"] = np.ascontiguousarray(a[layer].T)
                tensors[f"{where}.lora_B.weight"] = np.ascontiguousarray(b[layer].T)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": config.lora_scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name for modules in lora.values() for name in modules}),
        "inference_mode": True,
    }
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    (path / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
