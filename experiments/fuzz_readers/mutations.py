"""Mutations of files. Every mutation is drawn from one random generator, so a seed names a file exactly."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

DEEP = 100_000  # levels of nesting
# Values of a wrong type or size for any key.
VALUES: tuple[Any, ...] = (
    None, True, False, "false", "true", "", "x", "a\nb\x00", "\ud800", "é" * 50, [], [[]], {}, {"a": 1}, [None], [-1],
    0, 1, -1, 2, 2**31, 2**63, 2**64, 10**9, 10**18, 10**400, -(10**30), 0.5, 1.0, 1e-320, 1e308, -1e308,
    float("nan"), float("inf"), -float("inf"), [1, "2", None], {"": {}}, "../../etc/passwd", "a" * 10_000,
)  # fmt: skip


def slots(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the places of all values in a JSON value, the whole first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [prefix, *(slot for key, child in inner for slot in slots(child, (*prefix, key)))]


def at(value: Any, place: tuple[Any, ...]) -> Any:
    """Return the value at a place."""
    for key in place:
        value = value[key]
    return value


def put(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    """Return the JSON value with another value at a place."""
    if not place:
        return new
    out = copy.deepcopy(value)
    at(out, place[:-1])[place[-1]] = new
    return out


def json_value(rng: random.Random, value: Any) -> tuple[str, Any]:
    """Change one value, key or element of a JSON value. Returns what was done, and the new value."""
    place = rng.choice(slots(value))
    name = "/".join(map(str, place)) or "all"
    kind = rng.choice(("replace", "replace", "replace", "remove", "rename", "repeat", "swap", "wrap"))
    if kind == "replace" or not place:
        new = rng.choice(VALUES)
        return f"{name} = {ascii(new)[:40]}", put(value, place, copy.deepcopy(new))
    old, parent = at(value, place), copy.deepcopy(at(value, place[:-1]))
    if kind == "remove":
        del parent[place[-1]]
    elif kind == "rename" and isinstance(parent, dict):
        parent[rng.choice(("x", "", "a\nb", "\ud800", f"{place[-1]} "))] = parent.pop(place[-1])
    elif kind == "repeat" and isinstance(parent, list):
        parent += [copy.deepcopy(old) for _ in range(rng.choice((1, 5)))]
    elif kind == "swap":
        parent[place[-1]] = copy.deepcopy(at(value, rng.choice(slots(value))))
    else:
        parent[place[-1]] = rng.choice(([old], {"x": old}, json.dumps(old)))
    return f"{kind} {name}", put(value, place[:-1], parent)


def json_text(rng: random.Random, text: bytes) -> tuple[str, bytes]:
    """Damage the text of a JSON file as a whole."""
    kind = rng.choice(
        ("cut", "byte", "utf-16", "latin", "bom", "deep list", "deep object", "digits", "many", "long", "pointer",
         "empty", "twice", "constant")
    )  # fmt: skip
    middle = rng.randrange(len(text) + 1)
    depth = rng.choice((500, DEEP))
    return kind, {
        "cut": lambda: text[:middle],
        "byte": lambda: flipped(rng, text),
        "utf-16": lambda: text.decode("utf-8", "replace").encode("utf-16"),
        "latin": lambda: text[:middle] + b"\xe9\xff" + text[middle:],
        "bom": lambda: b"\xef\xbb\xbf" + text,
        "deep list": lambda: b'{"a":' + b"[" * depth + b"]" * depth + b"}",
        "deep object": lambda: b'{"a":' * depth + b"1" + b"}" * depth,
        "digits": lambda: b'{"a": ' + b"9" * 10_000 + b"}",
        "many": lambda: b'{"a": [' + b"[]," * 3_000_000 + b"[]]}",
        "long": lambda: b'{"a": "' + b"x" * rng.choice((100_000, 70_000_000)) + b'"}',
        "pointer": lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
        "empty": lambda: b"",
        "twice": lambda: text + text,
        "constant": lambda: text[:middle] + rng.choice((b"NaN", b"-Infinity", b"1e999", b"\\ud800")) + text[middle:],
    }[kind]()


def json_file(rng: random.Random, value: Any) -> tuple[str, bytes]:
    """Mutate a JSON file: one to three of its values, or its text."""
    if rng.random() < 0.08:
        return json_text(rng, json.dumps(value).encode())
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        what, value = json_value(rng, value)
        done.append(what)
    return "; ".join(done), json.dumps(value).encode()


def jsonl_file(rng: random.Random, rows: list[Any]) -> tuple[str, bytes]:
    """Mutate one row of a file of JSON rows, or its text."""
    if rng.random() < 0.08:
        return json_text(rng, b"\n".join(json.dumps(row).encode() for row in rows) + b"\n")
    number = rng.randrange(len(rows))
    what, row = json_file(rng, rows[number])
    lines = [json.dumps(r).encode() for r in rows]
    lines[number] = row
    if rng.random() < 0.1:
        lines.insert(rng.randrange(len(lines)), rng.choice((b"", b"[]", b"null", b"\x85", lines[0])))
    return f"row {number}: {what}", b"\n".join(lines) + rng.choice((b"\n", b"\n", b""))


def flipped(rng: random.Random, raw: bytes, first: int = 0, last: int | None = None) -> bytes:
    """Flip a few bits between two places."""
    out = bytearray(raw)
    last = len(out) if last is None else min(last, len(out))
    for _ in range(rng.choice((1, 1, 2, 8))):
        if last > first:
            out[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
    return bytes(out)


def binary_file(rng: random.Random, raw: bytes, header: int) -> tuple[str, bytes]:
    """Damage a binary file: bits, cuts, insertions, and integers of the header.

    Args:
        rng: the generator.
        raw: the file.
        header: bytes of its header.
    """
    kind = rng.choice(("bits", "bits", "cut", "insert", "remove", "32 bits", "64 bits", "64 bits", "zeros", "grow"))
    place = rng.randrange(max(1, min(header, len(raw))))
    number = rng.choice((0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1))
    out = {
        "bits": lambda: flipped(rng, raw, 0, header),
        "cut": lambda: raw[: rng.choice((place, rng.randrange(len(raw))))],
        "insert": lambda: raw[:place] + rng.randbytes(rng.choice((1, 4, 8))) + raw[place:],
        "remove": lambda: raw[:place] + raw[place + rng.choice((1, 4, 8)) :],
        "32 bits": lambda: raw[:place] + struct.pack("<I", number & 0xFFFFFFFF) + raw[place + 4 :],
        "64 bits": lambda: raw[:place] + struct.pack("<Q", number) + raw[place + 8 :],
        "zeros": lambda: raw[:place] + bytes(min(64, len(raw) - place)) + raw[place + 64 :],
        "grow": lambda: raw + bytes(rng.choice((1, 100))),
    }[kind]()
    return f"{kind} at {place}", out


def safetensors_file(rng: random.Random, raw: bytes) -> tuple[str, bytes]:
    """Mutate a safetensors file: its header as JSON with the length mended, or its bytes."""
    length = struct.unpack("<Q", raw[:8])[0]
    if rng.random() < 0.35:
        return binary_file(rng, raw, 8 + length)
    header = json.loads(raw[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    name, other = rng.choice(names), rng.choice(names)
    kind = rng.choice(("json", "json", "overlap", "dtype", "shape", "reversed", "gap", "name"))
    if kind == "json":
        kind, text = json_file(rng, header)
    else:
        first, last = header[name]["data_offsets"]
        if kind == "overlap":
            header[name]["data_offsets"] = list(header[other]["data_offsets"])
        elif kind == "dtype":
            header[name]["dtype"] = rng.choice(("F64", "F16", "BF16", "I64", "BOOL", "F8_E4M3", "F4", "f32", ""))
        elif kind == "shape":
            header[name]["shape"] = rng.choice(([], [0], [2**40, 0], [2**62, 4], [-1, -4], header[other]["shape"]))
        elif kind == "reversed":
            header[name]["data_offsets"] = [last, first]
        elif kind == "gap":
            header[name]["data_offsets"] = [first + 4, last + 4]
        else:
            header[f"{name}\n"] = header.pop(name)
        text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return kind, struct.pack("<Q", len(text)) + text + raw[8 + length :]
