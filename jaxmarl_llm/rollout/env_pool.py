"""Worker processes for host environments: parallel steps, a timeout for each call, and failures as values.

Every worker builds the environment once from a picklable factory, so only states and actions are sent to it. A worker
that computes with JAX uses the CPU. A call that raises, hangs or ends its process returns a `Failure`, and the pool
continues. Calls are pure functions of their arguments (see `messages.HostEnv`). Therefore a call is repeated when
another call ended its worker.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pebble import ProcessExpired, ProcessPool

from jaxmarl_llm.distributed import processes
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import HostEnv

LONGEST_TRACE = 8000  # characters of a traceback that are kept, from its end

_env: HostEnv | None = None


class Failure(NamedTuple):
    """The reason why a call has no result. ``kind``: ``raised``, ``timeout`` or ``died``.

    ``trace``: the traceback of what was raised, from the user's first line on; empty without an exception.
    """

    kind: str
    message: str
    trace: str = ""


def raised(error: BaseException) -> Failure:
    """The failure of a call that raised ``error``."""
    told = traceback.TracebackException.from_exception(error)
    told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if frame.filename != __file__])
    return Failure("raised", f"{type(error).__name__}: {error}", "".join(told.format())[-LONGEST_TRACE:])


def _build(factory: Callable[[], HostEnv]) -> None:
    """Make the environment of a worker process."""
    global _env
    # Models use the accelerators: their memory is full, or they refuse a second process.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if "jax" in sys.modules:  # imported together with the factory; JAX reads the variable only when it is imported
        sys.modules["jax"].config.update("jax_platforms", "cpu")
    _env = factory()


def _call(method: str, args: tuple) -> bytes:
    """The pickled result of a call. Pickling happens here, because a result that fails to pickle would end the pool."""
    try:
        return pickle.dumps(getattr(_env, method)(*args))
    except (Exception, SystemExit) as error:
        return pickle.dumps(raised(error))


class Call:
    """A call that `EnvPool.submit` has begun.

    ``future``: of the worker; None where the call is over, or was lost and is repeated by `result`.
    """

    def __init__(self, future: Any, result: Callable[[Any], Any]) -> None:
        self.future, self._result = future, result

    @property
    def done(self) -> bool:
        """Whether `result` returns at once, or repeats a call that was lost."""
        return self.future is None or self.future.done()

    def result(self) -> Any:
        """What the call returned, or a `Failure`. Waits for it."""
        return self._result(self.future)


class EnvPool:
    """Processes that run the functions of a host environment.

    ``factory``: makes the environment; picklable. ``workers``: number of processes; 0 runs calls in this process,
    without a timeout. ``timeout``: seconds for each call. ConfigError where an action could outlast the timeout.
    """

    def __init__(self, factory: Callable[[], HostEnv], *, workers: int = 2, timeout: float = 20.0):
        self.env = factory()  # an error of construction is raised here, not in a worker
        self.timeout = timeout
        if workers and timeout <= self.env.seconds:  # an action would decide that its step has no reward
            raise ConfigError(
                f"config.env.timeout: expected more than {self.env.seconds:g}, the seconds that a step of "
                f"{self.env.name!r} may take, got {timeout:g}"
            )
        self._factory, self._workers = factory, workers
        self._pool: ProcessPool | None = None

    def _live(self) -> ProcessPool:
        """The processes; new ones when the last pool broke."""
        if self._pool is None or not self._pool.active:
            self.close()
            # spawn: a fork of a process with XLA threads can deadlock.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPool(self._workers, initializer=_build, initargs=(self._factory,), context=context)
        return self._pool

    def map(self, method: str, calls: Sequence[tuple], tasks: Sequence[int] | None = None) -> list[Any]:
        """Results of ``env.method(*args)`` for each ``args`` in ``calls``, in order; a `Failure` for no result.

        ``tasks``: the task number of each call; None numbers the calls. With several training processes each one runs
        the calls of its own tasks, and all receive every result. Results and failures are therefore the same for any
        number of processes.
        """
        count, own, tasks = processes.count(), processes.index(), range(len(calls)) if tasks is None else tasks
        mine = self._map(method, [args for args, task in zip(calls, tasks, strict=True) if task % count == own])
        results = [iter(part) for part in processes.all_gather(mine)]
        return [next(results[task % count]) for task in tasks]

    def submit(self, method: str, args: tuple) -> Call:
        """Begin ``env.method(*args)``, of one training process. Without workers the call is over when this returns.

        Args:
            method: name of the function.
            args: its arguments.
        """
        if not self._workers:
            value = self._inline(method, args)
            return Call(None, lambda future: value)
        try:
            future = self._live().schedule(_call, args=(method, args), timeout=self.timeout)
        except RuntimeError:  # the pool is broken
            future = None

        def result(future: Any) -> Any:
            value = None if future is None else self._result(future)
            return self._alone(method, args) if value is None else value

        return Call(future, result)

    def _map(self, method: str, calls: Sequence[tuple]) -> list[Any]:
        if not self._workers:
            return [self._inline(method, args) for args in calls]
        return [self._alone(method, args) if r is None else r for args, r in zip(calls, self._try(method, calls))]

    def _try(self, method: str, calls: Sequence[tuple]) -> list[Any]:
        """Results as of `_map`, and None where the pool broke or the worker was terminated before the call returned."""
        pool = self._live()
        try:
            # The time of a new worker's imports does not count: pebble measures from the start of the call.
            futures = [pool.schedule(_call, args=(method, args), timeout=self.timeout) for args in calls]
        except RuntimeError:  # the pool is broken, and all scheduled calls are lost
            return [None] * len(calls)
        return [self._result(f) for f in futures]

    def _alone(self, method: str, args: tuple) -> Any:
        """The result of a call that is repeated alone after its pool or worker was lost.

        When the repeated call is lost too, the call itself is the cause. A worker that dies is replaced. The pool
        breaks when pebble notices the death before it knows which call the worker had begun, or when it had none.
        """
        (result,) = self._try(method, [args])
        return Failure("died", "worker exited") if result is None else result

    def _inline(self, method: str, args: tuple) -> Any:
        try:
            return getattr(self.env, method)(*args)
        except (Exception, SystemExit) as error:  # only this sample fails
            return raised(error)

    def _result(self, future: Any) -> Any:
        try:
            return pickle.loads(future.result())
        except concurrent.futures.TimeoutError:
            return Failure("timeout", f"no answer within {self.timeout:g} s")
        except concurrent.futures.BrokenExecutor:
            return None
        except ProcessExpired as error:
            # The call is not the cause: a scheduler that stops a run signals the workers too.
            if error.exitcode in (signal.SIGTERM, -signal.SIGTERM):
                return None
            return Failure("died", f"worker exited with code {error.exitcode}")
        except Exception as error:  # raised by the environment in the worker
            return raised(error)

    def close(self) -> None:
        """End the processes. They start again with the next call."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
