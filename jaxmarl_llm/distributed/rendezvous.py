"""Connections between the processes of a run, made before jax.distributed starts.

Process 0 listens on the coordinator's port. Every other process connects to it and sends its identity and its settings.
So every process can name a process that is missing or has different settings. `processes` keeps the connections open.
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

from jaxmarl_llm.errors import ConfigError

MAX_MESSAGE = 1 << 22  # bytes of one message


def is_loopback(host: str) -> bool:
    """Whether ``host`` names only this machine. Then nothing listens on other network interfaces.

    host: host name or address of the coordinator; an IPv6 address may be in brackets.
    """
    return host.strip("[]") in ("localhost", "127.0.0.1", "::1")


class ClusterSpec(NamedTuple):
    """A run's processes, and the index of this process among them.

    address: host:port of process 0. processes: their number. process: the index of this one, from 0.
    """

    address: str
    processes: int
    process: int


def find_cluster(
    coordinator: str | None, processes: int | None, process: int | None, timeout: float
) -> ClusterSpec | None:
    """Cluster of this run, from the flags or from the environment. None for a run of one process.

    coordinator: value of ``--coordinator``, host:port of process 0. processes: value of ``--processes``, their number.
    process: value of ``--process``, the index of this one. timeout: seconds for queries to the environment.

    Without flags, JAX detects Slurm, Open MPI, a TPU slice or a JobSet. Raises ConfigError for an incomplete or wrong
    set of flags.
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
        return ClusterSpec(coordinator, processes, process)
    if len(absent) < 3:
        raise ConfigError(f"{absent[0]}: required with {next(name for name in given if name not in absent)}")
    from jax._src.clusters import ClusterEnv  # the only API for the number of processes before they connect

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JAX warns in any container without the Kubernetes client
            found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(timeout))
    except Exception as error:  # the client of a scheduler may raise anything
        raise ConfigError(
            f"--processes: not known from the environment ({type(error).__name__}: {error}); give --coordinator, "
            "--processes and --process, or --processes=1 for one alone"
        ) from error
    address, total, index = found[:3]
    if total is None or total == 1:
        return None
    if address is None or index is None:
        raise ConfigError("--process: the environment gives a number of processes, but no coordinator or index")
    return ClusterSpec(address, total, index)


class PeerConnection:
    """Connection to another process. A message is one JSON object on one line.

    connection: the open TCP socket. process: index of the other process. ``last_received`` is the time of the newest
    message, in seconds of ``time.monotonic``.
    """

    def __init__(self, connection: socket.socket, process: int = 0):
        self.socket, self.process, self.last_received = connection, process, time.monotonic()
        self._rest = b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, **message: Any) -> None:
        """Send the keyword arguments as one message. A broken connection is ignored here; `receive` reports it."""
        with contextlib.suppress(OSError):
            self.socket.settimeout(5.0)
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float = 5.0) -> list[dict] | None:
        """Complete messages of the next received bytes, which may be none.

        seconds: time to wait. Returns None for silence, for a closed connection, and for bytes that are not messages.
        """
        try:
            self.socket.settimeout(seconds)
            got = self.socket.recv(1 << 16)
        except (TimeoutError, OSError):
            return None
        *lines, self._rest = (self._rest + got).split(b"\n")
        self.last_received = time.monotonic()
        try:
            messages = [json.loads(text) for text in lines]
        except ValueError:
            return None
        valid = got and len(self._rest) < MAX_MESSAGE and all(isinstance(each, dict) for each in messages)
        return messages if valid else None

    def receive_first(self, seconds: float) -> dict | None:
        """First message within ``seconds``; None when there is none."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            messages = self.receive(left)
            if messages is None:
                return None
            if messages:
                return messages[0]
        return None

    def closed(self) -> bool:
        """Whether the other process closed the connection. Reads nothing and does not wait."""
        self.socket.settimeout(0)
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


def connect(where: ClusterSpec, facts: Mapping[str, Any], timeout: float) -> tuple[list[str], list[PeerConnection]]:
    """Connect the processes of a run: process 0 to all others, every other process to process 0.

    where: the cluster and this process. facts: name -> JSON value that must be the same in all processes. timeout:
    seconds to wait. Returns the names of all processes in process order, and the open connections. Raises ConfigError
    when a process is missing, doubled or different.
    """
    host, _, port = where.address.rpartition(":")
    name = f"process {where.process} of {where.processes} ({socket.gethostname()}, pid {os.getpid()})"
    facts = {key: json.dumps(value, sort_keys=True) for key, value in facts.items()}
    me = {"process": where.process, "of": where.processes, "name": name, "facts": facts}
    role = _accept_all if where.process == 0 else _connect_to_0
    return role(host.strip("[]"), int(port), me, timeout)


def _accept_all(host: str, port: int, me: dict, timeout: float) -> tuple[list[str], list[PeerConnection]]:
    """Wait in process 0 for all other processes, then tell them to continue, or why they cannot.

    host, port: address to listen on. me: the message that describes process 0. timeout: seconds to wait.
    """
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        if is_loopback(host):
            own = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=own, backlog=me["of"])
        else:
            listener = socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=me["of"])
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"--coordinator: process 0 cannot listen on port {port}: {reason}") from error
    end, came = time.monotonic() + timeout, dict[int, tuple[PeerConnection, dict]]()

    def refuse(line: str, *more: PeerConnection) -> NoReturn:
        for peer in (*(peer for peer, _ in came.values()), *more):
            peer.send(refused=line)
            peer.socket.close()
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
            peer = PeerConnection(connection)
            other = peer.receive_first(5.0)
            if other is None or not {"of", "name", "facts"} <= other.keys() or type(other.get("process")) is not int:
                connection.close()  # not a process of this run
                continue
            peer.process = other["process"]
            if other["of"] != me["of"] or not 0 < peer.process < me["of"]:
                refuse(f"{other['name']} and {me['name']} do not agree on how many there are", peer)
            if peer.process in came:
                if not came[peer.process][0].closed():  # otherwise the process was started again
                    refuse(f"{other['name']} and {came[peer.process][1]['name']}: the same number twice", peer)
                came[peer.process][0].socket.close()
            came[peer.process] = peer, other
        for _, other in came.values():
            for key in sorted({*me["facts"], *other["facts"]}):
                mine, theirs = (facts.get(key, "nothing") for facts in (me["facts"], other["facts"]))
                if mine != theirs:
                    refuse(f"{key}: {theirs} in {other['name']}, but {mine} in {me['name']}; all have to be the same")
    names = [me["name"], *(came[k][1]["name"] for k in sorted(came))]
    for peer, _ in came.values():
        peer.send(go=names)
    return names, [peer for peer, _ in came.values()]


def _connect_to_0(host: str, port: int, me: dict, timeout: float) -> tuple[list[str], list[PeerConnection]]:
    """Connect to process 0, with retries, and wait for its answer.

    host, port: address of process 0. me: the message that describes this process. timeout: seconds to wait.
    """
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
    peer = PeerConnection(connection)
    peer.send(**me)
    answer = peer.receive_first(timeout + 10.0) or {}
    if "go" in answer:
        return answer["go"], [peer]
    connection.close()
    lost = f"process 0 of {me['of']} at {host}:{port} ended before all had come, or is not of this run"
    raise ConfigError(answer.get("refused", lost))
