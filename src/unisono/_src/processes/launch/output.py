"""The output of several processes as one. Whole lines with the rank in front, and one progress bar."""

from __future__ import annotations

import codecs
import collections
import itertools
import re
from typing import TextIO

CLEAR = "\r\x1b[K"
NO_WRAPPING = "\x1b[?7l"
WRAPPING = "\x1b[?7h"
"""A bar that is longer than the line would leave a trail."""

TRACEBACK = "Traceback (most recent call last):"
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
LOGGED = re.compile(r"[EFIW]\d{4} \d\d:\d\d:\d\d\.")
REMEMBERED = 400
"""Lines that are kept: enough for a traceback through Keras and JAX."""


class Screen:
    """The terminal or files where the lines of all processes meet.

    A bar is a line that is written again and again, after carriage returns.
    """

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self.out = out
        self.err = err
        self._bar: tuple[TextIO, str] | None = None

    def write_line(self, stream: TextIO, text: str) -> None:
        """Write a line above the bar."""
        bar = self._bar
        self.clear_bar()
        stream.write(text + "\n")
        stream.flush()
        if bar is not None:
            self.show_bar(*bar)

    def show_bar(self, stream: TextIO, text: str) -> None:
        """Show a bar on a terminal. A file gets its last state alone."""
        if stream.isatty():
            self._bar = stream, text
            stream.write(f"{CLEAR}{NO_WRAPPING}{text}{WRAPPING}")
            stream.flush()

    def clear_bar(self) -> None:
        if self._bar is not None:
            self._bar[0].write(CLEAR)
            self._bar[0].flush()
            self._bar = None


class WorkerOutput:
    """The standard output or error of one worker."""

    def __init__(self, screen: Screen, target: TextIO, process: int) -> None:
        self._screen = screen
        self._target = target
        self._process = process
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = ""
        self._is_bar = False
        self.last: collections.deque[str] = collections.deque(maxlen=REMEMBERED)

    def feed(self, content: bytes) -> None:
        """Take bytes that were read, and show whole lines."""
        *lines, self._unfinished = (self._unfinished + self._decoder.decode(content)).split("\n")
        for line in lines:
            self._show(line.removesuffix("\r"))
        if "\r" in self._unfinished.rstrip("\r"):
            more_comes_over_it = "\r" * self._unfinished.endswith("\r")
            self._unfinished = strip_overwritten(self._unfinished) + more_comes_over_it
            self._is_bar = True
        if self._is_bar and self._process == 0:
            self._screen.show_bar(self._target, self._prefix(strip_overwritten(self._unfinished)))

    def close(self) -> None:
        """Show the last line, even if it came without an end."""
        if self._unfinished:
            self._show(self._unfinished)
            self._unfinished = ""

    def _show(self, line: str) -> None:
        is_bar = self._is_bar or "\r" in line
        self._is_bar = False
        if is_bar:
            if self._process != 0:
                return
            self._screen.clear_bar()
        line = strip_overwritten(line)
        self.last.append(line)
        self._screen.write_line(self._target, self._prefix(line))

    def _prefix(self, line: str) -> str:
        return f"[{self._process}] {line}"


def strip_overwritten(line: str) -> str:
    """Cut a line to the part that a terminal still shows.

    The rest was overwritten after a carriage return. Keras backs over its bar first.
    """
    return line.rstrip("\r").rpartition("\r")[2].lstrip("\b").rstrip("\b")


def find_last_traceback(lines: list[str]) -> list[str]:
    """Find the last traceback, with the tracebacks that caused it.

    It goes to the end of the lines, or up to the logs of libraries below Python. Empty if there is none.
    """
    begins = [number for number, line in enumerate(lines) if line == TRACEBACK]
    if not begins:
        return []
    begin = begins.pop()
    while begins and any(line.startswith(CHAINED) for line in lines[begins[-1] : begin]):
        begin = begins.pop()
    return list(itertools.takewhile(lambda line: not LOGGED.match(line), lines[begin:]))
