"""All environment variables of Unisono, and a warning of misspelt ones."""

from __future__ import annotations

import functools
import os
import warnings

from unisono._src import hidden_frames, versions
from unisono._src.keras.record import run_details, run_recorder
from unisono._src.kernels.native import library
from unisono._src.near_names import find_near_names
from unisono._src.processes import names

PREFIX = "UNISONO_"

SET_BY_USERS = (
    names.COORDINATOR,
    names.PROCESSES,
    names.PROCESS,
    names.BOUND,
    names.DEVICES,
    names.REPLICAS,
    names.SHARED_MEMORY,
    library.SWITCH,
    hidden_frames.SWITCH,
    versions.SWITCH,
    run_recorder.SWITCH,
    run_recorder.EACH_PROCESS,
    run_recorder.STEPS,
)

SET_BY_COMMANDS = (
    names.RESTARTS,
    names.OTHER_PROGRAMS,
    names.REPLAY_STEP,
    names.INSPECTOR,
    names.REPLAY_REPORT,
    names.REPLAY_PROMPT,
    names.MEMORY_REPORT,
    names.MEMORY_REPLICAS,
    run_recorder.INSTEAD,
    run_details.SWITCH,
)

CUTOFF = 0.7
"""The similarity of near names. The prefix is left out, since all have it."""


@functools.cache
def warn_of_misspelt_variables() -> None:
    """Warn, once in a process, of variables that are nearly ours. A program may have others with our prefix for itself."""
    unknown = [name for name in sorted(os.environ) if name.startswith(PREFIX) and name not in (*SET_BY_USERS, *SET_BY_COMMANDS)]
    near = find_near_names(
        [name.removeprefix(PREFIX) for name in unknown], [name.removeprefix(PREFIX) for name in SET_BY_USERS], CUTOFF
    )
    for name, right in near.items():
        warnings.warn(
            f"Unisono does not read the environment variable {PREFIX}{name}. Write {PREFIX}{right}, if that is meant.",
            stacklevel=4,
        )
