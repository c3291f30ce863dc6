"""A headless Chromium, driven over the DevTools protocol through a pipe: no port, no library, no driver program."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WATCHDOG_S = 60.0
EXIT_S = 10.0
CTRL = 2
"""The Ctrl key, for ``Page.press``."""
SHOWN = """(async () => {
  const frame = () => new Promise(requestAnimationFrame);
  const { talk } = await import('/page/js/conversation.js');
  await frame();
  await new Promise((done) => {
    const told = () => { talk.listeners.delete(told); done(); };
    talk.listeners.add(told);
    talk.update();
  });
  await frame();
  await frame();
})()"""
"""Until the page has shown every change of the conversation so far."""
_KEY_CODES = {"Escape": 27, "Enter": 13, " ": 32, "Tab": 9}
"""The codes of the keys that do something by default. Without them, the browser does not do it."""
_NAVIGATED = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find default execution context",
)
"""How the browser refuses to evaluate in a page that is leaving for another URL."""


class PageNavigated(Exception):
    """The page left for another URL before an expression had its value."""


class Page:
    """The one page of a browser.

    Attributes:
        errors: What the page wrote to the console as an error, uncaught exceptions, and failed loads.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._pending, self._count, self._session = b"", 0, ""
        self.errors: list[str] = []
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self._call(f"{domain}.enable")

    def _call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params or {}}
        if self._session:
            message["sessionId"] = self._session
        sent = memoryview(json.dumps(message).encode() + b"\0")
        while sent:
            sent = sent[os.write(self._to, sent) :]
        while True:
            received = self._receive()
            if received.get("id") == self._count:
                if received.get("error", {}).get("message") in _NAVIGATED:
                    raise PageNavigated(method)
                assert "error" not in received, (method, received["error"])
                result: dict[str, Any] = received["result"]
                return result
            self._note(received)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            assert select.select([self._from], [], [], WATCHDOG_S)[0], "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._pending += data
        message, _, self._pending = self._pending.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(" ".join(str(each.get("value", each)) for each in params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def close_browser(self) -> None:
        """End the browser. Nothing else may be called after it."""
        self._session = ""
        self._call("Browser.close")

    def open(self, url: str) -> None:
        """Load a page, and return once its script runs."""
        self._call("Page.navigate", {"url": url})
        self.wait("document.readyState === 'complete'")

    def run_first(self, script: str) -> None:
        """Run a script in every page that is loaded from now on, before the page's own ones."""
        self._call("Page.addScriptToEvaluateOnNewDocument", {"source": script})

    def metrics(self) -> dict[str, float]:
        """Return the browser's own figures of the page, such as "TaskDuration": seconds of its main thread."""
        return {each["name"]: each["value"] for each in self._call("Performance.getMetrics")["metrics"]}

    def block(self, *patterns: str) -> None:
        """Let requests for URLs of these patterns ("*" stands for anything) fail; no pattern: none fails any more."""
        self._call("Network.setBlockedURLs", {"urls": list(patterns)})

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, as JSON has it. A promise is awaited."""
        params = {"expression": expression, "returnByValue": True, "awaitPromise": True, "userGesture": True}
        result = self._call("Runtime.evaluate", params)
        assert "exceptionDetails" not in result, (expression, result["exceptionDetails"])
        return result["result"].get("value")

    def wait(self, expression: str, timeout_s: float = WATCHDOG_S) -> Any:
        """Poll until an expression is truthy in JavaScript, and return its value. Fails after ``timeout_s``.

        The page may leave for another URL meanwhile.
        """
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                value = self.evaluate(expression)
            except PageNavigated:
                value = None
            if value not in (None, False, 0, ""):  # an element is {}
                return value
            assert time.monotonic() < give_up, f"waited {timeout_s:.0f} s for {expression}; errors: {self.errors}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        self._mouse(selector, "mousePressed", "mouseReleased")

    def press(self, selector: str, button: str = "left", modifiers: int = 0) -> None:
        """Press a mouse button over an element, without releasing it. modifiers: keys that are held, such as CTRL."""
        self._mouse(selector, "mousePressed", button=button, modifiers=modifiers)

    def release(self, selector: str) -> None:
        """Release the mouse button over an element."""
        self._mouse(selector, "mouseReleased")

    def _mouse(self, selector: str, *kinds: str, button: str = "left", modifiers: int = 0) -> None:
        box = self.wait(
            f"(() => {{ const each = document.querySelector({json.dumps(selector)}); if (!each) return null;"
            "each.scrollIntoView({block: 'center'}); const {x, y, width, height} = each.getBoundingClientRect();"
            "return [x + width / 2, y + height / 2]; })()"
        )
        for kind in kinds:
            at = {"x": box[0], "y": box[1]}
            event = {"type": kind, **at, "button": button, "modifiers": modifiers, "clickCount": 1}
            self._call("Input.dispatchMouseEvent", event)

    def type(self, text: str) -> None:
        """Type text into the element with the focus."""
        self._call("Input.insertText", {"text": text})

    def key(self, key: str, code: str = "", text: str = "") -> None:
        """Press and release a key, by its DOM names. text: what it types."""
        self.key_down(key, code, text)
        self.key_up(key, code)

    def key_down(self, key: str, code: str = "", text: str = "") -> None:
        """Press a key without releasing it."""
        event = {"type": "keyDown", "key": key, "code": code, "text": text}
        self._call("Input.dispatchKeyEvent", {**event, "windowsVirtualKeyCode": _KEY_CODES.get(key, 0)})

    def key_up(self, key: str, code: str = "") -> None:
        """Release a key."""
        self._call("Input.dispatchKeyEvent", {"type": "keyUp", "key": key, "code": code})

    def resize(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Set the size of the view, and which colours the system prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self._call("Emulation.setDeviceMetricsOverride", metrics)
        preferred = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", {"features": preferred})

    def screenshot(self, file: Path) -> None:
        """Write a PNG file of the view."""
        data = self._call("Page.captureScreenshot", {"format": "png"})["data"]
        file.write_bytes(base64.b64decode(data))


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe, whose numbers are none of those that the browser uses."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high[0], high[1]


@contextmanager
def open_page(*, microphone: Path | None = None) -> Iterator[Page]:
    """Run a browser for the block. microphone: a WAV file that its microphone plays once, from when it is opened."""
    # The browser makes sockets in its folder, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="page-", ignore_cleanup_errors=True) as folder:
        browser_reads, to_browser = _pipe()
        from_browser, browser_writes = _pipe()
        process = _start(Path(folder), browser_reads, browser_writes, microphone)
        os.close(browser_reads)
        os.close(browser_writes)
        try:
            page = Page(to_browser, from_browser)
            yield page
            page.close_browser()
        finally:
            os.close(to_browser)
            try:
                process.wait(EXIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(from_browser)


def _start(folder: Path, reads: int, writes: int, microphone: Path | None) -> subprocess.Popen[bytes]:
    """Start the browser. The protocol uses the descriptors 3 and 4; a shell puts the pipes there."""
    assert EXECUTABLE is not None
    flags = [
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"),
        *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream", "--remote-debugging-pipe"),
        *("--disable-breakpad", "--disable-crash-reporter", "--hide-scrollbars", "--force-color-profile=srgb"),
        f"--user-data-dir={folder}/profile",
    ]
    if microphone is not None:
        flags.append(f"--use-file-for-fake-audio-capture={microphone}%noloop")
    script = f'exec 3<&{reads} 4>&{writes}; exec "$@"'
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder)}
    with (folder / "log").open("wb") as log:
        command = ["bash", "-c", script, "sh", EXECUTABLE, *flags, "about:blank"]
        return subprocess.Popen(command, pass_fds=(reads, writes), stdout=log, stderr=log, env=environment)
