"""Findings about the cores of the processor."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from unisono._src.engine.xla import device_kind, runtime
from unisono._src.kernels.native.library import read_cores
from unisono._src.tools.doctor.finding import Finding, PromiseVerdict

SECTION = "processor"

SPEEDS = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
"""Files with the speed of a core, below its folder in Linux."""


class CoreKind(NamedTuple):
    """The properties of a core that decide bits."""

    model: str
    instructions: str
    caches: str


def examine_cores() -> Iterator[Finding]:
    """Find whether the cores that this process may use are alike."""
    allowed = list_allowed_cores()
    kinds = group_cores(allowed)
    if not kinds:
        yield Finding(SECTION, "cores", f"{runtime.count_cores()}; this system does not tell what they are", PromiseVerdict.NOTE)
        return
    if len(kinds) == 1:
        (kind,) = kinds
        yield Finding(SECTION, "cores", f"{len(allowed)} of one kind: {kind.model}, caches {kind.caches or 'unknown'}")
    else:
        most = max(kinds.values(), key=len)
        yield Finding(
            SECTION,
            "cores",
            f"{len(kinds)} kinds: {describe_kinds(kinds)}. Machine code and the pieces of products depend on the core on which "
            f"JAX starts, so that two runs may have other bits",
            PromiseVerdict.BREAKS,
            f"taskset --cpu-list {format_cores(most)} python ..., so that all cores of a run are of one kind",
        )
    speeds = {read_speed(core) for core in allowed} - {""}
    if len(kinds) == 1 and len(speeds) > 1:
        yield Finding(SECTION, "speeds", "cores are of several speeds, which changes no bit", PromiseVerdict.NOTE)


def list_allowed_cores() -> list[int]:
    """List the numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(runtime.count_cores()))


def group_cores(allowed: Collection[int]) -> dict[CoreKind, list[int]]:
    """Group the numbers of cores by their kind. Empty if the system does not tell the kinds."""
    kinds: dict[CoreKind, list[int]] = {}
    for core in read_cores():
        number = int(core.get("processor", "-1"))
        if number in allowed:
            kinds.setdefault(describe_core(number, core), []).append(number)
    return kinds


def describe_core(number: int, core: dict[str, str]) -> CoreKind:
    return CoreKind(
        " ".join(core[name] for name in device_kind.MODEL if name in core),
        " ".join(sorted(device_kind.select_computing_instructions(core))),
        device_kind.read_cache_sizes(device_kind.CORES / f"cpu{number}"),
    )


def describe_kinds(kinds: Mapping[CoreKind, list[int]]) -> str:
    """Describe the differences between kinds of cores."""
    common = set.intersection(*(set(kind.instructions.split()) for kind in kinds))
    texts = []
    for kind, numbers in kinds.items():
        more = sorted(set(kind.instructions.split()) - common)
        has = "".join([f", caches {kind.caches}" * bool(kind.caches), f", and {' '.join(more)}" * bool(more)])
        texts.append(f"cores {format_cores(numbers)} {kind.model}{has}")
    return "; ".join(texts)


def read_speed(number: int) -> str:
    """Read the speed of a core as the system writes it. "" if it has none."""
    for name in SPEEDS:
        try:
            return (device_kind.CORES / f"cpu{number}" / name).read_text().strip()
        except OSError:
            continue
    return ""


def format_cores(numbers: Collection[int]) -> str:
    """Write numbers of cores as `taskset` reads them.

    >>> format_cores([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
