"""The same numbers as PyTorch transformers: logits, greedy text, and checkpoints carried both ways."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Message
from jaxmarl_llm.models import decoder, decoder_config, hf_weights
from jaxmarl_llm.models.tokenizer import HFTokenizer

torch = pytest.importorskip("torch", reason="needs the parity extra: pip install -e .[parity]")
pytestmark = pytest.mark.parity

SMOLLM2 = Path(__file__).parents[2] / "weights" / "smollm2"
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no weights/smollm2: run `make weights`")
V = 131
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),  # not hidden_size / heads
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama3-scaling": ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False}}),
    "llama-yarn": ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5}}),
    "qwen2-dynamic": ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}),
}


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module", params=MODELS)
def reference(request, tmp_path_factory):
    """A random transformers model, norms and biases random too, and where it is saved."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, extra = MODELS[request.param]
    size = dict(
        vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True, rms_norm_eps=1e-6,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**size, **extra})).float().eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            centre, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.3 if name.endswith("bias") else 0.12)
            p.copy_(torch.tensor(rng.normal(centre, spread, p.shape), dtype=torch.float32))
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return model, path


def torch_logits(model, rows: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(rows)).logits.float().numpy()


def our_logits(policy, params, row: np.ndarray) -> np.ndarray:
    """[T V]: position t from the prompt row[: t + 1], right-padded to one shape (the last row is unpadded)."""
    t = len(row)
    tokens, length = jnp.tile(row, (t, 1)), jnp.arange(1, t + 1)
    tokens = jnp.where(jnp.arange(t) < length[:, None], tokens, V - 1)
    hidden, _ = jax.jit(policy.prefill)({"params": params}, tokens, length)
    return np.asarray(policy.unembed({"params": params}, hidden))


def greedy(policy, params, row: np.ndarray, count: int, padding: int = 3) -> list[int]:
    variables = {"params": params}
    tokens = jnp.asarray(np.pad(row, (0, padding)))[None]
    length = jnp.array([len(row)])
    hidden, prefix = jax.jit(policy.prefill)(variables, tokens, length)
    suffix = policy.init_suffix(prefix, 1, count)
    layers, out = policy.unstack(variables), []

    @jax.jit
    def step(layers, token, suffix, t):
        (hidden,), (suffix,) = policy.decode(layers, (token[None, None],), (prefix,), (length,), (suffix,), t)
        return jnp.argmax(policy.unembed(layers, hidden)[0, 0]), suffix

    token = jnp.argmax(policy.unembed(variables, hidden)[0])
    for t in range(count):
        out.append(int(token))
        token, suffix = step(layers, token, suffix, t)
    return out


def torch_greedy(model, row: np.ndarray, count: int) -> list[int]:
    ids = torch.tensor(row)[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(row) :].tolist()


def test_logits_at_every_position(reference):
    model, path = reference
    params, config = hf_weights.load(path)
    row = np.random.default_rng(1).integers(0, V, 24)
    want = torch_logits(model, row[None])[0]
    assert want.std() > 0.5  # the comparison is not about zeros
    np.testing.assert_allclose(our_logits(decoder.make_policy(config), params, row), want, rtol=0, atol=1e-5)


def test_logits_of_completions(reference):
    """Policy.hidden: prompts of several lengths (padded, and one unpadded), three completions each."""
    model, path = reference
    params, config = hf_weights.load(path)
    rng = np.random.default_rng(2)
    n, g, p, r = 3, 3, 12, 8
    tokens, length, said = rng.integers(0, V, (n, p)), np.array([1, 7, 12]), rng.integers(0, V, (n, g, r))
    policy = decoder.make_policy(config)
    hidden = jax.jit(policy.hidden)({"params": params}, tokens, length, said)
    ours = np.asarray(policy.unembed({"params": params}, hidden))
    for i, size in enumerate(length):
        rows = np.concatenate([np.tile(tokens[i, :size], (g, 1)), said[i]], axis=1)
        want = torch_logits(model, rows)[:, size - 1 : -1]
        np.testing.assert_allclose(ours[i], want, rtol=0, atol=1e-5)


def test_greedy_text(reference):
    model, path = reference
    params, config = hf_weights.load(path)
    row = np.random.default_rng(3).integers(0, V, 9)
    assert greedy(decoder.make_policy(config), params, row, 32) == torch_greedy(model, row, 32)


