"""A headless Chromium, driven by its DevTools protocol over a pipe: no driver, no socket, no library.

    with Browser(profile_folder) as browser:
        page = browser.open(path.as_uri(), width=390, height=844, is_phone=True)
        page.wait_for("document.documentElement.dataset.drawn")

What a page asks for, says on its console, or is refused by its own policy is kept and can be looked at afterwards.
Protocol: chromedevtools.github.io/devtools-protocol; messages end with a NUL, by file descriptors 3 and 4.
"""

import base64
import json
import math
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_DEADLINE_S = 60.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # a container's root has none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One process with one page at a time. Leaving the `with` block ends it."""

    def __init__(self, profile: Path):
        assert CHROMIUM is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # Its protocol wants 3 and 4, which a shell can make of any descriptors.
        wiring = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", wiring, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._unread = b""
        self._num_sent = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.call("Browser.close")
        os.close(self._out)
        os.close(self._in)
        self._process.wait(20)

    def open(self, address: str, *, width: int, height: int, is_phone: bool = False, is_dark: bool = False) -> "Page":
        """Returns the page, as its document has been loaded; on a phone with touch and a scale of 2."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if is_phone else 1, "mobile": is_phone}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=address)
        page.size = size
        return page

    def call(self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """Returns a command's result; fails with what the browser answers, or where it answers nothing."""
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": parameters or {}}
        os.write(self._out, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        deadline = time.monotonic() + _DEADLINE_S
        while (answer := self._read(deadline)).get("id") != self._num_sent:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(self._in, 1 << 20) if ready else b""
            assert received, "the browser says nothing any more"
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


class Page:
    """A document in the browser."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session
        self.size: dict[str, Any] = {}  # as Emulation.setDeviceMetricsOverride has it

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Returns a command's result."""
        return self._browser.call(method, parameters, self._session)

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression; fails where it throws."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Returns the expression's value as soon as it is true; fails where it never is. A document that is not there
        yet is no failure."""
        deadline = time.monotonic() + _DEADLINE_S
        attempt = f"document.documentElement && document.readyState === 'complete' ? {expression} : null"
        while not (value := self.evaluate(attempt)):
            assert time.monotonic() < deadline, f"never true: {expression}\n{self.complaints()}"
            time.sleep(0.02)
        return value

    def screenshot(self, path: Path) -> None:
        """Writes the whole page, also what is below the window's edge, as PNG."""
        height = self.call("Page.getLayoutMetrics")["cssContentSize"]["height"]
        # Not captureBeyondViewport, which gives the page other widths meanwhile, and plots are drawn anew in them.
        self.call("Emulation.setDeviceMetricsOverride", **self.size | {"height": math.ceil(height)})
        shot = self.call("Page.captureScreenshot", format="png")
        self.call("Emulation.setDeviceMetricsOverride", **self.size)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Returns what the page threw, logged as an error or a warning, or was forbidden by its policy."""
        thrown = [json.dumps(event["exceptionDetails"]) for event in self._own("Runtime.exceptionThrown")]
        logged = [event["entry"] for event in self._own("Log.entryAdded")]
        said = [event for event in self._own("Runtime.consoleAPICalled") if event["type"] not in ("log", "info")]
        return [
            *(text[:500] for text in thrown),
            *(entry["text"] for entry in logged if entry["level"] in ("error", "warning")),
            *(json.dumps(event["args"])[:500] for event in said),
        ]

    def requests(self) -> list[str]:
        """Returns the addresses that the page asked for, without data that stands in the address itself."""
        addresses = [event["request"]["url"] for event in self._own("Network.requestWillBeSent")]
        return [address for address in addresses if not address.startswith(("data:", "blob:"))]

    def _own(self, method: str) -> list[dict[str, Any]]:
        events = self._browser.events
        return [e["params"] for e in events if e.get("method") == method and e.get("sessionId") == self._session]
