"""The same numbers as PyTorch transformers: logits, greedy text, and checkpoints carried both ways."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmarl_llm import qwen, weights
from jaxmarl_llm.text import ConfigError, Message
from jaxmarl_llm.tokenizer import HFTokenizer

torch = pytest.importorskip("torch", reason="needs the parity extra: pip install -e .[parity]")
pytestmark = pytest.mark.parity

SMOLLM2 = Path(__file__).parents[1] / "weights" / "smollm2"
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
MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),  # not hidden_size / heads
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama3-scaling": ("llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3}),
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
        hidden, suffix = policy.decode(layers, token[None, None], prefix, length, suffix, t)
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
    params, config = weights.load(path)
    row = np.random.default_rng(1).integers(0, V, 24)
    want = torch_logits(model, row[None])[0]
    assert want.std() > 0.5  # the comparison is not about zeros
    np.testing.assert_allclose(our_logits(qwen.make_policy(config), params, row), want, rtol=0, atol=1e-5)


def test_logits_of_completions(reference):
    """Policy.hidden: prompts of several lengths (padded, and one unpadded), three completions each."""
    model, path = reference
    params, config = weights.load(path)
    rng = np.random.default_rng(2)
    n, g, p, r = 3, 3, 12, 8
    tokens, length, said = rng.integers(0, V, (n, p)), np.array([1, 7, 12]), rng.integers(0, V, (n, g, r))
    policy = qwen.make_policy(config)
    hidden = jax.jit(policy.hidden)({"params": params}, tokens, length, said)
    ours = np.asarray(policy.unembed({"params": params}, hidden))
    for i, size in enumerate(length):
        rows = np.concatenate([np.tile(tokens[i, :size], (g, 1)), said[i]], axis=1)
        want = torch_logits(model, rows)[:, size - 1 : -1]
        np.testing.assert_allclose(ours[i], want, rtol=0, atol=1e-5)


def test_greedy_text(reference):
    model, path = reference
    params, config = weights.load(path)
    row = np.random.default_rng(3).integers(0, V, 9)
    assert greedy(qwen.make_policy(config), params, row, 32) == torch_greedy(model, row, 32)


@pytest.mark.parametrize("max_shard_bytes", [4 * 1024**3, 60_000])
def test_export_loads_in_transformers_and_comes_back_bit_exact(reference, tmp_path, max_shard_bytes):
    from transformers import AutoModelForCausalLM

    model, path = reference
    params, config = weights.load(path)
    out = tmp_path / "export"
    weights.save(out, params, config, max_shard_bytes=max_shard_bytes)
    assert (out / "model.safetensors.index.json").exists() == (max_shard_bytes < 1e9)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    row = np.random.default_rng(4).integers(0, V, (1, 40))
    np.testing.assert_allclose(torch_logits(again, row), torch_logits(model, row), rtol=0, atol=1e-5)
    back, config_back = weights.load(out)
    assert config_back == config
    jax.tree.map(np.testing.assert_array_equal, back, params)
    if max_shard_bytes < 1e9:  # and the shards transformers writes
        model.save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
        assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
        jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path / "theirs")[0], params)


def test_bfloat16_export_is_what_transformers_rounds_to(reference, tmp_path):
    from transformers import AutoModelForCausalLM

    model, path = reference
    params, config = weights.load(path, dtype=jnp.bfloat16)
    weights.save(tmp_path / "half", params, config)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert again.dtype == torch.bfloat16
    for ours, theirs in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path / "half", dtype=jnp.bfloat16)[0], params)


def test_sharded_load_and_save(reference, tmp_path):
    _, path = reference
    params, config = weights.load(path)
    devices = np.array(jax.devices())
    if devices.size < 2:
        pytest.skip("needs several devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")
    mesh = Mesh(devices[: devices.size // 2 * 2].reshape(-1, 2), ("data", "model"))

    def place(leaf_path):
        axes = PartitionSpec(None, None, "model") if leaf_path[-1] == "kernel" and len(leaf_path) == 4 else None
        return NamedSharding(mesh, axes or PartitionSpec())

    sharded, _ = weights.load(path, sharding=place)
    kernel = sharded["layers"]["mlp"]["gate_proj"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 64, 48)
    jax.tree.map(np.testing.assert_array_equal, sharded, params)
    tree = jax.tree.map(lambda leaf: leaf.sharding, sharded)
    again, _ = weights.load(path, sharding=tree)
    assert jax.tree.map(lambda leaf: leaf.sharding, again) == tree
    weights.save(tmp_path / "sharded", sharded, config)
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path / "sharded")[0], params)


@pytest.mark.real_weights
@pytest.mark.slow
@needs_smollm2
def test_smollm2(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    params, config = weights.load(SMOLLM2)
    tokenizer = HFTokenizer(SMOLLM2)
    policy = qwen.make_policy(config)
    row = np.array(tokenizer.render((Message("user", "What is the capital of France?"),), "me"))
    hidden = jax.jit(policy.hidden)(
        {"params": params}, np.pad(row[None, :5], ((0, 0), (0, 3))), np.array([5]), row[None, None, 5:]
    )
    ours = np.asarray(policy.unembed({"params": params}, hidden))[0, 0]
    np.testing.assert_allclose(ours, torch_logits(model, row[None])[0, 4:-1], rtol=0, atol=5e-4)
    out = greedy(policy, params, row, 32)
    assert out == torch_greedy(model, row, 32)
    assert "Paris" in tokenizer.decode(out)


def gguf_names(config: qwen.Config) -> dict[str, str]:
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
    params, config = weights.load(path)
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
            weights.load(file)
    loaded, config_back = weights.load(file, config if scaling == "llama3" else None)
    np.testing.assert_allclose(config_back.rms_norm_eps, config.rms_norm_eps, rtol=1e-6)  # float32 in the file
    same = dataclasses.replace(config_back, rms_norm_eps=config.rms_norm_eps)
    assert same == config
    atol = 0.12 * 5 / 127 if quantized else 0.0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), loaded, params)
