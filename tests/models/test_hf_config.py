"""config.json: what real files say is read, and everything else is refused in one line that names file and key."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models import hf_config, hf_weights
from jaxmarl_llm.models.decoder_config import Config

TINY = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {**YARN, "attention_factor": 1.1, "beta_fast": 24.0, "beta_slow": 2.0, "truncate": False},
    "yarn with mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
# The keys of published files; the sizes are tiny.
PUBLISHED = {
    "Qwen2.5 with the long context of its model card": {
        **TINY, "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "initializer_range": 0.02, "max_window_layers": 28, "model_type": "qwen2",
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"},
    },
    "Qwen3": {
        **TINY, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "hidden_act": "silu", "max_window_layers": 36, "model_type": "qwen3", "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False,
    },
    "Llama 3.2": {
        **TINY, "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "eos_token_id": [1, 2, 3], "hidden_act": "silu", "mlp_bias": False, "model_type": "llama", "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": LLAMA3, "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "SmolLM2": {
        **TINY, "architectures": ["LlamaForCausalLM"], "is_llama_config": True, "mlp_bias": False, "head_dim": None,
        "model_type": "llama", "pad_token_id": 2, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
        "tie_word_embeddings": True, "transformers.js_config": {"dtype": "q4f16"},
    },
}  # fmt: skip


def read(tmp_path, hf) -> Config:
    (tmp_path / "config.json").write_text(json.dumps(hf))
    return hf_weights.read_config(tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read(name, tmp_path):
    hf = PUBLISHED[name]
    config = read(tmp_path, hf)
    assert (config.rope_theta, config.rms_norm_eps) == (hf["rope_theta"], hf.get("rms_norm_eps", 1e-6))
    assert (config.tie_embeddings, config.num_kv_heads, config.head_dim) == (hf["tie_word_embeddings"], 2, 16)
    scaling = dict(config.rope_scaling or ())
    assert scaling == {"rope_type" if k == "type" else k: v for k, v in (hf["rope_scaling"] or {}).items()}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_export_has_both_rope_keys_and_either_alone_is_the_same_model(scaling, family, tmp_path):
    scaling = SCALINGS[scaling]
    config = Config(
        300, 64, 96, 2, 4, 2, 16, rope_theta=77.0, family=family, attention_bias=family == "qwen2",
        qk_norm=family == "qwen3", rope_scaling=tuple(sorted(scaling.items())) if scaling else None,
    )  # fmt: skip
    hf = config.to_hf()
    assert (hf["rope_scaling"], hf["rope_theta"]) == (scaling, 77.0)
    assert hf["rope_parameters"] == {**(scaling or {"rope_type": "default"}), "rope_theta": 77.0}
    assert read(tmp_path, hf) == config
    assert read(tmp_path, {k: v for k, v in hf.items() if k != "rope_parameters"}) == config
    assert read(tmp_path, {k: v for k, v in hf.items() if k not in ("rope_scaling", "rope_theta")}) == config


def test_yarn_without_an_original_length_takes_the_length_of_the_file(tmp_path):
    hf = {**TINY, "model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": None}}
    want = (("factor", 2.0), ("original_max_position_embeddings", 128), ("rope_type", "yarn"))
    assert read(tmp_path, hf).rope_scaling == want


def test_layer_types_and_nulls_of_transformers_5(tmp_path):
    plain = read(tmp_path, {**TINY, "model_type": "qwen2"})
    extra = {"layer_types": ["full_attention"] * 2, "sliding_window": None, "quantization_config": None}
    assert read(tmp_path, {**TINY, "model_type": "qwen2", **extra}) == plain
    whole = {**TINY, "model_type": "llama"}
    del whole["max_position_embeddings"]
    assert read(tmp_path, {**whole, "num_key_value_heads": None}) == dataclasses.replace(
        plain, num_kv_heads=4, attention_bias=False, family="llama", max_position=2048
    )


LLAMA = {**TINY, "model_type": "llama"}
QWEN2 = {**TINY, "model_type": "qwen2"}
QWEN3 = {**TINY, "model_type": "qwen3"}
REMOVED = object()
REFUSED = {
    "unknown key": (LLAMA, {"logit_scale": 2.0}, "key 'logit_scale' is not known"),
    "two unknown keys": (LLAMA, {"x": 1, "logit_scale": 2.0}, r"key 'logit_scale' \(and 1 more\) is not known"),
    "unknown null": (LLAMA, {"logit_scale": None}, "key 'logit_scale' is not known"),
    "other family's key": (LLAMA, {"sliding_window": 4096}, "key 'sliding_window' is not known"),
    "family a list": (LLAMA, {"model_type": ["llama"]}, "'model_type'.*is not supported; known: qwen2, qwen3, llama"),
    "other head": (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "'architectures': expected null or"),
    "qwen3 bias": (QWEN3, {"attention_bias": True}, "key 'attention_bias': expected false, found true"),
    "qwen2 without bias": (QWEN2, {"attention_bias": False}, "key 'attention_bias': expected true, found false"),
    "llama bias": (LLAMA, {"attention_bias": True}, "key 'attention_bias': expected false, found true"),
    "mlp bias": (LLAMA, {"mlp_bias": True}, "key 'mlp_bias': expected false, found true"),
    "bias a number": (QWEN3, {"attention_bias": 0}, "key 'attention_bias': expected false, found 0"),
    "bias a word": (QWEN3, {"attention_bias": "false"}, "key 'attention_bias': expected false, found \"false\""),
    "sliding window": (QWEN2, {"use_sliding_window": True}, "key 'use_sliding_window': expected false, found true"),
    "sliding layer": (
        QWEN2, {"layer_types": ["full_attention", "sliding_attention"]}, "key 'layer_types': expected null or"
    ),
    "gelu": (LLAMA, {"hidden_act": "gelu"}, "key 'hidden_act': expected \"silu\", found \"gelu\""),
    "dropout": (LLAMA, {"attention_dropout": 0.1}, "key 'attention_dropout': expected 0"),
    "quantised": (LLAMA, {"quantization_config": {"bits": 4}}, "key 'quantization_config': expected null"),
    "partial rotary": (LLAMA, {"partial_rotary_factor": 0.5}, "key 'partial_rotary_factor': expected 1"),
    "custom code": (LLAMA, {"auto_map": {}}, "key 'auto_map' is not known"),
    "tie a word": (LLAMA, {"tie_word_embeddings": "false"}, "expected true or false, found \"false\""),
    "tie null": (LLAMA, {"tie_word_embeddings": None}, "expected true or false, found null"),
    "size a float": (LLAMA, {"hidden_size": 64.0}, "key 'hidden_size': expected an integer .*, found 64.0"),
    "size a word": (LLAMA, {"vocab_size": "300"}, "key 'vocab_size': expected an integer from 1"),
    "size zero": (LLAMA, {"num_hidden_layers": 0}, "key 'num_hidden_layers': expected .* 1 to 10000, found 0"),
    "a billion layers": (LLAMA, {"num_hidden_layers": 10**9}, "expected an integer from 1 to 10000, found 1000000000"),
    "theta of 400 digits": (LLAMA, {"rope_theta": 10**400}, "key 'rope_theta': expected a number above 0"),
    "size true": (LLAMA, {"num_attention_heads": True}, "key 'num_attention_heads': expected an integer"),
    "no heads": (LLAMA, {"num_attention_heads": REMOVED}, "key 'num_attention_heads' is missing"),
    "qwen heads unstated": (QWEN2, {"num_key_value_heads": REMOVED}, "key 'num_key_value_heads' is missing"),
    "qwen3 width unstated": (QWEN3, {"head_dim": REMOVED}, "key 'head_dim' is missing"),
    "heads do not divide": (LLAMA, {"num_key_value_heads": 3}, "'num_key_value_heads': expected a divisor of .*=4"),
    "odd heads": (LLAMA, {"head_dim": 15}, "key 'head_dim': expected an even number, found 15"),
    "eps a word": (LLAMA, {"rms_norm_eps": "1e-6"}, "key 'rms_norm_eps': expected a number above 0"),
    "theta infinite": (LLAMA, {"rope_theta": float("inf")}, "key 'rope_theta': expected a number above 0"),
    "theta null": (LLAMA, {"rope_theta": None}, "key 'rope_theta': expected a number above 0 and .*, found null"),
    "rope a word": (LLAMA, {"rope_scaling": "linear"}, "key 'rope_scaling': expected an object or null"),
    "unused rope a list": (
        LLAMA, {"rope_scaling": YARN, "rope_parameters": [1]}, "key 'rope_parameters': expected an object or null"
    ),
    "longrope": (LLAMA, {"rope_scaling": {"type": "longrope"}}, "rope_type \"longrope\" is not supported; known: "),
    "two types": (
        LLAMA, {"rope_scaling": {**YARN, "type": "linear"}}, 'rope_type is "yarn", yet type is "linear"'
    ),
    "rope by layer": (
        QWEN3, {"rope_parameters": {"full_attention": {}}}, "rope_parameters: key 'full_attention' is not known"
    ),
    "default with a factor": (
        LLAMA, {"rope_scaling": {"type": "default", "factor": 2.0}}, "rope_scaling: key 'factor' is not known"
    ),
    "no factor": (LLAMA, {"rope_scaling": {"type": "dynamic"}}, "rope_scaling: key 'factor' is missing"),
    "factor null": (LLAMA, {"rope_scaling": {**YARN, "factor": None}}, "'factor': expected a number of at least 1"),
    "factor below 1": (LLAMA, {"rope_scaling": {**YARN, "factor": 0.5}}, "'factor': expected a number of at least 1"),
    "factor a word": (LLAMA, {"rope_scaling": {"type": "linear", "factor": "4"}}, "'factor': expected a number"),
    **{
        f"llama3 without {key}": (
            LLAMA, {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != key}}, f"key '{key}' is missing"
        )
        for key in LLAMA3 if key != "rope_type"
    },
    "llama3 frequencies": (
        LLAMA, {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "'high_freq_factor': expected more than"
    ),
    "yarn betas": (LLAMA, {"rope_scaling": {**YARN, "beta_fast": 0.5}}, "expected beta_fast of at least beta_slow"),
    "yarn truncate": (LLAMA, {"rope_scaling": {**YARN, "truncate": 1}}, "'truncate': expected true or false, found 1"),
    "yarn theta": (LLAMA, {"rope_scaling": YARN, "rope_theta": 1}, "expected a rope_theta above 1 for yarn, found 1"),
    "yarn of DeepSeek": (LLAMA, {"rope_scaling": {**YARN, "finetuned": True}}, "key 'finetuned' is not known"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case, tmp_path):
    base, change, message = REFUSED[case]
    read(tmp_path, base)
    with pytest.raises(ConfigError, match=message) as error:
        read(tmp_path, {k: v for k, v in {**base, **change}.items() if v is not REMOVED})
    line = str(error.value)
    assert line.startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in line and len(line) < 400


def test_the_lists_of_keys_do_not_overlap():
    fixed = hf_config._fixed("llama", 2)
    assert not hf_config.HARMLESS & {*hf_config.READ, *fixed} and not set(hf_config.READ) & fixed.keys()
