"""What compiled programs do beside what the work needs, by the closed forms of `jaxmarl_llm.costs.model`.

Useful FLOPs are those of real nodes: no remat, no pair that the causal mask hides, no padding of rows. A decoded token
reads the weights and the cache once, except for what the compiler keeps in VMEM from token to token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.costs.counts import ModelSize, RoleLengths


def ratios(
    weights: ModelSize,
    parts: Sequence[tuple[int, int]],
    shape: Any,
    chips: int,
    tensor: int,
    cache: float,
    stages: dict[str, Any],
) -> dict[str, Any]:
    """Useful by compiled FLOPs of the programs in ``stages``, and bytes of a decoded token: all, and the least.

    weights: the model that was compiled. parts: (real rows, samples of each) of the launch. shape: what was
    compiled, a `compile_ahead.Shape`. tensor: devices that cut weights during generation. cache: bytes of a chip's part
    of the cache. All figures are of one chip.
    """
    useful = {
        "prefill": prefill_flops(weights, sum(n for n, _ in parts), shape.prompt) / chips,
        "decode": decode_flops(weights, sum(n * g for n, g in parts), shape.prompt, shape.response) / chips,
        "accumulate": update_flops(weights, shape) / chips,
    }
    found = {name: flops / stages[name].flops for name, flops in useful.items() if name in stages}
    row: dict[str, Any] = {"useful": found}
    if "decode" in stages:
        least = decode_weights(weights) / tensor + cache
        row |= {"token_bytes": stages["decode"].bytes, "least_token_bytes": least}
    return row


def prefill_flops(weights: ModelSize, nodes: int, prompt: int) -> float:
    """FLOPs of ``nodes`` prompts of ``prompt`` tokens, without the output head."""
    per, pair = costs.token_flops(weights), costs.attention_flops(weights.config)
    return nodes * (per * prompt + pair * prompt * (prompt + 1) / 2)


def decode_flops(weights: ModelSize, lanes: int, prompt: int, response: int) -> float:
    """FLOPs of one token of ``lanes`` samples: the mean over the ``response`` tokens behind a prompt."""
    keys = prompt + (response + 1) / 2
    head = costs.head_flops(weights.config)
    return lanes * (costs.token_flops(weights) + costs.attention_flops(weights.config) * keys + head)


def update_flops(weights: ModelSize, shape: Any) -> float:
    """FLOPs of the gradient of one micro-batch with all of its rows filled, without remat."""
    role = RoleLengths(0, ({shape.prompt: 1.0},), {shape.response: 1.0}, shape.response)
    return shape.micro * sum(costs.update_flops(role, 0, shape.micro_group, weights, False))


def decode_weights(weights: ModelSize) -> float:
    """Bytes of the parameters that a decoded token reads: layers and output head."""
    c = weights.config
    return costs.layer_bytes(weights) + costs.ITEMSIZE[c.dtype] * c.vocab_size * c.hidden_size
