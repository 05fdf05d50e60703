from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    kind: str  # "L" or "X"
    claim: str  # one sentence with its threshold
    figures: dict[str, list[float]]  # label -> one value a seed
    holds: bool
