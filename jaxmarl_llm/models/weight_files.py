"""Readers of checkpoint files: a Hugging Face directory of safetensors, and a GGUF file.

A reader has the names and shapes of its tensors from headers alone (``shapes``) and reads one tensor at a time
(``read``). Every error is a `ConfigError` of one line that names the file.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxmarl_llm import json_files
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.gguf_file import GGUFFile
from jaxmarl_llm.models.hf_config import read_hf_config
from jaxmarl_llm.models.tokenizer_files import vocabulary

WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. It may hold NaN and Infinity, which the checks of its keys refuse by name.

    Args:
        path: the file.
    """
    if path.is_file():
        refuse_pointer(path)
    return json_files.read_object(path, nan=True)


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
            self._add_shards(index)
        else:
            raise ConfigError(f"{path}: expected model.safetensors or model.safetensors.index.json, found neither")

    def _add_shards(self, index: Path) -> None:
        values = read_json(index)
        json_files.check(values, {"weight_map": dict}, str(index))
        weight_map = values["weight_map"]
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard or "\0" in shard or len(shard) > 200:
                found = json_files.shown(shard)
                raise ConfigError(f"{index}: weight_map: key {name!r:.80}: shard {found} is not a plain file name")
        for shard in sorted(set(weight_map.values())):
            self._add(self.path / shard)
        for name, shard in weight_map.items():
            if self._file.get(name) != self.path / shard:
                raise ConfigError(f"{self.path / shard}: tensor {name!r:.80} is missing; {index.name} lists it there")

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
            if length > json_files.MAX_BYTES:
                raise ConfigError(f"{file}: expected a header of at most {json_files.MAX_BYTES} bytes, found {length}")
            where = f"{file}: its safetensors header"
            header = json_files.parse(json_files.decoded(stream.read(length), where), where)
        if not isinstance(header, dict):
            raise ConfigError(f"{file}: expected a safetensors header that is a JSON object")
        header.pop("__metadata__", None)
        spans = sorted((*_span(file, name, tensor), name) for name, tensor in header.items())
        end = 0
        for first, last, name in spans:
            if first != end:
                what = "overlaps the tensor before it" if first < end else f"leaves {first - end} bytes before it"
                raise ConfigError(f"{file}: tensor {name!r:.80}: key 'data_offsets' {what}")
            end = last
        if size != 8 + length + end:
            raise ConfigError(f"{file}: expected {8 + length + end} bytes, found {size}")
        for name, tensor in header.items():
            if name in self._file:
                raise ConfigError(f"{file}: tensor {name!r:.80} is in {self._file[name].name} too")
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
        ids = vocabulary(read_json(file), file)
        if not all(type(id) is int for id in ids):
            raise ConfigError(f"{file}: model: key 'vocab': expected integers as ids")
        return 1 + max(ids, default=-1)


