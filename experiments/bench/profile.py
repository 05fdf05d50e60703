"""Where the time of decoding and of an update goes on the device: operations by their share of the time.

`jax.profiler` records one call. Its trace has the seconds of every operation that the device ran. The rest of the
call's time is the device's waiting, for the host or for the start of an operation.
"""

from __future__ import annotations

import collections
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from experiments.bench import Row, Suite, decode, update

# Shape, samples, prompt, response.
CASES = {
    "accelerator": (("qwen2_5_0_5b", 16, 512, 64), ("qwen2_5_3b", 16, 512, 64)),
    "tiny_accelerator": (("tiny", 4, 16, 8),),
}
LONGEST = 8  # operations that are named


def run(suite: Suite) -> Iterator[Row]:
    for shape, group, p, r in CASES[suite.name]:
        cfg, tokens, said, gain = update.inputs(suite, shape, group, p, r)
        case = f"{shape}, G={group}, P={p}, R={r}"
        yield profiled(f"generation, {case}", decode.sampler(cfg, tokens, group, r))
        yield profiled(f"update, {case}", update.ours(cfg, tokens, said, gain))


def profiled(case: str, form: Callable[[], Any]) -> Row:
    """Row of one call of ``form`` under the profiler, with the longest operations.

    Args:
        case: name of the row.
        form: function that waits for its result.
    """
    form()
    form()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it crashes a process whose threads run Python, and nothing here reads it
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            clock = time.perf_counter()
            form()
            seconds = time.perf_counter() - clock
        spent, calls = operations(Path(folder))
    facts: dict[str, Any] = {"device busy": f"{sum(spent.values()) / seconds:.2f} of {seconds * 1e3:.4g} ms"}
    facts["operations started"] = sum(calls.values())
    for name in sorted(spent, key=spent.__getitem__, reverse=True)[:LONGEST]:
        facts[name] = f"{spent[name] / seconds:.3f} of the time, {calls[name]} times"
    return Row("profile", case, {"ours": [seconds]}, facts=facts)


def operations(folder: Path) -> tuple[Mapping[str, float], Mapping[str, int]]:
    """Seconds and number of the device's operations in a trace, by name without a counter at its end.

    Without an accelerator, the operations of the host's threads are counted.

    Args:
        folder: where `jax.profiler.trace` wrote.
    """
    spent: dict[str, float] = collections.defaultdict(float)
    calls: dict[str, int] = collections.defaultdict(int)
    for file in folder.rglob("*.xplane.pb"):
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
        devices = [plane for plane in planes if plane.name.startswith("/device:")]
        for plane in devices or planes:
            for line in plane.lines:
                if devices and not line.name.startswith("Stream"):
                    continue  # lines beside the streams repeat their operations by program and by layer
                for event in line.events:
                    name = re.sub(r"[._]?\d+$", "", event.name)[:70]
                    spent[name] += event.duration_ns / 1e9
                    calls[name] += 1
    return spent, calls
