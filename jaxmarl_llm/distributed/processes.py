"""Many processes of one run: how they find each other, agree, and end together.

Every process runs the same program on the same host tables (jax.distributed, one mesh over all devices); what a single
one knows, the results of its environments or whether it was asked to stop, goes through `everyone`. Before JAX is told
of the others they meet (`meeting`), and the connections stay open. They are how a process learns, within a moment, that
another one died, failed or hangs; JAX itself would tell nobody which.

One process needs none of this: it has the deadlines and SIGTERM. Free of JAX until JAX is needed: workers import it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import selectors
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar, cast

from jaxmarl_llm.deadlines import WORK, Deadlines
from jaxmarl_llm.meeting import Peer, Place, loopback, meet
from jaxmarl_llm.text import ConfigError

T = TypeVar("T")

AGAIN = 75  # EX_TEMPFAIL: nothing is wrong with the run; the same command goes on from its last checkpoint
TICK = 1.0  # seconds between signs of life and looks at the clock
SILENCE = 30.0  # seconds without a sign of life after which a process is taken for dead
GRACE = 3.0  # seconds that a process has to end by itself once another has failed: likely of the same


def index() -> int:
    """The number of this process; 0 writes the files."""
    import jax

    return jax.process_index()


def count() -> int:
    import jax

    return jax.process_count()


def everyone(mine: T) -> list[T]:
    """``mine`` of every process, in their order. All of them have to ask. It is pickled, as between a process and its
    workers: a run trusts its own processes.
    """
    if count() == 1:
        return [mine]
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    own = pickle.dumps(mine)
    sizes = process_allgather(np.array([len(own)], np.int32)).reshape(-1)
    width = 1 << max(int(sizes.max()) - 1, 63).bit_length()  # few shapes: each is compiled
    rows = process_allgather(np.frombuffer(own.ljust(width, b"\0"), np.uint8))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows.reshape(-1, width), sizes)]


def first(make: Callable[[], T]) -> T:
    """What ``make`` gives in process 0, in every process: files are written there, and read where it matters that all
    see the same.
    """
    return cast(T, everyone(make() if index() == 0 else None)[0])


_stop = threading.Event()


def stop_asked() -> bool:
    """Whether any process was sent SIGTERM: all get the same answer, so that all stop at the same step."""
    return any(everyone(_stop.is_set()))


def listen_for_sigterm() -> None:
    """From now on SIGTERM does not kill but makes `stop_asked` true. (JAX's own handler, which jax.distributed brings,
    goes: its protocol needs more steps, and it is not there with one process.)
    """
    signal.signal(signal.SIGTERM, lambda *_: _stop.set())


@contextlib.contextmanager
def within(limits: Deadlines) -> Iterator[None]:
    """Inside, stages (`deadlines.stage`) that take longer than ``limits`` end the process, and with it the run."""
    import jax

    jax.monitoring.register_event_duration_secs_listener(WORK.compiles)
    WORK.limits = limits
    watch, own = _watch, None
    if watch is None:
        own = _Watch("the process", [])
        own.start()
    try:
        yield
    finally:
        WORK.limits = None
        jax.monitoring.unregister_event_duration_listener(WORK.compiles)
        if own is not None:
            own.close()


@contextlib.contextmanager
def joined(where: Place | None, facts: Mapping[str, Any], timeout: float) -> Iterator[None]:
    """Inside, this process is one of the run's; ``facts`` have to be the same in all of them.

    Ends with an error in every process when one is missing after ``timeout`` seconds or differs. When what runs inside
    raises, or when another process has ended, this one ends there and then: those that are left would wait for ever in
    a collective operation. Otherwise all leave together.
    """
    global _watch
    if where is None:
        listen_for_sigterm()
        yield
        return
    names, peers = meet(where, facts, timeout)
    _watch = _Watch(names[where.process], peers, names)
    _watch.start()
    try:
        import jax

        alone = where.address if loopback(where.address.rpartition(":")[0]) else None
        jax.distributed.initialize(
            where.address,
            where.processes,
            where.process,
            initialization_timeout=int(timeout),
            coordinator_bind_address=alone,
        )
        listen_for_sigterm()
        yield
    except SystemExit as stopped:
        if stopped.code not in (0, None, AGAIN):
            _watch.failed(f"exit code {stopped.code}", stopped.code if isinstance(stopped.code, int) else 1)
        _leave()
        raise
    except BaseException as error:
        _fail(error)
    else:
        _leave()


def _leave() -> None:
    global _watch
    import jax

    jax.distributed.shutdown()  # waits for all
    assert _watch is not None
    _watch.close()
    _watch = None  # who runs alone in this process later has a watch of its own


def _fail(error: BaseException) -> NoReturn:
    assert _watch is not None
    if isinstance(error, ConfigError):
        line, code = f"error: {' '.join(str(error).split())}", 2
        _tell(line)
    elif isinstance(error, KeyboardInterrupt):
        line, code = "interrupted", 130
        _tell(line)
    else:
        import jax

        line, code = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}", 1
        _tell("".join(traceback.format_exception(error)).rstrip())
        # Perhaps of a collective operation, because another process failed or is gone: the watch hears of that, says
        # which, and ends this one.
        time.sleep(SILENCE + 2 * TICK if isinstance(error, jax.errors.JaxRuntimeError) else GRACE)
    _watch.failed(line, code)


def _tell(line: str) -> None:
    """To stderr, if that still leads anywhere: a process that is to end does so without."""
    with contextlib.suppress(Exception):
        print(line, file=sys.stderr, flush=True)


class _Watch(threading.Thread):
    """Looks at the clock and listens to the other processes, and ends this one when there is no going on."""

    def __init__(self, name: str, peers: list[Peer], names: list[str] | None = None):
        super().__init__(name="jaxmarl_llm watch", daemon=True)
        self._me, self._peers, self._names = name, peers, names or [name]
        self._hub = self._names[0] == name
        self._closing, self._until = threading.Event(), 0.0
        self._lock = threading.Lock()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                peer.heard = time.monotonic()
                selector.register(peer.line, selectors.EVENT_READ, peer)
            spoke = 0.0
            while not self._closing.is_set() or (self._peers and time.monotonic() < self._until):
                if not selector.get_map():
                    self._closing.wait(TICK / 4)
                for key, _ in selector.select(TICK / 4) if selector.get_map() else ():
                    if not self._listen(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - spoke < TICK or self._closing.is_set():
                    continue
                spoke = now
                for peer in self._peers:
                    peer.say(alive=True)
                    if now - peer.heard > SILENCE:
                        self._lost(peer, f"has not been heard of for {SILENCE:g} s")
                late = WORK.late()
                if late is not None:
                    self._end(f"{self._me} hangs {WORK}, {late}", 1, where=True)

    def _listen(self, peer: Peer) -> bool:
        """Whether there is more to be expected of it."""
        for words in (said := peer.hear()) or ():
            if "bye" in words:
                self._peers.remove(peer)
                return False
            if "ended" in words:
                _tell(words["ended"])
                time.sleep(words["grace"])
                self._end(words["ended"], words["code"], where=words["where"], show=False)
        if said is not None:
            return True
        if not self._closing.is_set():
            self._lost(peer, "is gone")
        self._peers.remove(peer)
        return False

    def _lost(self, peer: Peer, how: str) -> NoReturn:
        again = "run the same command again to go on from the last checkpoint"
        self._end(f"{self._names[peer.process]} {how}; {again}", AGAIN)

    def failed(self, line: str, code: int) -> NoReturn:
        """End this process for a reason of its own, which it has printed, and tell the others."""
        self._end(f"{self._me} failed: {line}", code, grace=GRACE, show=False)

    def _end(self, line: str, code: int, *, where: bool = False, grace: float = 0.0, show: bool = True) -> NoReturn:
        """``where``: every process says where it waits. ``grace``: seconds that the others have before they end."""
        with self._lock:  # whoever comes second waits for the end
            try:
                if show:
                    _tell(line)
                if where:
                    _tell(f"{self._me} is {WORK}")
                    with contextlib.suppress(Exception):
                        faulthandler.dump_traceback(all_threads=True)
                for peer in self._peers:
                    peer.say(ended=line, code=code, where=where, grace=grace)
                # JAX aborts a process that finds process 0 gone: the others say their last words first.
                until = time.monotonic() + grace + GRACE
                for peer in self._peers if self._hub else ():
                    while (left := until - time.monotonic()) > 0 and peer.hear(left) is not None:
                        pass
                sys.stdout.flush()
            finally:  # whatever failed on the way, as a full disk under stdout: nobody else ends this process
                os._exit(code)

    def close(self) -> None:
        """Take leave; the others may take a moment longer."""
        lines = [peer.line for peer in self._peers]
        self._until = time.monotonic() + GRACE
        self._closing.set()  # before the word: whoever has heard it may be gone at once
        for peer in list(self._peers):
            peer.say(bye=True)
        self.join()
        for line in lines:
            line.close()


_watch: _Watch | None = None
