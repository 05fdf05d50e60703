"""How the processes of a run find each other before JAX does.

Process 0 listens on the coordinator's port, the others call there and say who they are and what they are about to run,
so that one who is missing or different is named by every process. The connections stay open (`processes`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from jaxmarl_llm.text import ConfigError

LONGEST = 1 << 22  # bytes of a message


def loopback(host: str) -> bool:
    """Whether a coordinator's host, in brackets or not, is this machine alone: nobody then listens elsewhere."""
    return host.strip("[]") in ("localhost", "127.0.0.1", "::1")


class Place(NamedTuple):
    """Where a process is among those of a run."""

    address: str  # host:port of process 0
    processes: int
    process: int


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


class Peer:
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


def meet(where: Place, facts: Mapping[str, Any], timeout: float) -> tuple[list[str], list[Peer]]:
    """Names of all processes, and the open connections: of process 0 to all others, of the others to process 0."""
    host, _, port = where.address.rpartition(":")
    name = f"process {where.process} of {where.processes} ({socket.gethostname()}, pid {os.getpid()})"
    facts = {key: json.dumps(value, sort_keys=True) for key, value in facts.items()}
    me = {"process": where.process, "of": where.processes, "name": name, "facts": facts}
    way = _receive if where.process == 0 else _call
    return way(host.strip("[]"), int(port), me, timeout)


def _receive(host: str, port: int, me: dict, timeout: float) -> tuple[list[str], list[Peer]]:
    """Process 0: wait for the others, then tell all of them to go on, or why not."""
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        if loopback(host):
            own = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=own, backlog=me["of"])
        else:
            listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=me["of"])
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--coordinator: process 0 cannot listen on port {port}: {reason}") from error
    end, came = time.monotonic() + timeout, dict[int, tuple[Peer, dict]]()

    def refuse(line: str, *more: Peer) -> NoReturn:
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
            peer = Peer(connection)
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


def _call(host: str, port: int, me: dict, timeout: float) -> tuple[list[str], list[Peer]]:
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
    peer = Peer(connection)
    peer.say(**me)
    answer = peer.wait(timeout + 10.0) or {}
    if "go" in answer:
        return answer["go"], [peer]
    connection.close()
    lost = f"process 0 of {me['of']} at {host}:{port} ended before all had come, or is not of this run"
    raise ConfigError(answer.get("refused", lost))
