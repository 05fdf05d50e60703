"""Whether a run fits the memory there is, before its first step: what a plan needs at least, and the update about."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from absl import logging

from experiments import heap


def available() -> int:
    """Bytes of memory of this machine, or of its container."""
    limit = Path("/sys/fs/cgroup/memory.max")
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = limit.read_text().strip() if limit.exists() else "max"
    return most if text == "max" else min(most, int(text))


def of_device() -> tuple[int, str]:
    """Bytes that arrays may take, and where: of the first accelerator, or of this machine."""
    import jax

    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    limit = stats.get("bytes_limit")
    return (int(limit), f"{device.device_kind} {device.id}") if limit else (available(), "this machine")


def check(cfg: Any, plan: Any) -> None:
    """ConfigError for a run on one device that does not fit it, a warning where its update may not. Of a mesh
    `experiments.aot` tells what a chip holds.
    """
    from jaxmarl_llm.meshes import MeshConfig
    from jaxmarl_llm.workload import workload_of

    if cfg.mesh != MeshConfig(data=1):
        heap.give_back()
        return
    (work, _), memory = workload_of(cfg), of_device()
    refuse(cfg, plan, work, *memory)
    if advice := micro_batch(cfg, plan, work, *memory):
        logging.warning(advice)
    if micro_batch(cfg, plan, work, memory[0] // 3, memory[1]):
        heap.give_back()


def refuse(cfg: Any, plan: Any, work: Any, room: int, whose: str, *, or_else: str = "") -> None:
    """ConfigError with the bytes and the flag to lower, when a plan cannot fit; ``or_else`` ends it."""
    from jaxmarl_llm import costs
    from jaxmarl_llm.text import ConfigError
    from jaxmarl_llm.workload import kept

    need = lambda tasks: costs.memory(plan, work._replace(tasks=tasks), **kept(cfg)).least
    if need(cfg.batch) <= room:
        return
    if need(1) <= room:
        low, high = 1, cfg.batch
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if need(middle) <= room else (low, middle)
        advice = f"lower --config.batch to {low}"
    else:
        held = costs.memory(plan, work._replace(tasks=1), **kept(cfg))
        too_much = held.updating > room
        fields = [f for f in ("group",) if hasattr(cfg, f)]
        advice = (
            "its parameters alone are too many: lower --config.team.backbone, or share them with --config.team.share"
            if too_much
            else f"lower --config.{fields[0] if fields else 'batch'}: one task is too much"
        )
    raise ConfigError(
        f"plan {plan.name}: needs at least {need(cfg.batch):,} bytes, {whose} has {room:,}; {advice}{or_else}"
    )


def micro_batch(cfg: Any, plan: Any, work: Any, room: int, whose: str) -> str | None:
    """What to lower when one micro-batch of the update is likely too large, or None.

    An estimate (`costs.update_bytes`): saved layers and attention scores; XLA may need more, or fewer.
    """
    from jaxmarl_llm import costs
    from jaxmarl_llm.complexity import launches
    from jaxmarl_llm.workload import kept

    held = costs.memory(plan, work, **kept(cfg))
    resident = held.updating
    started = launches(plan, work)
    group, top = max(x.group for x in started), max(started, key=lambda x: x.prompt + x.response)
    arch = work.models[top.model].config
    tokens = top.prompt + group * top.response
    need = lambda rows: resident + costs.update_bytes(arch, rows, top.prompt, group, top.response, cfg.team.remat)
    rows = max(1, cfg.micro_tokens // tokens)
    if need(rows) <= room:
        return None
    fewer = next((n for n in range(rows, 0, -1) if need(n) <= room), 0)
    if fewer:
        flag = f"lower --config.micro_tokens to {fewer * tokens}"
    elif not cfg.team.remat:
        flag = "set --config.team.remat=true"
    else:
        flag = f"lower --config.{'group' if hasattr(cfg, 'group') else 'team.max_new'}: one prompt is too much"
    return f"an update takes about {need(rows):,} bytes with all that is kept, {whose} has {room:,}; {flag}"