def _span(file: Path, name: str, tensor: Any) -> tuple[int, int]:
    """Return the first byte of a tensor and the one behind it, checked against its type and shape.

    Args:
        file: the file, for errors.
        name: name of the tensor.
        tensor: what the header says of it.
    """
    where = f"{file}: tensor {name!r:.80}"
    if not isinstance(tensor, dict):
        raise ConfigError(f"{where}: expected an object, found {json_files.shown(tensor)}")
    json_files.check(tensor, {"dtype": str, "shape": list, "data_offsets": list}, where)
    shape, span = tensor["shape"], tensor["data_offsets"]
    if tensor["dtype"] not in DTYPES:
        found = json_files.shown(tensor["dtype"])
        raise ConfigError(f"{where} has dtype {found}; expected one of {', '.join(DTYPES)}")
    for key, values in (("shape", shape), ("data_offsets", span)):
        if not all(type(n) is int and 0 <= n < 2**63 for n in values):
            raise ConfigError(
                f"{where}: key {key!r}: expected integers of at least 0, found {json_files.shown(values)}"
            )
    expected = math.prod(shape) * WIDTHS[tensor["dtype"]]
    if len(span) != 2 or span[1] - span[0] != expected:
        found = json_files.shown(span)
        raise ConfigError(f"{where}: key 'data_offsets': expected two that are {expected} apart, found {found}")
    return span[0], span[1]


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
        self.path = path
        if not path.is_file():
            raise ConfigError(f"{path}: file is missing")
        refuse_pointer(path)
        self._reader = GGUFFile(path)
        self.arch = self._get("general.architecture")
        if self.arch not in ARCHITECTURES:
            found = json_files.shown(self.arch)
            raise ConfigError(
                f"{path}: metadata general.architecture: architecture {found}; expected one of "
                f"{', '.join(ARCHITECTURES)}"
            )
        self._heads = {"attn_q": self._count("attention.head_count")}
        self._heads["attn_k"] = self._count("attention.head_count_kv", self._heads["attn_q"])
        self._names = {self._rename(name): name for name in self._reader.tensors}
        if len(self._names) != len(self._reader.tensors):
            raise ConfigError(f"{path}: two tensors have one Hugging Face name")
        self.shapes = {name: self._reader.tensors[own].shape for name, own in self._names.items()}

    def _get(self, key: str, default: Any = None) -> Any:
        value = self._reader.metadata.get(key, default)
        if value is None:
            raise ConfigError(f"{self.path}: metadata {key} is missing")
        return value

    def _count(self, name: str, default: Any = None) -> int:
        value = self._get(f"{self.arch}.{name}", default)
        if type(value) is not int or value < 1:
            found = json_files.shown(value)
            raise ConfigError(f"{self.path}: metadata {self.arch}.{name}: expected an integer from 1, found {found}")
        return value

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
        self._count("embedding_length")
        for key, name in OPTIONAL.items():
            if f"{self.arch}.{name}" in self._reader.metadata:
                hf[key] = self._get(f"{self.arch}.{name}")
        hf.setdefault("num_key_value_heads", hf["num_attention_heads"])
        hf.setdefault("head_dim", hf["hidden_size"] // hf["num_attention_heads"])
        key = f"{self.arch}.rope.scaling.type"
        scaling = self._get(key, "none")
        if not isinstance(scaling, str) or scaling not in ("none", "linear"):
            found = json_files.shown(scaling)
            raise ConfigError(f"{self.path}: metadata {key} is {found}; expected none or linear")
        if scaling == "linear":
            hf["rope_scaling"] = {"rope_type": scaling, "factor": self._get(f"{self.arch}.rope.scaling.factor")}
        if len(self.shapes.get(EMBED, ())) != 2:
            raise ConfigError(f"{self.path}: tensor token_embd.weight is missing, or has not two axes")
        tied = HEAD not in self.shapes
        hf |= {"model_type": self.arch, "vocab_size": self.shapes[EMBED][0], "tie_word_embeddings": tied}
        return read_hf_config(hf, str(self.path))

    def where(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self.path

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read a tensor, or a part of it, as `Safetensors.read` does."""
        own = self._names[name]
        kind = self._reader.tensors[own].kind
        try:
            value = _numbers(self._reader.data(own), kind)
        except NotImplementedError as error:  # so gguf says that it has no code for a type of quantisation
            raise ConfigError(f"{self.path}: tensor {own} has type {kind.name}, which cannot be read") from error
        module = own.split(".")[-2] if "." in own else ""
        if self.arch == "llama" and module in self._heads:
            heads = self._heads[module]
            value = value.reshape(heads, value.shape[0] // heads // 2, 2, -1).swapaxes(1, 2)
        return value.reshape(self.shapes[name])[index]

    def tokenizer_vocab(self) -> int:
        """Count the ids of the tokenizer in the file; 0 without one."""
        tokens = self._reader.metadata.get("tokenizer.ggml.tokens", ())
        if not isinstance(tokens, (tuple, list)):
            raise ConfigError(f"{self.path}: metadata tokenizer.ggml.tokens: expected a list of texts")
        return len(tokens)


def _numbers(raw: np.ndarray, kind: Any) -> np.ndarray:
    """Return the numbers of a tensor in float32.

    Args:
        raw: its bytes, [..., bytes].
        kind: its type, a gguf.GGMLQuantizationType.
    """
    from gguf.quants import dequantize

    plain = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}.get(kind.name)
    return raw.view(plain).astype(np.float32) if plain else dequantize(raw, kind).astype(np.float32, copy=False)
