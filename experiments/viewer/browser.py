"""Chromium without a window, driven over two pipes by the DevTools protocol: no port, no other package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
KEYS = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def found() -> str | None:
    """Path of a Chromium of this machine; None: there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser(contextlib.AbstractContextManager):
    """One tab.

    Args:
        size: Width and height of the page in pixels.
        dark: The system asks for dark pages.
        timeout: Seconds that an answer may take.
    """

    def __init__(self, size: tuple[int, int] = (1400, 900), dark: bool = False, timeout: float = 60):
        path = found()
        if path is None:
            raise FileNotFoundError(f"no Chromium: none of {', '.join(NAMES)}")
        self.timeout, self._number, self._buffer = timeout, 0, b""
        self.problems: list[str] = []
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        inward, self._out = os.pipe()
        self._in, outward = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank"]
        # Chromium reads descriptor 3 and writes descriptor 4.
        shell = f'exec "$0" "$@" 3<&{inward} 4>&{outward}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, path, *flags],
            pass_fds=(inward, outward), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(inward)
        os.close(outward)
        self._session: str | None = None
        tab = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.resize(*size)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol.

        Args:
            method: Its name.
            **parameters: Its parameters.
        """
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self.timeout
        while True:
            answer = self._next(until)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _next(self, until: float) -> dict[str, Any]:
        """The next message of the browser."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium gave no answer")
            if not (read := os.read(self._in, 2**20)):
                raise RuntimeError("Chromium has ended")
            self._buffer += read
        raw, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(raw)

    def _note(self, message: dict[str, Any]) -> None:
        """Keep what the page's console reports as an error."""
        given = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(given["exceptionDetails"])[:2000])
        elif message.get("method") == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.problems.append(given["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and given["type"] in ("error", "assert"):
            self.problems.append(json.dumps(given["args"])[:2000])

    def js(self, code: str) -> Any:
        """Value of an expression in the page; a promise is awaited.

        Args:
            code: The expression.
        """
        done = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"])[:2000])
        return done["result"].get("value")

    def wait(self, code: str) -> None:
        """Wait until an expression is true.

        Args:
            code: The expression.
        """
        until = time.monotonic() + self.timeout
        while not self.js(f"!!({code})"):
            if time.monotonic() > until:
                raise TimeoutError(f"{code}; problems: {self.problems}")
            time.sleep(0.02)

    def open(self, page: str | Path, place: str = "") -> None:
        """Load a page and wait until it shows a view.

        Args:
            page: File, or address of a server.
            place: What follows ``#``.
        """
        address = page if isinstance(page, str) else page.resolve().as_uri()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{address}#{place}")
        self.wait("document.body && document.body.dataset.ready")
        self.settle()

    def to(self, place: str) -> None:
        """Go to a place of the open page, and wait for its view.

        Args:
            place: What follows ``#``.
        """
        self.js("delete document.body.dataset.ready")
        self.js(f"location.hash = {json.dumps('#' + place)}; dispatchEvent(new Event('hashchange'))")
        self.wait("document.body.dataset.ready")
        self.settle()

    def settle(self) -> None:
        """Wait until two frames have been drawn."""
        self.js("new Promise((f) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(f))))")

    def key(self, name: str, shift: bool = False) -> None:
        """Press and release a key.

        Args:
            name: Its name, or its character.
            shift: Shift is held.
        """
        text = {"text": name} if len(name) == 1 else {"text": "\r"} if name == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            code = KEYS.get(name, 0)
            more = text if kind == "keyDown" else {}
            held = 8 if shift else 0
            self.call("Input.dispatchKeyEvent", type=kind, key=name, modifiers=held, windowsVirtualKeyCode=code, **more)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the left button of the mouse, move and release it.

        Args:
            start: Place in pixels where it is pressed.
            end: Place where it is released; the same place: a click.
        """
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        moves = [("mousePressed", start), ("mouseMoved", middle), ("mouseMoved", end), ("mouseReleased", end)]
        for kind, (x, y) in moves:
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
        self.settle()

    def resize(self, width: int, height: int) -> None:
        """Give the page another size.

        Args:
            width: Pixels.
            height: Pixels.
        """
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def picture(self, path: Path) -> None:
        """Write what is seen as a PNG.

        Args:
            path: The file.
        """
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
