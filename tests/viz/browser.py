"""Headless Chromium over the WebDriver protocol (W3C), by the standard library alone.

with Browser() as browser:
    browser.open(path)
    browser.run("return document.title")
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1400,900",
)  # fmt: skip


def missing() -> str:
    """Why there is no browser here; "" where there is one."""
    names = ("chromium", "chromedriver")
    absent = [name for name in names if shutil.which(name) is None]
    return f"no {' and no '.join(absent)}: apt-get install chromium chromium-driver" if absent else ""


class Browser:
    """One window."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.driver = subprocess.Popen(
            ["chromedriver", f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.session = ""

    def __enter__(self) -> Browser:
        while True:
            try:
                if self._call("GET", "/status")["ready"]:
                    break
            except (OSError, KeyError):
                time.sleep(0.1)
        options = {
            "args": [*FLAGS, f"--user-data-dir={self.profile.name}"],
            "binary": shutil.which("chromium"),
        }
        wanted = {
            "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        found = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{found['sessionId']}"
        return self

    def __exit__(self, *_: object) -> None:
        if self.session:
            self._call("DELETE", self.session)
        self.driver.terminate()
        self.driver.wait()
        self.profile.cleanup()

    def _call(self, method: str, path: str, data: Any = None) -> Any:
        body = json.dumps(data or {}).encode() if method == "POST" else None
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, file: Path) -> None:
        """Open a file and wait until it is loaded."""
        self._call("POST", f"{self.session}/url", {"url": file.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self._call("POST", f"{self.session}/execute/sync", {"script": script, "args": list(arguments)})

    def resize(self, width: int, height: int) -> None:
        """Show pages as on a screen of this size; 0, 0: as the window is."""
        what = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width > 0}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": what}
        if not width:
            command = {"cmd": "Emulation.clearDeviceMetricsOverride", "params": {}}
        self._call("POST", f"{self.session}/goog/cdp/execute", command)

    def point(self, selector: str, *, click: bool = False) -> None:
        """Move the mouse to the middle of the first element that matches, and click there."""
        x, y = self.run(
            "const r = document.querySelector(arguments[0]).getBoundingClientRect();"
            "return [Math.round(r.x + r.width / 2), Math.round(r.y + r.height / 2)]",
            selector,
        )
        moves: list[dict[str, Any]] = [{"type": "pointerMove", "duration": 20, "x": x, "y": y}]
        if click:
            moves += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        actions = [{"type": "pointer", "id": "mouse", "actions": moves}]
        self._call("POST", f"{self.session}/actions", {"actions": actions})

    def wheel(self, x: int, y: int, delta: int) -> None:
        """Turn the wheel at a point of the window."""
        turn = {"type": "scroll", "x": x, "y": y, "deltaX": 0, "deltaY": delta, "duration": 20}
        actions = [{"type": "wheel", "id": "wheel", "actions": [turn]}]
        self._call("POST", f"{self.session}/actions", {"actions": actions})

    def type(self, text: str) -> None:
        """Press keys, into whatever has the focus."""
        keys = [{"type": kind, "value": c} for c in text for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keys", "actions": keys}]
        self._call("POST", f"{self.session}/actions", {"actions": actions})

    def errors(self) -> list[str]:
        """Messages of level SEVERE on the console so far: errors, broken policies."""
        logs = self._call("POST", f"{self.session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in logs if entry["level"] == "SEVERE"]

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._call("GET", f"{self.session}/screenshot")))
