"""A server of the page on 127.0.0.1: steps are read when the page asks for them, new ones appear while a run trains."""

from __future__ import annotations

import collections
import http.server
import threading
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.viewer import data, page
from jaxmarl_llm.viewer.data import Run, Step

HOST = "127.0.0.1"
KEPT = 8  # steps in memory, compressed
TIMEOUT = 30  # seconds that a connection may be silent


class Server(http.server.ThreadingHTTPServer):
    """The server. `serve_forever` answers until `shutdown`.

    Args:
        runs: The runs of the page.
        port: Port on 127.0.0.1; 0: one that is free.

    Raises:
        ConfigError: The port is in use or may not be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, runs: Sequence[Run], port: int = 0):
        self.runs = list(runs)
        self._reading = threading.Lock()  # one step is read at a time
        self._steps: collections.OrderedDict[tuple[Any, ...], bytes] = collections.OrderedDict()
        self._index: tuple[Any, bytes] | None = None
        try:
            super().__init__((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "expected 0 to 65535"
            raise ConfigError(f"--port={port}: cannot listen on {HOST} ({why})") from None

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def index(self) -> bytes:
        """The compressed index, made again only when a file of a run has changed."""
        with self._reading:
            seen = [
                (list(run.files()), _stamp(run.workdir / "metrics.jsonl") if run.workdir else 0) for run in self.runs
            ]
            if self._index is None or self._index[0] != seen:
                self._index = seen, data.packed(data.index(self.runs, live=True))
            return self._index[1]

    def step(self, run: int, step: Step) -> bytes:
        """A compressed step. Raises `ConfigError` where it is not there or its file is damaged.

        Args:
            run: Position of the run.
            step: The step, or the evaluation.
        """
        if not 0 <= run < len(self.runs):
            raise ConfigError(f"run {run}: expected 0 to {len(self.runs) - 1}")
        with self._reading:
            path = self.runs[run].files().get(step)
            key = (run, step, _stamp(path) if path else None)
            if key not in self._steps:
                self._steps[key] = data.read_step(self.runs[run], step)
            self._steps.move_to_end(key)
            while len(self._steps) > KEPT:
                self._steps.popitem(last=False)
            return self._steps[key]


def _stamp(path: Path) -> tuple[int, int] | None:
    """Size and time of a file; None where it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers ``/``, ``/index`` and ``/step?run=R&step=N``. Another host name than the own is refused."""

    server: Server
    server_version, sys_version = "jaxmarl-llm", ""
    timeout = TIMEOUT

    def do_GET(self) -> None:
        """Answer one request."""
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in (HOST, "localhost"):  # a page of another site whose name leads here
            return self.reply(403, b"expected the host 127.0.0.1", "text/plain")
        url = urllib.parse.urlsplit(self.path)
        try:
            if url.path == "/":
                return self.reply(200, page.live_page(), "text/html; charset=utf-8")
            if url.path == "/index":
                return self.reply(200, self.server.index(), "application/json", compressed=True)
            if url.path == "/step":
                asked = {key: values[0] for key, values in urllib.parse.parse_qs(url.query).items()}
                body = self.server.step(int(asked["run"]), data.step_named(asked["step"]))
                return self.reply(200, body, "application/json", compressed=True)
            return self.reply(404, b"not found", "text/plain")
        except (KeyError, ValueError) as error:
            if not isinstance(error, ConfigError):
                return self.reply(400, b"expected /step?run=R&step=N", "text/plain")
            return self.reply(409, str(error).encode("utf-8", "replace"), "text/plain; charset=utf-8")

    def reply(self, status: int, body: bytes, kind: str, compressed: bool = False) -> None:
        """Send one answer.

        Args:
            status: HTTP status.
            body: The bytes.
            kind: Their content type.
            compressed: They are gzip.
        """
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if compressed:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Print nothing."""
