"""Compiled programs that the tests keep: compiling is most of what they do, and most of it was done before.

This process and all that it starts load what any earlier one has compiled, of ours and of plain Keras', from a folder of the tests' own:
UNISONO_TEST_PROGRAMS, or one under the user's cache. A program is found by its text, the versions, the flags, the number of threads and the
processor, so that a changed engine finds nothing. Tests whose subject is compiling take the fixture `compiled_anew`, or start their
processes with `NOTHING_KEPT`.
"""

from __future__ import annotations

import os
import pathlib
import time

NOTHING_KEPT = {"JAX_ENABLE_COMPILATION_CACHE": "0"}
"""For the environment of a process that compiles everything by itself."""

OLDEST = 14 * 24 * 3600
"""Seconds after which a program is thrown away: what is still in use costs one more compilation."""


def folder() -> pathlib.Path:
    """Where the programs are."""
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(os.environ.get("UNISONO_TEST_PROGRAMS") or pathlib.Path(caches) / "unisono" / "test-programs")


def keep() -> None:
    """Set the environment, of which JAX takes note when it is imported."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder())
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def throw_old_away() -> None:
    """Remove what was written long ago."""
    for path in folder().glob("*-cache"):
        try:
            if time.time() - path.stat().st_mtime > OLDEST:
                path.unlink()
        except FileNotFoundError:  # another run has thrown it away
            continue
