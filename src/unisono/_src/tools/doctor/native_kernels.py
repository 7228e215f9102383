"""Findings about the native kernels that this process uses."""

from __future__ import annotations

from collections.abc import Iterator

from unisono._src.kernels.native.library import SWITCH, load_kernels
from unisono._src.tools.doctor.finding import Finding, PromiseVerdict

SECTION = "processor"


def examine_kernels() -> Iterator[Finding]:
    """Yield a finding about the kernels that this process uses."""
    try:
        kernels = load_kernels()
    except ValueError as error:
        yield Finding(SECTION, "native kernels", str(error), PromiseVerdict.BREAKS, f"leave {SWITCH} out")
        return
    if kernels.level:
        yield Finding(SECTION, "native kernels", f"level {kernels.level}, build {kernels.build}")
        return
    advice = f"leave {SWITCH} out" if kernels.is_switched_off else "install a C++ compiler (g++), and Unisono again"
    fact = f"none: {kernels.reason}. XLA computes everything, with bits of its own"
    yield Finding(SECTION, "native kernels", fact, PromiseVerdict.NOTE, advice)


def describe_kernels() -> str:
    """Describe the kernels. If a strategy would refuse to start with them, this is its error."""
    try:
        return load_kernels().description
    except ValueError as error:
        return str(error)
