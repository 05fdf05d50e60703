"""Seconds of a training step, from compiled programs and the expected launches of a rollout."""

from __future__ import annotations

import math
from typing import Any

from experiments.tpu import compile_ahead
from jaxmarl_llm.costs.counts import Workload, counts
from jaxmarl_llm.costs.decodings import decodings
from jaxmarl_llm.costs.meshes import trained_nodes
from jaxmarl_llm.rollout.plans import Plan


def step_seconds(
    cfg: Any,
    plan: Plan,
    work: Workload,
    chip: Any,
    mesh: Any,
    team: Any,
    shape: Any,
    stages: dict[str, Any],
    blocks: int = 1,
) -> dict[str, Any]:
    """Seconds of a training step at the chip's public figures, with launches and micro-batches one after another.

    A launch with fewer expected samples than the compiled one counts its share of FLOPs, cache bytes and collectives of
    activations. Weights count in full. ``blocks``: models that generate at once.
    """
    seconds: dict[str, float] = {"weights to generation": 0.0, "prefill": 0.0, "decode": 0.0, "update": 0.0}
    weights, started = compile_ahead.chip_bytes(team.playing), decodings(plan, work, blocks)
    steps = sum(launch.tokens for launch in started)
    # A copy for each launch where separate models take turns, once where they share what is copied.
    separate = work.engine == "host" and team.shared is None and len(work.models) > 1
    made = len(started) if separate else 1 if team.shared is not None else len(work.models)
    copied = weights if team.playing_bytes else 0
    there = (
        0.0 if blocks > 1 else 1 / (mesh.shape["fsdp"] * compile_ahead.context_of(mesh))
    )  # of a copy, on the chip before
    seconds["weights to generation"] = made * copied * (1 - there) / chip.links
    for launch in started:
        of_lanes = launch.lanes / sum(n * g for n, g in shape.parts)
        of_nodes = launch.nodes / sum(n for n, _ in shape.parts)
        for name, part, times in (("prefill", of_nodes, 1.0), ("decode", of_lanes, launch.tokens)):
            s = stages[name]
            read = min(weights, s.bytes)
            seconds[name] += times * max(
                part * s.flops / chip.flops,
                (read + of_nodes * (s.bytes - read)) / chip.bandwidth,
                part * sum((s.collectives or {}).values()) / chip.links,
            )
    done = trained_nodes(cfg, plan, work)
    of_model = done / len(work.models)
    passes = len(work.models) * math.ceil(of_model / shape.micro)
    one = stages["accumulate"].roofline(chip)[0]
    seconds["update"] = cfg.loss.epochs * (passes * one + len(work.models) * stages["apply"].roofline(chip)[0])
    total = sum(seconds.values())
    slowest = max(seconds, key=lambda k: seconds[k])
    stage = {"update": "accumulate"}.get(slowest, slowest)
    bound = stages[stage].roofline(chip)[1] if stage in stages else "network"
    tokens = counts(plan, work).completion_tokens
    return {
        "seconds": seconds,
        "total": total,
        "bottleneck": f"{slowest}: {bound}",
        "micro_batches": passes,
        "filled": done / (passes * shape.micro),  # of the micro-batches' rows, expected
        "sampled_tokens": tokens,
        "decode_steps": steps,  # one launch after another
        "decode_step_seconds": seconds["decode"] / steps,
    }
