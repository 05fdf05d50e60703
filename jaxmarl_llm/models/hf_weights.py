"""Hugging Face checkpoints in and out: safetensors directories both ways, GGUF files in.

Weights are streamed. One tensor of the file is in memory at a time, beside the one leaf (all layers, stacked) that is
being filled. Where leaves are sharded it is one device's part of both. A part is moved to its device before the next is
read. Files, names, shapes and sizes are known from headers. They are checked before the first tensor is read, so that
no load ends half-way.
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

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.tokenizer import Tokenizer
from jaxmarl_llm.models.weight_files import DTYPES, EMBED, GGUF, HEAD, Safetensors, directory_config


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
    """List the leaves of the parameters of an architecture.

    Args:
        cfg: the architecture.
    """
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

    out = [Leaf(("embed", "embedding"), (EMBED,), (cfg.vocab_size, d), False, False)]
    for path, shape in layer.items():
        end = "bias" if path[-1] == "bias" else "weight"
        names = tuple(".".join(("model.layers", str(i), *path[:-1], end)) for i in range(cfg.num_layers))
        out.append(Leaf(("layers", *path), names, shape, path[-1] == "kernel", True))
    out.append(Leaf(("norm", "scale"), ("model.norm.weight",), (d,), False, False))
    if not cfg.tie_embeddings:
        out.append(Leaf(("lm_head", "kernel"), (HEAD,), (cfg.vocab_size, d), True, False))
    return out


def read_config(path: str | Path) -> Config:
    """Read the architecture of a checkpoint.

    Args:
        path: a Hugging Face directory (its config.json), or a GGUF file (its metadata).
    """
    path = Path(path)
    return GGUF(path).config() if path.suffix == ".gguf" else directory_config(path)


def load(
    path: str | Path, config: Config | None = None, *, dtype: Any = jnp.float32, sharding: Any = None
) -> tuple[Any, Config]:
    """Load parameters and architecture of a checkpoint.

    Args:
        path: a Hugging Face directory or a GGUF file.
        config: the architecture; None reads it from the checkpoint.
        dtype: of the parameters.
        sharding: placement of the leaves. None is the default device. Else one Sharding, a tree of Shardings shaped
            like the parameters, or a function of a leaf's path. The function takes a tuple of keys and returns a
            Sharding or None.
    """
    path, dtype = Path(path), jnp.dtype(dtype)
    source: GGUF | Safetensors
    if path.suffix == ".gguf":
        source = GGUF(path)
        config = config or source.config()
    else:
        config = config or directory_config(path)
        source = Safetensors(path)
    config = dataclasses.replace(config, dtype=dtype.name)
    _check(source, config)
    params: dict[str, Any] = {}
    for leaf in leaves(config):
        *parents, last = leaf.path
        node = params
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = _place(source, leaf, dtype, _sharding_of(sharding, leaf.path))
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
    """Write a directory that ``transformers.AutoModelForCausalLM`` loads.

    It is written under a hidden name beside ``path`` and renamed when complete.

    Args:
        path: the directory to write.
        params: parameters, a tree as `load` returns it.
        config: the architecture.
        tokenizer: the tokenizer to write beside the weights, or None.
        dtype: of the written tensors; None is ``config.dtype``.
        max_shard_bytes: largest size of one file.
        overwrite: whether to replace an existing directory.
    """
    path, dtype = Path(path), jnp.dtype(dtype or config.dtype)
    if dtype.name not in DTYPES.values():
        raise ConfigError(f"export {path}: dtype {dtype.name} is not supported; known: {', '.join(DTYPES.values())}")
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
    code = next(k for k, v in DTYPES.items() if v == dtype.name)
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


def _read(source: GGUF | Safetensors, leaf: Leaf, dtype: np.dtype, index: tuple[slice, ...]) -> np.ndarray:
    """Read the part ``index`` of a leaf. Of a safetensors file no more than this part is read."""
    size = [len(range(*s.indices(n))) for s, n in zip(index, leaf.full_shape)]
    host = np.empty(size, dtype)
    names, part = (leaf.names[index[0]], index[1:]) if leaf.stacked else (leaf.names, index)
    for i, name in enumerate(names):
        tensor = source.read(name, part[::-1] if leaf.transpose else part)
        host[i if leaf.stacked else ...] = tensor.T if leaf.transpose else tensor
    return host


def _place(
    source: GGUF | Safetensors, leaf: Leaf, dtype: np.dtype, sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """Read a leaf and put it on its devices, one device's part at a time.

    jax.make_array_from_callback would hold the parts of all devices in memory before it moves the first.
    """
    shape = leaf.full_shape
    if sharding is None:
        return jnp.asarray(_read(source, leaf, dtype, (slice(None),) * len(shape)))
    of_part: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        of_part.setdefault(tuple(s.indices(n)[:2] for s, n in zip(index or (), shape)), []).append(device)
    arrays = []
    for bounds, devices in of_part.items():
        part = _read(source, leaf, dtype, tuple(slice(a, b) for a, b in bounds))
        arrays += jax.block_until_ready([jax.device_put(part, device) for device in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _check(source: GGUF | Safetensors, config: Config) -> None:
    """Check names and shapes of all tensors against the architecture, before any tensor is read."""
    have = dict(source.shapes)
    for leaf in leaves(config):
        for name in leaf.names:
            if name not in have:
                raise ConfigError(f"{source.path}: tensor {name} is missing; expected shape {leaf.shape}")
            shape = have.pop(name)
            if shape != leaf.shape:
                raise ConfigError(f"{source.where(name)}: tensor {name}: expected shape {leaf.shape}, found {shape}")
    if config.tie_embeddings and HEAD in have:
        del have[HEAD]
        if not np.array_equal(source.read(HEAD), source.read(EMBED)):
            raise ConfigError(f"{source.where(HEAD)}: {HEAD} differs from the embedding, yet the config ties them")
    llama3 = dict(config.rope_scaling or ()).get("rope_type") == "llama3"
    if "rope_freqs.weight" in have and not llama3:
        raise ConfigError(f"{source.path}: rope_freqs.weight (llama3 rope scaling): give config= with its rope_scaling")
    known = ("rotary_emb.inv_freq", "rope_freqs.weight")
    extra = sorted(name for name in have if not name.endswith(known))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ConfigError(
            f"{source.where(extra[0])}: unknown tensor {extra[0]!r:.80}{more}; expected a {config.family} model"
        )
    vocab = source.tokenizer_vocab()
    if vocab > config.vocab_size:
        raise ConfigError(f"{source.path}: its tokenizer has {vocab} ids, the embedding {config.vocab_size} rows")
