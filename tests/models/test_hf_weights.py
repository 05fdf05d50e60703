"""Checkpoints without torch: round trips, and one clear line for every way a directory can be broken."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models import decoder, decoder_config, hf_weights
from jaxmarl_llm.models.tokenizer import ByteTokenizer

SMALL = decoder_config.Config(
    vocab_size=300, hidden_size=16, intermediate_size=24, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    tie_embeddings=True, attention_bias=True, qk_norm=False, family="qwen2",
)  # fmt: skip
CONFIGS = {
    "qwen2": SMALL,
    "qwen3-untied": dataclasses.replace(
        SMALL, tie_embeddings=False, attention_bias=False, qk_norm=True, family="qwen3"
    ),
    "llama": dataclasses.replace(
        SMALL, attention_bias=False, family="llama", rope_scaling=(("factor", 2.0), ("rope_type", "linear"))
    ),
}
Q = "model.layers.1.self_attn.q_proj.weight"


def random_params(config):
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(decoder.make_policy(config).init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes)


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [10**9, 4000])
def test_round_trip(config, dtype, max_shard_bytes, tmp_path):
    config = dataclasses.replace(config, dtype=dtype)
    params = random_params(config)
    hf_weights.save(tmp_path / "out", params, config, ByteTokenizer(), max_shard_bytes=max_shard_bytes)
    loaded, back = hf_weights.load(tmp_path / "out", dtype=dtype)
    assert back == config and hf_weights.read_config(tmp_path / "out") == dataclasses.replace(config, dtype="float32")
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    chex.assert_trees_all_equal(loaded, params)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [257]
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(shards) > 1) == (max_shard_bytes == 4000)
    biggest = config.vocab_size * config.hidden_size * jnp.dtype(dtype).itemsize  # one tensor is never split
    assert all(s.stat().st_size < max(max_shard_bytes, biggest) + 8000 for s in shards)


def test_kernels_are_transposed_and_layers_stacked_in_order(tmp_path):
    params = random_params(SMALL)
    hf_weights.save(tmp_path / "out", params, SMALL)
    file = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(file[Q], np.asarray(params["layers"]["self_attn"]["q_proj"]["kernel"][1]).T)
    np.testing.assert_array_equal(file["model.embed_tokens.weight"], params["embed"]["embedding"])


def test_dtype_of_the_file_does_not_matter(tmp_path):
    params = random_params(SMALL)
    hf_weights.save(tmp_path / "out", params, SMALL, dtype="float16")
    assert load_file(tmp_path / "out" / "model.safetensors")[Q].dtype == np.float16
    loaded, config = hf_weights.load(tmp_path / "out")
    assert config.dtype == "float32"
    want = jax.tree.map(lambda leaf: leaf.astype(jnp.float16).astype(jnp.float32), params)
    chex.assert_trees_all_equal(loaded, want)


def test_only_one_leaf_is_on_the_host_at_a_time(tmp_path, monkeypatch):
    """Every leaf is placed, in the order of the file's leaves, before a tensor of the next one is read."""
    hf_weights.save(tmp_path / "out", random_params(SMALL), SMALL)
    events = []
    read, place = hf_weights.Safetensors.read, hf_weights._place

    def spy_read(self, name, index):
        events.append(name)
        return read(self, name, index)

    def spy_place(source, leaf, *rest):
        array = place(source, leaf, *rest)
        events.append(array.shape)
        return array

    monkeypatch.setattr(hf_weights.Safetensors, "read", spy_read)
    monkeypatch.setattr(hf_weights, "_place", spy_place)
    hf_weights.load(tmp_path / "out")
    assert events == [e for leaf in hf_weights.leaves(SMALL) for e in (*leaf.names, leaf.full_shape)]


# Export


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    params = random_params(SMALL)
    hf_weights.save(tmp_path / "out", params, SMALL)
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_weights.os, "fsync", fail)
    for name in ("new", "out"):
        with pytest.raises(OSError, match="No space"):
            hf_weights.save(tmp_path / name, params, SMALL, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_overwriting_is_asked_for_and_cleans_up_after_a_killed_export(tmp_path):
    params = random_params(SMALL)
    hf_weights.save(tmp_path / "out", params, SMALL)
    with pytest.raises(ConfigError, match="overwrite"):
        hf_weights.save(tmp_path / "out", params, SMALL)
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "junk").touch()
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    hf_weights.save(tmp_path / "out", doubled, SMALL, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "junk").exists()
    chex.assert_trees_all_equal(hf_weights.load(tmp_path / "out")[0], doubled)


def test_parameters_that_do_not_fit_the_config(tmp_path):
    params = random_params(SMALL)
    with pytest.raises(ConfigError, match=r"k_proj/bias: expected nothing, found \(3, 16\)"):
        hf_weights.save(tmp_path / "out", params, dataclasses.replace(SMALL, attention_bias=False))
    with pytest.raises(ConfigError, match=r"lm_head/kernel: expected \(16, 300\), found nothing"):
        hf_weights.save(tmp_path / "out", params, dataclasses.replace(SMALL, tie_embeddings=False))
    with pytest.raises(ConfigError, match="264 ids, the embedding 263 rows"):
        hf_weights.save(tmp_path / "out", params, dataclasses.replace(SMALL, vocab_size=263), ByteTokenizer())
    with pytest.raises(ConfigError, match="int8"):
        hf_weights.save(tmp_path / "out", params, SMALL, dtype="int8")
    assert not list(tmp_path.iterdir())


