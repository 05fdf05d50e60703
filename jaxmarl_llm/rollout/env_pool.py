"""Worker processes for host environments: parallel steps, a timeout each, and failures as values.

Every worker builds the environment once from a picklable factory, so only states and actions cross the pipe; one that
computes with JAX does so on the CPU. A call that raises, hangs or kills its process gives a `Failure` in its place; the
pool goes on. Calls are functions of their arguments (see `text.HostEnv`), so one whose worker was lost to another call
is made again.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from jaxmarl_llm import processes
from jaxmarl_llm.text import HostEnv

_env: HostEnv | None = None


class Failure(NamedTuple):
    """Why a call has no result: kind is ``raised``, ``timeout`` or ``died``."""

    kind: str
    message: str


def _build(factory: Callable[[], HostEnv]) -> None:
    global _env
    # Accelerators are the models': a worker that took one would find its memory taken, or be refused.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # loaded with what the factory is made of; it reads the variable when it is loaded
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    _env = factory()


def _call(method: str, args: tuple) -> bytes:
    """Pickled here and unpickled by `EnvPool`: an exception or result that does not survive that would end the pool."""
    try:
        return pickle.dumps(getattr(_env, method)(*args))
    except (Exception, SystemExit) as error:
        return pickle.dumps(Failure("raised", f"{type(error).__name__}: {error}"))


class EnvPool:
    """``workers`` processes with ``timeout`` seconds a call; 0 workers: in this process, without a timeout."""

    def __init__(self, factory: Callable[[], HostEnv], *, workers: int = 2, timeout: float = 20.0):
        self.env = factory()  # errors of construction show here, not in a worker
        self.timeout = timeout
        self._factory, self._workers = factory, workers
        self._pool: ProcessPool | None = None

    def _live(self) -> ProcessPool:
        """The processes; new ones after the last pool broke."""
        if self._pool is None or not self._pool.active:
            self.close()
            # spawn: forking a process that runs XLA's threads can deadlock.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPool(self._workers, initializer=_build, initargs=(self._factory,), context=context)
        return self._pool

    def map(self, method: str, calls: Sequence[tuple], tasks: Sequence[int] | None = None) -> list[Any]:
        """``env.method(*args)`` for each args, in order; a `Failure` where a call has no result.

        ``tasks``: the task of each call; None: one each. Of several processes each plays its own, by number, and all
        get every result: what is played, and when it fails, is the same for any number of them.
        """
        count, own, tasks = processes.count(), processes.index(), range(len(calls)) if tasks is None else tasks
        mine = self._map(method, [args for args, task in zip(calls, tasks, strict=True) if task % count == own])
        results = [iter(part) for part in processes.everyone(mine)]
        return [next(results[task % count]) for task in tasks]

    def _map(self, method: str, calls: Sequence[tuple]) -> list[Any]:
        if not self._workers:
            return [self._inline(method, args) for args in calls]
        return [self._alone(method, args) if r is None else r for args, r in zip(calls, self._try(method, calls))]

    def _try(self, method: str, calls: Sequence[tuple]) -> list[Any]:
        """As `_map`, with None where the pool broke or the worker was told to end before the call was answered."""
        pool = self._live()
        try:
            # The first call of a fresh worker pays for its imports; pebble's clock starts when the call does.
            futures = [pool.schedule(_call, args=(method, args), timeout=self.timeout) for args in calls]
        except RuntimeError:  # the pool is broken: what was scheduled is void with it
            return [None] * len(calls)
        return [self._result(f) for f in futures]

    def _alone(self, method: str, args: tuple) -> Any:
        """A call made again after its pool or worker was lost, by itself: lost again, it is the call's doing.

        A worker that dies is replaced, but the pool breaks if pebble sees the death before it has read which call that
        worker had begun, or if the worker had none.
        """
        (result,) = self._try(method, [args])
        return Failure("died", "worker exited") if result is None else result

    def _inline(self, method: str, args: tuple) -> Any:
        try:
            return getattr(self.env, method)(*args)
        except (Exception, SystemExit) as error:  # its sample fails, not the run
            return Failure("raised", f"{type(error).__name__}: {error}")

    def _result(self, future: Any) -> Any:
        try:
            return pickle.loads(future.result())
        except concurrent.futures.TimeoutError:
            return Failure("timeout", f"no answer within {self.timeout:g} s")
        except concurrent.futures.BrokenExecutor:
            return None
        except ProcessExpired as error:
            # Not the call's doing: a scheduler that wants a run to stop signals its workers too.
            if error.exitcode in (signal.SIGTERM, -signal.SIGTERM):
                return None
            return Failure("died", f"worker exited with code {error.exitcode}")
        except Exception as error:  # whatever the environment raised in the worker
            return Failure("raised", f"{type(error).__name__}: {error}")

    def close(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
