"""Measured functions in separate processes, one call at a time.

On a CPU, retained or fragmented memory of one function then does not affect another one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import jax

from experiments.bench import Suite
from jaxmarl_llm.runs import allocator

_form: Callable[[], Any]


def _begin(keep: bool, make: Callable[..., Callable[[], Any]], given: tuple[Any, ...]) -> None:
    global _form
    if keep:
        allocator.retain()
    jax.config.update("jax_platforms", "cpu")
    _form = make(*given)


def _step() -> None:
    _form()


@contextlib.contextmanager
def apart(
    suite: Suite, make: Callable[..., Callable[[], Any]], *given: Any, keep: bool = True
) -> Iterator[Callable[[], Any]]:
    """Context manager for ``make(*given)``. On a CPU it runs in a new process, which ends with the context. On an
    accelerator it runs in this process. make: a function of a module. keep: retain freed memory, as `cli.train` does
    on a CPU.
    """
    if suite.accelerator:
        yield make(*given)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, _begin, (keep, make, given)) as pool:

        def step() -> None:
            try:
                pool.submit(_step).result()
            except BrokenProcessPool as error:
                why = "what it said is above; if nothing, memory ran out"
                raise RuntimeError(f"the process of a form ended before its step was done: {why}") from error

        yield step
