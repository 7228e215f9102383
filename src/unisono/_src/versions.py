"""The versions of Unisono and of its libraries.

Bits depend on these libraries; each has the versions with which Unisono works.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import warnings
from typing import NamedTuple

VERSION = "0.1.0"

SWITCH = "UNISONO_VERSIONS"
ANY = "any"
"""The value of the switch with which releases are not checked."""


class ReleaseWindow(NamedTuple):
    """The releases of a library with which Unisono works.

    Unisono uses private parts of the library, which change without notice.
    """

    package: str
    oldest: str
    end: str
    """The first release that is too new."""
    tried: tuple[str, ...]
    """The releases with which the tests were run."""

    @property
    def requirement(self) -> str:
        """The window as pyproject.toml and pip write it."""
        return f"{self.package}>={self.oldest},<{self.end}"

    def check(self, version: str) -> None:
        """Refuse a release outside of the window. A release inside that was not tried is warned of."""
        if os.environ.get(SWITCH) == ANY:
            return
        if not read_numbers(self.oldest) <= read_numbers(version) < read_numbers(self.end):
            raise ImportError(
                f"Unisono works with {self.requirement}, and this is {self.package} {version}. Unisono uses private parts of {self.package}, "
                f"which change from release to release. Install a release of the window: pip install '{self.requirement}'. To try "
                f"{version} all the same, set {SWITCH}={ANY}."
            )
        if version not in self.tried:
            warnings.warn(
                f"Unisono was not tried with {self.package} {version}, but with {', '.join(self.tried)}. Unisono uses private parts of "
                f"{self.package}, which seldom change in a patch release. Install a release that was tried if something fails.",
                stacklevel=4,
            )


WINDOWS = (
    ReleaseWindow("keras", "3.15.0", "3.16", tried=("3.15.0", "3.15.1")),
    ReleaseWindow("jax", "0.10.2", "0.13", tried=("0.10.2", "0.12.0.1")),
)


def read_numbers(version: str) -> tuple[int, ...]:
    """Read the first three numbers of a version. They order the releases."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:3]]
    return (*numbers, 0, 0)[:3]


@functools.cache
def check_versions() -> None:
    """Check the installed libraries, once in a process."""
    for window in WINDOWS:
        version = find_version(window.package)
        if version is None:
            raise ImportError(
                f"Unisono works with {window.requirement}, which is not installed: pip install '{window.requirement}'."
            )
        window.check(version)


def find_version(package: str) -> str | None:
    """Find the version of an installed package, or of its nightly build. None if neither is installed."""
    for name in (package, f"{package}-nightly"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def list_versions() -> dict[str, str]:
    """List the versions, by the names of the packages."""
    import jax
    import jaxlib.version
    import keras
    import numpy as np

    return {
        "unisono": VERSION,
        "keras": keras.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
    }
