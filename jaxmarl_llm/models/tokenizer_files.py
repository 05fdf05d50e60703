"""Readers of a tokenizer's files: tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json.

The files are checked before transformers and tokenizers read them. What these still refuse ends in a `ConfigError` of
one line. Code that a folder brings with it is never run, and nothing is asked on a terminal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxmarl_llm import json_files
from jaxmarl_llm.errors import ConfigError

# Types of the keys that decide how a text is encoded. transformers takes the text "false" for true.
_TOKEN = (str, dict)
CONFIG = {
    "chat_template?": (str, list),
    "tokenizer_class?": str,
    "model_max_length?": float,
    "additional_special_tokens?": (list, dict),
    "extra_special_tokens?": (list, dict),
    "added_tokens_decoder?": dict,
    "auto_map?": dict,
    "padding_side?": str,
    "truncation_side?": str,
    "errors?": str,
    **{f"{name}_token?": _TOKEN for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")},
    **{
        f"{name}?": bool
        for name in (
            "add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "legacy",
            "split_special_tokens", "spaces_between_special_tokens", "use_default_system_prompt", "use_fast",
        )
    },
}  # fmt: skip
TOKEN = {
    "content": str,
    "id?": int,
    **{f"{name}?": bool for name in ("lstrip", "normalized", "rstrip", "single_word", "special")},
}
# Largest id: a table of as many rows has to exist. Published vocabularies have some 300,000 ids.
MAX_IDS = 2**24


def load(path: Path) -> Any:
    """Load the tokenizer of transformers.

    Args:
        path: a directory with ``tokenizer.json``, or a ``.gguf`` file.
    """
    from transformers import AutoTokenizer

    if path.suffix == ".gguf" and path.is_file():
        from jaxmarl_llm.models.gguf_file import GGUFFile

        GGUFFile(path)  # refuses a damaged file
        with one_line(f"tokenizer {path}"):
            return AutoTokenizer.from_pretrained(
                str(path.parent), gguf_file=path.name, trust_remote_code=False, local_files_only=True
            )
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(f"tokenizer {path}: expected a directory with tokenizer.json, or a .gguf file")
    _check_tokenizer(path / "tokenizer.json")
    _check_config(path / "tokenizer_config.json")
    for name in ("config.json", "special_tokens_map.json", "added_tokens.json"):
        if (path / name).is_file():
            json_files.read_object(path / name)
    if (path / "chat_template.jinja").is_file():
        json_files.read_text(path / "chat_template.jinja", 2**20)
    with one_line(f"tokenizer {path}"):
        return AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)


def stop_ids(path: Path, vocab_size: int) -> list[int]:
    """Read ``eos_token_id`` of generation_config.json; empty without the file or the key.

    Args:
        path: the tokenizer's directory.
        vocab_size: number of ids; every stop id is below it.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return []
    eos = json_files.read_object(file).get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for id in ids:
        if type(id) is not int or not 0 <= id < vocab_size:
            raise ConfigError(
                f"{file}: key 'eos_token_id': expected ids from 0 to {vocab_size - 1}, found {json_files.shown(id)}"
            )
    return ids


@contextmanager
def one_line(where: str) -> Iterator[None]:
    """Turn every exception of the libraries into a `ConfigError` of one line.

    Args:
        where: name of the file, for errors.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # transformers raises any class for a file that it does not understand
        raise ConfigError(f"{where}: cannot be read ({json_files.reason(error)})") from None
    except BaseException as error:  # a panic of the Rust library derives from BaseException alone
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{where}: cannot be read ({json_files.reason(error)})") from None


def _check_tokenizer(file: Path) -> None:
    """Refuse a tokenizer.json that tokenizers does not read, or whose ids are no ids."""
    from tokenizers import Tokenizer

    spec = json_files.read_object(file)
    json_files.check(spec, {"model": dict, "added_tokens?": list}, str(file))
    for id in vocabulary(spec, file):
        if type(id) is not int or not 0 <= id < MAX_IDS:
            raise ConfigError(f"{file}: expected ids from 0 to {MAX_IDS - 1}, found {json_files.shown(id)}")
    with one_line(str(file)):
        Tokenizer.from_file(os.fspath(file))


def vocabulary(spec: dict[str, Any], file: Path) -> list[Any]:
    """List the ids of a parsed tokenizer.json, added tokens included.

    Args:
        spec: the contents of the file.
        file: the file, for errors.
    """
    model = spec.get("model") or {}
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    added = spec.get("added_tokens") or []
    if not isinstance(vocab, (dict, list)):
        raise ConfigError(f"{file}: model: key 'vocab': expected an object or a list, found {json_files.shown(vocab)}")
    if not isinstance(added, list):
        raise ConfigError(f"{file}: key 'added_tokens': expected a list, found {json_files.shown(added)}")
    for number, token in enumerate(added):
        if not isinstance(token, dict):
            raise ConfigError(f"{file}: added_tokens {number}: expected an object, found {json_files.shown(token)}")
        json_files.check(token, {**TOKEN, "id": int}, f"{file}: added_tokens {number}")
    return [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab))), *(token["id"] for token in added)]


def _check_config(file: Path) -> None:
    if not file.is_file():
        return
    config = json_files.read_object(file)
    json_files.check(config, CONFIG, str(file))
    if config.get("auto_map") is not None:
        raise ConfigError(f"{file}: key 'auto_map': code that comes with a folder is not run; remove the key")
    tokens = [(name, config[name]) for name in config if name.endswith("_token") and isinstance(config[name], dict)]
    for name, token in [*tokens, *(config.get("added_tokens_decoder") or {}).items()]:
        if not isinstance(token, dict):
            raise ConfigError(f"{file}: key {name!r}: expected an object, found {json_files.shown(token)}")
        json_files.check(token, TOKEN, f"{file}: {name}")
    for id in config.get("added_tokens_decoder") or {}:
        if not (id.isascii() and id.isdecimal() and len(id) < 9):
            raise ConfigError(f"{file}: added_tokens_decoder: expected ids as keys, found {id!r}")


# Messages of `tokenizer.ByteTokenizer`: role marker, bytes, end.
_BYTES_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] }}"
    "{{- '<|eos|>' if message['role'] == 'assistant' else '<|sep|>' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def save_bytes(directory: Path, control: Mapping[str, int]) -> None:
    """Write a tokenizer of bytes that transformers loads as ``PreTrainedTokenizerFast``.

    Transformers reads the text of a control token, as ``<|eos|>``, as that token. Our tokenizer reads it as bytes.

    Args:
        directory: Where tokenizer.json and tokenizer_config.json go.
        control: Id of each control token by its name, from 256 on without a gap.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # A byte without a printable character of its own has one from 256 on, in the order of the bytes.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(hidden)): byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    names = sorted(control, key=lambda name: control[name])
    made.add_special_tokens([AddedToken(f"<|{name}|>", normalized=False) for name in names])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|eos|>", clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = _BYTES_TEMPLATE
    wrapped.save_pretrained(str(directory))
