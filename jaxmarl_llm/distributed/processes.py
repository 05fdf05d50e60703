"""Runs on several processes: start, collectives over Python values, and a common end.

Every process runs the same program on the same host tables, with jax.distributed and one mesh over all devices. Values
that only one process has go through `all_gather`: results of its environments, or whether it received SIGTERM.

The processes connect to each other (`rendezvous`) before jax.distributed starts, and the connections stay open. Through
them, a process learns within seconds that another process died, failed or hangs. JAX itself does not say which.

A run of one process uses only the deadlines and SIGTERM. This module imports JAX inside functions, because environment
workers import the module and do not need JAX.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import selectors
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from jaxmarl_llm.distributed import signals
from jaxmarl_llm.distributed.deadlines import PROGRESS, Deadlines
from jaxmarl_llm.distributed.rendezvous import ClusterSpec, PeerConnection, connect, is_loopback
from jaxmarl_llm.distributed.signals import EXIT_INTERRUPTED, EXIT_RETRY, listen_for_sigterm
from jaxmarl_llm.errors import ConfigError, RunError

T = TypeVar("T")

TICK = 1.0  # seconds between heartbeats, and between checks of the deadlines
SILENCE = 30.0  # seconds without a heartbeat after which a process counts as dead
GRACE = 3.0  # seconds in which a process may end by itself after another one failed, probably for the same reason


def index() -> int:
    """Index of this process. Process 0 writes the files of the run."""
    import jax

    return jax.process_index()


def count() -> int:
    """Number of processes of the run."""
    import jax

    return jax.process_count()


def all_gather(value: T) -> list[T]:
    """All-gather ``value`` over processes, in process order. A collective: every process must call it.

    value: any picklable object. The processes of a run trust each other, so unpickling is safe.
    """
    if count() == 1:
        return [value]
    import numpy as np
    from jax.experimental.multihost_utils import process_allgather

    own = pickle.dumps(value)
    sizes = process_allgather(np.array([len(own)], np.int32)).reshape(-1)
    width = 1 << max(int(sizes.max()) - 1, 63).bit_length()  # a power of two: few shapes to compile
    rows = process_allgather(np.frombuffer(own.ljust(width, b"\0"), np.uint8))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows.reshape(-1, width), sizes)]


def broadcast_from_0(make: Callable[[], T]) -> T:
    """Result of ``make()`` in process 0, returned in every process. A collective: every process must call it.

    make: called in process 0 only. It writes files, or reads files that all processes must see in the same state.
    """
    return cast(T, all_gather(make() if index() == 0 else None)[0])


def stop_asked() -> int:
    """Exit code with which a signal asked some process to end (`signals.requested`), 0 for none. A collective: all
    processes get the same answer at the same step.
    """
    return max(all_gather(signals.requested()))


@contextlib.contextmanager
def watchdog(limits: Deadlines) -> Iterator[None]:
    """Context manager: end this process, and with it the run, when a stage exceeds its deadline.

    limits: deadlines of the stages that `deadlines.stage` times.
    """
    import jax

    jax.monitoring.register_event_duration_secs_listener(PROGRESS.on_compile_event)
    PROGRESS.limits = limits
    watch, own = _watch, None
    if watch is None:
        own = _Watch("the process", [])
        own.start()
    try:
        yield
    finally:
        PROGRESS.limits = None
        jax.monitoring.unregister_event_duration_listener(PROGRESS.on_compile_event)
        if own is not None:
            own.close()


@contextlib.contextmanager
def distributed_run(where: ClusterSpec | None, facts: Mapping[str, Any], timeout: float) -> Iterator[None]:
    """Context manager: run its body as one process of a distributed run.

    where: the cluster and this process's index in it; None for a run of one process. facts: name -> value that must be
    the same in all processes. timeout: seconds to wait for the other processes.

    Raises ConfigError in every process when a process is missing after ``timeout`` seconds, or when its facts differ.
    Raises ConfigError also when the processes have different numbers of devices.
    When the body raises, or when another process ends, this process ends immediately. Without that, the remaining
    processes would wait forever in a collective. Otherwise, all processes leave together.
    """
    global _watch
    if where is None:
        listen_for_sigterm()
        yield
        return
    names, peers = connect(where, facts, timeout)
    _watch = _Watch(names[where.process], peers, names)
    _watch.start()
    try:
        import jax

        alone = where.address if is_loopback(where.address.rpartition(":")[0]) else None
        jax.distributed.initialize(
            where.address,
            where.processes,
            where.process,
            initialization_timeout=int(timeout),
            coordinator_bind_address=alone,
        )
        listen_for_sigterm()
        _check_devices(names)
        yield
    except SystemExit as stopped:
        if stopped.code not in (0, None, EXIT_RETRY, EXIT_INTERRUPTED):
            _watch.failed(f"exit code {stopped.code}", stopped.code if isinstance(stopped.code, int) else 1)
        _leave()
        raise
    except BaseException as error:
        _fail(error)
    else:
        _leave()


def _check_devices(names: Sequence[str]) -> None:
    """Raise ConfigError when the processes of ``names`` have different numbers of devices: a mesh needs equal ones.

    A host whose driver does not see one of its accelerators is such a case. JAX tells every process about the devices
    of all processes, so each process finds the same answer without a collective.
    """
    import jax

    held = Counter(device.process_index for device in jax.devices())
    usual = Counter(held.values()).most_common(1)[0][0]
    others = [f"{name} has {held[k]}" for k, name in enumerate(names) if held[k] != usual]
    if others:
        raise ConfigError(
            f"devices: {'; '.join(others)}; the other processes have {usual} each; all need the same number: look at "
            "the accelerators of that host, or leave it out"
        )


def _leave() -> None:
    """Shut jax.distributed down and close the connections, after all processes arrived here."""
    global _watch
    import jax

    jax.distributed.shutdown()  # waits for all processes
    assert _watch is not None
    _watch.close()
    _watch = None  # a later run in this process starts its own watchdog


def _fail(error: BaseException) -> NoReturn:
    """Print ``error``, tell the other processes about it, and end this process."""
    assert _watch is not None
    if isinstance(error, (ConfigError, RunError)):
        line, code = f"error: {' '.join(str(error).split())}", 2 if isinstance(error, ConfigError) else 1
        _tell(line)
    elif isinstance(error, KeyboardInterrupt):
        line, code = "interrupted", EXIT_INTERRUPTED
        _tell(line)
    else:
        import jax

        line, code = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}", 1
        _tell("".join(traceback.format_exception(error)).rstrip())
        # A collective may have failed because another process failed or died. The watchdog receives that message,
        # names the process, and ends this one; so wait for it first.
        time.sleep(SILENCE + 2 * TICK if isinstance(error, jax.errors.JaxRuntimeError) else GRACE)
    _watch.failed(line, code)


def _tell(line: str) -> None:
    """Print ``line`` to stderr. A closed stderr is ignored, because the process must end in any case."""
    with contextlib.suppress(Exception):
        print(line, file=sys.stderr, flush=True)


class _Watch(threading.Thread):
    """Watchdog thread: checks deadlines and messages of other processes, and ends this process when it cannot continue.

    name: this process in messages. peers: open connections. names: all processes in process order; None for one
    process.
    """

    def __init__(self, name: str, peers: list[PeerConnection], names: list[str] | None = None):
        super().__init__(name="jaxmarl_llm watch", daemon=True)
        self._me, self._peers, self._names = name, peers, names or [name]
        self._hub = self._names[0] == name
        self._closing, self._until = threading.Event(), 0.0
        self._lock = threading.Lock()

    def run(self) -> None:
        """Receive messages, send heartbeats, and check the deadlines, until `close`."""
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                peer.last_received = time.monotonic()
                selector.register(peer.socket, selectors.EVENT_READ, peer)
            last_sent = 0.0
            while not self._closing.is_set() or (self._peers and time.monotonic() < self._until):
                if not selector.get_map():
                    self._closing.wait(TICK / 4)
                for key, _ in selector.select(TICK / 4) if selector.get_map() else ():
                    if not self._listen(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - last_sent < TICK or self._closing.is_set():
                    continue
                last_sent = now
                for peer in self._peers:
                    peer.send(alive=True)
                    if now - peer.last_received > SILENCE:
                        self._lost(peer, f"has not been heard of for {SILENCE:g} s")
                late = PROGRESS.late()
                if late is not None:
                    self._end(f"{self._me} hangs {PROGRESS}, {late}", 1, where=True)

    def _listen(self, peer: PeerConnection) -> bool:
        """Handle the messages that ``peer`` sent. Returns False when the connection ended."""
        for message in (messages := peer.receive()) or ():
            if "bye" in message:
                self._peers.remove(peer)
                return False
            if "ended" in message:
                _tell(message["ended"])
                time.sleep(message["grace"])
                self._end(message["ended"], message["code"], where=message["where"], show=False)
        if messages is not None:
            return True
        if not self._closing.is_set():
            self._lost(peer, "is gone")
        self._peers.remove(peer)
        return False

    def _lost(self, peer: PeerConnection, how: str) -> NoReturn:
        """End this process because ``peer`` is lost; ``how`` completes the sentence of the message."""
        again = "run the same command again to go on from the last checkpoint"
        self._end(f"{self._names[peer.process]} {how}; {again}", EXIT_RETRY)

    def failed(self, line: str, code: int) -> NoReturn:
        """End this process after its own failure, and tell the other processes.

        line: the failure, already printed by the caller. code: exit code of the run.
        """
        self._end(f"{self._me} failed: {line}", code, grace=GRACE, show=False)

    def _end(self, line: str, code: int, *, where: bool = False, grace: float = 0.0, show: bool = True) -> NoReturn:
        """End this process with exit code ``code``.

        line: the reason, sent to the other processes. where: every process prints its stage and its stack. grace:
        seconds that the other processes wait before they end. show: whether this process prints ``line``.
        """
        with self._lock:  # a second caller waits here until the process ends
            try:
                if show:
                    _tell(line)
                if where:
                    _tell(f"{self._me} is {PROGRESS}")
                    with contextlib.suppress(Exception):
                        faulthandler.dump_traceback(all_threads=True)
                for peer in self._peers:
                    peer.send(ended=line, code=code, where=where, grace=grace)
                signals.call_at_exit()
                # JAX aborts a process that loses process 0. So process 0 waits until the others have printed and ended.
                until = time.monotonic() + grace + GRACE
                for peer in self._peers if self._hub else ():
                    while (left := until - time.monotonic()) > 0 and peer.receive(left) is not None:
                        pass
                sys.stdout.flush()
            finally:  # also after a failure above, such as a full disk under stdout: nothing else ends this process
                os._exit(code)

    def close(self) -> None:
        """Tell the other processes that this one leaves, and stop the thread. The others may leave a moment later."""
        sockets = [peer.socket for peer in self._peers]
        self._until = time.monotonic() + GRACE
        self._closing.set()  # before the message: a peer that received the message may close its connection at once
        for peer in list(self._peers):
            peer.send(bye=True)
        self.join()
        for each in sockets:
            each.close()


_watch: _Watch | None = None
