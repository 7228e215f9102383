"""Whose fault an error is: a process whose neighbour is gone gets an error too, out of its exchange with it."""

from __future__ import annotations

import re
import types

STATUS = re.compile(r"([A-Z_]+): ")
"""What runs below JAX begins its errors so, of whatever class JAX makes them."""

OWN = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")


RAISING = ("jax", "jaxlib", "unisono")
"""JAX takes its own frames out of what it raises: an error of an exchange then seems to come from us, who asked for it."""


def is_of_others(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, may be another process' fault.

    Example:
        >>> is_of_others(ValueError("UNKNOWN: the user's own words"))
        False
    """
    while error is not None:
        status = STATUS.match(str(error))
        if status and status[1] not in OWN and innermost_package(error.__traceback__) in RAISING:
            return True
        error = error.__cause__ or error.__context__
    return False


def innermost_package(traceback: types.TracebackType | None) -> str:
    """Of the code that raised."""
    name = ""
    while traceback is not None:
        name, traceback = traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_next
    return name.partition(".")[0]