# Broken directories


def edit_tensors(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def cut(file, keep):
    file.write_bytes(file.read_bytes()[:keep])


def float8(path):
    header = json.dumps({"x": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0")


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n"
WHOLE = {
    "no directory": (lambda p: shutil.rmtree(p), r"config\.json: file is missing"),
    "no config": (lambda p: (p / "config.json").unlink(), r"config\.json: file is missing"),
    "config cut": (lambda p: cut(p / "config.json", 50), r"config\.json, line 4: not valid JSON"),
    "config a pointer": (lambda p: (p / "config.json").write_text(LFS), r"config\.json: a Git LFS pointer"),
    "config a list": (lambda p: (p / "config.json").write_text("[]"), r"expected a JSON object, found list"),
    "config without key": (
        lambda p: edit_json(p / "config.json", lambda c: c.pop("hidden_size")),
        r"config\.json: key 'hidden_size' is missing",
    ),
    "other family": (
        lambda p: edit_json(p / "config.json", lambda c: c.update(model_type="gpt2")),
        r"\"gpt2\" is not supported",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), r"expected model\.safetensors or .*found neither"),
    "pointer": (
        lambda p: (p / "model.safetensors").write_text(LFS),
        r"model\.safetensors: a Git LFS pointer of 71 bytes",
    ),
    "cut in the data": (lambda p: cut(p / "model.safetensors", 9000), r"expected \d+ bytes, found 9000"),
    "cut in the header": (lambda p: cut(p / "model.safetensors", 100), r"found 100 bytes without one"),
    "empty": (lambda p: cut(p / "model.safetensors", 0), r"found 0 bytes without one"),
    "header garbage": (
        lambda p: (p / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{x"),
        r"safetensors header: not valid JSON",
    ),
    "float8": (float8, r"tensor 'x' has dtype \"F8_E4M3\""),
    "wrong shape": (
        lambda p: edit_tensors(p, lambda t: t.update({Q: t[Q][:-1]})),
        rf"model\.safetensors: tensor {Q}: expected shape \(32, 16\), found \(31, 16\)",
    ),
    "missing tensor": (lambda p: edit_tensors(p, lambda t: t.pop(Q)), rf"tensor {Q} is missing; expected .*\(32, 16\)"),
    "extra tensor": (
        lambda p: edit_tensors(p, lambda t: t.update({"visual.x": t[Q], "visual.y": t[Q]})),
        r"unknown tensor 'visual\.x' and 1 more; expected a qwen2 model",
    ),
    "more layers than the config": (
        lambda p: edit_json(p / "config.json", lambda c: c.update(num_hidden_layers=2)),
        r"tensor 'model\.layers\.2\.input_layernorm\.weight' and 11 more",
    ),
    "untied without head": (
        lambda p: edit_json(p / "config.json", lambda c: c.update(tie_word_embeddings=False)),
        r"tensor lm_head\.weight is missing",
    ),
    "tied with another head": (
        lambda p: edit_tensors(p, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
        r"lm_head\.weight differs from the embedding",
    ),
    "big tokenizer": (
        lambda p: (p / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 300, "content": "b"}]})
        ),
        r"tokenizer has 301 ids, the embedding 300 rows",
    ),
}
INDEX = "model.safetensors.index.json"
SHARDED = {
    "no shard": (lambda p, s: s.unlink(), r"model-00002-of-\d+\.safetensors: shard is missing"),
    "shard pointer": (lambda p, s: s.write_text(LFS), r"model-00002-of-\d+\.safetensors: a Git LFS pointer"),
    "shard cut": (lambda p, s: cut(s, s.stat().st_size - 1), r"model-00002-of-.*: expected \d+ bytes, found \d+"),
    "no index": (lambda p, s: (p / INDEX).unlink(), "found neither"),
    "index cut": (lambda p, s: cut(p / INDEX, 100), r"index\.json, line 6: not valid JSON"),
    "index without map": (lambda p, s: (p / INDEX).write_text("{}"), "'weight_map' is missing"),
    "index outside": (
        lambda p, s: edit_json(p / INDEX, lambda i: i["weight_map"].update(x="../x.safetensors")),
        "not a plain file name",
    ),
    "index a long name": (
        lambda p, s: edit_json(p / INDEX, lambda i: i["weight_map"].update(x="a" * 9999)),
        "is not a plain file name",
    ),
    "index a number": (
        lambda p, s: edit_json(p / INDEX, lambda i: i["weight_map"].update(x=3)),
        "shard 3 is not a plain file name",
    ),
    "index wrong": (
        lambda p, s: edit_json(p / INDEX, lambda i: i["weight_map"].update(x=s.name)),
        rf"tensor 'x' is missing; {INDEX} lists it there",
    ),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path, params = tmp_path_factory.mktemp("exported"), random_params(SMALL)
    hf_weights.save(path / "whole", params, SMALL)
    hf_weights.save(path / "sharded", params, SMALL, max_shard_bytes=4000)
    return path


def assert_refused(path, message):
    with pytest.raises(ConfigError, match=message) as error:
        hf_weights.load(path)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def edit_header(path, change):
    """Change the header of a safetensors file in place, with its length mended."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header = change(header) or header
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


NORM = "model.norm.weight"
HEADERS = {
    "a list": (lambda h: [1], "header that is a JSON object"),
    "no dtype": (lambda h: h[Q].pop("dtype") and None, f"tensor '{Q}': key 'dtype' is missing"),
    "no offsets": (lambda h: h[Q].pop("data_offsets") and None, "key 'data_offsets' is missing"),
    "shape of texts": (lambda h: h[Q].update(shape=["32", 16]), "key 'shape': expected integers"),
    "shape below 0": (lambda h: h[Q].update(shape=[-32, -16]), "key 'shape': expected integers"),
    "shape without end": (lambda h: h[Q].update(shape=[2**62, 2**62]), "key 'data_offsets': expected two that are"),
    "offsets true": (lambda h: h[Q].update(data_offsets=[False, True]), "key 'data_offsets': expected integers"),
    "reversed": (lambda h: h[Q]["data_offsets"].reverse(), "key 'data_offsets': expected two that are 2048 apart"),
    "another dtype": (lambda h: h[Q].update(dtype="F16"), "key 'data_offsets': expected two that are 1024 apart"),
    "overlap": (lambda h: h[NORM].update(data_offsets=[0, 64]), "key 'data_offsets' overlaps the tensor before it"),
    "a number": (lambda h: h.update({Q: 3}), f"tensor '{Q}': expected an object, found 3"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_broken_header(exported, tmp_path, case):
    path = shutil.copytree(exported / "whole", tmp_path / "model")
    change, message = HEADERS[case]
    edit_header(path / "model.safetensors", change)
    assert_refused(path, message)


@pytest.mark.parametrize("case", WHOLE)
def test_broken_directory(exported, tmp_path, case):
    path = shutil.copytree(exported / "whole", tmp_path / "model")
    breakage, message = WHOLE[case]
    breakage(path)
    assert_refused(path, message)


@pytest.mark.parametrize("case", SHARDED)
def test_broken_shards(exported, tmp_path, case):
    path = shutil.copytree(exported / "sharded", tmp_path / "model")
    breakage, message = SHARDED[case]
    breakage(path, sorted(path.glob("*.safetensors"))[1])
    assert_refused(path, message)


def test_harmless_extras_are_ignored(exported, tmp_path):
    path = shutil.copytree(exported / "whole", tmp_path / "model")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    edit_tensors(path, lambda t: t.update(extra, **{"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    loaded, _ = hf_weights.load(path)
    chex.assert_trees_all_equal(loaded, random_params(SMALL))


def test_broken_gguf(tmp_path):
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "x.gguf"
    assert_refused(file, r"x\.gguf: file is missing")
    file.write_text(LFS)
    assert_refused(file, "a Git LFS pointer")
    file.write_bytes(b"GGUF")
    assert_refused(file, "not a whole GGUF file of 4 bytes")

    def write(arch, *tensors, **metadata):
        writer = gguf.GGUFWriter(file, arch)
        for key, value in metadata.items():
            getattr(writer, f"add_{key}")(value)
        for name, value in tensors:
            writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    write("mamba")
    assert_refused(file, 'architecture "mamba"; expected one of llama, qwen2, qwen3')
    write("llama")
    assert_refused(file, r"metadata llama\.attention\.head_count is missing")
    sizes = dict(block_count=1, embedding_length=4, feed_forward_length=4, head_count=2, layer_norm_rms_eps=1e-6)
    write("llama", **sizes)
    assert_refused(file, r"tensor token_embd\.weight is missing")
    embedding = ("token_embd.weight", np.ones((8, 4), np.float32))
    write("llama", embedding, **sizes)
    assert_refused(file, r"x\.gguf: tensor model\.layers\.0\.input_layernorm\.weight is missing")
    write("llama", embedding, token_list=[b"t%d" % i for i in range(9)], **sizes)
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    assert_refused(file, "not a whole GGUF file")
    # An array of 2^60 bytes, a key twice, text that is not UTF-8, tensors over one another.
    count = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    file.write_bytes(whole[:count] + struct.pack("<Q", 2**60) + whole[count + 8 :])
    assert_refused(file, r"metadata 'tokenizer\.ggml\.tokens': a count of 1152921504606846976")
    file.write_bytes(whole.replace(b"llama.block_count", b"llama.block_c\xffunt"))
    assert_refused(file, "a metadata key: not UTF-8")
    two = ("output_norm.weight", np.ones(8, np.float32)), embedding
    write("llama", *two, **sizes)
    whole = file.read_bytes()
    place = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16 + 4
    file.write_bytes(whole[:place] + struct.pack("<Q", 0) + whole[place + 8 :])
    assert_refused(file, r"tensor '(token_embd|output_norm)\.weight' overlaps")
