"""Reader of the GGUF format, versions 2 and 3, little-endian: metadata and the places of the tensors.

Every count, length and offset is compared with the size of the file before anything is read by it. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmarl_llm.errors import ConfigError

STRING, ARRAY, BOOL = 8, 9, 7
# Scalars by their number in the format.
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
MAX_KEY = 65_535  # bytes of a key or of a tensor's name, as the format says
MAX_DEPTH = 4  # of arrays in arrays


class Place(NamedTuple):
    """Place of a tensor in the file."""

    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # the last axis is the innermost
    start: int  # first byte
    size: int  # bytes


class GGUFFile:
    """Header of a GGUF file. ``metadata``: values by key. ``tensors``: places by name.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ConfigError(f"{path}: reading GGUF needs the gguf package: pip install gguf") from error
        self.path = path
        self._size = path.stat().st_size
        self._raw = np.memmap(path, mode="r") if self._size else np.empty(0, np.uint8)
        self._at = 0
        if self._take(4, "magic").tobytes() != b"GGUF":
            raise self._error("it does not begin with GGUF")
        version = self._number("I", "version")
        if version not in (2, 3):
            raise self._error(f"version {version}; expected 2 or 3, little-endian")
        tensors, keys = self._count(24, "tensors"), self._count(13, "metadata keys")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text("a metadata key", MAX_KEY)
            if key in self.metadata:
                raise self._error(f"metadata {key!r} occurs twice")
            self.metadata[key] = self._value(self._number("I", f"metadata {key!r}"), f"metadata {key!r}")
        found = [self._tensor(gguf) for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self._error(f"metadata 'general.alignment': expected a power of two, found {alignment!r:.80}")
        self.tensors = self._places(found, -(-self._at // alignment) * alignment)

    def data(self, name: str) -> np.ndarray:
        """Return the bytes of a tensor as a row of blocks for each row of the tensor, [..., bytes].

        Args:
            name: name of the tensor.
        """
        place = self.tensors[name]
        raw = self._raw[place.start : place.start + place.size]
        return raw.reshape(*place.shape[:-1], -1)

    def _tensor(self, gguf: Any) -> tuple[str, Any, tuple[int, ...], int, int]:
        name = self._text("a tensor's name", MAX_KEY)
        where = f"tensor {name!r}"
        axes = self._number("I", where)
        if not 1 <= axes <= 4:
            raise self._error(f"{where}: expected 1 to 4 axes, found {axes}")
        shape = tuple(self._number("Q", where) for _ in range(axes))[::-1]
        code, offset = self._number("I", where), self._number("Q", where)
        try:
            kind = gguf.GGMLQuantizationType(code)
            block, width = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise self._error(f"{where}: type {code} is not known") from None
        if shape[-1] % block or min(shape) < 1:
            raise self._error(f"{where}: shape {shape} does not fit blocks of {block}")
        return name, kind, shape, offset, math.prod(shape) // block * width

    def _places(self, found: list[tuple[str, Any, tuple[int, ...], int, int]], base: int) -> dict[str, Place]:
        """Return the places of tensors, none of which overlap or reach beyond the file."""
        places: dict[str, Place] = {}
        end = 0
        for name, kind, shape, offset, size in sorted(found, key=lambda t: t[3]):
            if name in places:
                raise self._error(f"tensor {name!r} occurs twice")
            if base + offset + size > self._size:
                raise self._error(f"tensor {name!r}: expected {size} bytes at {base + offset}")
            if offset < end:
                raise self._error(f"tensor {name!r} overlaps the tensor before it")
            end = offset + size
            places[name] = Place(kind, shape, base + offset, size)
        return places

    def _value(self, kind: int, where: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self._text(where)
        if kind == ARRAY and depth < MAX_DEPTH:
            element = self._number("I", where)
            least = struct.calcsize(SCALARS[element]) if element in SCALARS else 8
            count = self._count(least, where)
            if element not in SCALARS:
                return [self._value(element, where, depth + 1) for _ in range(count)]
            raw = self._take(count * least, where)
            return raw.view(np.dtype(SCALARS[element]).newbyteorder("<"))
        if kind == BOOL:
            return bool(self._number("B", where))
        if kind not in SCALARS:
            raise self._error(f"{where}: type {kind} is not known")
        return self._number(SCALARS[kind], where)

    def _text(self, where: str, most: int | None = None) -> str:
        length = self._count(1, where)
        if most is not None and length > most:
            raise self._error(f"{where}: {length} bytes")
        raw = self._take(length, where).tobytes()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{where}: not UTF-8") from None

    def _count(self, least: int, where: str) -> int:
        """Read a count of things that take at least ``least`` bytes each."""
        count = self._number("Q", where)
        if count * least > self._size - self._at:
            raise self._error(f"{where}: a count of {count}")
        return count

    def _number(self, code: str, where: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize(code), where).tobytes())[0]

    def _take(self, size: int, where: str) -> np.ndarray:
        if size > self._size - self._at:
            raise self._error(f"it ends within {where}")
        self._at += size
        return self._raw[self._at - size : self._at]

    def _error(self, what: str) -> ConfigError:
        what = what if len(what) <= 200 else f"{what[:197]}..."
        return ConfigError(f"{self.path}: not a whole GGUF file of {self._size} bytes: {what}")
