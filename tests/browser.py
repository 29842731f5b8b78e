"""Chromium without a window, driven by its own protocol (CDP) over a websocket."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="chromium not installed")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    # Nothing but loopback can be reached, whatever a page asks for.
    "--proxy-server=127.0.0.1:9",
    "--proxy-bypass-list=127.0.0.1",
    "--lang=en-US",
)


class Page:
    """One tab. Everything that its console, its exceptions and its content policy said is kept."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.console: list[str] = []
        self.violations: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console.append(json.dumps(params["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif method == "Audits.issueAdded" and "contentSecurityPolicy" in json.dumps(params):
            self.violations.append(json.dumps(params["issue"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
            self._number += 1
            handle = {"method": "Page.handleJavaScriptDialog", "params": {"accept": False}}
            self._socket.send(json.dumps({"id": self._number, **handle}))

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> Any:
        """The expression's first true value."""
        end = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < end, f"waited in vain for {expression}\n{self.console}"
            time.sleep(0.05)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait(
            "document.readyState === 'complete' && typeof state === 'object' && state.model !=="
            " null"
        )

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Escape": 27, "Tab": 9}
        event = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def click(self, selector: str) -> None:
        """A real click in the middle of the element."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'nearest'}})")
        place = self.run(
            f"(() => {{ const r = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        event = {"x": place[0], "y": place[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **event)

    def size(
        self, width: int, height: int, *, phone: bool = False, dark: bool = False, scale: float = 1
    ) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A new chromium with a profile of its own."""
    from websockets.sync.client import connect

    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(words, **quiet)
        try:
            port_file = Path(profile, "DevToolsActivePort")
            end = time.monotonic() + 60
            while not (port_file.exists() and port_file.read_text().count("\n")):
                assert process.poll() is None and time.monotonic() < end, "chromium did not start"
                time.sleep(0.1)
            port = port_file.read_text().split("\n")[0]
            with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as response:
                tabs = json.load(response)
            tab = next(tab for tab in tabs if tab["type"] == "page")
            with connect(tab["webSocketDebuggerUrl"], max_size=64 << 20, proxy=None) as socket:
                yield Page(socket)
        finally:
            process.kill()
            process.wait()
