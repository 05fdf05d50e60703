"""Files of a tokenizer: typed, bounded, and without code of strangers."""

from __future__ import annotations

import json

import pytest

from experiments.fuzz_readers.kinds import tokenizer
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import HFTokenizer

CONFIG, GENERATION, SPEC = "tokenizer_config.json", "generation_config.json", "tokenizer.json"
REFUSED = {
    "eos a word": (GENERATION, {"eos_token_id": "x"}, "key 'eos_token_id': expected ids from 0 to 260, found \"x\""),
    "eos outside": (GENERATION, {"eos_token_id": [257, 10**9]}, "found 1000000000"),
    "eos below 0": (GENERATION, {"eos_token_id": -1}, "found -1"),
    "eos true": (GENERATION, {"eos_token_id": True}, "found true"),
    "eos an object": (GENERATION, {"eos_token_id": {"a": 1}}, "key 'eos_token_id'"),
    "a flag as text": (CONFIG, {"add_prefix_space": "false"}, "key 'add_prefix_space': expected true or false"),
    "code": (CONFIG, {"auto_map": {"AutoTokenizer": ["x.X", None]}}, "key 'auto_map': code .* is not run"),
    "template a number": (CONFIG, {"chat_template": 3}, "key 'chat_template': expected text or a list, found 3"),
    "an added token": (CONFIG, {"added_tokens_decoder": {"256": "x"}}, "key '256': expected an object"),
    "an id too large": (SPEC, {"added_tokens": [{"id": 10**9, "content": "x"}]}, "found 1000000000"),
    "no model": (SPEC, {"model": None}, "key 'model': expected an object, found null"),
    "vocab a text": (SPEC, {"model": {"type": "BPE", "vocab": "x"}}, "key 'vocab': expected an object or a list"),
}


def folder(path, file, change):
    for name, raw in tokenizer().items():
        values = json.loads(raw)
        (path / name).write_text(json.dumps({**values, **change} if name == file else values))
    return path


def test_the_whole_folder_loads(tmp_path):
    loaded = HFTokenizer(folder(tmp_path, "", {}))
    assert loaded.vocab_size == 261 and loaded.stop_ids == (260, 258)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_with_the_file_and_the_key(case, tmp_path, monkeypatch):
    file, change, message = REFUSED[case]
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    with pytest.raises(ConfigError, match=message) as error:
        HFTokenizer(folder(tmp_path, file, change))
    assert str(tmp_path / file) in str(error.value) and "\n" not in str(error.value)


def test_no_eos_of_the_generation_config_is_no_error(tmp_path):
    assert HFTokenizer(folder(tmp_path, GENERATION, {"eos_token_id": None})).stop_ids == (260, 258)
