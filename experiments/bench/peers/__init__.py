"""Other systems for comparison: each one in its own virtual environment and process, run one step at a time.

`make peers` creates the environments. A driver in this folder runs in one of them; `drive` describes the protocol.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from experiments.bench import KEEP_FREED_MEMORY
from jaxmarl_llm.errors import ConfigError

DRIVERS = {"TRL": "trl_grpo", "CoMLRL": "comlrl_magrpo", "google-tunix": "tunix_grpo"}
HOMES = {"TRL": "torch", "CoMLRL": "torch", "google-tunix": "tunix"}  # folders of --peers


class Peer:
    """A driver's process. ``step()`` lets it take one step; use it as a context, which ends the process.

    ``folder``: where it may write, removed when it ends.
    """

    def __init__(
        self,
        command: list[str],
        name: str,
        limit: float = 1800.0,
        folder: tempfile.TemporaryDirectory | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self.name, self._limit, self._folder = name, limit, folder
        self._log = tempfile.NamedTemporaryFile("w+", prefix=f"{name}-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, bufsize=1, env=env
        )
        self.versions: dict[str, str] = self._answer("ready")["versions"]

    def step(self) -> float:
        """Run one step. Returns its seconds, as measured by the driver."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # said with the end of its log, below
            self._process.stdin.write("step\n")
        return float(self._answer("seconds")["seconds"])

    def _answer(self, wanted: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch = threading.Timer(self._limit, self._process.kill)
        watch.start()
        line = self._process.stdout.readline()
        watch.cancel()
        answer = json.loads(line) if line.startswith("{") else {}
        if wanted not in answer:
            self._end()
            self._log.seek(0)
            tail = " | ".join(self._log.read().strip().splitlines()[-3:])
            self.close()
            raise RuntimeError(f"{self.name}: expected {wanted!r} from its driver, got {line!r}; it said: {tail}")
        return answer

    def _end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """End the process."""
        self._end()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def start(name: str, home: str, spec: dict[str, Any]) -> Peer:
    """Start the driver of ``name`` in ``home``/torch or ``home``/tunix. Raises ConfigError if this environment is
    missing. The process keeps freed memory, as ours does (`bench.KEEP_FREED_MEMORY`).
    """
    python = Path(home) / HOMES[name] / "bin" / "python"
    if not python.is_file():
        raise ConfigError(f"--peers: no {python}, in which {name} runs; `make peers` makes it")
    driver = Path(__file__).parent / f"{DRIVERS[name]}.py"
    folder = tempfile.TemporaryDirectory(prefix="bench-peer-")
    spec = {"threads": os.cpu_count() or 1, "folder": folder.name, **spec}
    env = {**os.environ, "GLIBC_TUNABLES": KEEP_FREED_MEMORY}
    return Peer([str(python), str(driver), json.dumps(spec)], name, folder=folder, env=env)
