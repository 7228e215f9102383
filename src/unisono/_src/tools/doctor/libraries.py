"""Findings about installed versions, and those that Unisono works with."""

from __future__ import annotations

import importlib.metadata
import platform
import warnings
from collections.abc import Iterator

from unisono._src.tools.doctor.finding import Finding, PromiseVerdict
from unisono._src.versions import VERSION, WINDOWS, ReleaseWindow

SECTION = "versions"
OTHERS = ("jaxlib", "numpy")
"""Libraries that bits depend on, and that may have any release here."""


def examine_libraries() -> Iterator[Finding]:
    """Yield a finding for each library that bits depend on."""
    yield Finding(SECTION, "unisono", f"{VERSION}, on Python {platform.python_version()}")
    for window in WINDOWS:
        yield examine_release(window)
    for package in OTHERS:
        version = find_version(package)
        yield Finding(SECTION, package, version or "not installed", PromiseVerdict.OK if version else PromiseVerdict.BREAKS)


def examine_release(window: ReleaseWindow) -> Finding:
    """Find whether Unisono works with the installed release of a library."""
    version = find_version(window.package)
    install = f"pip install '{window.requirement}'"
    if version is None:
        return Finding(SECTION, window.package, "not installed", PromiseVerdict.BREAKS, install)
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            window.check(version)
    except ImportError:
        return Finding(
            SECTION, window.package, f"{version}; Unisono works with {window.requirement}", PromiseVerdict.BREAKS, install
        )
    tried = ", ".join(window.tried)
    if said:
        return Finding(
            SECTION, window.package, f"{version}, with which Unisono was not tried, but with {tried}", PromiseVerdict.NOTE
        )
    return Finding(SECTION, window.package, f"{version}, with which Unisono was tried")


def find_version(package: str) -> str | None:
    """Find the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