BASE_INSIDE = {"rope_type": "default", "rope_theta": 60.0}
CARD = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}  # as a model card writes it
ROPE_KEYS = {
    "rope_scaling over rope_parameters": {"rope_scaling": CARD, "rope_parameters": BASE_INSIDE, "rope_theta": 500.0},
    "the base of an unused object": {"rope_scaling": CARD, "rope_parameters": BASE_INSIDE},
    "the base inside rope_scaling": {"rope_scaling": {**CARD, "rope_theta": 60.0}, "rope_theta": 500.0},
    "the base inside rope_parameters": {"rope_parameters": {**CARD, "rope_theta": 60.0}, "rope_theta": 500.0},
    "empty rope_scaling": {"rope_scaling": {}, "rope_parameters": BASE_INSIDE, "rope_theta": 500.0},
    "null rope_scaling": {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "default over linear": {"rope_scaling": {"type": "default"}, "rope_parameters": {"type": "linear", "factor": 2.0}},
    "yarn without a length": {"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 500.0},
    "no key": {},
}


@pytest.mark.parametrize("case", ROPE_KEYS)
def test_rope_keys_mean_what_they_mean_to_transformers(case, tmp_path):
    """One file with the keys of transformers 4, of 5 or of both: our logits are those of the installed version."""
    from transformers import AutoModelForCausalLM

    rng = np.random.default_rng(5)
    policy = decoder.make_policy(decoder_config.Config(V, 64, 96, 2, 4, 2, 16, max_position=128))
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.2, leaf.shape), leaf.dtype), shapes)
    hf_weights.save(tmp_path / "out", params, policy.config)
    file = tmp_path / "out" / "config.json"
    plain = {k: v for k, v in json.loads(file.read_text()).items() if not k.startswith("rope_")}
    file.write_text(json.dumps({**plain, **ROPE_KEYS[case]}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    params, config = hf_weights.load(tmp_path / "out")
    row = rng.integers(0, V, 40)
    ours = our_logits(decoder.make_policy(config), params, row)
    np.testing.assert_allclose(ours, torch_logits(model, row[None])[0], rtol=0, atol=1e-5)


def test_dynamic_scaling_of_transformers_depends_on_the_chunks_beyond_its_limit():
    """Why rows beyond the limit are refused: one text has other logits when it is sent in two parts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    size = dict(vocab_size=V, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    given = AutoConfig.for_model(
        "qwen2", **size, num_key_value_heads=2, max_position_embeddings=16, rope_parameters=rope, initializer_range=0.3
    )
    row = np.random.default_rng(6).integers(0, V, (1, 64))

    def difference(length):
        model = AutoModelForCausalLM.from_config(given).float().eval()
        ids = torch.tensor(row[:, :length])
        with torch.no_grad():
            first = model(ids[:, : length // 2], use_cache=True)
            # transformers 5.24 renamed the argument; its results keep the earlier name, or have both.
            name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
            cache = first["past_key_values"] if "past_key_values" in first else first["cache"]
            second = model(ids[:, length // 2 :], **{name: cache})
            return float((model(ids).logits[:, length // 2 :] - second.logits).abs().max())

    assert difference(16) < 1e-4 and difference(64) > 0.01


@pytest.mark.parametrize("max_shard_bytes", [4 * 1024**3, 60_000])
def test_export_loads_in_transformers_and_comes_back_bit_exact(reference, tmp_path, max_shard_bytes):
    from transformers import AutoModelForCausalLM

    model, path = reference
    params, config = hf_weights.load(path)
    out = tmp_path / "export"
    hf_weights.save(out, params, config, max_shard_bytes=max_shard_bytes)
    assert (out / "model.safetensors.index.json").exists() == (max_shard_bytes < 1e9)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    row = np.random.default_rng(4).integers(0, V, (1, 40))
    np.testing.assert_allclose(torch_logits(again, row), torch_logits(model, row), rtol=0, atol=1e-5)
    back, config_back = hf_weights.load(out)
    assert config_back == config
    chex.assert_trees_all_equal(back, params)
    if max_shard_bytes < 1e9:  # and the shards transformers writes
        model.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
        assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
        chex.assert_trees_all_equal(hf_weights.load(tmp_path / "theirs")[0], params)


def test_bfloat16_export_is_what_transformers_rounds_to(reference, tmp_path):
    from transformers import AutoModelForCausalLM

    model, path = reference
    params, config = hf_weights.load(path, dtype=jnp.bfloat16)
    hf_weights.save(tmp_path / "half", params, config)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert again.dtype == torch.bfloat16
    for ours, theirs in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    chex.assert_trees_all_equal(hf_weights.load(tmp_path / "half", dtype=jnp.bfloat16)[0], params)


def test_sharded_load_and_save(reference, tmp_path):
    _, path = reference
    params, config = hf_weights.load(path)
    devices = np.array(jax.devices())
    if devices.size < 2:
        pytest.skip("needs several devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    mesh = Mesh(devices[: devices.size // 2 * 2].reshape(-1, 2), ("data", "model"))

    def place(leaf_path):
        axes = PartitionSpec(None, None, "model") if leaf_path[-1] == "kernel" and len(leaf_path) == 4 else None
        return NamedSharding(mesh, axes or PartitionSpec())

    sharded, _ = hf_weights.load(path, sharding=place)
    kernel = sharded["layers"]["mlp"]["gate_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 64, 48)
    chex.assert_trees_all_equal(sharded, params)
    tree = jax.tree.map(lambda leaf: leaf.sharding, sharded)
    again, _ = hf_weights.load(path, sharding=tree)
    assert jax.tree.map(lambda leaf: leaf.sharding, again) == tree
    hf_weights.save(tmp_path / "sharded", sharded, config)
    chex.assert_trees_all_equal(hf_weights.load(tmp_path / "sharded")[0], params)


@pytest.mark.real_weights
@pytest.mark.slow
@needs_smollm2
def test_smollm2(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    params, config = hf_weights.load(SMOLLM2)
    tokenizer = HFTokenizer(SMOLLM2)
    policy = decoder.make_policy(config)
    row = np.array(tokenizer.render((Message("user", "What is the capital of France?"),), "me"))
    hidden = jax.jit(policy.hidden)(
        {"params": params}, np.pad(row[None, :5], ((0, 0), (0, 3))), np.array([5]), row[None, None, 5:]
    )
    ours = np.asarray(policy.unembed({"params": params}, hidden))[0, 0]
    np.testing.assert_allclose(ours, torch_logits(model, row[None])[0, 4:-1], rtol=0, atol=5e-4)
    out = greedy(policy, params, row, 32)
    assert out == torch_greedy(model, row, 32)
    assert "Paris" in tokenizer.decode(out)


def gguf_names(config: decoder_config.Config) -> dict[str, str]:
    """Hugging Face names of a model's tensors and what GGUF converters call them."""
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    names["lm_head.weight"] = "output.weight"
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for layer in range(config.num_layers):
        for theirs, gguf in parts.items():
            for end in ("weight", "bias"):
                names[f"model.layers.{layer}.{theirs}.{end}"] = f"blk.{layer}.{gguf}.{end}"
    return names


@pytest.mark.parametrize("quantized", [False, True])
def test_gguf_is_the_same_model(reference, tmp_path, quantized):
    """A GGUF file written the way converters do: q and k rows of Llama interleaved, matrices perhaps Q8_0."""
    gguf = pytest.importorskip("gguf")
    model, path = reference
    params, config = hf_weights.load(path)
    file, arch = tmp_path / "model.gguf", config.family
    writer = gguf.GGUFWriter(file, arch)
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_context_length(config.max_position)
    scaling = dict(config.rope_scaling or ()).get("rope_type")
    if scaling == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
    if scaling == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
    if scaling == "llama3":
        writer.add_tensor("rope_freqs.weight", np.ones(config.head_dim // 2, np.float32))
    names = gguf_names(config)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_embeddings:
            continue
        value = tensor.numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_heads if "q_proj" in name else config.num_kv_heads
            value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        if quantized and value.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(names[name], gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(names[name], value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    if scaling == "llama3":  # the file holds factors per frequency, not what they were made from
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight.*config="):
            hf_weights.load(file)
    if scaling == "yarn":
        with pytest.raises(ConfigError, match=r'rope\.scaling\.type is "yarn"; expected none or linear'):
            hf_weights.load(file)
    loaded, config_back = hf_weights.load(file, None if scaling in (None, "linear") else config)
    np.testing.assert_allclose(config_back.rms_norm_eps, config.rms_norm_eps, rtol=1e-6)  # float32 in the file
    same = dataclasses.replace(config_back, rms_norm_eps=config.rms_norm_eps)
    assert same == config
    atol = 0.12 * 5 / 127 if quantized else 0.0
    chex.assert_trees_all_close(loaded, params, rtol=0, atol=atol)
