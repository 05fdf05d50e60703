"""What `python -m experiments.bench` measures: one module a part, each with ``run(shape, repeats) -> [Row]``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxmarl_llm.qwen import Config

# Shapes by name: random weights of a model's true shape take the time that the real ones do.
SHAPES = {
    "tiny": Config(1024, 64, 128, 2, 4, 2, 16, attention_bias=False, family="llama"),
    "smollm2_135m": Config(49_152, 576, 1536, 30, 9, 3, 64, rope_theta=1e5, attention_bias=False, family="llama"),
    "qwen2_5_0_5b": Config(151_936, 896, 4864, 24, 14, 2, 64, rope_theta=1e6),
}


def temporary(compiled: Any) -> int:
    """Bytes that a compiled program holds besides its arguments and results."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


class Row(NamedTuple):
    """One comparison. ``seconds`` by form, ``ours`` among them, as many of each, measured in turns."""

    part: str
    case: str
    seconds: Mapping[str, list[float]]
    first: Mapping[str, float]  # of the first call, which compiles
    facts: Mapping[str, Any]  # whatever else is counted: bytes, tokens

    def ratio(self, other: str) -> tuple[float, float, float]:
        """other / ours: median over rounds, least and largest. Above 1, ours is faster."""
        ratios = np.array(self.seconds[other]) / np.array(self.seconds["ours"])
        return float(np.median(ratios)), float(ratios.min()), float(ratios.max())


def measure(part: str, case: str, forms: Mapping[str, Callable[[], Any]], repeats: int, **facts: Any) -> Row:
    """Every form once (it compiles), then ``repeats`` rounds of all of them in turn: a slow minute hits all alike."""
    first: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for name, form in forms.items():
        clock = time.perf_counter()
        form()
        first[name] = time.perf_counter() - clock
    for _ in range(repeats):
        for name, form in forms.items():
            clock = time.perf_counter()
            form()
            seconds[name].append(time.perf_counter() - clock)
    return Row(part, case, seconds, first, facts)
