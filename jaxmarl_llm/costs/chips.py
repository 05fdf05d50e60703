"""Public figures of accelerator chips, and the reader of a set of chips such as ``h100:8``.

Each entry is what JAX shows as one device. That is a whole chip, except for tpu7x (Ironwood). A chip of tpu7x is two
devices, and its entry has half of the chip's figures. Google publishes the bandwidth of links in both directions added
up, and ``links`` is one direction: half of it.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxmarl_llm.config import nearest
from jaxmarl_llm.errors import ConfigError


class Chip(NamedTuple):
    """Public figures of a chip.

    flops: bfloat16 FLOPs per second, without sparsity. bandwidth: bytes per second of its memory. memory: bytes. links:
    bytes per second that it sends to other chips, over all its links. source: where the figures are published. kernels:
    whether attention takes Pallas kernels there, which keep no scores (`kernels/attention`).
    """

    flops: float
    bandwidth: float
    memory: float
    links: float
    source: str
    kernels: bool = False


CHIPS = {
    "v4": Chip(275e12, 1200e9, 32e9, 300e9, "cloud.google.com/tpu/docs/v4", True),
    "v5e": Chip(197e12, 819e9, 16e9, 200e9, "cloud.google.com/tpu/docs/v5e", True),
    "v5p": Chip(459e12, 2765e9, 95e9, 600e9, "cloud.google.com/tpu/docs/v5p", True),
    "v6e": Chip(918e12, 1638e9, 32e9, 400e9, "cloud.google.com/tpu/docs/v6e", True),
    "tpu7x": Chip(2307e12 / 2, 7380e9 / 2, 192e9 / 2, 600e9 / 2, "cloud.google.com/tpu/docs/tpu7x, half a chip", True),
    "a100": Chip(312e12, 2039e9, 80e9, 300e9, "NVIDIA A100 datasheet, SXM 80 GB"),
    "h100": Chip(989e12, 3.35e12, 80e9, 450e9, "NVIDIA H100 datasheet, SXM"),
    "h200": Chip(989e12, 4.8e12, 141e9, 450e9, "NVIDIA H200 datasheet, SXM"),
}

MOST_CHIPS = 2**20  # of one set


class ChipSet(NamedTuple):
    """Chips of one kind. name: key of `CHIPS`. size: number of devices."""

    name: str
    size: int

    @property
    def chip(self) -> Chip:
        """Figures of one of the chips."""
        return CHIPS[self.name]

    def __str__(self) -> str:
        return f"{self.name}:{self.size}"


def chip_set(text: str, flag: str = "--chip") -> ChipSet:
    """Set of chips that ``text`` names: ``h100`` is one chip, ``h100:8`` are eight.

    Args:
        text: Name of a chip, and maybe a colon and the number of devices.
        flag: Name of the flag in messages.

    Raises:
        ConfigError: The chip is unknown, or the count is no number from 1 to `MOST_CHIPS`.
    """
    name, colon, count = text.partition(":")
    if name not in CHIPS:
        raise ConfigError(f"{flag}: unknown chip {name!r}; {nearest(name, CHIPS)}")
    if colon and not (count.isdecimal() and count.isascii() and 1 <= int(count[:9]) <= MOST_CHIPS and len(count) < 9):
        raise ConfigError(f"{flag}: {name}: expected a number of chips from 1 to {MOST_CHIPS}, got {count!r}")
    return ChipSet(name, int(count) if colon else 1)
