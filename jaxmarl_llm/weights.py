"""Hugging Face checkpoints in and out: safetensors directories both ways, GGUF files in.

Weights are streamed: one tensor of the file is in memory at a time, beside the one leaf (all layers, stacked) that is
being filled; each full leaf goes to its devices before the next begins. Everything that can be known from headers
(files, names, shapes, sizes) is checked before the first tensor is read, so nothing is half-loaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.qwen import Config
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.tokenizer import Tokenizer

_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"


class Leaf(NamedTuple):
    """One array of the parameter tree and the Hugging Face tensors it is made of (one a layer when stacked)."""

    path: tuple[str, ...]
    names: tuple[str, ...]
    shape: tuple[int, ...]  # of one tensor, as Hugging Face stores it: kernels are [out, in] there, [in, out] here
    transpose: bool
    stacked: bool

    @property
    def full_shape(self) -> tuple[int, ...]:
        shape = self.shape[::-1] if self.transpose else self.shape
        return (len(self.names), *shape) if self.stacked else shape


def leaves(cfg: Config) -> list[Leaf]:
    """Every leaf of the parameters of ``cfg``."""
    d, f, h = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    heads = {"q": cfg.num_heads * h, "k": cfg.num_kv_heads * h, "v": cfg.num_kv_heads * h}
    layer: dict[tuple[str, ...], tuple[int, ...]] = {("input_layernorm", "scale"): (d,)}
    for name, width in heads.items():
        layer["self_attn", f"{name}_proj", "kernel"] = (width, d)
        if cfg.attention_bias:
            layer["self_attn", f"{name}_proj", "bias"] = (width,)
        if cfg.qk_norm and name != "v":
            layer["self_attn", f"{name}_norm", "scale"] = (h,)
    layer["self_attn", "o_proj", "kernel"] = (d, heads["q"])
    layer["post_attention_layernorm", "scale"] = (d,)
    layer |= {("mlp", "gate_proj", "kernel"): (f, d), ("mlp", "up_proj", "kernel"): (f, d)}
    layer["mlp", "down_proj", "kernel"] = (d, f)

    out = [Leaf(("embed", "embedding"), (_EMBED,), (cfg.vocab_size, d), False, False)]
    for path, shape in layer.items():
        end = "bias" if path[-1] == "bias" else "weight"
        names = tuple(".".join(("model.layers", str(i), *path[:-1], end)) for i in range(cfg.num_layers))
        out.append(Leaf(("layers", *path), names, shape, path[-1] == "kernel", True))
    out.append(Leaf(("norm", "scale"), ("model.norm.weight",), (d,), False, False))
    if not cfg.tie_embeddings:
        out.append(Leaf(("lm_head", "kernel"), (_HEAD,), (cfg.vocab_size, d), True, False))
    return out


def read_config(path: str | Path) -> Config:
    """The architecture in a Hugging Face directory (config.json) or a GGUF file (its metadata)."""
    path = Path(path)
    return _GGUF(path).config() if path.suffix == ".gguf" else _directory_config(path)


def load(
    path: str | Path, config: Config | None = None, *, dtype: Any = jnp.float32, sharding: Any = None
) -> tuple[Any, Config]:
    """Parameters and config of a Hugging Face directory or GGUF file.

    ``sharding``: where the leaves go. None (the default device), one Sharding, a tree of them shaped like the
    parameters, or a function of a leaf's path (a tuple of keys) that returns a Sharding or None.
    """
    path, dtype = Path(path), jnp.dtype(dtype)
    source: _GGUF | _Safetensors
    if path.suffix == ".gguf":
        source = _GGUF(path)
        config = config or source.config()
    else:
        config = config or _directory_config(path)
        source = _Safetensors(path)
    config = dataclasses.replace(config, dtype=dtype.name)
    _check(source, config)
    params: dict[str, Any] = {}
    for leaf in leaves(config):
        host = np.empty(leaf.full_shape, dtype)
        for i, name in enumerate(leaf.names):
            tensor = source.read(name)
            host[i if leaf.stacked else ...] = tensor.T if leaf.transpose else tensor
        *parents, last = leaf.path
        node = params
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = _place(host, _sharding_of(sharding, leaf.path))
    return params, config


def save(
    path: str | Path,
    params: Any,
    config: Config,
    tokenizer: Tokenizer | None = None,
    *,
    dtype: Any = None,
    max_shard_bytes: int = 4 * 1024**3,
    overwrite: bool = False,
) -> None:
    """Writes a directory that ``transformers.AutoModelForCausalLM`` loads; ``dtype`` None keeps ``config.dtype``.

    It is written under a hidden name beside ``path`` and renamed when complete. Tokenizers without transformers files
    (bytes) leave only their eos and pad ids.
    """
    path, dtype = Path(path), jnp.dtype(dtype or config.dtype)
    if dtype.name not in _DTYPES.values():
        raise ConfigError(f"export {path}: dtype {dtype.name} is not supported; known: {', '.join(_DTYPES.values())}")
    if path.exists() and not overwrite:
        raise ConfigError(f"export {path}: it exists; remove it or give overwrite=True")
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"export {path}: tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, "
            f"the embedding {config.vocab_size} rows"
        )
    found = {tuple(str(k.key) for k in p): leaf for p, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
    expected = {leaf.path: leaf for leaf in leaves(config)}
    for key in sorted(found.keys() | expected.keys()):
        have = tuple(found[key].shape) if key in found else "nothing"
        want = expected[key].full_shape if key in expected else "nothing"
        if have != want:
            raise ConfigError(f"export {path}: parameter {'/'.join(key)}: expected {want}, found {have}")

    temporary = path.parent / f".{path.name}.tmp"
    if temporary.exists():
        shutil.rmtree(temporary)  # of an export that was killed
    temporary.mkdir(parents=True)
    try:
        if tokenizer is not None:
            tokenizer.save(temporary)
        _write_json(temporary / "config.json", {**config.to_hf(), "dtype": dtype.name})
        ids = {"eos_token_id": list(tokenizer.stop_ids), "pad_token_id": tokenizer.pad_id} if tokenizer else {}
        _write_json(temporary / "generation_config.json", ids)
        _write_tensors(temporary, expected, found, dtype, max_shard_bytes)
        if path.exists():
            old = path.parent / f".{path.name}.old"
            if old.exists():
                shutil.rmtree(old)
            path.rename(old)
            temporary.rename(path)
            shutil.rmtree(old)
        else:
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_tensors(
    folder: Path, expected: Mapping[Any, Leaf], found: Mapping[Any, Any], dtype: np.dtype, limit: int
) -> None:
    shards: list[list[tuple[str, Leaf, int]]] = [[]]
    size = total = 0
    for leaf in expected.values():
        for i, name in enumerate(leaf.names):
            count = int(np.prod(leaf.shape)) * dtype.itemsize
            if shards[-1] and size + count > limit:
                shards.append([])
                size = 0
            shards[-1].append((name, leaf, i))
            size, total = size + count, total + count
    code = next(k for k, v in _DTYPES.items() if v == dtype.name)
    weight_map = {}
    for n, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, leaf, _ in shard:
            end = at + int(np.prod(leaf.shape)) * dtype.itemsize
            header[name] = {"dtype": code, "shape": list(leaf.shape), "data_offsets": [at, end]}
            weight_map[name] = file
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _, leaf, i in shard:
                value = found[leaf.path]
                tensor = np.asarray(value[i] if leaf.stacked else value).astype(dtype)
                out.write(np.ascontiguousarray(tensor.T if leaf.transpose else tensor).tobytes())
            out.flush()
            os.fsync(out.fileno())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _sharding_of(sharding: Any, path: tuple[str, ...]) -> jax.sharding.Sharding | None:
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return sharding
    if callable(sharding):
        return sharding(path)
    for key in path:
        sharding = sharding[key]
    return sharding


def _place(host: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return jnp.asarray(host)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _check(source: _GGUF | _Safetensors, config: Config) -> None:
    """Names and shapes of the whole source against the config, before anything is read."""
    have = dict(source.shapes)
    for leaf in leaves(config):
        for name in leaf.names:
            if name not in have:
                raise ConfigError(f"{source.path}: tensor {name} is missing; expected shape {leaf.shape}")
            shape = have.pop(name)
            if shape != leaf.shape:
                raise ConfigError(f"{source.where(name)}: tensor {name}: expected shape {leaf.shape}, found {shape}")
    if config.tie_embeddings and _HEAD in have:
        del have[_HEAD]
        if not np.array_equal(source.read(_HEAD), source.read(_EMBED)):
            raise ConfigError(f"{source.where(_HEAD)}: {_HEAD} differs from the embedding, yet the config ties them")
    llama3 = dict(config.rope_scaling or ()).get("rope_type") == "llama3"
    if "rope_freqs.weight" in have and not llama3:
        raise ConfigError(f"{source.path}: rope_freqs.weight (llama3 rope scaling): give config= with its rope_scaling")
    known = ("rotary_emb.inv_freq", "rope_freqs.weight")
    extra = sorted(name for name in have if not name.endswith(known))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ConfigError(
            f"{source.where(extra[0])}: unknown tensor {extra[0]}{more}; expected a {config.family} model"
        )
    vocab = source.tokenizer_vocab()
    if vocab > config.vocab_size:
        raise ConfigError(f"{source.path}: its tokenizer has {vocab} ids, the embedding {config.vocab_size} rows")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path}: file is missing")
    try:
        value = json.loads(path.read_text())
    except ValueError as error:  # JSON or UTF-8
        _refuse_pointer(path)
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _refuse_pointer(path: Path) -> None:
    with open(path, "rb") as file:
        if file.read(23) == b"version https://git-lfs":
            size = path.stat().st_size
            raise ConfigError(f"{path}: a Git LFS pointer of {size} bytes, not the file; fetch it with git lfs pull")


def _directory_config(path: Path) -> Config:
    hf = _read_json(path / "config.json")
    try:
        return Config.from_hf(hf)
    except KeyError as error:
        raise ConfigError(f"{path / 'config.json'}: key {error} is missing") from error


class _Safetensors:
    """Tensors of a Hugging Face directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._file: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        index = path / "model.safetensors.index.json"
        if (path / "model.safetensors").is_file():
            self._add(path / "model.safetensors")
        elif index.is_file():
            weight_map = _read_json(index).get("weight_map")
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
        _refuse_pointer(file)
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
            if tensor["dtype"] not in _DTYPES:
                raise ConfigError(
                    f"{file}: tensor {name} has dtype {tensor['dtype']}; expected one of {', '.join(_DTYPES)}"
                )
            self.shapes[name] = tuple(tensor["shape"])
            self._file[name] = file

    def where(self, name: str) -> Path:
        return self._file[name]

    def read(self, name: str) -> np.ndarray:
        from safetensors import safe_open

        file = self._file[name]
        if self._open is None or self._open[0] != file:
            self._open = file, safe_open(file, framework="numpy")
        return self._open[1].get_tensor(name)

    def tokenizer_vocab(self) -> int:
        file = self.path / "tokenizer.json"
        if not file.is_file():
            return 0
        spec = _read_json(file)
        vocab = spec.get("model", {}).get("vocab", {})
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        return 1 + max([*ids, *(t["id"] for t in spec.get("added_tokens", ()))], default=-1)


