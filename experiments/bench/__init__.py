"""What `python -m experiments.bench` measures: a module for each part, whose ``run(suite)`` gives rows as they come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxmarl_llm.models.decoder_config import Config

# Shapes by name: random weights of a model's true shape take the time that the real ones do.
SHAPES = {
    "tiny": Config(1024, 64, 128, 2, 4, 2, 16, attention_bias=False, family="llama"),
    "7m": Config(8192, 256, 704, 6, 4, 4, 64, attention_bias=False, family="llama"),
    "smollm2_135m": Config(49_152, 576, 1536, 30, 9, 3, 64, rope_theta=1e5, attention_bias=False, family="llama"),
    "qwen2_5_0_5b": Config(151_936, 896, 4864, 24, 14, 2, 64, rope_theta=1e6),
    "qwen2_5_3b": Config(151_936, 2048, 11_008, 36, 16, 2, 128, rope_theta=1e6),
}


@dataclass(frozen=True)
class Suite:
    """What a machine is measured on."""

    name: str
    parts: tuple[str, ...]
    repeats: int = 5
    peers: str = ".venv-peers"  # folder of the virtual environments of other systems
    dtype: str = "float32"
    device: str = "cpu"  # of torch

    @property
    def accelerator(self) -> bool:
        """Also in its tiny form, which runs on a CPU."""
        return "machine" in self.parts

    @property
    def tiny(self) -> bool:
        """The shapes and sizes of the tests."""
        return self.name.startswith("tiny")


CPU = ("head", "decode", "update", "step", "product", "invariant", "sweep", "scheduler", "adapters", "variants")
GPU = ("machine", "head", "decode", "update", "step", "kernels", "variants", "adapters", "profile")
TURN, MOST = 0.2, 100  # seconds, and calls
# What keeps freed memory in any program with glibc, as `runs.allocator.retain` does in ours on a CPU.
KEEP_FREED_MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=34359738368:"
    "glibc.malloc.arena_max=1"
)
LONG = 20.0  # seconds of a first call on a CPU, after which no second one tells how many make a turn

SUITES = {
    "cpu": Suite("cpu", CPU),
    "accelerator": Suite("accelerator", GPU, dtype="bfloat16", device="cuda"),
    "tiny": Suite("tiny", CPU, repeats=1),
    "tiny_accelerator": Suite("tiny_accelerator", GPU, repeats=1, dtype="bfloat16"),
}


@dataclass(frozen=True)
class Row:
    """Ours beside others, as many measurements of each, taken in turns. Less is better: seconds, or bytes.

    ``targets`` and ``limits`` by name of the other: the ratio that is asked for; and the ratio that the counted work
    allows, where counting bounds it.
    """

    part: str
    case: str
    values: Mapping[str, list[float]]  # "ours" among them
    unit: str = "s"
    first: Mapping[str, float] = field(default_factory=dict)  # seconds of the first call, which compiles
    targets: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # whatever else is known of the case

    def others(self) -> list[str]:
        return [name for name in self.values if name != "ours"]

    def ratio(self, other: str) -> tuple[float, float, float]:
        """other / ours: median over rounds, least and largest. Above 1, ours is faster, or smaller."""
        ratios = np.array(self.values[other]) / np.array(self.values["ours"])
        return float(np.median(ratios)), float(ratios.min()), float(ratios.max())


def measure(part: str, case: str, forms: Mapping[str, Callable[[], Any]], repeats: int, **more: Any) -> Row:
    """Every form once (it compiles), then ``repeats`` rounds of all of them in turn: a slow minute hits all alike.

    A turn of a form that takes less than `TURN` is the mean of as many calls as fill it, `MOST` at most.
    """
    first: dict[str, float] = {}
    calls: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    work = dict.fromkeys(forms, 0.0)

    def turn(form: Callable[[], Any], calls: int) -> float:
        clock = time.perf_counter()
        for _ in range(calls):
            form()
        return (time.perf_counter() - clock) / calls

    for name, form in forms.items():
        first[name] = turn(form, 1)
        again = first[name] <= LONG or jax.default_backend() != "cpu"  # a GPU's second call still builds graphs
        calls[name] = min(math.ceil(TURN / turn(form, 1)), MOST) if again else 1
    for _ in range(repeats):
        for name, form in forms.items():
            cpu = time.process_time()
            seconds[name].append(turn(form, calls[name]))
            work[name] += (time.process_time() - cpu) / calls[name]
    # Another system works in a process of its own, and on an accelerator nothing works here.
    busy = {name: work[name] / sum(seconds[name]) for name in forms if work[name] > 0.05 * sum(seconds[name])}
    if busy:
        said = ", ".join(f"{name} {x:.2f}" for name, x in busy.items())
        more["facts"] = {**more.get("facts", {}), "cores kept busy": said}
    return Row(part, case, seconds, first=first, **more)


def temporary(compiled: Any) -> int:
    """Bytes that a compiled program holds besides its arguments and results."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def held(compiled: Any) -> int:
    """Bytes that a compiled program holds at its peak, arguments and results included, as the compiler counts them."""
    size = compiled.memory_analysis()
    return temporary(compiled) + int(size.argument_size_in_bytes + size.output_size_in_bytes - size.alias_size_in_bytes)


def trunk_ratio(group: int, prompt: int, response: int) -> float:
    """How many times the tokens a trunk is sent when every sample brings its own prompt: the bound of sharing it.

    Nothing asks for what comes after the last token of a completion.
    """
    return group * (prompt + response - 1) / (prompt + group * (response - 1))
