"""Meshes, micro-batches and remat for a slice of TPUs, by closed forms: for `plan_pod --search`."""

from __future__ import annotations

import math
from typing import Any


def trained_nodes(cfg: Any, plan: Any, work: Any) -> float:
    """Expected number of nodes in an update, over all models."""
    from jaxmarl_llm.costs import counts as complexity
    from jaxmarl_llm.costs.workload import update_selection

    groups, most = update_selection(cfg, work)
    found = (level for level in complexity.turn_states(plan, work) if level.group > 1 or not groups)
    nodes = sum(level.states * len(work.turns[level.branch.turn].seats) for level in found)
    return float(nodes if most is None else min(nodes, most))


def tensor_sizes(arch: Any, chips: int) -> list[int]:
    """Sizes of the tensor axis that divide heads, units and vocabulary."""
    sizes = (arch.num_heads, arch.num_kv_heads, arch.intermediate_size, arch.vocab_size, chips)
    return [t for t in range(1, 65) if all(n % t == 0 for n in sizes)]


def proposals(cfg: Any, plan: Any, work: Any, topology: str) -> list[dict[str, Any]]:
    """Meshes, micro-batches and remat, sorted by estimated seconds of a step, those that fit first. The estimate uses
    closed forms: parameters, moments, copies, cache, logits, saved layers and attention scores; FLOPs, gathered and
    reduced weights, bytes read.
    """
    from experiments.tpu import compile_ahead
    from jaxmarl_llm.costs import model as costs
    from jaxmarl_llm.costs.counts import counts, longest
    from jaxmarl_llm.costs.counts import launches as started
    from jaxmarl_llm.costs.workload import memory_options

    chip, n = costs.CHIPS[topology.partition(":")[0]], compile_ahead.chips(topology)
    top = compile_ahead.largest(plan, work)
    weights = work.models[top.model]
    arch = weights.config
    size = costs.ITEMSIZE[arch.dtype]
    held = costs.memory(plan, work, **memory_options(cfg))
    whole = costs.base_bytes([weights]) + costs.own_bytes(weights) if weights.rank else costs.own_bytes(weights)
    team = held.base + held.own + held.copies
    group = max(launch.group for launch in started(plan, work))
    tokens = top.prompt + group * top.response
    nodes = trained_nodes(cfg, plan, work) / len(work.models)
    d, f = arch.hidden_size, arch.intermediate_size
    seen = counts(plan, work)
    steps = sum(longest(x.samples) for x in started(plan, work))
    found = []
    for tensor in tensor_sizes(arch, n):
        for fsdp in (x for x in range(1, n // tensor + 1) if (n // tensor) % x == 0 and d % x == 0):
            parts = n // tensor
            for remat in (True, False):
                for rows in (1, 2, 4):
                    scores = costs.score_bytes(arch, top.prompt, group, top.response)
                    layers = costs.saved_bytes(arch, rows, top.prompt, group, top.response, remat)
                    kept_scores = rows * costs.saved_scores(arch, top.prompt, group, top.response, remat)
                    update = held.gradient / (fsdp * tensor) + layers / (1 if remat else tensor) + kept_scores / tensor
                    lanes = compile_ahead.up_to(top.rows, parts) / parts
                    prompt = 4 * arch.num_heads * top.prompt**2 + size * top.prompt * (6 * d + 3 * f)
                    playing = whole if work.engine == "host" else team
                    play = (playing / tensor if fsdp > 1 else 0) + held.cache / n
                    play += max(lanes * prompt, 3 * 4 * lanes * top.group * arch.vocab_size) / tensor
                    moments = held.optimizer / (fsdp * tensor)
                    memory = team / (fsdp * tensor)
                    memory += max(play + (0 if held.offload else moments), update + moments)
                    passes = math.ceil(nodes / (rows * parts))
                    per = (
                        costs.token_flops(weights) * tokens + costs.attention_flops(arch) * scores / 4 / arch.num_heads
                    )
                    moved = 3 * whole / tensor * (fsdp > 1) + 2 * 4 * held.gradient / 8 / tensor * (parts > 1)
                    moved += 4 * 4 * arch.num_layers * rows * tokens * d * size * (1 - 1 / tensor)
                    learn = max(rows * per * (4 if remat else 3) / tensor / chip.flops, moved / chip.links)
                    hops = 4 * arch.num_layers * seen.sequences / seen.launches / parts * d * size * (1 - 1 / tensor)
                    decode = max(whole / tensor / chip.bandwidth, hops / chip.links)
                    seconds = steps * decode + len(work.models) * passes * learn
                    found.append(
                        {
                            "mesh": f"{parts // fsdp},{fsdp},{tensor}",
                            "micro_tokens": rows * tokens,
                            "remat": remat,
                            "memory": memory,
                            "seconds": seconds,
                            "fits": memory <= chip.memory,
                        }
                    )
    return sorted(found, key=lambda x: (not x["fits"], x["seconds"] if x["fits"] else x["memory"]))
