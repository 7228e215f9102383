"""The state of processes on this machine, from the kernel. It says more, and sooner, than the processes themselves."""

from __future__ import annotations

import os
import pathlib

PROC = pathlib.Path("/proc")

GONE = "gone"
STOPPED = "stopped"
THERE = "there"


def read_machine_name() -> str:
    """Name this boot of this machine and its process id space. Containers have their own."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(PROC / 'self/ns/pid')}"
    except OSError:
        return f"unknown to process {os.getpid()}"  # equal to no other


def read_start_time(pid: int) -> int:
    """Read when the process started, in ticks since the boot. 0 if it is unknown."""
    fields = read_status(pid)
    return int(fields[19]) if fields else 0


def read_process_state(pid: int, started: int) -> str:
    """Read whether a local process is gone, stopped or there. A zombie is gone."""
    fields = read_status(pid)
    if not fields or fields[0] in "ZX" or int(fields[19]) != started:
        return GONE
    return STOPPED if fields[0] == "T" else THERE


def read_status(pid: int) -> list[str]:
    """Read the fields of /proc/pid/stat behind the command. The command may hold spaces. Empty if there is no such process."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
