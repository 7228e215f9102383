"""The cores of the processor, as Linux describes them."""

from __future__ import annotations

import pathlib

CPUINFO = pathlib.Path("/proc/cpuinfo")

INSTRUCTIONS = ("flags", "Features")
"""Names of a core's instructions in /proc/cpuinfo: on x86, and on Arm."""


def read_cores() -> list[dict[str, str]]:
    """Read the description of each core, by name. It is empty where the system gives none.

    A part without instructions is no core: on some Arm machines the last part is about the board.
    """
    try:
        text = CPUINFO.read_text()
    except OSError:
        return []
    cores = map(parse_core, text.split("\n\n"))
    return [core for core in cores if get_instructions(core)]


def parse_core(lines: str) -> dict[str, str]:
    """Parse the description of one core, by name.

    >>> parse_core("model\\t\\t: 17\\nflags\\t\\t: fpu avx2")
    {'model': '17', 'flags': 'fpu avx2'}
    """
    pairs = (line.partition(":") for line in lines.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def get_instructions(core: dict[str, str]) -> str:
    """The names of a core's instructions, in Linux's order. Empty where it gives none."""
    return next((core[name] for name in INSTRUCTIONS if core.get(name)), "")


def list_common_instructions() -> set[str]:
    """List the instructions that all cores have. The set is empty where the system gives none."""
    cores = read_cores()
    return set.intersection(*(set(get_instructions(core).split()) for core in cores)) if cores else set()
