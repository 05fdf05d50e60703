"""Time of one whole judge call: processor time of the jails and of the judge, and wall time.

The calls of a program, the decoding of its replies, and the tests that use them spend one budget. Its end is a timeout
of the program. Time in which a process was ready to run and got no processor is the machine's, and spends nothing.
Python's full garbage collections spend nothing either: each goes over all objects of the process that judges.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping

INTERVAL = 0.05  # CPU seconds between two looks at the budget while a test runs


class _Collections(threading.local):
    """CPU seconds of the full garbage collections that ran in this thread."""

    seconds = 0.0
    start = 0.0


_collections = _Collections()


def _time_collection(phase: str, info: Mapping[str, int]) -> None:
    """Add a full collection to `_collections`. Collections of young objects are left: what they cost, a reply made."""
    if info["generation"] < 2:
        return
    if phase == "start":
        _collections.start = time.thread_time()
    else:
        _collections.seconds += time.thread_time() - _collections.start


gc.callbacks.append(_time_collection)


class Budget:
    """Account of what one judge call has spent, to be used in the thread that made the account.

    total: allowed CPU seconds of all jails and of this thread. wall: allowed seconds, as `seconds` counts them.
    """

    def __init__(self, total: float, wall: float):
        self.total, self.wall = total, wall
        self.jails_cpu = self.jails_wall = 0.0  # of jails that have ended
        self._start = self._now()

    @staticmethod
    def _now() -> float:
        """CPU seconds of this thread, without full garbage collections."""
        return time.thread_time() - _collections.seconds

    def own(self) -> float:
        """CPU seconds of the judge: decoding of replies, and tests."""
        return self._now() - self._start

    def left(self, cpu: float = 0.0, wall: float = 0.0) -> tuple[float, float]:
        """CPU and wall seconds that are left.

        cpu: CPU seconds of the current jail. wall: wall seconds of the calls into it. The judge's CPU counts as wall
        time too, so that ``wall`` limits the whole call.
        """
        own = self.own()
        return self.total - self.jails_cpu - cpu - own, self.wall - self.jails_wall - wall - own

    def over(self, cpu: float = 0.0, wall: float = 0.0) -> str:
        """Which limit is exceeded, in a few words; empty if none. Arguments as of `left`."""
        cpu, wall = self.left(cpu, wall)
        if cpu <= 0:
            return f"more than {self.total:g} s of CPU in all"
        return f"more than {self.wall:g} s in all" if wall <= 0 else ""


@contextlib.contextmanager
def interrupting(look: Callable[[], None]) -> Iterator[None]:
    """Call ``look`` every `INTERVAL` of this process's CPU time. An exception of ``look`` ends the body.

    It works in the main thread, where Python handles signals. In another thread ``look`` is never called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, lambda number, frame: look())
    before = signal.setitimer(signal.ITIMER_VIRTUAL, INTERVAL, INTERVAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, *before)
        signal.signal(signal.SIGVTALRM, signal.SIG_DFL if handler is None else handler)
