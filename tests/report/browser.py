"""A real Chromium, driven through its pipe for developers: what a page logs, asks for and does on input."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_LIMIT_S = 120


class Browser:
    """One page at a time. `problems` are messages on its console, `requests` the addresses it asked for."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4.
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, *arguments, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self._number, self._session = 0, None
        self.problems: list[str] = []
        self.requests: list[str] = []
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            told = self._read()
            if told.get("id") == self._number:
                assert "error" not in told, told["error"]
                result: dict[str, Any] = told["result"]
                return result

    def open(self, page: Path, width: int = 1280, *, is_dark: bool = False) -> None:
        self.problems.clear()
        self.requests.clear()
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=page.as_uri())
        limit = time.monotonic() + _LIMIT_S
        while self.run("document.readyState") != "complete" or self.run("location.href") != page.as_uri():
            assert time.monotonic() < limit, "the page did not load"

    def run(self, script: str) -> Any:
        """The value of a script in the page, which its policy does not concern."""
        told = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def move_to(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        """The pointer, to a place in an element given as parts of its size."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"(({{left, top, width, height}}) => [left, top, width, height])"
                       f"(document.querySelector({selector!r}).getBoundingClientRect())")  # fmt: skip
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + x * box[2], y=box[1] + y * box[3])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._in.read(1)) != b"\0":
            assert byte, "Chromium has ended"
            data += byte
        told: dict[str, Any] = json.loads(data)
        values = told.get("params", {})
        match told.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(str(values["exceptionDetails"]))
            case "Log.entryAdded":
                self.problems.append(values["entry"]["text"])
            case "Runtime.consoleAPICalled":
                self.problems.append(str(values["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(values["request"]["url"])
        return told
