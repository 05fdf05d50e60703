"""The one reader of JSON: what it refuses, in one line that names the file."""

from __future__ import annotations

import pytest

from jaxmarl_llm import json_files
from jaxmarl_llm.errors import ConfigError

REFUSED = {
    "cut": (b'{"a": 1', r"f\.json: not valid JSON"),
    "second line": (b'{\n"a" 1}', r"f\.json, line 2: not valid JSON"),
    "not UTF-8": (b'{\n"a": "\xff"}', r"f\.json, line 2: not UTF-8 \(byte 0xff\)"),
    "deep": (b"[" * 100_000 + b"]" * 100_000, r"nested too deeply"),
    "digits": (b"9" * 5000, r"not valid JSON \(Exceeds the limit"),
    "NaN": (b'{"a": NaN}', r"NaN is no JSON number"),
    "half a surrogate pair": (b'{"a": "\\ud800"}', r"half of a surrogate pair"),
    "many values": (b"[" + b"[]," * 1_100_000 + b"[]]", r"at most 2000000 values"),
    "a list": (b"[]", r"expected a JSON object, found list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case, tmp_path):
    raw, message = REFUSED[case]
    file = tmp_path / "f.json"
    file.write_bytes(raw)
    with pytest.raises(ConfigError, match=message) as error:
        json_files.read_object(file)
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)


def test_files_that_are_no_files(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="file is missing"):
        json_files.read(tmp_path)
    (tmp_path / "f.json").write_bytes(b"[1, 2]")
    monkeypatch.setattr(json_files, "MAX_LINE", 4)
    with pytest.raises(ConfigError, match="at most 5 bytes, found 6"):
        json_files.read_bytes(tmp_path / "f.json", 5)
    with open(tmp_path / "f.json", "rb") as file, pytest.raises(ConfigError, match="line 1: expected at most 4 bytes"):
        list(json_files.lines(file, "f.json"))


def test_values_that_are_kept(tmp_path):
    file = tmp_path / "f.json"
    file.write_bytes('{"a": "é\\ud83d\\ude00", "b": NaN}'.encode())
    assert json_files.read(file, nan=True)["a"] == "é😀"


FORM = {"n": int, "x": float, "f?": bool, "o": {"s": (str, list)}}
WHOLE = {"n": 1, "x": 2, "f": True, "o": {"s": []}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": True}, "key 'n': expected an integer, found true"),
        ({"n": 1.0}, "key 'n': expected an integer, found 1.0"),
        ({"x": "2"}, "key 'x': expected a number, found \"2\""),
        ({"f": "false"}, "key 'f': expected true or false, found \"false\""),
        ({"o": []}, "key 'o': expected an object"),
        ({"o": {}}, "W: o: key 's' is missing; expected text or a list"),
        ({"x": [1] * 1000}, "found [1, 1"),
    ],
)
def test_keys_have_types(change, message):
    with pytest.raises(ConfigError) as error:
        json_files.check({**WHOLE, **change}, FORM, "W")
    assert message in str(error.value) and len(str(error.value)) < 200


def test_optional_keys_may_be_absent_or_null():
    for rest in (WHOLE, {**WHOLE, "f": None}, {k: v for k, v in WHOLE.items() if k != "f"}, {**WHOLE, "more": 1}):
        json_files.check(rest, FORM, "W")
