"""Many processes of one run: how they find each other, agree, and end together.

Every process runs the same program on the same host tables (jax.distributed, one mesh over all devices); what a single
one knows, the results of its environments or whether it was asked to stop, goes through `everyone`. Before JAX is told
of the others they meet: process 0 listens on the coordinator's port, the others call there and say who they are and
what they are about to run, so that one who is missing or different is named by every process. The connections stay
open. They are how a process learns, within a moment, that another one died, failed or hangs; JAX itself would tell
nobody which.

One process needs none of this: it has `stage`, the deadlines and SIGTERM. Free of JAX until JAX is needed: workers
import it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar

from jaxmarl_llm.text import ConfigError

T = TypeVar("T")

AGAIN = 75  # EX_TEMPFAIL: nothing is wrong with the run; the same command goes on from its last checkpoint
TICK = 1.0  # seconds between signs of life and looks at the clock
SILENCE = 30.0  # seconds without a sign of life after which a process is taken for dead
GRACE = 3.0  # seconds that a process has to end by itself once another has failed: likely of the same
LONGEST = 1 << 22  # bytes of a message
LOOPBACK = ("localhost", "127.0.0.1")  # of a coordinator here nobody listens on other addresses


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a stage of a step counts as hanging and the run ends; 0: never."""

    compile: float = 3600.0  # of one program; not part of the stage that needs it
    rollout: float = 7200.0  # also of an evaluation
    reward: float = 3600.0
    update: float = 7200.0  # memory included
    save: float = 3600.0  # checkpoints, metrics, and waiting for the other processes at the end of a step

    def check(self, path: str) -> None:
        if min(self.compile, self.rollout, self.reward, self.update, self.save) < 0:
            raise ConfigError(f"{path}: expected seconds >= 0 (0: no deadline)")


class Place(NamedTuple):
    """Where a process is among those of a run."""

    address: str  # host:port of process 0
    processes: int
    process: int


# What a program asks


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
    return everyone(make() if index() == 0 else None)[0]  # type: ignore[return-value]


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
def stage(name: str) -> Iterator[None]:
    """What runs inside is ``name`` to the deadlines: a field of `Deadlines`, anything else counts as ``update``.

    A stage inside of another one is not part of it.
    """
    _work.begin(name if name in Deadlines.__dataclass_fields__ else "update")
    try:
        yield
    finally:
        _work.end()


@contextlib.contextmanager
def deadlines(limits: Deadlines) -> Iterator[None]:
    """Inside, stages that take longer than ``limits`` end the process, and with it the run."""
    import jax

    jax.monitoring.register_event_duration_secs_listener(_work.compiles)
    _work.limits = limits
    watch, own = _watch, None
    if watch is None:
        own = _Watch("the process", [])
        own.start()
    try:
        yield
    finally:
        _work.limits = None
        jax.monitoring.unregister_event_duration_listener(_work.compiles)
        if own is not None:
            own.close()


def at(step: int) -> None:
    """For messages: ``step`` steps are done."""
    _work.step = step


@dataclass
class _Stage:
    name: str
    since: float
    apart: float = 0.0  # seconds since then that went into compiling and other stages


@dataclass
class _Work:
    """What this process is doing."""

    stages: list[_Stage] = field(default_factory=list)
    compiling: float | None = None  # since when
    limits: Deadlines | None = None
    step: int = 0

    def begin(self, name: str) -> None:
        self.stages.append(_Stage(name, time.monotonic()))
        self.compiling = None

    def end(self) -> None:
        done = self.stages.pop()
        self.compiling = None
        if self.stages:
            self.stages[-1].apart += time.monotonic() - done.since

    def compiles(self, event: str, seconds: float, **_: Any) -> None:
        """Listener of JAX: a program was lowered, so that it is compiled now, or has been compiled."""
        if event.endswith("/jaxpr_to_mlir_module_duration"):
            self.compiling = time.monotonic()
        elif event.endswith("/backend_compile_duration"):
            self.compiling = None
            if self.stages:
                self.stages[-1].apart += seconds

    def said(self) -> tuple[str, float]:
        """The innermost stage, or compiling, and seconds in it."""
        now, since = time.monotonic(), self.compiling
        if since is not None:
            return "compile", now - since
        for top in self.stages[-1:]:  # the main thread may end it now
            return top.name, now - top.since - top.apart
        return "no stage", 0.0

    def late(self) -> str | None:
        """What takes longer than it may."""
        name, seconds = self.said()
        limit = getattr(self.limits, name, 0.0) if self.limits else 0.0
        return f"longer than config.run.deadlines.{name}={limit:g}" if limit and seconds > limit else None

    def __str__(self) -> str:
        name, seconds = self.said()
        return f"in {name} after step {self.step}, for {seconds:.0f} s"


_work = _Work()


# How processes meet


