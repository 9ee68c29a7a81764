"""Headless Chromium over its DevTools pipe: no package, no port, and a network on which no name is found."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root, whom the sandbox refuses
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--window-size=1100,1600",
)
# Chromium speaks DevTools on the descriptors 3 and 4; this puts ours there before it begins.
ON_3_AND_4 = (
    "import fcntl, os, sys; r, w = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]); "
    "os.dup2(r, 3); os.dup2(w, 4); os.execv(sys.argv[3], sys.argv[3:])"
)
TIMEOUT_S = 90.0


class Page:
    """One page, and all that was said and asked for while it was open."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write = to_browser
        self._read = from_browser
        self._left = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Return what a DevTools method answers; what happens meanwhile is kept in `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        for found in self._messages():
            if found.get("id") == self._number:
                assert "error" not in found, found
                return dict(found["result"])
            self.events.append(found)
        raise AssertionError("Chromium ended")

    def open(self, path: Path, ready: str = "document.documentElement?.dataset.charts !== undefined") -> None:
        """Load a file and wait until it is ready: until its charts are drawn, by default."""
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if self.errors() or self.evaluate(ready):
                return
            time.sleep(0.02)
        raise AssertionError(f"the page was not ready in {TIMEOUT_S} s: {self.errors()}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def errors(self) -> list[str]:
        """Return what the console, the log and uncaught exceptions said, as text."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        console = [e for e in self.events if e.get("method") == "Runtime.consoleAPICalled"]
        said = [e for e in console if e["params"]["type"] in ("error", "warning", "assert")]
        return [json.dumps(e["params"])[:600] for e in [*said, *(e for e in self.events if e.get("method") in kinds)]]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for, the page's own among them."""
        sent = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [e["params"]["request"]["url"] for e in sent]

    def dark(self, is_dark: bool) -> None:
        """Prefer a dark or a light page."""
        value = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def size(self, width: int, height: int) -> None:
        """Show pages on a screen of so many CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )

    def screenshot(self, path: Path) -> bytes:
        """Write and return the whole page as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        content = base64.b64decode(found["data"])
        path.write_bytes(content)
        return content

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" in self._left:
                message, _, self._left = self._left.partition(b"\0")
                yield json.loads(message)
            more = os.read(self._read, 1 << 20)
            if not more:
                return
            self._left += more


@contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Open a browser with an empty profile, and end it."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    with (profile.parent / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", ON_3_AND_4, str(theirs_in), str(theirs_out), *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Page(ours_out, ours_in)
    finally:
        os.close(ours_out)  # Chromium ends with its pipe
        os.close(ours_in)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
