"""The one reader of JSON: a value, or a `ConfigError` of one line that names the file.

Size and number of values are bounded before a file is parsed, so that a damaged or hostile file costs little time and
memory. NaN and Infinity are no JSON. Without JAX, as `errors` is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxmarl_llm.errors import ConfigError

MAX_BYTES = 64 * 2**20  # the largest published tokenizer.json has 33 MB
MAX_LINE = 16 * 2**20  # bytes of a line of a file of rows
MAX_VALUES = 2_000_000  # an upper bound of the values: commas and opening brackets; that tokenizer.json has 1.9 million
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def shown(value: Any, limit: int = 80) -> str:
    """Write a value as JSON on one line, cut to a length.

    Args:
        value: any value.
        limit: largest number of characters.
    """
    try:
        text = json.dumps(value)  # escapes line ends and everything that is not ASCII
    except (TypeError, ValueError, RecursionError):
        text = ascii(type(value).__name__)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def reason(error: BaseException, limit: int = 200) -> str:
    """Write what an exception says on one line, cut to a length.

    Args:
        error: the exception.
        limit: largest number of characters.
    """
    text = " ".join(str(error).split()).encode("ascii", "backslashreplace").decode()
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def read_bytes(path: Path, limit: int | None = MAX_BYTES) -> bytes:
    """Read a file.

    Args:
        path: the file.
        limit: largest number of bytes; None permits every size.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: file is missing")
    try:
        size = path.stat().st_size
        if limit is not None and size > limit:
            raise ConfigError(f"{path}: expected at most {limit} bytes, found {size}")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def read_text(path: Path, limit: int | None = MAX_BYTES) -> str:
    """Read a file of UTF-8.

    Args:
        path: the file.
        limit: see `read_bytes`.
    """
    return decoded(read_bytes(path, limit), str(path))


def lines(file: BinaryIO, where: str, most: int | None = None) -> Iterator[bytes]:
    """Yield the lines of an open file, line ends included. At most one line is in memory.

    Args:
        file: the file.
        where: its name, for errors.
        most: largest number of bytes of the file; None permits every size.
    """
    number = total = 0
    while line := file.readline(MAX_LINE + 1):
        number, total = number + 1, total + len(line)
        if len(line) > MAX_LINE:
            raise ConfigError(f"{where}, line {number}: expected at most {MAX_LINE} bytes")
        if most is not None and total > most:
            raise ConfigError(f"{where}: expected at most {most} bytes of text")
        yield line


def decoded(raw: bytes, where: str, line: int = 1) -> str:
    """Decode UTF-8.

    Args:
        raw: the bytes.
        where: name of the file, for errors.
        line: number of the first line of the bytes in the file.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line += raw[: error.start].count(b"\n")
        raise ConfigError(f"{where}, line {line}: not UTF-8 (byte {raw[error.start]:#04x})") from None


def parse(text: str, where: str, *, nan: bool = False) -> Any:
    """Parse one JSON value.

    Args:
        text: the text.
        where: name of the file, and of the line if the text is one line of it, for errors.
        nan: whether NaN and Infinity are permitted, as Python's json writes them.
    """
    count = 1 + text.count(",") + text.count("[") + text.count("{")
    if count > MAX_VALUES:
        raise ConfigError(f"{where}: expected at most {MAX_VALUES} values, found up to {count}")
    try:
        value = json.loads(text, parse_constant=None if nan else _refuse_constant)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "\n" in text else ""
        raise ConfigError(f"{where}{line}: not valid JSON ({error.msg} at column {error.colno})") from None
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: not valid JSON (half of a surrogate pair in a string)") from None
    except RecursionError:
        raise ConfigError(f"{where}: not valid JSON (nested too deeply)") from None
    except ValueError as error:  # a constant, or an integer of more than 4,300 digits
        raise ConfigError(f"{where}: not valid JSON ({' '.join(str(error).split())[:100]})") from None
    return value


def read(path: Path, *, nan: bool = False) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        nan: see `parse`.
    """
    return parse(read_text(path), str(path), nan=nan)


def read_object(path: Path, *, nan: bool = False) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        path: the file.
        nan: see `parse`.
    """
    value = read(path, nan=nan)
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def check(values: Mapping[str, Any], form: Mapping[str, Any], where: str) -> None:
    """Check the types of keys. Keys that the form does not name are not looked at.

    Args:
        values: a JSON object.
        form: a type, a tuple of types, or a form for the object under each key. A key that ends with ``?`` may be
            absent or null. ``int`` and ``float`` do not mean booleans, and ``float`` means an integer too.
        where: name of the file, and of the object's place in it, for errors.
    """
    for name, kind in form.items():
        key = name.removesuffix("?")
        value = values.get(key)
        if value is None and key != name:
            continue
        kinds = (dict,) if isinstance(kind, Mapping) else kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join("null" if k is type(None) else _NAMES[k] for k in kinds)
        if key not in values:
            raise ConfigError(f"{where}: key {key!r} is missing; expected {expected}")
        if not any(_is(value, k) for k in kinds):
            raise ConfigError(f"{where}: key {key!r}: expected {expected}, found {shown(value)}")
        if isinstance(kind, Mapping) and isinstance(value, dict):
            check(value, kind, f"{where}: {key}")


_NAMES = {dict: "an object", list: "a list", str: "text", int: "an integer", float: "a number", bool: "true or false"}


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")
