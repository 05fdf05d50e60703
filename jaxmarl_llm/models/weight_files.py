"""Readers of checkpoint files: a Hugging Face directory of safetensors, and a GGUF file.

A reader has the names and shapes of its tensors from headers alone (``shapes``) and reads one tensor at a time
(``read``). Every error is a `ConfigError` of one line that names the file.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.decoder import Config
from jaxmarl_llm.models.hf_config import read_hf_config

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: the file.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: file is missing")
    try:
        value = json.loads(path.read_text())
    except ValueError as error:  # JSON or UTF-8
        refuse_pointer(path)
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def refuse_pointer(path: Path) -> None:
    """Raise `ConfigError` for a Git LFS pointer in place of a file.

    Args:
        path: the file.
    """
    with open(path, "rb") as file:
        if file.read(23) == b"version https://git-lfs":
            size = path.stat().st_size
            raise ConfigError(f"{path}: a Git LFS pointer of {size} bytes, not the file; fetch it with git lfs pull")


def directory_config(path: Path) -> Config:
    """Read the architecture from config.json.

    Args:
        path: a Hugging Face directory.
    """
    file = path / "config.json"
    return read_hf_config(read_json(file), str(file))


class Safetensors:
    """Reader of the safetensors files of a Hugging Face directory.

    Args:
        path: the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        index = path / "model.safetensors.index.json"
        if (path / "model.safetensors").is_file():
            self._add(path / "model.safetensors")
        elif index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ConfigError(f"{index}: key 'weight_map' is missing")
            for name in sorted(set(weight_map.values())):
                if Path(name).name != name:
                    raise ConfigError(f"{index}: shard {name!r} is not a plain file name")
                self._add(path / name)
            for name, shard in weight_map.items():
                if self._file.get(name) != path / shard:
                    raise ConfigError(f"{path / shard}: tensor {name} is missing; {index.name} lists it there")
        else:
            raise ConfigError(f"{path}: expected model.safetensors or model.safetensors.index.json, found neither")

    def _add(self, file: Path) -> None:
        if not file.is_file():
            raise ConfigError(f"{file}: shard is missing")
        refuse_pointer(file)
        size = file.stat().st_size
        with open(file, "rb") as stream:
            start = stream.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length <= size - 8:
                raise ConfigError(f"{file}: expected a safetensors header, found {size} bytes without one")
            try:
                header = json.loads(stream.read(length))
            except ValueError as error:
                raise ConfigError(f"{file}: its safetensors header is not JSON: {error}") from error
        header.pop("__metadata__", None)
        expected = 8 + length + max((t["data_offsets"][1] for t in header.values()), default=0)
        if size != expected:
            raise ConfigError(f"{file}: expected {expected} bytes, found {size}")
        for name, tensor in header.items():
            if tensor["dtype"] not in DTYPES:
                raise ConfigError(
                    f"{file}: tensor {name} has dtype {tensor['dtype']}; expected one of {', '.join(DTYPES)}"
                )
            self.shapes[name] = tuple(tensor["shape"])
            self._file[name] = file

    def where(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._file[name]

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a tensor, or a part of it.

        Args:
            name: name of the tensor.
            index: one slice for each axis; () is all of it.
        """
        from safetensors import safe_open

        file = self._file[name]
        if self._open is None or self._open[0] != file:
            self._open = file, safe_open(file, framework="numpy")
        whole = all(s.indices(n) == (0, n, 1) for s, n in zip(index, self.shapes[name]))
        return self._open[1].get_tensor(name) if whole else self._open[1].get_slice(name)[index]

    def tokenizer_vocab(self) -> int:
        """Count the ids of the tokenizer beside the weights; 0 without one."""
        file = self.path / "tokenizer.json"
        if not file.is_file():
            return 0
        spec = read_json(file)
        vocab = spec.get("model", {}).get("vocab", {})
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        return 1 + max([*ids, *(t["id"] for t in spec.get("added_tokens", ()))], default=-1)


# Architectures whose tensors map one to one; Llama converters interleave the rows of q and k (undone on reading).
ARCHITECTURES = ("llama", "qwen2", "qwen3")
KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
TOP = {"token_embd.weight": EMBED, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUF:
    """Reader of a GGUF file. Tensors have their Hugging Face names and are dequantized one by one.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ConfigError(f"{path}: reading GGUF needs the gguf package: pip install gguf") from error
        self.path = path
        if not path.is_file():
            raise ConfigError(f"{path}: file is missing")
        refuse_pointer(path)
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise ConfigError(f"{path}: not a whole GGUF file of {path.stat().st_size} bytes: {error}") from error
        self.arch = self._get("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise ConfigError(f"{path}: architecture {self.arch!r}; expected one of {', '.join(ARCHITECTURES)}")
        self._heads = {"attn_q": self._get(f"{self.arch}.attention.head_count")}
        self._heads["attn_k"] = self._get(f"{self.arch}.attention.head_count_kv", self._heads["attn_q"])
        self._tensors = {self._rename(t.name): t for t in self._reader.tensors}
        self.shapes = {name: tuple(int(n) for n in t.shape[::-1]) for name, t in self._tensors.items()}

    def _get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        if field is None and default is None:
            raise ConfigError(f"{self.path}: metadata {key} is missing")
        return default if field is None else field.contents()

    @staticmethod
    def _rename(name: str) -> str:
        if name in TOP:
            return TOP[name]
        block, _, rest = name.partition(".")
        layer, _, rest = rest.partition(".")
        module, _, end = rest.partition(".")
        if block == "blk" and module in LAYER:
            return f"model.layers.{layer}.{LAYER[module]}.{end}"
        return name

    def config(self) -> Config:
        """Read the architecture from the metadata."""
        hf = {key: self._get(f"{self.arch}.{name}") for key, name in KEYS.items()}
        for key, name in OPTIONAL.items():
            if self._reader.get_field(f"{self.arch}.{name}") is not None:
                hf[key] = self._get(f"{self.arch}.{name}")
        hf.setdefault("num_key_value_heads", hf["num_attention_heads"])
        hf.setdefault("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
        key = f"{self.arch}.rope.scaling.type"
        scaling = self._get(key, "none")
        if scaling not in ("none", "linear"):
            raise ConfigError(f"{self.path}: metadata {key} is {scaling!r}; expected none or linear")
        if scaling == "linear":
            hf["rope_scaling"] = {"rope_type": scaling, "factor": self._get(f"{self.arch}.rope.scaling.factor")}
        if EMBED not in self.shapes:
            raise ConfigError(f"{self.path}: tensor token_embd.weight is missing")
        tied = HEAD not in self.shapes
        hf |= {"model_type": self.arch, "vocab_size": self.shapes[EMBED][0], "tie_word_embeddings": tied}
        return read_hf_config(hf, str(self.path))

    def where(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self.path

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a tensor, or a part of it, as `Safetensors.read` does."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:  # so gguf says that it has no code for a type of quantisation
            kind = tensor.tensor_type.name
            raise ConfigError(f"{self.path}: tensor {tensor.name} has type {kind}, which cannot be read") from error
        module = tensor.name.split(".")[-2]
        if self.arch == "llama" and module in self._heads:
            heads = self._heads[module]
            value = value.reshape(heads, value.shape[0] // heads // 2, 2, -1).swapaxes(1, 2)
        return value.reshape(self.shapes[name])[index]

    def tokenizer_vocab(self) -> int:
        """Count the ids of the tokenizer in the file; 0 without one."""
        field = self._reader.get_field("tokenizer.ggml.tokens")
        return 0 if field is None else len(field.data)