def place(coordinator: str | None, processes: int | None, process: int | None, timeout: float) -> Place | None:
    """From the flags, or from the environment: Slurm, Open MPI, a TPU slice, a JobSet, as JAX knows them. None for one
    process alone. ConfigError for flags that do not go together.
    """
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    absent = [name for name, value in given.items() if value is None]
    if processes == 1:
        return None
    if not absent:
        assert coordinator is not None and processes is not None and process is not None
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"--coordinator: expected host:port of process 0, got {coordinator!r}")
        if not 0 <= process < processes:
            raise ConfigError(f"--process: expected 0 to {processes - 1} with --processes={processes}, got {process}")
        return Place(coordinator, processes, process)
    if len(absent) < 3:
        raise ConfigError(f"{absent[0]}: required with {next(name for name in given if name not in absent)}")
    from jax._src.clusters import ClusterEnv  # the only place that says how many there are before they have met

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of any container: how Kubernetes could be asked
            found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(timeout))
    except Exception as error:  # whatever a scheduler's client raises
        raise ConfigError(
            f"--processes: not known from the environment ({type(error).__name__}: {error}); give --coordinator, "
            "--processes and --process, or --processes=1 for one alone"
        ) from error
    return None if found[1] in (None, 1) else Place(*found[:3])


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
    names, peers = _meet(where, facts, timeout)
    _watch = _Watch(names[where.process], peers, names)
    _watch.start()
    try:
        import jax

        alone = where.address if where.address.rpartition(":")[0] in LOOPBACK else None
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
    import jax

    jax.distributed.shutdown()  # waits for all
    assert _watch is not None
    _watch.close()


def _fail(error: BaseException) -> NoReturn:
    assert _watch is not None
    if isinstance(error, ConfigError):
        line, code = f"error: {' '.join(str(error).split())}", 2
        print(line, file=sys.stderr, flush=True)
    elif isinstance(error, KeyboardInterrupt):
        line, code = "interrupted", 130
        print(line, file=sys.stderr, flush=True)
    else:
        import jax

        line, code = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}", 1
        traceback.print_exception(error)
        # Perhaps of a collective operation, because another process failed or is gone: the watch hears of that, says
        # which, and ends this one.
        time.sleep(SILENCE + 2 * TICK if isinstance(error, jax.errors.JaxRuntimeError) else GRACE)
    _watch.failed(line, code)


def _meet(where: Place, facts: Mapping[str, Any], timeout: float) -> tuple[list[str], list[_Peer]]:
    """Names of all processes, and the open connections: of process 0 to all others, of the others to process 0."""
    host, _, port = where.address.rpartition(":")
    name = f"process {where.process} of {where.processes} ({socket.gethostname()}, pid {os.getpid()})"
    facts = {key: json.dumps(value, sort_keys=True) for key, value in facts.items()}
    me = {"process": where.process, "of": where.processes, "name": name, "facts": facts}
    meet = _receive if where.process == 0 else _call
    return meet(host.strip("[]"), int(port), me, timeout)


def _receive(host: str, port: int, me: dict, timeout: float) -> tuple[list[str], list[_Peer]]:
    """Process 0: wait for the others, then tell all of them to go on, or why not."""
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        if host in LOOPBACK:
            listener = socket.create_server((host, port), backlog=me["of"])
        else:
            listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=me["of"])
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--coordinator: process 0 cannot listen on port {port}: {reason}") from error
    end, came = time.monotonic() + timeout, dict[int, tuple[_Peer, dict]]()

    def refuse(line: str, *more: _Peer) -> NoReturn:
        for peer in (*(peer for peer, _ in came.values()), *more):
            peer.say(refused=line)
            peer.line.close()
        raise ConfigError(line)

    with listener:
        while len(came) < me["of"] - 1:
            listener.settimeout(max(end - time.monotonic(), 0.01))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [str(k) for k in range(1, me["of"]) if k not in came]
                whom = f"process{'es' * (len(missing) > 1)} {', '.join(missing)} of {me['of']}"
                refuse(
                    f"waited {timeout:g} s for {whom}: started on every host? does port {port} of "
                    f"{socket.gethostname()} let them in?"
                )
            peer = _Peer(connection)
            other = peer.wait(5.0)
            if other is None or not {"of", "name", "facts"} <= other.keys() or type(other.get("process")) is not int:
                connection.close()  # whoever that was
                continue
            peer.process = other["process"]
            if other["of"] != me["of"] or not 0 < peer.process < me["of"]:
                refuse(f"{other['name']} and {me['name']} do not agree on how many there are", peer)
            if peer.process in came:
                if not came[peer.process][0].closed():  # or it was started again
                    refuse(f"{other['name']} and {came[peer.process][1]['name']}: the same number twice", peer)
                came[peer.process][0].line.close()
            came[peer.process] = peer, other
        for _, other in came.values():
            for key in sorted({*me["facts"], *other["facts"]}):
                mine, theirs = (facts.get(key, "nothing") for facts in (me["facts"], other["facts"]))
                if mine != theirs:
                    refuse(f"{key}: {theirs} in {other['name']}, but {mine} in {me['name']}; all have to be the same")
    names = [me["name"], *(came[k][1]["name"] for k in sorted(came))]
    for peer, _ in came.values():
        peer.say(go=names)
    return names, [peer for peer, _ in came.values()]


