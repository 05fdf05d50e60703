"""What the module of a claim returns."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    kind: str  # "U" (counted in the run), "L" or "X"
    claim: str  # one sentence with its threshold
    figures: dict[str, list[float]]  # label -> one value a seed
    holds: bool
