"""The state of processes on this machine, from the kernel, which says more, and sooner, than the processes themselves."""

from __future__ import annotations

import os
import pathlib

PROC = pathlib.Path("/proc")

GONE = "gone"
STOPPED = "stopped"
THERE = "there"


def read_machine_name() -> str:
    """Return a name for this boot of this machine and its space of process ids: containers have their own."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return f"unknown to process {os.getpid()}"  # equal to no other


def read_start_time(pid: int) -> int:
    """Return when the process started, in ticks since the boot; 0 where it is not known."""
    fields = read_status(pid)
    return int(fields[19]) if fields else 0


def read_process_state(pid: int, started: int) -> str:
    """Return whether a process of this machine is gone (or a zombie), stopped, or there."""
    fields = read_status(pid)
    if not fields or fields[0] in "ZX" or int(fields[19]) != started:
        return GONE
    return STOPPED if fields[0] == "T" else THERE


def read_status(pid: int) -> list[str]:
    """Return the fields of /proc/pid/stat after the command, which may hold spaces; empty where there is no such process."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
