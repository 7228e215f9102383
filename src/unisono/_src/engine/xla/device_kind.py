"""The kind of a device, which decides bits.

Two devices of one kind give the same bits.

On a CPU, instructions and caches decide bits: code is compiled for the instructions, and matmuls are blocked by the sizes of the
caches. So does the library of native kernels, or its absence.
"""

from __future__ import annotations

import functools
import pathlib
import platform
from collections.abc import Mapping

import jax

from unisono._src.kernels.native.library import NATIVE, get_instructions, load_kernels, read_cores

DeviceKind = Mapping[str, str]

CORES = pathlib.Path("/sys/devices/system/cpu")

MODEL = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
"""Names in /proc/cpuinfo: of x86 first, then of Arm."""

COMPUTING_PREFIXES = ("sse", "ssse", "avx", "fma", "f16c", "bmi", "amx")
"""Prefixes of the x86 instructions that compute. Other instructions differ between virtual machines on one processor."""


def describe_device(device: jax.Device) -> dict[str, str]:
    """Describe the kind of a device, by the name of each fact."""
    if device.platform != "cpu":
        return {"device": device.device_kind}
    return {"device": device.device_kind} | describe_processor() | {"kernels": load_kernels().description}


def has_native_kernels(kind: DeviceKind) -> bool | None:
    """Whether a kind of device computes with native kernels. It is None if the kind does not say, as in older records.

    >>> has_native_kernels({"kernels": "native avx2, build 1a2b"}), has_native_kernels({"kernels": "XLA's"})
    (True, False)
    """
    return kind["kernels"].startswith(NATIVE) if "kernels" in kind else None


def list_kind_differences(theirs: DeviceKind, ours: DeviceKind, there: str = "there", here: str = "here") -> list[str]:
    """List the differences of two kinds, in words.

    Facts that only one side knows are left out. Of instructions, only those of one side are listed.

    >>> list_kind_differences({"caches": "32K", "instructions": "avx2 fma"}, {"caches": "48K", "instructions": "avx2 avx512f fma"})
    ['caches: 32K there, 48K here', 'instructions: avx512f only here']
    """
    names = [name for name in sorted({*theirs, *ours}) if theirs.get(name) and ours.get(name) and theirs[name] != ours[name]]
    texts = {name: f"{theirs[name]} {there}, {ours[name]} {here}" for name in names}
    if "instructions" in texts:
        sides = {there: set(theirs["instructions"].split()), here: set(ours["instructions"].split())}
        only = {side: sorted(names - set.intersection(*sides.values())) for side, names in sides.items()}
        texts["instructions"] = ", ".join(f"{' '.join(names)} only {side}" for side, names in only.items() if names)
    return [f"{name}: {text}" for name, text in texts.items()]


@functools.cache
def describe_processor() -> dict[str, str]:
    """Describe the processor by the facts that decide bits. Where the system gives none, Python's own are taken.

    If cores differ, all their models and caches are listed; instructions are listed if all cores have them.
    """
    cores = read_cores()
    models = [" ".join(core[name] for name in MODEL if name in core) for core in cores]
    return {
        "processor": join_alternatives(models) or platform.processor(),
        "instructions": " ".join(sorted(set.intersection(*map(select_computing_instructions, cores))))
        if cores
        else platform.machine(),
        "caches": join_alternatives([read_cache_sizes(path) for path in sorted(CORES.glob("cpu[0-9]*"))]),
    }


@functools.cache
def list_all_instructions() -> str:
    """The names of all instructions of the first core. Machine code with other instructions may not run."""
    return next(map(get_instructions, read_cores()), platform.machine())


def select_computing_instructions(core: dict[str, str]) -> set[str]:
    """Select the names of a core's instructions that compute.

    >>> sorted(select_computing_instructions({"flags": "fpu avx2 hypervisor fma"}))
    ['avx2', 'fma']
    >>> sorted(select_computing_instructions({"Features": "fp asimd bf16"}))
    ['asimd', 'bf16', 'fp']
    """
    x86 = {name for name in core.get("flags", "").split() if name.startswith(COMPUTING_PREFIXES)}
    return x86 | set(core.get("Features", "").split())


def read_cache_sizes(path: pathlib.Path) -> str:
    """Read the sizes of a core's data caches, the first level first."""
    sizes = []
    for index in sorted(path.glob("cache/index[0-9]*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            sizes.append((int(level), size))
    return " ".join(size for _, size in sorted(sizes))


def join_alternatives(descriptions: list[str]) -> str:
    """Join the different descriptions in one text, each of them once.

    >>> join_alternatives(["48K 1280K", "48K 1280K", "32K 2048K", ""])
    '32K 2048K beside 48K 1280K'
    """
    return " beside ".join(sorted(set(descriptions) - {""}))
