"""What the kernel says of processes on this machine, which is more and sooner than they say themselves."""

from __future__ import annotations

import os
import pathlib

PROC = pathlib.Path("/proc")

GONE, STOPPED, THERE = "gone", "stopped", "there"


def name() -> str:
    """This boot of this machine, and the space in which process ids are counted: containers have their own."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return f"unknown to process {os.getpid()}"  # equal to no other


def born(pid: int) -> int:
    """When the process started, in ticks since the boot; 0 where it is not known."""
    status = status_of(pid)
    return int(status[19]) if status else 0


def state(pid: int, started: int) -> str:
    """Whether a process of this machine is gone (or waits to be buried), stopped, or there."""
    status = status_of(pid)
    if not status or status[0] in "ZX" or int(status[19]) != started:
        return GONE
    return STOPPED if status[0] == "T" else THERE


def status_of(pid: int) -> list[str]:
    """The fields of /proc/pid/stat after the command, which may hold spaces."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
