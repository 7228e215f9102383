"""Processes that began with a mark in their environment, whoever started them: which are there, where they listen; and their end."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
from collections.abc import Iterable

from processes import are_gone

MARK = "UNISONO_TEST_MARK"
LISTENS = "0A"
"""A state in /proc/net/tcp."""


def find_marked(mark: str) -> list[int]:
    """Finds the processes that began with this mark, and all that these have started."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def end_marked(mark: str) -> list[int]:
    """Ends, by their numbers, the marked processes that do not end by themselves within seconds, and returns which these were."""
    if are_gone(find_marked(mark)):
        return []
    left = find_marked(mark)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended meanwhile
            continue
    return left


def find_addresses(pids: Iterable[int]) -> set[str]:
    """Finds the addresses at which processes listen for TCP connections."""
    sockets = set()
    for pid in pids:
        for path in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(str(path.readlink()))
            except OSError:
                continue
    found = set()
    for file, family in (("/proc/net/tcp", socket.AF_INET), ("/proc/net/tcp6", socket.AF_INET6)):
        for words in map(str.split, pathlib.Path(file).read_text().splitlines()[1:]):
            if words[3] == LISTENS and f"socket:[{words[9]}]" in sockets:
                found.add(read_address(words[1].partition(":")[0], family))
    return found


def read_address(text: str, family: int) -> str:
    """Reads an address of /proc/net, whose words of four bytes are those of a little-endian machine.

    >>> read_address("0100007F", socket.AF_INET)
    '127.0.0.1'
    """
    packed = b"".join(bytes.fromhex(text[begin : begin + 8])[::-1] for begin in range(0, len(text), 8))
    return socket.inet_ntop(family, packed)
