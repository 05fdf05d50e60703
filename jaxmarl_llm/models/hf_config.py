"""Reader of Hugging Face's config.json: an architecture, or a refusal of one line.

Every key of the file belongs to one of four kinds. Keys that are read have a type and a range. Keys of `_fixed` may
have only the values with which this decoder computes the same function. Keys of `HARMLESS` do not change the function.
Every other key is refused. A `ConfigError` names the file and the key.

The rotary embedding stands in ``rope_scaling`` and ``rope_theta`` (transformers 4) or in ``rope_parameters``
(transformers 5). Where both are there, the file means what it means to transformers 5. A ``rope_scaling`` that is
neither null nor empty replaces all of ``rope_parameters``, its ``rope_theta`` included. The base is the ``rope_theta``
inside the chosen object, else the one of the file, else 10,000.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.json_files import shown
from jaxmarl_llm.models.decoder_config import FAMILIES, Config

READ = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "rope_theta",
    "rope_scaling", "rope_parameters",
)  # fmt: skip
HARMLESS = frozenset([
    # Origin of the file, and how weights and outputs are held. pretraining_tp splits products and adds the parts.
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "transformers.js_config", "torch_dtype",
    "dtype", "use_bfloat16", "torchscript", "tf_legacy_loss", "unsloth_version", "unsloth_fixed", "is_llama_config",
    "pretraining_tp", "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "use_cache",
    "is_decoder", "return_dict", "use_return_dict", "output_attentions", "output_hidden_states",
    "tie_last_hidden_states", "initializer_range", "tokenizer_class",
    # Heads for other tasks, which no causal language model has.
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    # Generation: tokens and defaults of `transformers.generate`. The tokenizer's files give the tokens here.
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix",
    "bad_words_ids", "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
])  # fmt: skip
# Null means that the key is absent, as in transformers.
NULLABLE = ("num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters")
# Keys of a rope object beside rope_type, type and rope_theta: required, optional (null is absent).
ROPE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        (
            "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
            "mscale_all_dim", "truncate",
        ),
    ),
}  # fmt: skip
REQUIRED = object()
MAX_LAYERS = 10_000  # tensors of every layer are listed before a file is opened; published models have some 100 layers
MAX_NUMBER = 1e30  # its square root and reciprocal are numbers of float32


@dataclass(frozen=True)
class Keys:
    """Typed access to the keys of one JSON object.

    Args:
        where: the file, and the key of the object in the file if it is not the whole.
        values: the object.
    """

    where: str
    values: Mapping[str, Any]

    def error(self, key: str, expected: str) -> ConfigError:
        """Make the error for a value.

        Args:
            key: key of the value.
            expected: what would be right, in words.
        """
        return ConfigError(f"{self.where}: key {key!r}: expected {expected}, found {shown(self.values[key])}")

    def integer(self, key: str, default: Any = REQUIRED, *, most: int = 2**31 - 1) -> int:
        """Read an integer of at least 1.

        Args:
            key: key of the value.
            default: value of an absent key; without it the key is required.
            most: largest permitted integer.
        """
        expected = f"an integer from 1 to {most}"
        return self._take(key, default, expected, lambda x: type(x) is int and 1 <= x <= most)

    def number(self, key: str, default: Any = REQUIRED, *, least: float | None = None) -> float:
        """Read a number that is finite in float32.

        Args:
            key: key of the value.
            default: value of an absent key; without it the key is required.
            least: smallest permitted number; None permits every number above 0.
        """
        fits = lambda x: type(x) in (int, float) and x <= MAX_NUMBER and (x > 0 if least is None else x >= least)
        expected = "a number above 0" if least is None else f"a number of at least {least:g}"
        expected += f" and at most {MAX_NUMBER:g}"
        return float(self._take(key, default, expected, fits))

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """Read true or false.

        Args:
            key: key of the value.
            default: value of an absent key; without it the key is required.
        """
        return self._take(key, default, "true or false", lambda x: type(x) is bool)

    def object(self, key: str) -> Mapping[str, Any]:
        """Read a JSON object, empty where the key is absent.

        Args:
            key: key of the value.
        """
        return self._take(key, {}, "an object or null", lambda x: isinstance(x, dict))

    def refuse_others(self, known: frozenset[str]) -> None:
        """Raise `ConfigError` if there is a key beside the known ones.

        Args:
            known: the known keys.
        """
        others = sorted(self.values.keys() - known)
        if others:
            more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
            raise ConfigError(
                f"{self.where}: key {others[0]!r:.80}{more} is not known; remove it only if the model computes the "
                "same without it"
            )

    def _take(self, key: str, default: Any, expected: str, fits: Callable[[Any], bool]) -> Any:
        if key not in self.values and default is REQUIRED:
            raise ConfigError(f"{self.where}: key {key!r} is missing; expected {expected}")
        if key not in self.values:
            return default
        if not fits(self.values[key]):
            raise self.error(key, expected)
        return self.values[key]


def read_hf_config(hf: Mapping[str, Any], where: str) -> Config:
    """Read the contents of a config.json of transformers 4 or 5.

    Args:
        hf: the parsed file.
        where: name of the file, for errors.
    """
    keys = Keys(where, {k: v for k, v in hf.items() if v is not None or k not in NULLABLE})
    family = keys.values.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        found = shown(family)
        raise ConfigError(f"{where}: key 'model_type': {found} is not supported; known: {', '.join(FAMILIES)}")
    layers, heads = keys.integer("num_hidden_layers", most=MAX_LAYERS), keys.integer("num_attention_heads")
    hidden_size = keys.integer("hidden_size")
    fixed = _fixed(family, layers)
    window = ("sliding_window", "max_window_layers") if family != "llama" else ()  # unused: use_sliding_window is false
    keys.refuse_others(HARMLESS.union(READ, fixed, window))
    for key, permitted in fixed.items():
        if key in keys.values and not any(_same(keys.values[key], value) for value in permitted):
            raise keys.error(key, " or ".join(shown(value) for value in permitted))
    # Where the key is absent, transformers means 32 heads of keys and values in Qwen, and 128 for Qwen3's head_dim.
    stated = REQUIRED if family != "llama" and "num_key_value_heads" not in hf else heads
    kv_heads = keys.integer("num_key_value_heads", stated)
    head_dim = keys.integer("head_dim", REQUIRED if family == "qwen3" else hidden_size // heads)
    if heads % kv_heads:
        raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"{where}: key 'head_dim': expected an even number, found {head_dim}")
    max_position = keys.integer("max_position_embeddings", 2048 if family == "llama" else 32_768)
    theta, scaling = _read_rope(keys, max_position)
    return Config(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_position=max_position,
        family=family,
    )


def _fixed(family: str, layers: int) -> dict[str, tuple[Any, ...]]:
    """Return the permitted values of the keys that change the function in a way that the decoder does not compute."""
    return {
        "architectures": (None, [FAMILIES[family]]),
        "hidden_act": ("silu",),
        "attention_bias": (family == "qwen2",),
        "mlp_bias": (False,),
        "attention_dropout": (0, 0.0),
        "use_sliding_window": (False,),
        "layer_types": (None, ["full_attention"] * layers),
        "partial_rotary_factor": (1, 1.0),
        "rope_interleaved": (False,),
        "use_mrope": (False,),
        "quantization_config": (None,),
        "is_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "cross_attention_hidden_size": (None,),
        "tie_encoder_decoder": (False,),
        "chunk_size_feed_forward": (0,),
        "pruned_heads": ({},),
    }


def _same(value: Any, permitted: Any) -> bool:
    """Compare two values of JSON by type and value: 0 is not false."""
    return type(value) is type(permitted) and value == permitted


def _read_rope(keys: Keys, max_position: int) -> tuple[float, tuple[tuple[str, Any], ...] | None]:
    """Read the base and the scaling of rotary embeddings, the latter in the form of `Config.rope_scaling`.

    Args:
        keys: keys of the file.
        max_position: ``max_position_embeddings``, which YaRN takes where the original length is not stated.
    """
    parts = {name: keys.object(name) for name in ("rope_scaling", "rope_parameters")}
    name = "rope_scaling" if parts["rope_scaling"] else "rope_parameters"
    rope = Keys(f"{keys.where}: {name}", parts[name])
    theta = rope.number("rope_theta") if "rope_theta" in rope.values else keys.number("rope_theta", 10_000.0)
    names = [rope.values[key] for key in ("rope_type", "type") if key in rope.values]
    kind = names[0] if names else "default"
    if any(other != kind for other in names):
        raise ConfigError(f"{rope.where}: rope_type is {shown(names[0])}, yet type is {shown(names[1])}")
    if not isinstance(kind, str) or kind not in ROPE:
        raise ConfigError(f"{rope.where}: rope_type {shown(kind)} is not supported; known: {', '.join(ROPE)}")
    required, optional = ROPE[kind]
    rope.refuse_others(frozenset(("rope_type", "type", "rope_theta", *required, *optional)))
    if kind == "default":
        return theta, None
    given = {key: rope.values.get(key) for key in (*required, *optional) if key in rope.values}
    rope = Keys(rope.where, {key: value for key, value in given.items() if value is not None or key in required})
    return theta, tuple(sorted({"rope_type": kind, **_read_scaling(rope, required, max_position, kind, theta)}.items()))


def _read_scaling(
    rope: Keys, required: tuple[str, ...], max_position: int, kind: str, theta: float
) -> dict[str, float | int | bool]:
    """Read the numbers of a rope object.

    Args:
        rope: its keys without the type and the base, optional nulls removed.
        required: keys that must be there.
        max_position: see `_read_rope`.
        kind: the type.
        theta: the base.
    """
    out: dict[str, float | int | bool] = {}
    for key in (*required, *(key for key in rope.values if key not in required)):
        if key == "truncate":
            out[key] = rope.flag(key)
        elif key == "original_max_position_embeddings":
            out[key] = rope.integer(key)
        else:
            out[key] = rope.number(key, least={"factor": 1.0, "mscale": 0.0, "mscale_all_dim": 0.0}.get(key))
    if kind == "llama3" and out["high_freq_factor"] <= out["low_freq_factor"]:
        raise rope.error("high_freq_factor", f"more than low_freq_factor={out['low_freq_factor']:g}")
    if kind == "yarn":
        out.setdefault("original_max_position_embeddings", max_position)
        fast, slow = out.get("beta_fast", 32.0), out.get("beta_slow", 1.0)
        if fast < slow:
            raise ConfigError(f"{rope.where}: expected beta_fast of at least beta_slow, found {fast:g} and {slow:g}")
        if theta <= 1:
            raise ConfigError(f"{rope.where}: expected a rope_theta above 1 for yarn, found {theta:g}")
    return out
