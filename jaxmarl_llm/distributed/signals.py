"""Signals that stop a run: SIGTERM from a scheduler, and Ctrl-C from a person.

Python runs its signal handlers between two instructions of the main thread, so a compilation of minutes delays them.
Therefore a thread reads the numbers of the signals as the interpreter receives them (``signal.set_wakeup_fd``). The
thread answers at once. The run reads `requested` after every step.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

EXIT_RETRY = 75  # exit code EX_TEMPFAIL: the run is fine; the same command continues from the last checkpoint
EXIT_INTERRUPTED = 130  # exit code of a program that a person ended with Ctrl-C
NAMES = {EXIT_RETRY: "SIGTERM", EXIT_INTERRUPTED: "Ctrl-C"}
GRACE = 1.0  # seconds in which a run may end by itself after the second Ctrl-C

_code = 0  # what `requested` returns
_at_exit: list[Callable[[], None]] = []


def requested() -> int:
    """Exit code with which a signal asked this process to end: `EXIT_RETRY`, `EXIT_INTERRUPTED`, or 0 for no signal."""
    return _code


def listen_for_sigterm() -> None:
    """Install a handler for SIGTERM that makes `requested` true instead of ending the process.

    The handler replaces the one of jax.distributed. That one needs several steps for its protocol, and is absent in a
    run of one process. During a run, `listening` answers sooner.
    """
    signal.signal(signal.SIGTERM, lambda *_: _hear_sigterm())


@contextlib.contextmanager
def at_exit(function: Callable[[], None]) -> Iterator[None]:
    """Context manager: ``function`` is called where the process is ended from another thread than the main one."""
    _at_exit.append(function)
    try:
        yield
    finally:
        _at_exit.remove(function)


def call_at_exit(seconds: float = 2.0) -> None:
    """Call the functions of `at_exit`. seconds: how long to wait for them, because a file system may hang."""

    def call() -> None:
        for function in list(_at_exit):
            with contextlib.suppress(Exception):
                function()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Context manager: SIGTERM and the first Ctrl-C make `requested` true, and say at once that they were heard.

    A second Ctrl-C ends the process with exit code 130, in a notebook the cell. The handlers from before return at the
    end. In a thread that is not the main one, nothing is installed: signals reach the main thread alone.
    """
    global _code
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listener = _Listener()
    before = {number: signal.signal(number, listener.handle) for number in (signal.SIGTERM, signal.SIGINT)}
    woken = signal.set_wakeup_fd(listener.writes, warn_on_full_buffer=False)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        listener.close()
        _code = 0


class _Listener(threading.Thread):
    """Reads the numbers of signals from a pipe, until `close`."""

    def __init__(self) -> None:
        super().__init__(name="jaxmarl_llm signals", daemon=True)
        self.reads, self.writes = os.pipe()
        os.set_blocking(self.writes, False)
        self.interrupts = 0  # of which this thread read
        self._handled = 0
        self._closing = threading.Event()

    def handle(self, number: int, frame: Any) -> None:
        """The signal handler, in the main thread: the second Ctrl-C raises KeyboardInterrupt there."""
        if number == signal.SIGINT:
            self._handled += 1
            if max(self._handled, self.interrupts) > 1:
                raise KeyboardInterrupt

    def run(self) -> None:
        while not self._closing.is_set():
            for number in os.read(self.reads, 64):
                if number == signal.SIGTERM:
                    _hear_sigterm()
                elif number == signal.SIGINT:
                    self.interrupts += 1
                    self._hear_interrupt()

    def _hear_interrupt(self) -> None:
        global _code
        if self.interrupts == 1:
            _code = EXIT_INTERRUPTED
            _say(
                "Ctrl-C: heard; the run finishes the step in progress, saves it and ends; press Ctrl-C again to end at "
                "once"
            )
            return
        _say("Ctrl-C again: ended at once; the same command goes on from the last checkpoint")
        if "ipykernel" not in sys.modules:
            end_now(EXIT_INTERRUPTED, self._closing)

    def close(self) -> None:
        """Stop the thread."""
        self._closing.set()
        os.write(self.writes, b"\0")
        self.join()
        os.close(self.reads)  # not by the thread: it may end before the write
        os.close(self.writes)


def end_now(code: int, ended: threading.Event) -> None:
    """End this process and its worker processes with exit ``code`` after `GRACE` seconds, unless ``ended`` is set."""
    if ended.wait(GRACE):
        return
    call_at_exit()
    for child in multiprocessing.active_children():
        child.terminate()
    time.sleep(0.1)
    os._exit(code)


def _hear_sigterm() -> None:
    global _code
    if not _code:
        _code = EXIT_RETRY
        _say("SIGTERM: heard; the run finishes the step in progress, saves it and ends")


def _say(line: str) -> None:
    """Print ``line`` to stderr, which may be closed. Not through ``print``: the main thread may be inside it."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
