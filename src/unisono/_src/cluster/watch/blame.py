"""The fault for an error: where a process is gone, the others get errors too, out of their exchange with it."""

from __future__ import annotations

import re
import types

STATUS = re.compile(r"([A-Z_]+): ")
"""The beginning of errors of what runs below JAX, whatever class JAX gives them."""

OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
"""Kinds of errors that a process has by itself."""

RAISING = ("jax", "jaxlib", "unisono")
"""The packages that raise errors of an exchange. JAX takes its own frames out: the error then seems to come from Unisono, which asked for
the exchange."""


def is_fault_of_others(error: BaseException | None) -> bool:
    """Return whether an error, or the error that it came from, may be the fault of another process.

    Example:
        >>> is_fault_of_others(ValueError("UNKNOWN: the user's own words"))
        False
    """
    while error is not None:
        status = STATUS.match(str(error))
        if status and status[1] not in OWN and innermost_package(error.__traceback__) in RAISING:
            return True
        error = error.__cause__ or error.__context__
    return False


def innermost_package(traceback: types.TracebackType | None) -> str:
    """Return the name of the package whose code raised."""
    name = ""
    while traceback is not None:
        name = traceback.tb_frame.f_globals.get("__name__", "")
        traceback = traceback.tb_next
    return name.partition(".")[0]
