"""Drives headless Chromium over a pipe by the DevTools protocol, for tests and pictures of pages.

The browser reads messages from its file descriptor 3 and writes to 4, JSON ended by a zero byte
(`--remote-debugging-pipe`). No package or port is needed.

    with Browser() as browser:
        page = browser.open("file:///…/page.html")
        page.value("document.title")
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--mute-audio", "--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip
KEYS = {
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35, "Tab": 9, "Enter": 13,
    "[": 219, "]": 221,
}  # fmt: skip
SHIFT = 8


def chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def _moved(number: int) -> int:
    """Move a file descriptor to a number from 10 on."""
    moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(number)
    return moved


class Browser:
    """A browser that lives as long as the `with` statement. Raises `RuntimeError` if none is installed."""

    def __init__(self, timeout_s: float = 60) -> None:
        self.timeout_s = timeout_s
        self.ids = itertools.count(1)
        self.pages: dict[str, Page] = {}
        self.rest = b""

    def __enter__(self) -> Self:
        path = chromium()
        if path is None:
            raise RuntimeError("Chromium is not installed; on Debian: apt-get install chromium")
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # Numbers from 10 on, so that the shell's 3 and 4 overwrite none of them.
        self.reader, write_there, read_there, self.writer = (_moved(each) for each in (*os.pipe(), *os.pipe()))
        command = f'exec "$@" 3<&{read_there} 4>&{write_there}'
        flags = [*FLAGS, f"--user-data-dir={self.folder.name}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", command, "bash", path, *flags],
            pass_fds=(read_there, write_there), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_there)
        os.close(write_there)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self.process.wait(5)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        os.close(self.reader)
        os.close(self.writer)
        self.folder.cleanup()

    def open(self, url: str, width: int = 1280, height: int = 900, ratio: float = 1) -> Page:
        """Open a page and load `url`."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize(width, height, ratio)
        page.go(url)
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for the answer; events meanwhile go to their pages."""
        number = next(self.ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        stop = time.monotonic() + self.timeout_s
        while True:
            said = self.receive(stop)
            if said.get("id") != number:
                continue
            if "error" in said:
                raise RuntimeError(f"{method}: {said['error'].get('message')}")
            return dict(said["result"])

    def receive(self, stop: float) -> dict[str, Any]:
        """Return the next message. Raises `RuntimeError` if none comes until `stop`."""
        while b"\0" not in self.rest:
            if not select.select([self.reader], [], [], max(0.0, stop - time.monotonic()))[0]:
                raise RuntimeError("Chromium does not answer")
            part = os.read(self.reader, 1 << 20)
            if not part:
                raise RuntimeError("Chromium has ended")
            self.rest += part
        text, _, self.rest = self.rest.partition(b"\0")
        said: dict[str, Any] = json.loads(text)
        page = self.pages.get(said.get("sessionId", ""))
        if page is not None and "method" in said:
            page.hear(said["method"], said["params"])
        return said


class Page:
    """A page of a browser. `complaints` are the errors and warnings on its console."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self.browser, self.session, self.target = browser, session, target
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.has_loaded = False

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def hear(self, event: str, said: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self.has_loaded = True
        elif event == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(each.get("value", each.get("description"))) for each in said["args"]))
        elif event == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")

    def go(self, url: str) -> None:
        """Load `url` and wait for the end of loading."""
        self.has_loaded = False
        self.call("Page.navigate", url=url)
        stop = time.monotonic() + self.browser.timeout_s
        while not self.has_loaded:
            self.browser.receive(stop)

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or its promise's. Raises `RuntimeError` if it throws."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise RuntimeError(said["exceptionDetails"].get("exception", {}).get("description", expression))
        return said["result"].get("value")

    def wait(self, expression: str, timeout_s: float = 20) -> None:
        """Wait until a JavaScript expression is true. Raises `TimeoutError` after `timeout_s`."""
        stop = time.monotonic() + timeout_s
        while not self.value(f"!!({expression})"):
            if time.monotonic() > stop:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until pending changes are drawn."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def resize(self, width: int, height: int, ratio: float = 1) -> None:
        """Make the page's screen `width` by `height` CSS pixels, each `ratio` pixels of a picture."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=ratio, mobile=False
        )

    def prefer(self, **features: str) -> None:
        """Set the reader's preferences: `color_scheme="dark"`, `reduced_motion="reduce"`."""
        media = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=media)

    def middle(self, element: str) -> tuple[float, float]:
        """Scroll the element of an expression into view and return its middle."""
        self.value(f"({element}).scrollIntoView({{block: 'nearest'}})")
        x, y, width, height = self.value(f"(b => [b.x, b.y, b.width, b.height])(({element}).getBoundingClientRect())")
        return x + width / 2, y + height / 2

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        self.point(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key by name, such as `ArrowLeft` or `a`."""
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {}
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, modifiers=modifiers, **text
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code, modifiers=modifiers)
        self.settle()

    def picture(self, whole: bool = False, clip: str | None = None) -> bytes:
        """Return a PNG of the screen, of the whole page, or of the element of the expression `clip`."""
        options: dict[str, Any] = {}
        if clip is not None:
            box = f"(b => [b.x + scrollX, b.y + scrollY, b.width, b.height])(({clip}).getBoundingClientRect())"
            options["clip"] = dict(zip(("x", "y", "width", "height"), self.value(box), strict=True)) | {"scale": 1}
        beyond = whole or clip is not None
        said = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=beyond, **options)
        return base64.b64decode(said["data"])