# Architectures whose tensors map one to one; Llama converters interleave the rows of q and k (undone on reading).
_GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_GGUF_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_GGUF_OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
_GGUF_TOP = {"token_embd.weight": _EMBED, "output_norm.weight": "model.norm.weight", "output.weight": _HEAD}
_GGUF_LAYER = {
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


class _GGUF:
    """Tensors of a GGUF file under their Hugging Face names, dequantized one by one."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ConfigError(f"{path}: reading GGUF needs the gguf package: pip install gguf") from error
        self.path = path
        if not path.is_file():
            raise ConfigError(f"{path}: file is missing")
        _refuse_pointer(path)
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise ConfigError(f"{path}: not a whole GGUF file of {path.stat().st_size} bytes: {error}") from error
        self.arch = self._get("general.architecture")
        if self.arch not in _GGUF_ARCHITECTURES:
            raise ConfigError(f"{path}: architecture {self.arch!r}; expected one of {', '.join(_GGUF_ARCHITECTURES)}")
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
        if name in _GGUF_TOP:
            return _GGUF_TOP[name]
        block, _, rest = name.partition(".")
        layer, _, rest = rest.partition(".")
        module, _, end = rest.partition(".")
        if block == "blk" and module in _GGUF_LAYER:
            return f"model.layers.{layer}.{_GGUF_LAYER[module]}.{end}"
        return name

    def config(self) -> Config:
        hf = {key: self._get(f"{self.arch}.{name}") for key, name in _GGUF_KEYS.items()}
        for key, name in _GGUF_OPTIONAL.items():
            if self._reader.get_field(f"{self.arch}.{name}") is not None:
                hf[key] = self._get(f"{self.arch}.{name}")
        scaling = self._get(f"{self.arch}.rope.scaling.type", "none")
        if scaling != "none":
            hf["rope_scaling"] = {"rope_type": scaling, "factor": self._get(f"{self.arch}.rope.scaling.factor")}
        if _EMBED not in self.shapes:
            raise ConfigError(f"{self.path}: tensor token_embd.weight is missing")
        tied = _HEAD not in self.shapes
        return Config.from_hf(
            {**hf, "model_type": self.arch, "vocab_size": self.shapes[_EMBED][0], "tie_word_embeddings": tied}
        )

    def where(self, name: str) -> Path:
        return self.path

    def read(self, name: str) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            value = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ConfigError(f"{self.path}: tensor {tensor.name} has type {kind}, which cannot be read") from error
        module = tensor.name.split(".")[-2]
        if self.arch == "llama" and module in self._heads:
            heads = self._heads[module]
            value = value.reshape(heads, value.shape[0] // heads // 2, 2, -1).swapaxes(1, 2)
        return value.reshape(self.shapes[name])

    def tokenizer_vocab(self) -> int:
        field = self._reader.get_field("tokenizer.ggml.tokens")
        return 0 if field is None else len(field.data)
