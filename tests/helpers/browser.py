"""A headless Chromium for tests, spoken to over a pipe in its DevTools protocol: no driver and no package needed.

`Browser.open` loads a page and collects whatever it prints to the console, throws, or asks the network for.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().with_name("chromium.sh")
CANNOT_INSTALL = 3  # exit status of SCRIPT
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PATIENCE = 30.0  # seconds for one answer


class CannotRun(Exception):
    """This machine has no browser; the message says why."""


def executable() -> str:
    """The path of a Chromium, installed now where that is possible. Raises CannotRun."""
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return found
    done = subprocess.run(["bash", str(SCRIPT), "install"], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == CANNOT_INSTALL:
        raise CannotRun(done.stderr.strip())
    if done.returncode:
        raise AssertionError(f"{SCRIPT.name} failed: {done.stderr}")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found, "chromium was installed and is not there"
    return found


class Browser:
    """One Chromium with one page. `messages`: what the console and exceptions said; `requests`: URLs asked for."""

    def __init__(self) -> None:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser reads from descriptor 3 and writes to 4; high numbers first, since these may be in use.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (to_browser, from_browser)]
        os.close(to_browser)
        os.close(from_browser)
        program = [
            executable(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe",
            f"--user-data-dir={self._profile}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{high[0]} 4>&{high[1]}', "bash", *program],
            pass_fds=high,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for end in high:
            os.close(end)
        os.set_blocking(self._read, False)
        self._buffer, self._number, self._session = b"", 0, None
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._loads = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            answer = self._receive()
            if answer is not None and answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
        raise AssertionError(f"chromium did not answer to {method}")

    def _receive(self) -> dict[str, Any] | None:
        """The next message, after noting what it tells; None where there is none for a moment."""
        if b"\0" not in self._buffer:
            try:
                part = os.read(self._read, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
                return None
            assert part, "chromium ended"
            self._buffer += part
            return None
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        kind, told = message.get("method"), message.get("params", {})
        if kind == "Runtime.consoleAPICalled":
            self.messages.append(" ".join(str(a.get("value", a.get("description"))) for a in told["args"]))
        elif kind == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(told["exceptionDetails"])[:500])
        elif kind == "Log.entryAdded":
            self.messages.append(told["entry"]["text"])
        elif kind == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif kind == "Page.loadEventFired":
            self._loads += 1
        return message

    @property
    def loads(self) -> int:
        """How many pages have been loaded so far."""
        self.evaluate("0")
        return self._loads

    def open(self, path: Path, width: int = 1280, height: int = 900, scheme: str = "light", scale: float = 1) -> None:
        """Load a local page in a window of this size; `scheme` is light or dark. Starts the collections anew."""
        self.messages, self.requests = [], []
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        before = self._loads
        self.call("Page.navigate", url=path.resolve().as_uri())
        end = time.monotonic() + _PATIENCE
        while self._loads == before:
            self._receive()
            assert time.monotonic() < end, f"{path} does not finish loading"

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; asked again where the page was just being replaced."""
        for attempt in range(5):
            try:
                answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
                break
            except AssertionError as error:
                if "context" not in str(error) or attempt == 4:
                    raise
                time.sleep(0.1)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, pressed: bool = False) -> None:
        """Move or press the mouse: kind is mouseMoved, mousePressed or mouseReleased."""
        held = {"button": "left", "clickCount": 1, "buttons": 1} if pressed or kind != "mouseMoved" else {}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **held)

    def screenshot(self, path: Path, whole: bool = False) -> Path:
        """Save the window, or the whole page, as a PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))
        return path

    def close(self) -> None:
        """End the browser and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)
