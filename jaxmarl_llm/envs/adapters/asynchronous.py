"""Coroutines of other libraries, run to completion with a time limit.

Reward functions and clients of some libraries are asynchronous, and keep connections that belong to one event loop. So
a process has one loop, in a thread of its own. A coroutine that exceeds its limit ends the loop, and the next call
starts another one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
_LOOPS: dict[int, asyncio.AbstractEventLoop] = {}  # by process id: a forked process has no thread of its parent
_LOCK = threading.Lock()


def complete(coroutine: Coroutine[Any, Any, Result], seconds: float, what: str) -> Result:
    """The result of a coroutine.

    Args:
        coroutine: The coroutine; it runs in the thread of the loop.
        seconds: Time limit.
        what: How the message calls it.

    Raises:
        TimeoutError: It had no result in time. It is cancelled.
    """
    with _LOCK:
        loop = _LOOPS.get(os.getpid())
        if loop is None:
            loop = _LOOPS[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(loop,), name="adapters.asynchronous", daemon=True).start()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result(seconds)
    except TimeoutError:
        if future.done():  # the coroutine itself raised it
            raise
        with _LOCK:
            if _LOOPS.get(os.getpid()) is loop:
                del _LOOPS[os.getpid()]
        loop.call_soon_threadsafe(loop.stop)
        raise TimeoutError(f"{what}: no result within {seconds:g} s") from None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run ``loop`` until it is stopped; then cancel what is left, and close it."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()
