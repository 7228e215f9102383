"""What a CPU is, as far as it decides bits: code is compiled for its instructions, and products are cut by the sizes of its caches."""

from __future__ import annotations

import functools
import pathlib
import platform

CPUINFO = pathlib.Path("/proc/cpuinfo")
CORES = pathlib.Path("/sys/devices/system/cpu")

MODEL = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
"""What Linux says of x86 first, then of Arm."""

FOR_NUMBERS = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx")
"""How the names of instructions of x86 begin that compute; others differ between virtual machines on one processor."""


@functools.cache
def facts() -> dict[str, str]:
    """Return what two processors that give the same bits have in common; where the system does not tell it, what Python knows.

    Models and caches of cores that are not alike are told one beside the other; instructions are those that all have.
    """
    cores = [described_core(lines) for lines in read_cpuinfo().split("\n\n") if lines.strip()]
    models = [" ".join(core[name] for name in MODEL if name in core) for core in cores]
    return {
        "processor": alternatives(models) or platform.processor(),
        "instructions": " ".join(sorted(set.intersection(*map(computing_instructions, cores)))) if cores else platform.machine(),
        "caches": alternatives([caches_of(path) for path in sorted(CORES.glob("cpu[0-9]*"))]),
    }


@functools.cache
def all_instructions() -> str:
    """Return the names of all that the first core has: machine code for others may not run."""
    core = described_core(read_cpuinfo().split("\n\n")[0])
    return core.get("flags") or core.get("Features") or platform.machine()


def read_cpuinfo() -> str:
    """Return what Linux tells of the cores."""
    try:
        return CPUINFO.read_text()
    except OSError:
        return ""


def described_core(lines: str) -> dict[str, str]:
    """Return what Linux tells of a core, by name.

    >>> described_core("model\\t\\t: 17\\nflags\\t\\t: fpu avx2")
    {'model': '17', 'flags': 'fpu avx2'}
    """
    pairs = (line.partition(":") for line in lines.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def computing_instructions(core: dict[str, str]) -> set[str]:
    """Return the names of the instructions that compute.

    >>> sorted(computing_instructions({"flags": "fpu avx2 hypervisor fma"}))
    ['avx2', 'fma']
    >>> sorted(computing_instructions({"Features": "fp asimd bf16"}))
    ['asimd', 'bf16', 'fp']
    """
    of_x86 = {name for name in core.get("flags", "").split() if name.startswith(FOR_NUMBERS)}
    return of_x86 | set(core.get("Features", "").split())


def caches_of(path: pathlib.Path) -> str:
    """Return the sizes of the caches of a core, the first level first."""
    sizes = []
    for index in sorted(path.glob("cache/index[0-9]*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            sizes.append((int(level), size))
    return " ".join(size for _, size in sorted(sizes))


def alternatives(descriptions: list[str]) -> str:
    """Return each that is there, once.

    >>> alternatives(["48K 1280K", "48K 1280K", "32K 2048K", ""])
    '32K 2048K beside 48K 1280K'
    """
    return " beside ".join(sorted(set(descriptions) - {""}))
