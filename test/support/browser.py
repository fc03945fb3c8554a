"""A headless Chromium, by the DevTools protocol over a pipe (https://chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 60

_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
_SHIFT = 8  # the bit of this key in DevTools' modifiers


def executable() -> str | None:
    """Return Chromium's path; None if there is none."""
    names = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Page:
    """One page of a browser.

    events: what the browser has reported, by kinds such as "Network.requestWillBeSent".
    """

    def __init__(self, to_browser: int, from_browser: int):
        self._to_browser = to_browser
        self._from_browser = os.fdopen(from_browser, "rb")
        self._session = None
        self._last_id = 0
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last_id:
            self.events.append((answer["method"], answer["params"]))
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._from_browser.read(1)) != b"\0":
            assert byte, "the browser ended"
            data += byte
        return json.loads(data)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaiting a promise. It runs as if the user had clicked."""
        options = dict(awaitPromise=True, returnByValue=True, userGesture=True)
        answer = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, condition: str) -> Any:
        """Wait until an expression is true; return its value."""
        end = time.monotonic() + SECONDS
        while not (value := self.run(condition)):
            assert time.monotonic() < end, condition
            time.sleep(0.02)
        return value

    def open(self, url: str) -> None:
        """Open an address and wait for the page."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def press(self, key: str, shift: bool = False) -> None:
        """Press Enter, Escape or Tab."""
        code, text = _KEYS[key]
        options = dict(key=key, code=key, windowsVirtualKeyCode=code, modifiers=_SHIFT if shift else 0)
        self.call("Input.dispatchKeyEvent", type="keyDown", **options, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **options)

    def type(self, text: str) -> None:
        """Type a text into the focused element."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        """Resize the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Run a browser with a profile in `folder`; yield an empty page."""
    (its_input, to_browser), (from_browser, its_output) = os.pipe(), os.pipe()
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
    options += ["--disable-background-networking", "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
    # The browser reads descriptor 3 and writes to 4.
    with_pipes = ["bash", "-c", f'exec "$0" "$@" 3<&{its_input} 4>&{its_output}', executable(), *options]
    quiet = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = subprocess.Popen(with_pipes, pass_fds=(its_input, its_output), **quiet)
    os.close(its_input)
    os.close(its_output)
    watchdog = threading.Timer(4 * SECONDS, process.kill)  # ends a wait for an answer that never comes
    watchdog.start()
    try:
        yield Page(to_browser, from_browser)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        os.close(to_browser)
