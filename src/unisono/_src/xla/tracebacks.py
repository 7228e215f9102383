"""Whether a program says from which lines of Python it was traced."""

from __future__ import annotations

import contextlib

from jax._src import config  # checked with jax 0.10.2: the setting has no public name for one thread alone


def without_source_lines() -> contextlib.AbstractContextManager[None]:
    """For the block, in this thread: programs hold no paths of source files."""
    return config.traceback_in_locations_limit(0)
