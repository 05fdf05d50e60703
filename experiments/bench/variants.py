"""What a choice is worth, in the whole of a generation or an update.

On a GPU: the attention of a token by XLA or by the kernel, layers in a loop or unrolled. On a CPU: the layout of the
cache that the attention of a token reads.

Each form is compiled with the choice in place, so ``first`` of a row is without the compilation of the other form.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import numpy as np

from experiments.bench import SHAPES, Row, Suite, decode, measure, update
from jaxmarl_llm.kernels.attention import group, group_decode
from jaxmarl_llm.models import decoder
from jaxmarl_llm.models.decoder_config import Config

# Shape; samples of one prompt, or on a CPU prompts with one sample each; tokens of a prompt; tokens of a response.
CASES = {
    "accelerator": ("qwen2_5_0_5b", 16, 512, 64),
    "tiny_accelerator": ("tiny", 4, 16, 8),
    "cpu": ("7m", 16, 256, 128),
    "tiny": ("tiny", 4, 16, 8),
}


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


def of_its_own(cfg: Config) -> Config:
    """An architecture that computes what ``cfg`` computes. Equal architectures share compiled programs."""
    return dataclasses.replace(cfg, max_position=cfg.max_position + 1)


def run(suite: Suite) -> Iterator[Row]:
    return on_gpu(suite) if suite.accelerator else on_cpu(suite)


def on_cpu(suite: Suite) -> Iterator[Row]:
    shape, prompts, p, r = CASES[suite.name]
    cfg = SHAPES[shape]
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (1, p)).astype(np.int32)
    sampler = functools.partial(decode.sampler, repeat=prompts)
    layouts = mock.patch.object(group, "_attend_one_on_cpu", group._attend)
    forms = {
        "ours": sampler(cfg, tokens, 1, r),
        "the compiler's layouts": chosen(layouts, sampler, of_its_own(cfg), tokens, 1, r),
    }
    yield measure("variants", f"generation, {shape}, {prompts} prompts, G=1, P={p}, R={r}", forms, suite.repeats)


def on_gpu(suite: Suite) -> Iterator[Row]:
    shape, samples, p, r = CASES[suite.name]
    cfg, tokens, said, gain = update.inputs(suite, shape, samples, p, r)
    other = of_its_own(cfg)
    case = f"{shape}, G={samples}, P={p}, R={r}"
    portable = mock.patch.dict(group_decode.PAYS, clear=True)
    forms = {
        "ours": decode.sampler(cfg, tokens, samples, r),
        "XLA's attention": chosen(portable, decode.sampler, other, tokens, samples, r),
    }
    yield measure("variants", f"generation, {case}", forms, suite.repeats)
    unrolled = mock.patch.object(decoder, "_unroll", lambda cfg: True)
    forms = {
        "ours": update.ours(cfg, tokens, said, gain),
        "layers unrolled": chosen(unrolled, update.ours, other, tokens, said, gain),
    }
    yield measure("variants", f"update, {case}", forms, suite.repeats)
