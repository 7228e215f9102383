"""Source lines in programs: the lines of Python that a program was traced from."""

from __future__ import annotations

import contextlib

from jax._src import config  # checked with jax 0.10.2: the setting has no public name for one thread alone


def omit_source_lines() -> contextlib.AbstractContextManager[None]:
    """Return a context in which programs, traced in this thread, hold no paths of source files."""
    return config.traceback_in_locations_limit(0)
