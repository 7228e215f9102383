"""Findings about devices, installed versions and native kernels."""

from __future__ import annotations

import platform
import warnings
from collections import Counter
from collections.abc import Iterator

import jax

from unisono._src.engine.xla.determinism import GPU_PLATFORMS
from unisono._src.kernels.native.library import SWITCH, load_kernels
from unisono._src.tools.doctor.finding import Finding, PromiseVerdict
from unisono._src.versions import VERSION, WINDOWS, ReleaseWindow, find_version

DEVICES = "devices"


def examine_devices() -> Iterator[Finding]:
    """Yield a finding for each kind of device of this process."""
    devices = jax.local_devices()
    for (backend, kind), count in Counter((device.platform, device.device_kind) for device in devices).items():
        runtime = next(device.client.platform_version for device in devices if device.platform == backend).splitlines()[0]
        name = backend.upper() if kind == backend else f"{backend.upper()} ({kind})"
        if backend == "cpu":
            yield Finding(DEVICES, name, "as many devices as a strategy asks for, on these cores")
        else:
            plural = "s" * (count != 1)
            yield Finding(
                DEVICES, name, f"{count} device{plural}, {runtime}: only the self-test speaks for it", PromiseVerdict.NOTE
            )
    if len({device.device_kind for device in devices}) > 1:
        yield Finding(
            DEVICES,
            "kinds",
            "devices of several kinds, which have other bits: which replica runs where then decides the result",
            PromiseVerdict.BREAKS,
            "CUDA_VISIBLE_DEVICES=... to leave devices of one kind" if devices[0].platform in GPU_PLATFORMS else "",
        )


LIBRARIES = "versions"
OTHERS = ("jaxlib", "numpy")
"""Libraries that bits depend on, and that may have any release here."""


def examine_libraries() -> Iterator[Finding]:
    """Yield a finding for each library that bits depend on."""
    yield Finding(LIBRARIES, "unisono", f"{VERSION}, on Python {platform.python_version()}")
    for window in WINDOWS:
        yield examine_release(window)
    for package in OTHERS:
        version = find_version(package)
        yield Finding(LIBRARIES, package, version or "not installed", PromiseVerdict.OK if version else PromiseVerdict.BREAKS)


def examine_release(window: ReleaseWindow) -> Finding:
    """Find whether Unisono works with the installed release of a library."""
    version = find_version(window.package)
    install = f"pip install '{window.requirement}'"
    if version is None:
        return Finding(LIBRARIES, window.package, "not installed", PromiseVerdict.BREAKS, install)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            window.check(version)
    except ImportError:
        return Finding(
            LIBRARIES, window.package, f"{version}; Unisono works with {window.requirement}", PromiseVerdict.BREAKS, install
        )
    tried = ", ".join(window.tried)
    if said or version not in window.tried:
        return Finding(
            LIBRARIES, window.package, f"{version}, with which Unisono was not tried, but with {tried}", PromiseVerdict.NOTE
        )
    return Finding(LIBRARIES, window.package, f"{version}, with which Unisono was tried")


NATIVE_KERNELS = "processor"


def examine_kernels() -> Iterator[Finding]:
    """Yield a finding about the kernels that this process uses."""
    try:
        kernels = load_kernels()
    except ValueError as error:
        yield Finding(NATIVE_KERNELS, "native kernels", str(error), PromiseVerdict.BREAKS, f"leave {SWITCH} out")
        return
    if kernels.level:
        yield Finding(NATIVE_KERNELS, "native kernels", f"level {kernels.level}, build {kernels.build}")
        return
    advice = f"leave {SWITCH} out" if kernels.is_switched_off else "install a C++ compiler (g++), and Unisono again"
    fact = f"none: {kernels.reason}. XLA computes everything, with bits of its own"
    yield Finding(NATIVE_KERNELS, "native kernels", fact, PromiseVerdict.NOTE, advice)


def describe_kernels() -> str:
    """Describe the kernels. If a strategy would refuse to start with them, this is its error."""
    try:
        return load_kernels().description
    except ValueError as error:
        return str(error)
