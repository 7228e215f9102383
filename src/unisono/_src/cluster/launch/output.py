"""The output of several processes as one: whole lines with the process in front, and one progress bar."""

from __future__ import annotations

import codecs
import collections
import itertools
import re
from typing import TextIO

CLEAR = "\r\x1b[K"
NO_WRAPPING, WRAPPING = "\x1b[?7l", "\x1b[?7h"
"""A bar that is longer than the line would leave a trail."""

TRACEBACK = "Traceback (most recent call last):"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
LOGGED = re.compile(r"[EFIW]\d{4} \d\d:\d\d:\d\d\.")
REMEMBERED = 400
"""Lines, which are enough for a traceback through Keras and JAX."""


class Screen:
    """Where the lines of all processes come together. A bar is a line that is written again and again, after carriage returns."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.out, self.err = out, err
        self._bar: tuple[TextIO, str] | None = None

    def line(self, stream: TextIO, text: str) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar[0].write(CLEAR)
            bar[0].flush()
        stream.write(text + "\n")
        stream.flush()
        if bar is not None:
            self.bar(*bar)

    def bar(self, stream: TextIO, text: str) -> None:
        """Shown on a terminal; a file has its last state alone."""
        if stream.isatty():
            self._bar = stream, text
            stream.write(f"{CLEAR}{NO_WRAPPING}{text}{WRAPPING}")
            stream.flush()

    def no_bar(self) -> None:
        if self._bar is not None:
            self._bar[0].write(CLEAR)
            self._bar = None


class Stream:
    """The standard output or error of one process, on its way to the screen."""

    def __init__(self, screen: Screen, to: TextIO, process: int) -> None:
        self._screen, self._to, self._process = screen, to, process
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""
        self._is_bar = False
        self.last: collections.deque[str] = collections.deque(maxlen=REMEMBERED)

    def feed(self, content: bytes) -> None:
        """Takes what was read."""
        *lines, self._rest = (self._rest + self._decoder.decode(content)).split("\n")
        for line in lines:
            self._show(line.removesuffix("\r"))
        if "\r" in self._rest.rstrip("\r"):
            more_comes_over_it = "\r" * self._rest.endswith("\r")
            self._rest, self._is_bar = latest(self._rest) + more_comes_over_it, True
        if self._is_bar and self._process == 0:
            self._screen.bar(self._to, self._prefixed(latest(self._rest)))

    def close(self) -> None:
        """What came without an end of line is shown too."""
        if self._rest:
            self._show(self._rest)
            self._rest = ""

    def _show(self, line: str) -> None:
        is_bar, self._is_bar = self._is_bar or "\r" in line, False
        if is_bar:
            if self._process != 0:
                return
            self._screen.no_bar()
        line = latest(line)
        self.last.append(line)
        self._screen.line(self._to, self._prefixed(line))

    def _prefixed(self, line: str) -> str:
        return f"[{self._process}] {line}"


def latest(line: str) -> str:
    """What a terminal shows of a line that goes back to its beginning: Keras backs over its bar first."""
    return line.rstrip("\r").rpartition("\r")[2].lstrip("\b").rstrip("\b")


def last_traceback(lines: list[str]) -> list[str]:
    """The last one, with those that it came from, up to the end of the lines or what the libraries below Python log; empty where
    there is none."""
    begins = [at for at, line in enumerate(lines) if line == TRACEBACK]
    if not begins:
        return []
    begin = begins.pop()
    while begins and any(line.startswith(CHAINED) for line in lines[begins[-1] : begin]):
        begin = begins.pop()
    return list(itertools.takewhile(lambda line: not LOGGED.match(line), lines[begin:]))
