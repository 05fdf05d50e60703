"""Memory check before the first step of a run: a lower bound for the plan, and an estimate for the update."""

from __future__ import annotations

import bisect
import os
from pathlib import Path
from typing import Any

from absl import logging

from jaxmarl_llm.runs import allocator


def host_memory() -> int:
    """Bytes of memory of this machine, or the limit of its container."""
    limit = Path("/sys/fs/cgroup/memory.max")
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = limit.read_text().strip() if limit.exists() else "max"
    return most if text == "max" else min(most, int(text))


def device_memory() -> tuple[int, str]:
    """Bytes that arrays may use, and the name of the device: the first accelerator, or this machine."""
    import jax

    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return (int(limit), f"{device.device_kind} {device.id}") if limit else (host_memory(), "this machine")


def check(cfg: Any, plan: Any) -> None:
    """Check that a run on one device fits into its memory.

    cfg: configuration. plan: the recipe's plan. Raises ConfigError when the lower bound does not fit; logs a warning
    when the update may not fit. A run on a mesh is not checked; `experiments.tpu.plan_pod` shows what a chip holds.
    """
    from jaxmarl_llm.costs.workload import workload_of
    from jaxmarl_llm.distributed.meshes import MeshConfig

    if cfg.mesh != MeshConfig(data=1):
        allocator.release()
        return
    (work, _), memory = workload_of(cfg), device_memory()
    check_memory(cfg, plan, work, *memory)
    if advice := micro_batch(cfg, plan, work, *memory):
        logging.warning(advice)
    if micro_batch(cfg, plan, work, memory[0] // 3, memory[1]):
        allocator.release()


def epochs(cfg: Any, tasks: int) -> str | None:
    """A line that says how often RL plays each training task of a host environment; None for a run without RL.

    cfg: configuration. tasks: number of training tasks. Raises ConfigError above ``run.max_epochs`` passes: a
    configuration of a large run was left with a small sample of its data.
    """
    from jaxmarl_llm.errors import ConfigError

    if not cfg.steps:
        return None
    passes = cfg.steps * cfg.batch / tasks
    line = f"{tasks} training tasks; {cfg.steps} steps of {cfg.batch} tasks play each one {passes:.3g} times"
    if cfg.run.max_epochs and passes > cfg.run.max_epochs:
        raise ConfigError(
            f"config.run.max_epochs={cfg.run.max_epochs:g}: {line}; give all of the data (config.env.args.data), lower "
            "config.steps, or raise config.run.max_epochs"
        )
    return line


def check_memory(cfg: Any, plan: Any, work: Any, room: int, whose: str, *, or_else: str = "") -> None:
    """Raise ConfigError, with the bytes and the flag to lower, when a plan cannot fit.

    cfg: configuration. plan: the recipe's plan. work: workload of ``cfg``. room: bytes of the device. whose: its name.
    or_else: text at the end of the message.
    """
    from jaxmarl_llm.costs import model as costs
    from jaxmarl_llm.costs.workload import memory_options
    from jaxmarl_llm.errors import ConfigError

    need = lambda tasks: costs.memory(plan, work._replace(tasks=tasks), **memory_options(cfg)).peak_lower_bound
    if need(cfg.batch) <= room:
        return
    if need(1) <= room:
        low, high = 1, cfg.batch
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if need(middle) <= room else (low, middle)
        advice = f"lower --config.batch to {low}"
    else:
        held = costs.memory(plan, work._replace(tasks=1), **memory_options(cfg))
        too_much = held.updating > room
        fields = [f for f in ("group",) if hasattr(cfg, f)]
        advice = (
            "its parameters alone are too many: lower --config.team.backbone, or set --config.team.parameter_sharing"
            if too_much
            else f"lower --config.{fields[0] if fields else 'batch'}: one task is too much"
        )
    raise ConfigError(
        f"plan {plan.name}: needs at least {need(cfg.batch):,} bytes, {whose} has {room:,}; {advice}{or_else}"
    )


def micro_batch(cfg: Any, plan: Any, work: Any, room: int, whose: str) -> str | None:
    """Advice which flag to lower when one micro-batch of the update is probably too large; otherwise None.

    cfg: configuration. plan: the recipe's plan. work: workload of ``cfg``. room: bytes of the device. whose: its name.
    The estimate is `costs.model.update_bytes`: saved activations and attention scores.
    XLA may need more or less.
    """
    from jaxmarl_llm.costs import model as costs
    from jaxmarl_llm.costs.counts import launches
    from jaxmarl_llm.costs.workload import memory_options

    held = costs.memory(plan, work, **memory_options(cfg))
    resident = held.updating
    started = launches(plan, work)
    group = max(part.group for x in started for part in x.parts)
    top = max(started, key=lambda x: x.prompt + x.response)
    arch = work.models[top.model].config
    tokens = top.prompt + group * top.response
    need = lambda rows: resident + costs.update_bytes(arch, rows, top.prompt, group, top.response, cfg.team.remat)
    rows = max(1, cfg.micro_tokens // tokens)
    if need(rows) <= room:
        return None
    fewer = bisect.bisect_right(range(1, rows + 1), room, key=need)  # more rows never need less
    if fewer:
        flag = f"lower --config.micro_tokens to {fewer * tokens}"
    elif not cfg.team.remat:
        flag = "set --config.team.remat=true"
    else:
        flag = f"lower --config.{'group' if hasattr(cfg, 'group') else 'team.max_new_tokens'}: one prompt is too much"
    return f"an update takes about {need(rows):,} bytes with all that is kept, {whose} has {room:,}; {flag}"
