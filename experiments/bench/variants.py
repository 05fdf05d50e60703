"""What a choice is worth on a GPU, in the whole of a generation or an update: the attention of a token by XLA or by
the kernel, layers in a loop or unrolled.

Each form is compiled with the choice in place, so ``first`` of a row is without the compilation of the other form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from experiments.bench import Row, Suite, decode, measure, update
from jaxmarl_llm.kernels.attention import group_decode
from jaxmarl_llm.models import decoder

# Shape, samples, prompt, response.
CASES = {"accelerator": ("qwen2_5_0_5b", 16, 512, 64), "tiny_accelerator": ("tiny", 4, 16, 8)}


def chosen(
    choice: AbstractContextManager[Any], make: Callable[..., Callable[[], Any]], *given: Any
) -> Callable[[], Any]:
    """Function of ``make(*given)``, whose first call compiles it with a choice in place.

    Args:
        choice: context in which the choice holds.
        make: function that returns what is timed. Its first argument is an architecture of its own.
        given: arguments of ``make``.
    """
    form = make(*given)
    with choice:
        form()
    return form


def run(suite: Suite) -> Iterator[Row]:
    shape, group, p, r = CASES[suite.name]
    cfg, tokens, said, gain = update.inputs(suite, shape, group, p, r)
    # Equal architectures share compiled programs. This one computes the same.
    other = dataclasses.replace(cfg, max_position=cfg.max_position + 1)
    case = f"{shape}, G={group}, P={p}, R={r}"
    portable = mock.patch.dict(group_decode.PAYS, clear=True)
    forms = {
        "ours": decode.sampler(cfg, tokens, group, r),
        "XLA's attention": chosen(portable, decode.sampler, other, tokens, group, r),
    }
    yield measure("variants", f"generation, {case}", forms, suite.repeats)
    unrolled = mock.patch.object(decoder, "_unroll", lambda cfg: True)
    forms = {
        "ours": update.ours(cfg, tokens, said, gain),
        "layers unrolled": chosen(unrolled, update.ours, other, tokens, said, gain),
    }
    yield measure("variants", f"update, {case}", forms, suite.repeats)
