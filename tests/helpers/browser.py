"""Headless Chromium for tests, which tell it what to open and ask what it shows."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

from processes import environment

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Chromium looks for Google's servers unless it is told not to.
OPTIONS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1400,4000",
    "--remote-debugging-pipe",
]  # fmt: skip
SECONDS = 120


class Browser:
    """Chromium, told what to do by DevTools' protocol over two pipes."""

    # Chromium reads and writes at 3 and 4, which no option of subprocess can say.
    START = """import fcntl, os, sys
for to, of in zip((3, 4), [fcntl.fcntl(int(number), fcntl.F_DUPFD, 20) for number in sys.argv[1:3]]):
    os.dup2(of, to)
os.execv(sys.argv[3], sys.argv[3:])"""
    TEXT = """(function text(node) {
        if (node.nodeType == Node.TEXT_NODE) return node.textContent;
        if (["SCRIPT", "STYLE", "TEMPLATE"].includes(node.tagName)) return "";
        const inside = node.shadowRoot ? [...node.shadowRoot.childNodes] : [];
        return [...inside, ...node.childNodes].map(text).join(" ");
    })(document.body)"""
    "Of the components of TensorBoard, which are shadow roots, too."

    def __init__(self, profile):
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        command = [sys.executable, "-c", self.START, str(read), str(write), CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"]
        self._log = (profile / "log").open("w+")
        self._process = subprocess.Popen(command, env=environment(), pass_fds=(read, write), stderr=self._log)
        os.close(read)
        os.close(write)
        self._answers, self._number = os.fdopen(self._read, "rb"), 0
        self.events: list[dict] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}

    def ask(self, method, **params):
        self._number += 1
        session = getattr(self, "_session", {})
        os.write(self._write, json.dumps({"id": self._number, "method": method, "params": params, **session}).encode() + b"\0")
        while True:
            answer = json.loads(self._next())
            if "method" in answer:
                self.events.append(answer)
            if answer.get("id") == self._number:
                assert "result" in answer, answer
                return answer["result"]

    def text(self, url, names):
        """Of the page, when all the names are in it, or after some seconds."""
        self.ask("Page.navigate", url="about:blank")  # else a tab of the same page is not loaded anew
        self.ask("Page.navigate", url=url)
        until = time.monotonic() + 30
        while True:
            time.sleep(0.3)
            found = self.ask("Runtime.evaluate", expression=self.TEXT)["result"].get("value", "")
            if all(name in found for name in names) or time.monotonic() > until:
                return " ".join(found.split())

    def close(self):
        os.close(self._write)  # which ends it
        self._answers.close()
        self._process.wait(SECONDS)
        self._log.close()

    def _next(self):
        said = b""
        while not said.endswith(b"\0"):
            byte = self._answers.read(1)
            assert byte, "Chromium ended: " + pathlib.Path(self._log.name).read_text()[-2000:]
            said += byte
        return said[:-1]