def _call(host: str, port: int, me: dict, timeout: float) -> tuple[list[str], list[_Peer]]:
    """Another process: call process 0 until it answers."""
    end = time.monotonic() + timeout
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=max(end - time.monotonic(), 0.1))
            break
        except OSError as error:
            if time.monotonic() > end:
                raise ConfigError(
                    f"waited {timeout:g} s for process 0 of {me['of']} at {host}:{port} ({error.strerror or error}): "
                    "is it started? is the port open?"
                ) from None
            time.sleep(0.2)
    peer = _Peer(connection)
    peer.say(**me)
    answer = peer.wait(timeout + 10.0) or {}
    if "go" in answer:
        return answer["go"], [peer]
    connection.close()
    lost = f"process 0 of {me['of']} at {host}:{port} ended before all had come, or is not of this run"
    raise ConfigError(answer.get("refused", lost))


# How they end together


class _Peer:
    """A connection to another process: JSON, an object a line."""

    def __init__(self, line: socket.socket, process: int = 0):
        self.line, self.process, self.heard = line, process, time.monotonic()
        self._rest = b""
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, **words: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone: that is noticed when it is listened to
            self.line.settimeout(5.0)
            self.line.sendall(json.dumps(words).encode() + b"\n")

    def hear(self, seconds: float = 5.0) -> list[dict] | None:
        """What it says next, within ``seconds``; None when it says nothing, is gone, or is not one of us."""
        try:
            self.line.settimeout(seconds)
            got = self.line.recv(1 << 16)
        except (TimeoutError, OSError):
            return None
        *lines, self._rest = (self._rest + got).split(b"\n")
        self.heard = time.monotonic()
        try:
            words = [json.loads(text) for text in lines]
        except ValueError:
            return None
        fine = got and len(self._rest) < LONGEST and all(isinstance(each, dict) for each in words)
        return words if fine else None

    def wait(self, seconds: float) -> dict | None:
        """The first thing it says."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            words = self.hear(left)
            if words is None:
                return None
            if words:
                return words[0]
        return None

    def closed(self) -> bool:
        self.line.settimeout(0)
        try:
            return not self.line.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


class _Watch(threading.Thread):
    """Looks at the clock and listens to the other processes, and ends this one when there is no going on."""

    def __init__(self, name: str, peers: list[_Peer], names: list[str] | None = None):
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
                late = _work.late()
                if late is not None:
                    self._end(f"{self._me} hangs {_work}, {late}", 1, where=True)

    def _listen(self, peer: _Peer) -> bool:
        """Whether there is more to be expected of it."""
        for words in (said := peer.hear()) or ():
            if "bye" in words:
                self._peers.remove(peer)
                return False
            if "ended" in words:
                print(words["ended"], file=sys.stderr, flush=True)
                time.sleep(words["grace"])
                self._end(words["ended"], words["code"], where=words["where"], show=False)
        if said is not None:
            return True
        if not self._closing.is_set():
            self._lost(peer, "is gone")
        self._peers.remove(peer)
        return False

    def _lost(self, peer: _Peer, how: str) -> NoReturn:
        again = "run the same command again to go on from the last checkpoint"
        self._end(f"{self._names[peer.process]} {how}; {again}", AGAIN)

    def failed(self, line: str, code: int) -> NoReturn:
        """End this process for a reason of its own, which it has printed, and tell the others."""
        self._end(f"{self._me} failed: {line}", code, grace=GRACE, show=False)

    def _end(self, line: str, code: int, *, where: bool = False, grace: float = 0.0, show: bool = True) -> NoReturn:
        """``where``: every process says where it waits. ``grace``: seconds that the others have before they end."""
        with self._lock:  # whoever comes second waits for the end
            if show:
                print(line, file=sys.stderr, flush=True)
            if where:
                print(f"{self._me} is {_work}", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
            for peer in self._peers:
                peer.say(ended=line, code=code, where=where, grace=grace)
            # JAX aborts a process that finds process 0 gone: the others say their last words first.
            until = time.monotonic() + grace + GRACE
            for peer in self._peers if self._hub else ():
                while (left := until - time.monotonic()) > 0 and peer.hear(left) is not None:
                    pass
            sys.stdout.flush()
            os._exit(code)

    def close(self) -> None:
        """Take leave; the others may take a moment longer."""
        lines = [peer.line for peer in self._peers]
        for peer in list(self._peers):
            peer.say(bye=True)
        self._until = time.monotonic() + GRACE
        self._closing.set()
        self.join()
        for line in lines:
            line.close()


_watch: _Watch | None = None
